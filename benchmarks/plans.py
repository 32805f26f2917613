"""Compare plans with alternatives, with their forecasts and with their caps, on virtual GPUs.

    python benchmarks/plans.py                           all tables, about five minutes
    python benchmarks/plans.py --cases gpt-4 mlp-8       models on so many virtual GPUs, in order
    python benchmarks/plans.py --cases unequal           three virtual GPUs of unequal size
    python benchmarks/plans.py --tables caps             one of the tables
    python benchmarks/plans.py --alternatives 5          fewer of them
    python benchmarks/plans.py --briefly gpt-4           of these cases the plan only
    python benchmarks/plans.py --seconds 120             stop after so long
    python benchmarks/plans.py --out results.jsonl       write each row and each profile, too
    python benchmarks/plans.py --gaps results.jsonl      search in these profiles again, with the
                                                         solver, and print the gaps. Needs no GPU
    python benchmarks/plans.py --cpu                     tiny models on the CPU, to try the script

choices  the plan and at least 20 alternatives: other schedules and numbers of micro-batches, each
         with the best cut for it, equal layers, and everything recomputed. Measured and forecast
         milliseconds of a step. The plan should be within 2% of the fastest, and within 5% of its
         forecast.
caps     plans under three caps that bind, against equal layers, 1f1b and everything recomputed
         under the same cap. The caps lie between what that needs (or, if it needs much, 1f1b with
         another cut) and what the plan needs without a cap, at equal ratios. The bytes that the
         fullest rank allocates, and its share of the cap
unequal  groups of 64, 32 and 16 multiprocessors: the plan against equal layers and the ceiling: all
         groups busy all the time, at the speed that they have then

For each plan it prints the gap of its certificate (by how much another plan may be faster), and at
the end the median of these gaps, without caps and under them. Without ortools the gaps are larger.

A plan is what `penstock.plan` returns: its profile is measured first, and the searches for all
tables run beside the measurements, in processes of their own. Layers of the GPT are an embedding,
16 attentions, 16 feed-forward blocks and a head of 32,000 words, in bf16. Times are medians in
milliseconds. Each row is printed as soon as it is measured.

Most of the time goes into the first step and the capture of each pipe. So several processes
prepare one pipe each, and then time their steps in turns, while the others wait:

    process 0    [ build, first step, capture ]         [ steps ]
    process 1    [ build, first step, capture    ]              [ steps ]
    process 2    [ build, first step, capture  ]                        [ steps ]
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import penstock
from penstock import Pipe, Plan
from penstock.device.device import Device, resolve_device
from penstock.errors import PenstockError
from penstock.model.model_profile import profile_model
from penstock.model.planner import ModelPlan, attach_model
from penstock.model.profiler import bind_target
from penstock.planning import Profile, search_plan
from penstock.schedules.families import FAMILIES

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.virtual import TURNS, Block, graph_of, head, line, loss_of, needs_cuda

TABLES = ("choices", "caps")
CASES = ("gpt-4", "gpt-8", "mlp-4", "mlp-8", "resnet101-4", "resnet101-8", "unequal")
ALTERNATIVES = 20
WORKERS = 7  # processes that prepare pipes side by side
TIMED_STEPS = 9
WARM_SECONDS = 0.5  # until the clock of the GPU has settled
# A plan that was made for a cap leaves some of it free if it can, as in `penstock.plan`.
SEARCHED_SHARES = (0.95, 1.0)
# From what everything recomputed needs (0) to what is needed without a cap (1), as exponents.
CAPS = (0.2, 0.5, 0.8)


# ---- models ------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.inputs = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        mixed = self.inputs(self.norm(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = mixed.permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = x + self.output(y.transpose(1, 2).reshape(x.shape))
        return out


class Bottleneck(nn.Module):
    """A block of ResNet-101."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.convolutions(x) + self.shortcut(x))


def gpt(blocks: int, width: int, words: int) -> nn.Sequential:
    layers = [layer for _ in range(blocks) for layer in (Attention(width, 16), Block(width))]
    end = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, words, bias=False))
    return nn.Sequential(nn.Embedding(words, width), *layers, end)


def resnet(blocks: Sequence[int], width: int) -> nn.Sequential:
    stem = nn.Sequential(
        nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    )
    layers: list[nn.Module] = [stem]
    inputs = width
    for size, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if size and not block else 1
            layers.append(Bottleneck(inputs, width * 2**size, stride))
            inputs = 4 * width * 2**size
    end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))
    return nn.Sequential(*layers, end)


def mlp(blocks: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def word_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Case:
    """A model with a batch and a loss, and the virtual GPUs to plan for."""

    name: str
    model: nn.Sequential
    x: Tensor
    target: Tensor | None
    loss_fn: Callable[..., Tensor]
    places: tuple[Device, ...]
    chunks: tuple[int, ...] = (4, 8, 16)  # to try. More take long to capture

    @property
    def ranks(self) -> int:
        return len(self.places)


def make_case(entry: str, cpu: bool) -> Case:
    torch.manual_seed(0)
    place, dtype = ("cpu", torch.float32) if cpu else ("cuda:0", torch.bfloat16)
    name, _, ranks = entry.partition("-")
    places: Sequence[Any] = ["cpu"] * int(ranks or 3)
    if not cpu:
        sizes = {"n": int(ranks)} if ranks else {"sms": [64, 32, 16]}
        places = penstock.virtual_devices("cuda:0", **sizes)
    devices = tuple(map(resolve_device, places))
    if name == "gpt":
        blocks, width, words, rows, length = (16, 1024, 32_000, 32, 512)
        if cpu:
            blocks, width, words, rows, length = (4, 32, 100, 16, 8)
        x = torch.randint(words, (rows, length), device=place)
        with torch.device(place):
            model = gpt(blocks, width, words).to(dtype)
        return Case(entry, model, x, x.roll(-1, 1), word_loss, devices)
    if name == "resnet101":
        layers, width, rows, size = (
            ((1, 1, 2, 1), 4, 16, 64) if cpu else ((3, 4, 23, 3), 64, 128, 128)
        )
        images = torch.randn(rows, 3, size, size, device=place)
        labels = torch.randint(1000, (rows,), device=place)
        with torch.device(place):
            model = resnet(layers, width)
        return Case(entry, model, images, labels, nn.functional.cross_entropy, devices)
    blocks, width, rows = (32, 1024, 65_536) if name == "unequal" else (16, 2048, 8192)
    if cpu:
        blocks, width, rows = (16, 16, 64)
    x = torch.randn(rows, width, device=place, dtype=dtype)
    with torch.device(place):
        model = mlp(blocks, width).to(dtype)
    chunks = (8, 16, 32) if name == "unequal" else (4, 8, 16)
    return Case(entry, model, x, None, loss_of, devices, chunks)


# ---- the report --------------------------------------------------------------------------------


class Report:
    """The rows so far, printed and written at once, and the time that is left."""

    def __init__(self, path: Path | None, seconds: float) -> None:
        self.path, self.begin = path, perf_counter()
        self.end = self.begin + seconds
        self._gaps: dict[str, list[float]] = {}  # of certificates, by kind of plan

    @property
    def is_over(self) -> bool:
        return perf_counter() > self.end

    def write(self, **row: Any) -> None:
        row["at"] = round(perf_counter() - self.begin, 1)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def print(self, cells: Sequence[str], **row: Any) -> None:
        print(line(cells), flush=True)
        self.write(cells=cells, **row)

    def say(self, words: str) -> None:
        print(f"{words} [{perf_counter() - self.begin:.0f} s]", flush=True)
        self.write(words=words)

    def say_gap(self, kind: str, name: str, plan: Plan) -> None:
        """Say how far the plan may be from the best, and remember it for the median."""
        if plan.gap is not None and plan.certificate is not None:
            self._gaps.setdefault(kind, []).append(plan.gap)
            bound = plan.certificate.bound
            self.say(
                f"{name}: no plan is faster than {1e3 * bound:.1f} ms, a gap of {plan.gap:.2%}"
            )

    def say_median_gaps(self) -> None:
        for kind, gaps in self._gaps.items():
            self.say(f"{kind}: the median gap of {len(gaps)} certificates is {median(gaps):.2%}")


# ---- searches ----------------------------------------------------------------------------------

Choice = dict[str, Any]


class Searches:
    """Processes that search for plans side by side. They start before CUDA does."""

    def __init__(self) -> None:
        # The other half of the processors is for the measurements.
        workers = max(1, (os.cpu_count() or 2) // 2)
        self._pool = ProcessPoolExecutor(workers, get_context("fork"))
        self._pool.submit(int).result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def submit(self, profile: Profile, choices: Sequence[Choice]) -> list[Future[Plan | None]]:
        """Begin to search for the best plan with each of these choices."""
        return [self._pool.submit(search_choice, profile, choice) for choice in choices]


def search_choice(profile: Profile, choice: Choice) -> Plan | None:
    cap = choice["memory"]
    for share in SEARCHED_SHARES:
        try:
            plan = search_plan(profile, solver_seconds=0, **{**choice, "memory": share * cap})
        except PenstockError:
            continue
        return replace(plan, memory=(cap,) * plan.ranks)
    return None


def find_least_memory(profile: Profile, chunks: int, most: float) -> float:
    """Return about the smallest cap with which 1f1b fits, everything recomputed, with any cut."""
    least, ranks = 0.0, len(profile.devices)
    choice = {"schedules": ["1f1b"], "chunks": [chunks], "recompute": [True] * ranks}
    for _ in range(7):
        middle = (least + most) / 2
        try:
            search_plan(profile, solver_seconds=0, memory=middle, **choice)  # type: ignore[arg-type]
            most = middle
        except PenstockError:
            least = middle
    return most


def cut_equally(units: int, stages: int) -> list[int]:
    share, rest = divmod(units, stages)
    return [share + (stage < rest) for stage in range(stages)]


class Planned:
    """A case with its profile, and the searches that have been started for it."""

    def __init__(self, report: Report, case: Case, searches: Searches, workers: Workers) -> None:
        self.report, self.case, self.searches, self.workers = report, case, searches, workers
        begin = perf_counter()
        self.profile = profile_model(
            case.model,
            case.x,
            case.places,
            optimizer_factor=0.0,  # plain SGD
            loss=partial(bind_target, case.loss_fn, case.target),
        )
        if case.x.is_cuda:
            torch.cuda.empty_cache()  # other processes need memory, too
        report.write(profile=self.profile.to_json(), name=case.name, chunks=case.chunks)
        speeds = {f"{d.speed:.3f} ({d.idle_gain:.2f})" for d in self.profile.devices}
        report.say(
            f"{case.name}: profiled in {perf_counter() - begin:.1f} s; speed while all groups are "
            f"busy (and gain while they are idle): {', '.join(sorted(speeds))}"
        )
        self.units = len(self.profile.units)
        self.equal = cut_equally(self.units, case.ranks)
        free = {"memory": inf, "chunks": case.chunks}
        others = [] if case.name == "unequal" else self._list_alternatives()
        self.choices = [("the plan", free), *others]
        self._futures = searches.submit(self.profile, [choice for _, choice in self.choices])

    def _list_alternatives(self) -> list[tuple[str, Choice]]:
        """Return schedules x micro-batches with their best cuts, then cuts and recomputation."""
        names = [name for name, family in FAMILIES.items() if family.trains and name != "naive"]
        schedules: list[Choice] = [{"schedules": [name]} for name in (*names, "fit")]
        everything: Choice = {"recompute": [True] * self.case.ranks}
        equal: Choice = {"cut": self.equal}
        many = {"memory": inf, "chunks": [max(self.case.ranks, self.case.chunks[1])]}
        return [
            *(
                ("", {"memory": inf, "chunks": [number], **choice})
                for number in self.case.chunks
                if number >= self.case.ranks
                for choice in schedules
            ),
            (", equal layers", {**many, "schedules": ["1f1b"], **equal}),
            (", equal layers", {**many, "schedules": ["zb-h1"], **equal}),
            (", all recomputed", {**many, "schedules": ["1f1b"], **everything}),
            (
                ", equal layers, all recomputed",
                {**many, "schedules": ["1f1b"], **equal, **everything},
            ),
            *(
                (", equal layers", {"memory": inf, "chunks": [n], "schedules": [name], **equal})
                for n in self.case.chunks
                for name in ("zb-h2", "gpipe", "1f1b", "zb-h1")
                if n >= self.case.ranks
            ),
        ]

    def find_plans(self, count: int) -> tuple[Plan, list[tuple[str, Plan]]]:
        """Return the plan, and so many others, the best forecasts first.

        A fifth of them are plans with equal layers or with everything recomputed, or more if there
        are too few others.
        """
        plan, *others = [future.result() for future in self._futures]
        assert plan is not None
        known = [plan]
        found: dict[bool, list[tuple[str, Plan]]] = {False: [], True: []}
        for (words, _), other in sorted(
            zip(self.choices[1:], others, strict=True),
            key=lambda entry: 0.0 if entry[1] is None or entry[0][0] else entry[1].seconds,
        ):
            if other is not None and not any(is_same(other, p) for p in known):
                known.append(other)
                name = f"{other.schedule_name}, {other.chunks}, {len(other.cut)} stages{words}"
                found[bool(words)].append((name, other))
        ranked = found[False][: count - count // 5]
        return plan, [*ranked, *found[True][: count - len(ranked)]]


def is_same(plan: Plan, other: Plan) -> bool:
    return (plan.cut, plan.schedule, plan.recompute) == (other.cut, other.schedule, other.recompute)


# ---- measurements ------------------------------------------------------------------------------


class Job(NamedTuple):
    """A plan to measure.

    name: of the row
    case: the name of the case
    with_time, with_memory: what to measure
    """

    name: str
    case: str
    plan: Plan
    with_time: bool = True
    with_memory: bool = False


class Measured(NamedTuple):
    """The median milliseconds of a step, and the bytes of the fullest rank, if they were asked for.

    seconds: of the pipe, the first step, and the capture
    stages: the seconds of F, I and W, by stage
    forecast_ms: the simulated step with these seconds
    """

    ms: float
    rank_peak: float
    seconds: list[float]
    stages: list[list[float]]
    forecast_ms: float


class PreparedPipe:
    """A pipe whose step is captured, and ready to be timed."""

    def __init__(self, case: Case, job: Job) -> None:
        gc.collect()
        times = [perf_counter()]
        self.is_gpu, self.with_time = case.x.is_cuda, job.with_time
        # Without the cap, so that nothing but the measurement says whether the plan keeps to it.
        plan = replace(job.plan, memory=(inf,) * job.plan.ranks)
        planned = attach_model(plan, case.x, case.target, case.places, None)
        options: dict[str, Any] = {"loss_fn": case.loss_fn, "audit": "off"}
        self.pipe = Pipe(case.model, plan=planned, runtime=plan.runtime, **options)
        self.step = partial(self.pipe.step, case.x, target=case.target)
        times.append(perf_counter())
        case.model.zero_grad()
        self.rank_peak = 0.0
        if job.with_memory and self.is_gpu:
            self.rank_peak = measure_rank_peak(planned, self.step)
        else:
            self.step()
        self._wait()
        times.append(perf_counter())
        if self.with_time:
            self.step()  # is captured
            self._wait()
        times.append(perf_counter())
        self.seconds = [round(end - start, 3) for start, end in pairwise(times)]

    def _wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def measure(self) -> Measured:
        """Return what was measured before, and the time of steps that follow each other."""
        if not self.with_time:
            return Measured(0.0, self.rank_peak, self.seconds, [], 0.0)
        begin = perf_counter()
        while perf_counter() - begin < WARM_SECONDS:
            self.step()
            self._wait()
        ms = self._time_steps()
        forecast = self.pipe.forecast()
        cost = forecast.cost
        stages = [list(cost.F), list(cost.I), list(cost.W)]
        return Measured(ms, self.rank_peak, self.seconds, stages, 1e3 * forecast.makespan)

    def _time_steps(self) -> float:
        if not self.is_gpu:
            ends = [perf_counter()]
            for _ in range(TIMED_STEPS):
                self.step()
                ends.append(perf_counter())
            return 1e3 * median(end - start for start, end in pairwise(ends))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED_STEPS + 1)]
        events[0].record()
        for event in events[1:]:
            self.step()
            event.record()
        torch.cuda.synchronize()
        return float(median(start.elapsed_time(end) for start, end in pairwise(events)))


def serve(connection: Connection, cpu: bool) -> None:
    """Prepare and measure pipes, one after the other, as the main process asks."""
    gc.freeze()  # what was imported need not be looked at again for each pipe
    case: Case | None = None
    prepared: PreparedPipe | None = None
    while (job := connection.recv()) is not None:
        try:
            if isinstance(job, Job):
                if case is None or case.name != job.case:
                    prepared = case = None
                    case = make_case(job.case, cpu)
                prepared = PreparedPipe(case, job)
                connection.send(None)
            else:
                assert prepared is not None
                connection.send(prepared.measure())
                prepared = None
        except Exception as error:
            prepared = None
            connection.send(f"{type(error).__name__}: {str(error)[:300]}")


class Workers:
    """Processes that prepare pipes side by side, and time them one by one."""

    def __init__(self, cpu: bool) -> None:
        context = get_context("spawn")  # a process that was forked may not use CUDA
        self._connections: list[Connection] = []
        for _ in range(WORKERS):
            here, there = context.Pipe()
            context.Process(target=serve, args=(there, cpu), daemon=True).start()
            self._connections.append(here)

    def close(self) -> None:
        for connection in self._connections:
            connection.send(None)

    def measure(self, report: Report, jobs: Sequence[Job]) -> Iterator[tuple[Job, Measured]]:
        """Yield what was measured of each job, in order, until there is no time left."""
        for first in range(0, len(jobs), WORKERS):
            if report.is_over:
                return
            batch = list(zip(jobs[first : first + WORKERS], self._connections, strict=False))
            for job, connection in batch:
                connection.send(job)
            errors = [connection.recv() for _, connection in batch]
            for (job, connection), error in zip(batch, errors, strict=True):
                if error is None:
                    connection.send("measure")
                    answer = connection.recv()
                    if isinstance(answer, Measured):
                        yield job, answer
                        continue
                    error = answer
                report.say(f"{job.name}: {error}")


def measure_rank_peak(plan: ModelPlan, step: Callable[[], object]) -> float:
    """Return the most bytes that a rank has allocated in the first step, with what it holds.

    The allocator records every allocation with its stream, and the stream tells the rank. What is
    not freed in the step are gradients, which later steps have from the start.
    """
    rank_of = {
        handle: rank
        for rank, device in enumerate(plan.model_devices)
        for handle in device.list_stream_handles()
    }
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=2_000_000)
    step()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    changes: list[tuple[int, int, int]] = []  # position in the trace, rank, bytes
    alive: dict[int, tuple[int, int, int]] = {}  # the same of an allocation, by its address
    for position, entry in enumerate(trace):
        if entry["action"] == "alloc" and entry["stream"] in rank_of:
            alive[entry["addr"]] = position, rank_of[entry["stream"]], entry["size"]
        elif entry["action"] == "free_requested" and entry["addr"] in alive:
            begin, rank, size = alive.pop(entry["addr"])
            changes += [(begin, rank, size), (position, rank, -size)]
    now, most = [0] * plan.ranks, [0] * plan.ranks
    for _, rank, size in sorted(changes):
        now[rank] += size
        most[rank] = max(most[rank], now[rank])
    held = count_parameters(plan)
    for _, rank, size in alive.values():
        held[rank] += size
    return max(map(sum, zip(held, most, strict=True)))


def count_parameters(plan: Plan) -> list[float]:
    """Return the bytes of the parameters and buffers of each rank."""
    sizes, first = [0.0] * plan.ranks, 0
    for rank, count in zip(plan.placement, plan.cut, strict=True):
        sizes[rank] += sum(u.parameter_bytes for u in plan.profile.units[first : first + count])
        first += count
    return sizes


# ---- tables ------------------------------------------------------------------------------------


def print_choices(planned: Planned, plan: Plan, others: Sequence[tuple[str, Plan]]) -> None:
    report, case = planned.report, planned.case
    print(head(["choice", "ms", "forecast", "measured / forecast"]), flush=True)
    rows = [("the plan", plan), *others]
    measured: dict[str, float] = {}
    for job, found in planned.workers.measure(report, [Job(n, case.name, p) for n, p in rows]):
        other = job.plan
        measured[job.name] = found.ms
        cost = other.costs.cost
        report.print(
            [
                job.name,
                f"{found.ms:.1f}",
                f"{1e3 * other.seconds:.1f}",
                f"{found.ms / 1e3 / other.seconds:.3f}",
            ],
            case=case.name,
            planned=[sum(s) for s in zip(cost.F, cost.I, cost.W, strict=True)],
            cut=other.cut,
            **found._asdict(),
        )
    ms = measured.pop("the plan", 0.0)
    if ms and measured:
        report.say(
            f"{case.name}: the plan takes {ms / min(measured.values()):.3f} of the fastest of "
            f"{len(measured)} alternatives, and {ms / 1e3 / plan.seconds:.3f} of its forecast"
        )


class Caps:
    """Three caps that bind, and the searches for plans and for the usual choice under each."""

    def __init__(self, planned: Planned, plan: Plan) -> None:
        chunks = planned.case.chunks
        usual = {
            "cut": planned.equal,
            "schedules": ["1f1b"],
            "recompute": [True] * plan.ranks,
            "chunks": chunks,
        }
        smallest = {**usual, "chunks": [max(chunks)], "memory": inf}
        leanest = search_choice(planned.profile, smallest)
        assert leanest is not None
        self.least, self.most = (max(p.forecast.peak) for p in (leanest, plan))
        if self.least > 0.8 * self.most:  # equal layers are uneven
            self.least = find_least_memory(planned.profile, max(chunks), self.least)
        self.caps = [self.least * (self.most / self.least) ** share for share in CAPS]
        submit = partial(planned.searches.submit, planned.profile)
        self.plans = submit([{"memory": cap, "chunks": chunks} for cap in self.caps])
        self.usual = submit([{"memory": cap, **usual} for cap in self.caps])


def print_caps(planned: Planned, caps: Caps, with_time: bool) -> None:
    report, case = planned.report, planned.case
    report.say(
        f"{case.name}: without a cap the plan needs {caps.most / 1e9:.3f} GB; with everything "
        f"recomputed, 1f1b needs at least {caps.least / 1e9:.3f} GB"
    )
    names = ["cap", "choice", "ms", "forecast", "fullest rank", "forecast", "of the cap", "speed"]
    print(head(names), flush=True)
    plans, usual = ([search.result() for search in part] for part in (caps.plans, caps.usual))
    for cap, plan in zip(caps.caps, plans, strict=True):
        if plan is not None:
            report.say_gap("plans under caps", f"{case.name}, {cap / 1e9:.3f} GB", plan)
    jobs = [
        Job(f"{cap:.0f}", case.name, plan, with_time, with_memory=True)
        for cap, plan in zip(caps.caps, plans, strict=True)
        if plan is not None
    ]
    slow = {plan.chunks: plan for plan in usual if plan is not None} if with_time else {}
    jobs = [*(Job(f"usual {m}", case.name, plan) for m, plan in slow.items()), *jobs]
    usual_ms: dict[int, float] = {}
    for job, found in planned.workers.measure(report, jobs):
        plan = job.plan
        times = [f"{found.ms:.1f}" if with_time else "", f"{1e3 * plan.seconds:.1f}"]
        if job.name.startswith("usual"):
            usual_ms[plan.chunks] = found.ms
            name = f"equal layers, {plan.describe_choice()}"
            report.print(["", name, *times, "", "", "", ""], case=case.name)
            continue
        cap = float(job.name)
        others = [p for c, p in zip(caps.caps, usual, strict=True) if p and abs(c - cap) < 1]
        speeds = [usual_ms[p.chunks] / found.ms for p in others if p.chunks in usual_ms]
        report.print(
            [
                f"{cap / 1e9:.3f} GB",
                plan.describe_choice(),
                *times,
                f"{found.rank_peak / 1e9:.3f} GB",
                f"{max(plan.forecast.peak) / 1e9:.3f} GB",
                f"{found.rank_peak / cap:.3f}",
                "".join(f"{speed:.2f}" for speed in speeds),
            ],
            case=case.name,
            cut=plan.cut,
            **found._asdict(),
        )


def measure_ceiling(case: Case, plan: Plan) -> float:
    """Return the seconds of a step if all groups were busy all the time with blocks of the model.

    Each group repeats a block, forward and backward, for a second, while the others do the same. As
    in a step, each group has a block of its own, and gradients are random: with a gradient of ones
    the GPU draws less power, lowers its clock less, and is 4% faster.
    """
    works = []
    for _ in case.places:
        x = case.x[: plan.rows].clone().requires_grad_()
        works.append((copy.deepcopy(case.model[0]), x, torch.randn_like(x)))

    def work(index: int, turns: int) -> None:
        block, x, gradient = works[index]
        for _ in range(turns):
            block(x).backward(gradient)

    graphs = [
        graph_of(partial(work, index, 2), partial(work, index, TURNS), place.compute_stream)  # type: ignore[attr-defined]
        for index, place in enumerate(case.places)
    ]

    def replay(counts: Sequence[int]) -> list[float]:
        """Return the seconds of a replay of each group, in the middle third of these."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in graphs]
        launched = [0] * len(graphs)
        torch.cuda.synchronize()
        for turn in range(max(counts)):
            for rank, (place, graph) in enumerate(zip(case.places, graphs, strict=True)):
                count = counts[rank]
                while launched[rank] < count * (turn + 1) / max(counts):
                    for event, at in zip(events[rank], (count // 3, 2 * count // 3), strict=True):
                        if launched[rank] == at:
                            event.record(place.compute_stream)  # type: ignore[attr-defined]
                    with place.activate():
                        graph.replay()
                    launched[rank] += 1
        torch.cuda.synchronize()
        return [
            start.elapsed_time(end) / 1e3 / max(1, 2 * count // 3 - count // 3)
            for (start, end), count in zip(events, counts, strict=True)
        ]

    sms = [place.sms for place in case.places]  # type: ignore[attr-defined]
    first = replay([3 * size // min(sms) for size in sms])
    seconds = replay([max(3, round(1.0 / one)) for one in first])
    rate = sum(TURNS / one for one in seconds)
    return len(case.model) * plan.chunks / rate


def print_unequal(planned: Planned) -> None:
    report, case = planned.report, planned.case
    plan, _ = planned.find_plans(0)
    equal = {"cut": cut_equally(planned.units, len(plan.cut)), "chunks": [plan.chunks]}
    (search,) = planned.searches.submit(planned.profile, [{**equal, "memory": inf}])
    ceiling = measure_ceiling(case, plan) if case.x.is_cuda else plan.seconds
    even = search.result()
    assert even is not None
    jobs = [Job("the plan", case.name, plan), Job("equal cut", case.name, even)]
    fast, slow = (found for _, found in planned.workers.measure(report, jobs))
    bubble = ", ".join(f"{cause} {share:.1%}" for cause, share in plan.forecast.bubble.items())
    report.say(
        f"unequal: {plan.describe_choice()}, cut {list(plan.cut)}: {fast.ms:.1f} ms, forecast "
        f"{1e3 * plan.seconds:.1f}; idle: {bubble}"
    )
    report.say_gap("plans", case.name, plan)
    report.say(f"{1e3 * ceiling / fast.ms:.3f} of the ceiling ({1e3 * ceiling:.1f} ms)")
    report.say(
        f"equal cut {slow.ms:.1f} ms (forecast {1e3 * even.seconds:.1f}): "
        f"{slow.ms / fast.ms:.2f} times the speed"
    )
    cost = plan.costs.cost
    whole = [sum(s) for s in zip(cost.F, cost.I, cost.W, strict=True)]
    report.write(case=case.name, planned=whole, cut=plan.cut, **fast._asdict())


def print_case(planned: Planned, args: argparse.Namespace) -> None:
    case = planned.case
    if case.name == "unequal":
        print_unequal(planned)
        return
    plan, others = planned.find_plans(0 if case.name in args.briefly else args.alternatives)
    bubble = ", ".join(f"{cause} {share:.1%}" for cause, share in plan.forecast.bubble.items())
    planned.report.say(
        f"\n## {case.name}: {plan.describe_choice()}, cut {list(plan.cut)}, "
        f"{1e3 * plan.seconds:.1f} ms; idle: {bubble}"
    )
    planned.report.say_gap("plans", case.name, plan)
    with_caps = "caps" in args.tables and case.name not in args.briefly
    caps = Caps(planned, plan) if with_caps else None
    if "choices" in args.tables:
        print_choices(planned, plan, others)
    if caps is not None:
        print_caps(planned, caps, with_time=case.name.startswith("gpt"))


@contextmanager
def others_go_on(report: Report) -> Iterator[None]:
    """Report an error, as the other cases may still work."""
    try:
        yield
    except Exception:
        report.say(traceback.format_exc())


def print_gaps(path: Path) -> None:
    """Search for plans without caps in the profiles of a file, and print their gaps."""
    report = Report(None, inf)
    for text in path.read_text().splitlines():
        row = json.loads(text)
        if "profile" in row:
            profile = Profile.from_json(row["profile"])
            plan = search_plan(profile, memory=inf, chunks=row["chunks"], solver_seconds=60)
            report.say(f"{row['name']}: {plan.describe_choice()}, {1e3 * plan.seconds:.1f} ms")
            report.say_gap("plans", row["name"], plan)
    report.say_median_gaps()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--briefly", nargs="*", default=[], choices=CASES)
    parser.add_argument("--tables", nargs="*", default=list(TABLES), choices=TABLES)
    parser.add_argument("--alternatives", type=int, default=ALTERNATIVES)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gaps", type=Path)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    if args.gaps is not None:
        print_gaps(args.gaps)
        return
    searches, workers = Searches(), Workers(args.cpu)
    if not args.cpu:
        needs_cuda()
        torch.cuda.init()
    report = Report(args.out, args.seconds)
    name = "CPU" if args.cpu else torch.cuda.get_device_name()
    report.say(f"{name}, torch {torch.__version__}")
    # All models are profiled first, so that the searches run beside the measurements.
    planned: list[Planned] = []
    for entry in args.cases:
        with others_go_on(report):
            planned.append(Planned(report, make_case(entry, args.cpu), searches, workers))
    for case in planned:
        if report.is_over:
            break
        with others_go_on(report):
            print_case(case, args)
    searches.close()
    workers.close()
    report.say_median_gaps()
    report.say("done")


if __name__ == "__main__":
    main()

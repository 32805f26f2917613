"""Compare plans with alternatives, with their forecasts and with their caps, on virtual GPUs.

    python benchmarks/plans.py                              all tables, about ten minutes
    python benchmarks/plans.py --rounds gpt-4 mlp-8         models on so many virtual GPUs, in order
    python benchmarks/plans.py --rounds unequal             three virtual GPUs of unequal size
    python benchmarks/plans.py --tables caps                one of the tables
    python benchmarks/plans.py --seconds 120                stop after so long
    python benchmarks/plans.py --out results.jsonl          write each row and each profile, too

choices  the plan and at least 20 alternatives: other schedules and numbers of micro-batches, each
         with the best cut for it, equal layers, and everything recomputed. Measured and forecast
         milliseconds of a step. The plan should be within 2% of the fastest, and within 5% of its
         forecast.
caps     plans under three caps that bind, against equal layers, 1f1b and everything recomputed:
         from little more than that needs to nearly what 1f1b needs without recomputation. What the
         fullest rank allocates, and its share of the cap; what all ranks allocate, likewise
unequal  groups of 64, 32 and 16 multiprocessors: the plan against equal layers and three ceilings

A forecast is that of `penstock.plan`, which measures how much the groups slow each other down. The
GPT has 16 blocks and a head of 32,000 words, in bf16. Times are medians in milliseconds. Each row
is printed as soon as it is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import inf
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import penstock
from penstock import Pipe, Plan
from penstock.device.contention import SharedDevice
from penstock.device.device import Gpu
from penstock.errors import ArgumentError, PenstockError
from penstock.model.planner import ModelPlan, attach_model
from penstock.planning import Profile, search_plan
from penstock.schedules.families import FAMILIES

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from benchmarks.virtual import (
    Block,
    blocks_of,
    head,
    line,
    loss_of,
    milliseconds,
    needs_cuda,
)
from resnet101 import resnet101

TABLES = ("choices", "caps")
ROUNDS = ("gpt-4", "unequal", "gpt-8", "mlp-4", "mlp-8", "resnet101-4", "resnet101-8")
ALTERNATIVES = 21
WORDS, SEQUENCE = 32_000, 512
SEARCHED_SHARES = (1.0, 0.93, 0.85)  # of a cap
# From what everything recomputed needs (0) to what is needed without recomputation (1).
CAPS = (0.05, 0.5, 0.9)


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


def gpt(blocks: int = 16, width: int = 1024) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(Attention(width, 16), Block(width)) for _ in range(blocks)]
    end = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False))
    return nn.Sequential(nn.Embedding(WORDS, width), *layers, end).to("cuda:0", torch.bfloat16)


def word_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Case(NamedTuple):
    """A model with a batch and a loss."""

    model: nn.Sequential
    x: Tensor
    target: Tensor | None
    loss_fn: Callable[..., Tensor]


def make_case(name: str) -> Case:
    if name == "gpt":
        words = torch.randint(WORDS, (64, SEQUENCE), device="cuda:0")
        return Case(gpt(), words, words.roll(-1, 1), word_loss)
    if name == "resnet101":
        images = torch.randn(128, 3, 128, 128, device="cuda:0")
        labels = torch.randint(1000, (128,), device="cuda:0")
        return Case(resnet101().to("cuda:0"), images, labels, nn.functional.cross_entropy)
    x = torch.randn(32 * 1024, 2048, device="cuda:0", dtype=torch.bfloat16)
    return Case(blocks_of(16, 2048), x, None, loss_of)


class Report:
    """The rows so far, printed and written at once, and the time that is left."""

    def __init__(self, path: Path | None, seconds: float) -> None:
        self.path, self.begin = path, perf_counter()
        self.end = self.begin + seconds

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


# ---- plans -------------------------------------------------------------------------------------


def make_plan(report: Report, case: Case, places: Sequence[Any], **options: Any) -> ModelPlan:
    planned = penstock.plan(
        case.model,
        case.x,
        devices=places,
        target=case.target,
        loss_fn=case.loss_fn,
        optimizer="sgd",
        solver_seconds=0,
        **options,
    )
    report.write(profile=planned.profile.to_json())
    speeds = sorted({f"{device.speed:.3f}" for device in planned.profile.devices})
    report.say(
        f"\nplan: {planned.describe_choice()}, cut {list(planned.cut)}, "
        f"{1e3 * planned.seconds:.1f} ms; speed while all groups are busy {', '.join(speeds)}"
    )
    return planned


class Searches:
    """Processes that search for plans side by side. They start before CUDA does."""

    def __init__(self) -> None:
        workers = max(1, (os.cpu_count() or 2) - 2)
        self._pool = ProcessPoolExecutor(workers, get_context("fork"))
        self._pool.submit(int).result()

    def close(self) -> None:
        self._pool.shutdown()

    def run(self, planned: ModelPlan, choices: Sequence[dict[str, Any]]) -> list[ModelPlan | None]:
        """Return the best plan with each of these choices from the same profile."""
        attached = planned.example, planned.target, planned.model_devices, planned.units
        jobs = [self._pool.submit(search_choice, planned.profile, choice) for choice in choices]
        plans = [job.result() for job in jobs]
        return [None if plan is None else attach_model(plan, *attached) for plan in plans]


def search_choice(profile: Profile, choice: dict[str, Any]) -> Plan | None:
    try:
        return search_plan(profile, solver_seconds=0, **choice)
    except PenstockError:
        return None


def list_alternatives(planned: ModelPlan, searches: Searches) -> list[tuple[str, ModelPlan]]:
    """Return other plans, the fastest first: schedules x micro-batches x cuts x recomputation."""
    ranks, rows = planned.ranks, planned.profile.rows
    # More micro-batches take long to capture.
    chunks = [m for m in sorted({8, ranks, 2 * ranks, 16}) if rows % m == 0]
    names = [name for name, family in FAMILIES.items() if family.trains and name != "naive"]
    everything: dict[str, Any] = {"recompute": [True] * ranks}
    equal: dict[str, Any] = {"cut": cut_equally(planned, ranks)}
    usual: list[tuple[str, str, dict[str, Any]]] = [
        ("1f1b", ", equal layers", equal),
        ("zb-h1", ", equal layers", equal),
        ("1f1b", ", all recomputed", everything),
        ("1f1b", ", equal layers, all recomputed", {**equal, **everything}),
    ]
    choices = [
        (words, {"schedules": [name], "chunks": [number], "memory": inf, **options})
        for number in chunks
        for name, words, options in [*((name, "", {}) for name in (*names, "fit")), *usual]
        if not words or number == chunks[-1]
    ]
    plans = searches.run(planned, [choice for _, choice in choices])
    found = [
        (f"{choice['schedules'][0]}, {plan.chunks}, {len(plan.cut)} stages{words}", words, plan)
        for (words, choice), plan in zip(choices, plans, strict=True)
        if plan is not None
    ]
    named: list[tuple[str, ModelPlan]] = []
    for name, words, plan in sorted(found, key=lambda entry: entry[2].seconds):
        if not words and not any(is_same(plan, p) for p in (planned, *(p for _, p in named))):
            named.append((name, plan))
    return [
        *named[: ALTERNATIVES - len(usual)],
        *((name, plan) for name, words, plan in found if words),
    ]


def is_same(plan: ModelPlan, other: ModelPlan) -> bool:
    return (plan.cut, plan.schedule, plan.recompute) == (other.cut, other.schedule, other.recompute)


def cut_equally(plan: ModelPlan, stages: int) -> list[int]:
    share, rest = divmod(len(plan.profile.units), stages)
    return [share + (stage < rest) for stage in range(stages)]


# ---- measurements ------------------------------------------------------------------------------


class Measured(NamedTuple):
    """The median milliseconds of a step, and bytes: of all ranks, and of the fullest rank."""

    ms: float
    allocated: int
    rank_peak: float
    stages: list[float]  # seconds of F, I and W of each stage


def measure(case: Case, plan: ModelPlan, times: int, with_ranks: bool = False) -> Measured:
    gc.collect()
    torch.cuda.empty_cache()
    pipe = Pipe(case.model, plan=plan, loss_fn=case.loss_fn, audit="off", runtime="auto")

    def step() -> object:
        return pipe.step(case.x, target=case.target)

    # The second step is captured. A replayed one does not allocate: its memory is counted here.
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step()
    ms = milliseconds(lambda: [step() for _ in range(2)], times, warm_up=0) / 2
    allocated = torch.cuda.max_memory_allocated()
    cost = pipe.forecast().cost
    stages = [sum(seconds) for seconds in zip(cost.F, cost.I, cost.W, strict=True)]
    rank_peak = 0.0
    if with_ranks:
        memory = pipe.memory(case.x, target=case.target)
        rank_peak = max(map(sum, zip(memory.peak, memory.held, strict=True)))
    return Measured(ms, allocated, rank_peak, stages)


def measure_within(
    report: Report, case: Case, plans: Sequence[ModelPlan | None], cap: float, times: int
) -> tuple[ModelPlan, Measured] | None:
    """Return the first of the plans that fits below a cap, and what it takes.

    A pipe measures what its stages keep, and refuses a plan that needs more than its profile has
    told. The next plan then has to leave more free.
    """
    for plan in plans:
        if plan is None or report.is_over:
            return None
        capped = replace(plan, memory=(cap,) * plan.ranks)
        try:
            return capped, measure(case, capped, times, with_ranks=True)
        except ArgumentError as error:
            report.say(f"a plan for {plan.memory[0] / 1e9:.2f} GB: {str(error)[:200]}")
    return None


def search_within(
    planned: ModelPlan, caps: Sequence[float], searches: Searches
) -> list[list[ModelPlan | None]]:
    """Return, for each cap, the plans for ever smaller shares of it."""
    choices = [{"memory": cap * share} for cap in caps for share in SEARCHED_SHARES]
    plans = searches.run(planned, choices)
    count = len(SEARCHED_SHARES)
    return [plans[index : index + count] for index in range(0, len(plans), count)]


# ---- tables ------------------------------------------------------------------------------------


def print_slowdowns(report: Report, case: Case, places: Sequence[Gpu]) -> None:
    """Print how many times longer a block takes while 0, 1, 2, ... other groups do the same."""
    middle = len(case.model) // 2
    with torch.no_grad():
        x = case.model[:middle](case.x[: len(case.x) // (2 * len(places))]).requires_grad_()

    def work() -> None:
        torch.autograd.grad(case.model[middle](x).float().sum(), x)

    slowdowns = [
        SharedDevice(places[0], tuple(places[1 : 1 + busy])).measure_slowdown(work)
        for busy in range(len(places))
    ]
    words = ", ".join("?" if number is None else f"{number:.3f}" for number in slowdowns)
    report.say(f"a block takes so many times longer beside 0, 1, 2, ... busy groups: {words}")


def print_choices(
    report: Report, case: Case, planned: ModelPlan, searches: Searches, times: int, end: float
) -> None:
    alternatives = list_alternatives(planned, searches)
    rows = [("the plan", planned), *alternatives, ("again", planned)]
    report.say(f"{len(rows) - 2} alternatives")
    print(head(["choice", "ms", "forecast", "measured / forecast"]), flush=True)
    measured: dict[str, float] = {}
    for name, other in rows:
        if perf_counter() > end and len(measured) > 1 and name != "again":
            continue
        try:
            found = measure(case, other, times)
        except (PenstockError, torch.OutOfMemoryError) as error:
            report.say(f"{name}: {type(error).__name__}, {str(error)[:100]}")
            continue
        measured[name] = found.ms
        cost = other.costs.cost
        report.print(
            [
                name,
                f"{found.ms:.1f}",
                f"{1e3 * other.seconds:.1f}",
                f"{found.ms / 1e3 / other.seconds:.3f}",
            ],
            stages=found.stages,
            planned=[sum(s) for s in zip(cost.F, cost.I, cost.W, strict=True)],
            cut=other.cut,
            allocated=found.allocated,
            bubble=sum(other.forecast.bubble.values()),
        )
    if "the plan" not in measured:
        return
    mine = min(measured.pop("the plan"), measured.pop("again", inf))
    fastest = min(measured.values(), default=mine)
    report.say(
        f"the plan takes {mine / fastest:.3f} of the fastest of {len(measured)} alternatives, "
        f"and {mine / 1e3 / planned.seconds:.3f} of its forecast"
    )


def print_caps(report: Report, case: Case, free: ModelPlan, searches: Searches, times: int) -> None:
    ranks = free.ranks
    equal: dict[str, Any] = {"cut": cut_equally(free, ranks), "schedules": ["1f1b"], "memory": inf}
    (usual,) = searches.run(free, [{**equal, "recompute": [True] * ranks}])
    assert usual is not None
    kept_choice = {**equal, "recompute": [False] * ranks, "chunks": [usual.chunks]}
    (kept,) = searches.run(free, [kept_choice])
    assert kept is not None
    least, most = (max(plan.forecast.peak) for plan in (usual, kept))
    caps = [least + share * (most - least) for share in CAPS]
    searched = search_within(free, caps, searches)
    need = max(free.forecast.peak)
    report.say(f"\nwithout a cap: {need / 1e9:.2f} GB; caps from {least / 1e9:.2f} GB")
    names = ["cap", "choice", "ms", "forecast", "fullest rank", "of the cap", "all", "of the caps"]
    print(head([*names, "speed"]), flush=True)
    slow = measure(case, usual, times)
    name = f"equal layers, {usual.describe_choice()}"
    report.print(
        ["", name, f"{slow.ms:.1f}", f"{1e3 * usual.seconds:.1f}", "", "", "", "", "1.00"],
        peak=usual.forecast.peak,
        stages=slow.stages,
    )
    for cap, plans in zip(caps, searched, strict=True):
        found = measure_within(report, case, plans, cap, times)
        if found is None:
            report.print([f"{cap / 1e9:.2f} GB", "nothing fits, or no time is left"])
            continue
        plan, (ms, allocated, rank_peak, stages) = found
        report.print(
            [
                f"{cap / 1e9:.2f} GB",
                plan.describe_choice(),
                f"{ms:.1f}",
                f"{1e3 * plan.seconds:.1f}",
                f"{rank_peak / 1e9:.2f} GB",
                f"{rank_peak / cap:.2f}",
                f"{allocated / 1e9:.2f} GB",
                f"{allocated / cap / ranks:.2f}",
                f"{slow.ms / ms:.2f}",
            ],
            peak=plan.forecast.peak,
            stages=stages,
        )


def print_unequal(report: Report, searches: Searches, times: int) -> None:
    places = penstock.virtual_devices("cuda:0", sms=[64, 32, 16])
    case = make_case("mlp")
    planned = make_plan(report, case, places, memory=inf, chunks=[8, 16, 32])
    equal = {"cut": cut_equally(planned, len(planned.cut)), "chunks": [planned.chunks]}
    (even,) = searches.run(planned, [{**equal, "memory": inf}])
    assert even is not None
    assert planned.certificate is not None
    fast, slow = (measure(case, plan, times) for plan in (planned, even))
    rows = -(-planned.profile.rows // planned.chunks)
    whole = [
        sum(
            getattr(unit.seconds[device.kind], op).at(rows)
            for unit in planned.profile.units
            for op in "FIW"
        )
        * planned.chunks
        / device.speed
        for device in planned.profile.devices
    ]
    ceilings = {
        "the forecast": planned.seconds,
        "the bound of every plan": planned.certificate.bound,
        "all multiprocessors busy all the time": 1 / sum(1 / seconds for seconds in whole),
    }
    report.say(f"\nunequal: {[place.sms for place in places]} multiprocessors")
    report.say(f"plan {planned.describe_choice()}, cut {list(planned.cut)}: {fast.ms:.1f} ms")
    for name, seconds in ceilings.items():
        report.say(f"{1e3 * seconds / fast.ms:.3f} of {name} ({1e3 * seconds:.1f} ms)")
    report.say(
        f"equal cut {slow.ms:.1f} ms (forecast {1e3 * even.seconds:.1f}): "
        f"{slow.ms / fast.ms:.2f} times the speed"
    )
    report.write(stages=fast.stages, cut=planned.cut)


def print_round(
    report: Report, searches: Searches, entry: str, args: argparse.Namespace, end: float
) -> None:
    if entry == "unequal":
        print_unequal(report, searches, args.times)
        return
    name, ranks = entry.split("-")
    places, case = penstock.virtual_devices("cuda:0", int(ranks)), make_case(name)
    print(f"\n## {name} on {ranks} virtual GPUs of {places[0].sms} multiprocessors", flush=True)
    # Any number of the MLP's rows is a micro-batch. A few numbers are enough.
    chunks = [4, 8, 16, 32, 64] if name == "mlp" else None
    planned = make_plan(report, case, places, memory=inf, chunks=chunks)
    print_slowdowns(report, case, places)
    if "choices" in args.tables:
        print_choices(report, case, planned, searches, args.times, end)
    if "caps" in args.tables:
        print_caps(report, case, planned, searches, args.times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", nargs="*", default=list(ROUNDS), choices=ROUNDS)
    parser.add_argument("--tables", nargs="*", default=list(TABLES), choices=TABLES)
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    gc.freeze()  # what was imported need not be looked at again after each row
    searches = Searches()
    needs_cuda()
    torch.cuda.init()
    report = Report(args.out, args.seconds)
    report.say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for index, entry in enumerate(args.rounds):
        # What is left is shared by the tables that are left, so that each gets some rows.
        rest = [other for other in args.rounds[index:] if other != "unequal"]
        end = perf_counter() + (report.end - perf_counter()) / max(1, len(rest))
        try:
            print_round(report, searches, entry, args, end)
        except Exception:  # the other rounds may still work
            report.say(traceback.format_exc())
    searches.close()
    report.say("done")


if __name__ == "__main__":
    main()

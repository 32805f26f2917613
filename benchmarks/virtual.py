"""Shared parts of the benchmarks on virtual GPUs: blocks, timers, contention, and the ceiling.

naive       the stages one after another: one group of multiprocessors is busy at a time
contention  the speed of a group while all groups are busy, relative to the same work alone
ideal       the simulated speed-up of the schedule over naive: unit costs, no messages
ceiling     ideal x contention: the largest speed-up that the GPU allows; as a time, the simulated
            step of the kernels' times alone, messages free, divided by the contention
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import statistics
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import penstock
from penstock import Cost, Pipe, schedules
from penstock.device.nvidia import VirtualGpu
from penstock.model.cut import ResourceLimits, find_cut_within
from penstock.model.traced.traced_partition import UnitCost
from penstock.schedules.balance import DeviceCapacity, UnitOutput, count_in_flight

CYCLES = 4_000_000  # about 2 ms, enough for the host to launch the work of all groups
TURNS = 8  # repetitions of the work in a graph that measures contention
BUSY_MS = (
    200.0  # all groups are busy for so long at least: under load the clock falls after a while
)
IN_A_ROW = 4  # steps that are launched before the host waits


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def loss_of(out: Tensor) -> Tensor:
    return out.float().square().mean()


def blocks_of(number: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(width) for _ in range(number)])
    return model.to("cuda:0", torch.bfloat16)


def needs_cuda() -> None:
    """Exit with a message if there is no CUDA GPU."""
    if not torch.cuda.is_available():
        print("this measures virtual devices of a CUDA GPU, and there is none", file=sys.stderr)
        raise SystemExit(2)


# ---- timers --------------------------------------------------------------------------------


def enough(durations: Sequence[float], times: int, budget: float) -> bool:
    """Return whether there are enough measurements: `times` of them, or `budget` ms and three."""
    return len(durations) >= times or (len(durations) >= 3 and sum(durations) >= budget)


def milliseconds(
    run: Callable[[], object], times: int, warm_up: int = 3, budget: float = 8000.0
) -> float:
    """Return the median time on the device, of fewer runs if they exceed the budget in ms."""
    for _ in range(warm_up):
        run()
    torch.cuda.synchronize()
    durations: list[float] = []
    while not enough(durations, times, budget):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        durations.append(start.elapsed_time(end))
    return float(statistics.median(durations))


def host_milliseconds(run: Callable[[], object], times: int) -> float:
    """Return the median time that the host takes to launch a run.

    The device is idle before each run, because otherwise the host might wait for a full queue.
    """
    durations = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = perf_counter()
        run()
        durations.append(1e3 * (perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(durations)


def in_turns(runs: Sequence[Callable[[], object]], times: int) -> list[float]:
    """Return the median milliseconds of each; they alternate, several runs in a row."""
    durations: list[list[float]] = [[] for _ in runs]
    for round_index in range(times + 1):
        for run, run_durations in zip(runs, durations, strict=True):
            ms = milliseconds(lambda run=run: [run() for _ in range(IN_A_ROW)], 1, 0, 0)  # type: ignore[misc]
            if round_index:  # the first round warms up
                run_durations.append(ms / IN_A_ROW)
    return [statistics.median(run_durations) for run_durations in durations]


# ---- one process at a time -------------------------------------------------------------------


class GpuLock:
    """A lock on two files, by which processes that share the GPU take turns; or none.

    Who waits for the first file is next for the second, so that those who share the lock do not
    keep out for ever who wants to be alone.
    """

    def __init__(self, path: str | None) -> None:
        paths = [] if path is None else [path, f"{path}.next"]
        self._files = [open(path, "a") for path in paths]  # noqa: SIM115

    @contextmanager
    def hold(self, exclusive: bool) -> Iterator[None]:
        """Hold the lock: alone for a measurement, with others for work that is not measured."""
        if not self._files:
            yield
            return
        import fcntl

        held, turnstile = self._files
        fcntl.flock(turnstile, fcntl.LOCK_EX)
        fcntl.flock(held, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        fcntl.flock(turnstile, fcntl.LOCK_UN)
        try:
            yield
            torch.cuda.synchronize()
        finally:
            fcntl.flock(held, fcntl.LOCK_UN)

    @contextmanager
    def around_replays(self) -> Iterator[None]:
        """Hold the lock with others around each replay of a graph only, not around its capture."""
        graphs: Any = torch.cuda.CUDAGraph
        replay = graphs.replay

        def locked(graph: torch.cuda.CUDAGraph) -> None:
            with self.hold(exclusive=False):
                replay(graph)

        graphs.replay = locked
        try:
            yield
        finally:
            graphs.replay = replay


# ---- contention and the ceiling ------------------------------------------------------------


def contention(places: list[VirtualGpu], stage: nn.Module, x: Tensor) -> float:
    """Return the time of one group alone over its time while all groups work, one thread each."""

    def work(place: VirtualGpu, module: nn.Module, durations: list[float]) -> None:
        torch.autograd.set_multithreading_enabled(False)
        with place.activate():
            for turn in range(4 + TURNS):
                if turn == 4:
                    start = torch.cuda.Event(enable_timing=True)
                    start.record()
                loss_of(module(x)).backward()
            end = torch.cuda.Event(enable_timing=True)
            end.record()
        end.synchronize()
        durations.append(start.elapsed_time(end))

    def together(chosen: list[VirtualGpu]) -> float:
        durations: list[float] = []
        threads = [
            threading.Thread(target=work, args=(place, copy.deepcopy(stage), durations))
            for place in chosen
        ]
        torch.cuda.synchronize()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return statistics.mean(durations)

    alone = statistics.median(together(places[:1]) for _ in range(3))
    return alone / statistics.median(together(places) for _ in range(3))


def contention_of_graphs(
    places: list[VirtualGpu],
    stage: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
) -> float:
    """Return the contention of captured work, which the host does not slow down at any size.

    The work is the forward of the stage with these arguments, and its backward.
    """
    stages = [copy.deepcopy(stage) for _ in places]  # a graph does not keep their memory alive
    graphs = [
        captured(place, module, args, kwargs or {})
        for place, module in zip(places, stages, strict=True)
    ]

    def together(chosen: Sequence[int], replays: int = 1) -> float:
        torch.cuda._sleep(CYCLES)
        begin = torch.cuda.current_stream().record_event()
        starts_and_ends = {
            index: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for index in chosen
        }
        for replay in range(replays):
            for index in chosen:
                place, (start, end) = places[index], starts_and_ends[index]
                if not replay:
                    place.compute_stream.wait_event(begin)
                with place.activate():
                    if not replay:
                        start.record()
                    graphs[index].replay()
                    end.record()
        torch.cuda.synchronize()
        pairs = list(starts_and_ends.values())
        return float(statistics.mean(start.elapsed_time(end) for start, end in pairs)) / replays

    everyone = range(len(places))
    busy = together(everyone)
    # Groups may be unequal, so each of them is measured alone.
    alone = statistics.mean(
        statistics.median(together([index]) for _ in range(3)) for index in everyone
    )
    replays = max(1, math.ceil(BUSY_MS / busy))
    return alone / statistics.median(together(everyone, replays) for _ in range(3))


def captured(
    place: VirtualGpu, stage: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.cuda.CUDAGraph:
    """Capture `TURNS` repetitions of forward and backward on the multiprocessors of a group."""

    def work(turns: int) -> None:
        for _ in range(turns):
            out = stage(*args, **kwargs)
            loss_of(out[0] if isinstance(out, tuple) else out).backward()

    return graph_of(lambda: work(2), lambda: work(TURNS), place.compute_stream)


def graph_of(
    warm_up: Callable[[], object], body: Callable[[], object], stream: torch.cuda.Stream
) -> torch.cuda.CUDAGraph:
    """Capture `body` on the stream as a plain CUDA graph, after a warm-up."""
    graph = torch.cuda.CUDAGraph()
    was_multithreaded = torch._C._is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)
    try:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            warm_up()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            body()
    finally:
        torch.autograd.set_multithreading_enabled(was_multithreaded)
    return graph


def ideal_of(name: str, checkpoint: str, ranks: int, chunks: int) -> float:
    """Return the simulated speed-up over naive without recomputation.

    A name that is not a schedule stands for a call and its backward, which runs as gpipe.
    """

    def makespan(name: str, checkpoint: str) -> float:
        name = name if name in schedules.FAMILIES else "gpipe"
        schedule = schedules.make(name, ranks, chunks)
        schedule = penstock.recompute(schedule, penstock.recompute_mode(checkpoint, chunks))
        return penstock.simulate(penstock.lower(schedule)).makespan

    return makespan("naive", "never") / makespan(name, checkpoint)


def simulate_units(pipe: Pipe, units: Sequence[UnitCost]) -> float:
    """Return the seconds of a step of a pipe whose units have these costs, with free messages.

    NaN if the units of the pipe are others: with more stages, larger units are cut up.
    """
    counts = pipe.partition.counts
    if sum(counts) != len(units):
        return math.nan
    ends = list(itertools.accumulate(counts))
    stages = [units[end - count : end] for count, end in zip(counts, ends, strict=True)]
    F, I, W = (
        tuple(sum(getattr(unit, op) for unit in stage) for stage in stages)
        for op in ("forward", "input_grad", "weight_grad")
    )
    return pipe.forecast(Cost(F, I, W, activation=(0.0,) * len(counts))).makespan


def choose_cut(
    name: str,
    places: Sequence[Any],
    chunks: int,
    units: Sequence[UnitCost],
    values: tuple[UnitOutput, ...] = (),
) -> tuple[int, ...]:
    """Return the cut that `Pipe(balance="time")` chooses, from the costs of units on one device."""
    schedule = schedules.make(name, len(places), chunks)
    limits = ResourceLimits(
        tuple(places[rank].device for rank in schedule.placement),
        count_in_flight(schedule),
        schedule.placement,
        (math.inf,) * len(places),
        on_one_device=True,
        schedule=schedule,
    )
    return find_cut_within(limits, units, (DeviceCapacity(),) * len(places), values)


# ---- tables --------------------------------------------------------------------------------


def line(cells: Iterable[object]) -> str:
    """Return one row of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def head(cells: Sequence[str]) -> str:
    """Return the header and the separator of a Markdown table."""
    return line(cells) + "\n" + "|---" * len(cells) + "|"


# ---- memory --------------------------------------------------------------------------------


class Peak(NamedTuple):
    """Additional bytes: allocated in tensors, and reserved from the device."""

    allocated: int
    reserved: int


def peak_of(step: Callable[[], object]) -> Peak:
    """Return the peak of the second and the third step; a graph is captured in the second."""
    step()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    return Peak(
        torch.cuda.max_memory_allocated() - before[0],
        torch.cuda.max_memory_reserved() - before[1],
    )

"""What benchmarks on virtual GPUs have in common: blocks, clocks, contention, and the ceiling.

naive       the stages one after the other, one group of multiprocessors busy at a time
contention  how fast each group is when all work at once, against one alone (same work)
ideal       the schedule's speed-up over naive on paper: unit costs, no messages
ceiling     ideal x contention: what the machine allows
"""

from __future__ import annotations

import copy
import gc
import statistics
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

import penstock
from penstock import schedules
from penstock.device.virtual_gpu import VirtualGpu

CYCLES = 4_000_000  # about 2 ms, in which the host asks all groups for their work
TURNS = 8  # of the same work, while contention is measured
IN_A_ROW = 4  # steps that are asked for before the host waits


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
    made = nn.Sequential(*[Block(width) for _ in range(number)])
    return made.to("cuda:0", torch.bfloat16)


def needs_cuda() -> None:
    """End the program, and say why, where there is no GPU to be cut."""
    if not torch.cuda.is_available():
        print("this measures virtual devices of a CUDA GPU, and there is none", file=sys.stderr)
        raise SystemExit(2)


# ---- clocks --------------------------------------------------------------------------------


def enough(found: Sequence[float], times: int, budget: float) -> bool:
    """Are so many measurements there, in ms, or have they taken that long? Three at least."""
    return len(found) >= times or (len(found) >= 3 and sum(found) >= budget)


def milliseconds(
    run: Callable[[], object], times: int, warm_up: int = 3, budget: float = 8000.0
) -> float:
    """Of the device, the median: fewer than so many times where that would take long."""
    for _ in range(warm_up):
        run()
    torch.cuda.synchronize()
    found: list[float] = []
    while not enough(found, times, budget):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return float(statistics.median(found))


def host_milliseconds(run: Callable[[], object], times: int) -> float:
    """What it takes the host to ask for it, the median. The device is idle, or else the host might
    wait for room in its queues.
    """
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = perf_counter()
        run()
        found.append(1e3 * (perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(found)


def in_turns(runs: Sequence[Callable[[], object]], times: int) -> list[float]:
    """Milliseconds of each, the medians: several in a row of one, then of the next, and again."""
    found: list[list[float]] = [[] for _ in runs]
    for turn in range(times + 1):
        for run, taken in zip(runs, found, strict=True):
            ms = milliseconds(lambda run=run: [run() for _ in range(IN_A_ROW)], 1, 0, 0)  # type: ignore[misc]
            if turn:  # the first warms up
                taken.append(ms / IN_A_ROW)
    return [statistics.median(taken) for taken in found]


# ---- what the machine allows ---------------------------------------------------------------


def contention(places: list[VirtualGpu], stage: nn.Module, x: Tensor) -> float:
    """Time of one group alone over its time while all groups do the same work, by threads."""

    def work(place: VirtualGpu, mine: nn.Module, found: list[float]) -> None:
        torch.autograd.set_multithreading_enabled(False)
        with place.activate():
            for turn in range(4 + TURNS):
                if turn == 4:
                    start = torch.cuda.Event(enable_timing=True)
                    start.record()
                loss_of(mine(x)).backward()
            end = torch.cuda.Event(enable_timing=True)
            end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))

    def together(chosen: list[VirtualGpu]) -> float:
        found: list[float] = []
        threads = [
            threading.Thread(target=work, args=(place, copy.deepcopy(stage), found))
            for place in chosen
        ]
        torch.cuda.synchronize()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return statistics.mean(found)

    alone = statistics.median(together(places[:1]) for _ in range(3))
    return alone / statistics.median(together(places) for _ in range(3))


def contention_of_graphs(places: list[VirtualGpu], stage: nn.Module, x: Tensor) -> float:
    """The same of captured work, which the host does not slow down however small it is."""
    stages = [copy.deepcopy(stage) for _ in places]  # a graph does not keep their memory
    graphs = [captured(place, mine, x) for place, mine in zip(places, stages, strict=True)]

    def together(number: int) -> float:
        pairs = []
        torch.cuda._sleep(CYCLES)
        begin = torch.cuda.current_stream().record_event()
        for place, graph in zip(places[:number], graphs, strict=False):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            place.compute_stream.wait_event(begin)
            with place.activate():
                start.record()
                graph.replay()
                end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return float(statistics.mean(start.elapsed_time(end) for start, end in pairs))

    together(len(places))
    alone = statistics.median(together(1) for _ in range(5))
    return alone / statistics.median(together(len(places)) for _ in range(5))


def captured(place: VirtualGpu, stage: nn.Module, x: Tensor) -> torch.cuda.CUDAGraph:
    """So many turns of forward and backward, on the group's multiprocessors."""

    def work(turns: int) -> None:
        for _ in range(turns):
            loss_of(stage(x)).backward()

    return graph_of(lambda: work(2), lambda: work(TURNS), place.compute_stream)


def graph_of(
    warm_up: Callable[[], object], body: Callable[[], object], stream: torch.cuda.Stream
) -> torch.cuda.CUDAGraph:
    """A plain CUDA graph of a body, on the stream, after something that is like it."""
    graph = torch.cuda.CUDAGraph()
    before = torch._C._is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)
    try:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            warm_up()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            body()
    finally:
        torch.autograd.set_multithreading_enabled(before)
    return graph


def ideal_of(name: str, checkpoint: str, ranks: int, chunks: int) -> float:
    """On paper, against naive without recomputation. What is no schedule's name is a call."""

    def makespan(name: str, checkpoint: str) -> float:
        name = name if name in schedules.FAMILIES else "gpipe"
        schedule = schedules.make(name, ranks, chunks)
        schedule = penstock.recompute(schedule, penstock.recompute_mode(checkpoint, chunks))
        return penstock.simulate(penstock.lower(schedule)).makespan

    return makespan("naive", "never") / makespan(name, checkpoint)


# ---- tables --------------------------------------------------------------------------------


def line(cells: Iterable[object]) -> str:
    """One row of a table in markdown."""
    return "| " + " | ".join(map(str, cells)) + " |"


def head(cells: Sequence[str]) -> str:
    """Its first two lines."""
    return line(cells) + "\n" + "|---" * len(cells) + "|"


# ---- memory --------------------------------------------------------------------------------


class Peak(NamedTuple):
    """Bytes beside what was there before: in tensors, and taken from the device."""

    allocated: int
    reserved: int


def peak_of(step: Callable[[], object]) -> Peak:
    """Of the second step and the third; a captured one is captured in the second."""
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

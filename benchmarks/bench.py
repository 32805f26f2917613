"""Time a training step of a model under several schedules and runtimes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from benchmarks.virtual import (
    Peak,
    contention_of_graphs,
    graph_of,
    host_milliseconds,
    ideal_of,
    in_turns,
    loss_of,
    milliseconds,
    peak_of,
)
from torch import Tensor, nn

from penstock import Pipe

Made = TypeVar("Made")

WARM_UP = 3  # the first step runs eagerly, the second is captured


class Way(NamedTuple):
    """A schedule and a runtime."""

    schedule: str
    runtime: str


NAIVE, THREADS, GRAPH = Way("naive", "graph"), Way("1f1b", "threads"), Way("1f1b", "graph")
TORCHGPIPE = Way("gpipe", "threads")


@dataclass(frozen=True)
class Speed:
    """The measurements of one size: milliseconds per step, and two ratios."""

    naive: float
    threads: float
    graph: float
    ideal: float
    contention: float

    @property
    def ceiling(self) -> float:
        """Milliseconds of a step with the ideal speed-up under contention: a lower bound."""
        return self.naive / (self.ideal * self.contention)

    @property
    def over_threads(self) -> float:
        return self.threads / self.graph

    @property
    def of_the_ceiling(self) -> float:
        return self.ceiling / self.graph


@dataclass(frozen=True)
class Bench:
    """A model, a batch, the number of micro-batches, and the number of timed steps."""

    model: nn.Sequential
    x: Tensor
    chunks: int
    times: int

    def of_pipe(self, way: Way, places: Sequence[Any], use: Callable[[Pipe], Made]) -> Made:
        """Call `use` with a pipe that has equally many blocks per device, then free its memory."""
        try:
            return use(self._pipe(way, places))
        finally:
            self.tidy()

    def _pipe(self, way: Way, places: Sequence[Any]) -> Pipe:
        return Pipe(
            self.model,
            self.chunks,
            "never",
            stages=[len(self.model) // len(places)] * len(places),
            devices=places,
            schedule=way.schedule,
            runtime=way.runtime,
            loss_fn=loss_of,
            # The audit takes time in the first step, and the benchmarks build many pipes.
            audit="off",
        )

    def tidy(self) -> None:
        self.model.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()

    def ms(self, pipe: Pipe) -> float:
        return milliseconds(lambda: pipe.step(self.x), self.times, WARM_UP)

    def step(self, way: Way, places: Sequence[Any]) -> float:
        """Return the milliseconds of a step, or NaN if it runs out of memory."""
        try:
            return self.of_pipe(way, places, self.ms)
        except torch.OutOfMemoryError:
            pass
        self.tidy()  # outside the handler, where the error no longer keeps tensors alive
        return float("nan")

    def host(self, places: Sequence[Any]) -> tuple[float, float]:
        """Return the milliseconds of the host for a replayed step, and those of the step."""

        def both(pipe: Pipe) -> tuple[float, float]:
            step = self.ms(pipe)
            return host_milliseconds(lambda: pipe.step(self.x), self.times), step

        return self.of_pipe(GRAPH, places, both)

    def memory(self, places: Sequence[Any]) -> tuple[float, float]:
        """Return the peak memory of graph over threads: allocated in tensors, and reserved."""

        def peak(pipe: Pipe) -> Peak:
            return peak_of(lambda: pipe.step(self.x))

        graph, threads = (self.of_pipe(way, places, peak) for way in (GRAPH, THREADS))
        return graph.allocated / threads.allocated, graph.reserved / threads.reserved

    def speed(self, places: list[Any]) -> Speed:
        ranks = len(places)
        stage = self.model[: len(self.model) // ranks]
        share = contention_of_graphs(places, stage, [self.x[: len(self.x) // self.chunks]])
        self.tidy()
        naive, threads, graph = (self.step(way, places) for way in (NAIVE, THREADS, GRAPH))
        ideal = ideal_of(GRAPH.schedule, "never", ranks, self.chunks)
        return Speed(naive, threads, graph, ideal, share)

    def over_plain(self, pipe: Pipe, stream: torch.cuda.Stream) -> float:
        """Return the time of the pipe over that of gradient accumulation as a plain CUDA graph."""
        for _ in range(WARM_UP):
            pipe.step(self.x)
        graph = graph_of(self.accumulate, self.accumulate, stream)
        pipelined, plain = in_turns([lambda: pipe.step(self.x), graph.replay], self.times)
        return pipelined / plain

    def plain(self, stream: torch.cuda.Stream) -> float:
        """Return the milliseconds of gradient accumulation as a plain CUDA graph."""
        graph = graph_of(self.accumulate, self.accumulate, stream)
        return milliseconds(graph.replay, self.times, WARM_UP)

    def accumulate(self) -> None:
        accumulate(self.model, self.x, self.chunks)


def accumulate(model: nn.Module, x: Tensor, chunks: int) -> None:
    """Accumulate the gradients of the mean loss, micro-batch by micro-batch."""
    for part in x.chunk(chunks):
        (loss_of(model(part)) / chunks).backward()

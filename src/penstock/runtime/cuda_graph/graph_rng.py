"""Random numbers of a captured step: new ones in every replay, the same in its recomputations.

Each computation of a cell has a generator that the recording knows. Before a replay, all those of
one cell get the seed that the cell would have in a step that is not captured.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from penstock.runtime.cuda_graph.capture_guard import CaptureError, CaptureGuard
from penstock.runtime.cuda_graph.recorded_graph import RecordedGraph
from penstock.runtime.execution import RngPolicy
from penstock.stage.rng import RngSource, SeededRng, advance_caller_rng, derive_cell_seed, peek_seed

Cell = tuple[int, int]  # stage, micro-batch


class RngUsage:
    """In a step that is not captured: how often each cell has drawn random numbers."""

    def __init__(self) -> None:
        self.draws_per_cell: Counter[Cell] = Counter()
        self.advanced_caller_rng = False  # was the caller's generator?
        self._issued: list[tuple[Cell, SeededRng]] = []

    @property
    def rng_policy(self) -> RngPolicy:
        """As ever."""
        return RngPolicy(advance_rng=self._advance_caller_rng, make_cell_rng=self._create_source)

    def _advance_caller_rng(self) -> None:
        self.advanced_caller_rng = True
        advance_caller_rng()

    def _create_source(self, seed: int, stage: int, microbatch: int) -> SeededRng:
        source = SeededRng(derive_cell_seed(seed, stage, microbatch))
        self._issued.append(((stage, microbatch), source))
        return source

    def finish_step(self) -> None:
        """The step has ended: who asked may have drawn nothing."""
        self.draws_per_cell.update(cell for cell, source in self._issued if source.has_drawn)
        self._issued.clear()


class ForbiddenGenerator:
    """For a cell that has drawn nothing before."""

    has_drawn = False

    def generator_for(self, device: torch.device) -> torch.Generator:
        """It draws nothing now."""
        raise CaptureError("it draws random numbers, which it had not done before")

    def replace_shared_generator(self, generator: torch.Generator) -> AbstractContextManager[None]:
        """Nor so."""
        raise AssertionError("there is none to lend")


class GraphGenerator:
    """Of one computation of a cell."""

    def __init__(self, graph: RecordedGraph, guard: CaptureGuard, device: torch.device) -> None:
        self._graph, self._guard = graph, guard
        self.generator = graph.create_generator(device)
        guard.register_generator(self.generator)
        self.has_drawn = False

    def generator_for(self, device: torch.device) -> torch.Generator:
        """The one that the recording knows."""
        if device != self.generator.device:
            raise CaptureError(f"it draws random numbers on {device}, where no replay draws any")
        self.has_drawn = True
        return self.generator

    @contextmanager
    def replace_shared_generator(self, generator: torch.Generator) -> Iterator[None]:
        """As the recording does it."""
        with self._graph.replace_shared_generator(generator), self._guard.allow_shared_generator():
            yield


class GraphGenerators:
    """Those of one recording."""

    def __init__(
        self,
        graph: RecordedGraph,
        guard: CaptureGuard,
        rng_usage: RngUsage,
        device_of: Callable[[int], torch.device],
    ) -> None:
        self._unused = {
            cell: [GraphGenerator(graph, guard, device_of(cell[0])) for _ in range(times)]
            for cell, times in rng_usage.draws_per_cell.items()
        }
        self._used: list[tuple[Cell, GraphGenerator]] = []
        self._advances_caller_rng = rng_usage.advanced_caller_rng

    @property
    def rng_policy(self) -> RngPolicy:
        """For the capture: others cannot be watched, and the watch of the capture sees them."""
        return RngPolicy(lambda: 0, lambda: None, self._take_source, detect_outside_rng_use=False)

    def _take_source(self, _: int, stage: int, microbatch: int) -> RngSource:
        stock = self._unused.get((stage, microbatch))
        if not stock:
            return ForbiddenGenerator()
        source = stock.pop()
        self._used.append(((stage, microbatch), source))
        return source

    def finish_capture(self) -> None:
        """The capture has ended: those that gave nothing are not seeded."""
        self._used = [(cell, source) for cell, source in self._used if source.has_drawn]
        self._unused.clear()

    def seed_generators(self) -> None:
        """Before a replay: as in a step that is not captured."""
        if self._used:
            seed = peek_seed()
            for (stage, microbatch), source in self._used:
                source.generator.manual_seed(derive_cell_seed(seed, stage, microbatch))
        if self._advances_caller_rng:
            advance_caller_rng()


# -------------------------------------------------------------------------------------------------
# Random numbers that the host draws: Python's own, and numpy's. A replay draws none of them.
# -------------------------------------------------------------------------------------------------


class HostRngGuard:
    """Where these generators stand, before a step."""

    def __init__(self) -> None:
        self._python_state = random.getstate()
        self._numpy_state = _get_numpy_state()

    def check_unchanged(self) -> None:
        """After it: they stand there still."""
        for name, before, now in (
            ("random", self._python_state, random.getstate()),
            ("numpy.random", self._numpy_state, _get_numpy_state()),
        ):
            if str(before) != str(now):
                raise CaptureError(
                    f"a layer draws from {name} in every step, and a replay would not: draw with "
                    "torch on the layer's device"
                )

    def restore(self) -> None:
        """As if it had not been."""
        random.setstate(self._python_state)
        if self._numpy_state is not None:
            sys.modules["numpy"].random.set_state(self._numpy_state)


def _get_numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None or not hasattr(numpy, "random") else numpy.random.get_state()

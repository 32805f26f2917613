"""Random numbers of a captured step.

Every replay must draw new numbers, and they must be those that an eager step would draw. A cell is
computed once, or twice under recomputation, and both computations must draw the same numbers.

So each computation of a cell that draws has a generator of its own, which is registered with the
graph. Before a replay, the generators of one cell all get the seed that the cell would have in an
eager step:

    first step   RngUsage counts how often each cell draws
    capture      GraphGenerators hands out that many generators, and refuses further draws
    replay       seed_generators sets their seeds, and advances the caller's generator

`HostRngGuard` watches `random` and `numpy.random`, from which no replay can draw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from penstock.device.recorded_graph import RecordedGraph
from penstock.runtime.cuda_graph.capture_guard import CaptureError, CaptureGuard
from penstock.runtime.execution import RngPolicy
from penstock.stage.host_rng import HostRngState
from penstock.stage.rng import RngSource, SeededRng, advance_caller_rng, derive_cell_seed, peek_seed

Cell = tuple[int, int]  # stage, micro-batch


class RngUsage:
    """Counts, in an eager step, how many computations of each cell draw random numbers."""

    def __init__(self) -> None:
        self.draws_per_cell: Counter[Cell] = Counter()
        self.advanced_caller_rng = False
        self._issued: list[tuple[Cell, SeededRng]] = []

    @property
    def rng_policy(self) -> RngPolicy:
        """Return the policy of an eager step. It records the generators that it hands out."""
        return RngPolicy(advance_rng=self._advance_caller_rng, make_cell_rng=self._create_source)

    def _advance_caller_rng(self) -> None:
        self.advanced_caller_rng = True
        advance_caller_rng()

    def _create_source(self, seed: int, stage: int, microbatch: int) -> SeededRng:
        source = SeededRng(derive_cell_seed(seed, stage, microbatch))
        self._issued.append(((stage, microbatch), source))
        return source

    def finish_step(self) -> None:
        """Count the sources that were drawn from. A cell may have asked for one and not used it."""
        self.draws_per_cell.update(cell for cell, source in self._issued if source.has_drawn)
        self._issued.clear()


class ForbiddenGenerator:
    """The random source of a cell that drew nothing in the first step. It raises when used."""

    has_drawn = False

    def generator_for(self, device: torch.device) -> torch.Generator:
        """Raise `CaptureError`: the graph has no generator for this cell."""
        raise CaptureError("it draws random numbers, but drew none in the first step of this kind")

    def replace_shared_generator(self, generator: torch.Generator) -> AbstractContextManager[None]:
        """Raise: `generator_for` never returns a generator to replace the shared one by."""
        raise AssertionError("a cell without a generator cannot replace the shared one")


class GraphGenerator:
    """The random source of one computation of a cell in a capture."""

    def __init__(self, graph: RecordedGraph, guard: CaptureGuard, device: torch.device) -> None:
        self._graph, self._guard = graph, guard
        self.generator = graph.create_generator(device)
        guard.register_generator(self.generator)
        self.has_drawn = False

    def generator_for(self, device: torch.device) -> torch.Generator:
        """Return the generator that is registered with the graph."""
        if device != self.generator.device:
            raise CaptureError(
                f"it draws random numbers on {device}, but a replay draws on "
                f"{self.generator.device} only. Draw on the layer's device"
            )
        self.has_drawn = True
        return self.generator

    @contextmanager
    def replace_shared_generator(self, generator: torch.Generator) -> Iterator[None]:
        """Let operations that use the default generator draw from this one, in the context."""
        with self._graph.replace_shared_generator(generator), self._guard.allow_shared_generator():
            yield


class GraphGenerators:
    """The generators of one graph, by cell."""

    def __init__(
        self,
        graph: RecordedGraph,
        guard: CaptureGuard,
        rng_usage: RngUsage,
        device_of: Callable[[int], torch.device],
    ) -> None:
        # PyTorch refuses to register a generator with a graph during the capture. So all of them
        # are made now, as many as the first step has counted.
        self._unused = {
            cell: [GraphGenerator(graph, guard, device_of(cell[0])) for _ in range(times)]
            for cell, times in rng_usage.draws_per_cell.items()
        }
        self._used: list[tuple[Cell, GraphGenerator]] = []
        self._advances_caller_rng = rng_usage.advanced_caller_rng

    @property
    def rng_policy(self) -> RngPolicy:
        """Return the policy of the capture.

        Draws outside of cells are found by `CaptureGuard`. An eager step compares the states of the
        generators instead, and PyTorch refuses to read those during a capture.
        """
        return RngPolicy(lambda: 0, lambda: None, self._take_source, detect_outside_rng_use=False)

    def _take_source(self, _: int, stage: int, microbatch: int) -> RngSource:
        unused = self._unused.get((stage, microbatch))
        if not unused:
            return ForbiddenGenerator()
        source = unused.pop()
        self._used.append(((stage, microbatch), source))
        return source

    def finish_capture(self) -> None:
        """Keep the generators that were drawn from; only these are seeded before a replay."""
        self._used = [(cell, source) for cell, source in self._used if source.has_drawn]
        # A pipe that is a layer draws a seed in its first call, and none once it has shown that it
        # draws nothing itself.
        self._advances_caller_rng &= bool(self._used)
        self._unused.clear()

    def seed_generators(self) -> None:
        """Seed the generators before a replay, as an eager step would seed its cells."""
        if self._used:
            seed = peek_seed()
            for (stage, microbatch), source in self._used:
                source.generator.manual_seed(derive_cell_seed(seed, stage, microbatch))
        if self._advances_caller_rng:
            advance_caller_rng()


# ---- random numbers of the host -------------------------------------------------------------


class HostRngGuard(HostRngState):
    """The state of Python's and NumPy's global generators before a step."""

    def check_unchanged(self) -> None:
        """Raise `CaptureError` if the step has drawn from one of them."""
        for name in self.find_used():
            raise CaptureError(
                f"a layer draws from {name} in every step, and a replay would not. Draw with "
                "torch, on the layer's device"
            )

"""The programs of a pipe, for each number of micro-batches: made when they are first needed."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from penstock.ir import Program, Schedule, StageGraph
from penstock.lower import (
    forwards_first,
    joined,
    lower,
    recompute,
    recompute_mode,
    without_recompute,
)
from penstock.run.phase import Phase, is_backward, is_forward, whole
from penstock.schedules.choice import Choice


class Size(NamedTuple):
    """How many micro-batches there are, and which are recomputed: none, unless it `trains`."""

    chunks: int
    trains: bool
    checkpoint: str


class Programs:
    """Of one choice of a schedule. A copy makes its own."""

    def __init__(self, choice: Choice, graph: StageGraph) -> None:
        self._choice, self._graph = choice, graph
        self._whole: dict[Size, tuple[Program, Phase]] = {}
        self._halves: dict[Size, tuple[Program, Phase, Phase]] = {}
        self._others: dict[StageGraph, Programs] = {}

    def __reduce__(self) -> tuple[type[Programs], tuple[Choice, StageGraph]]:
        return Programs, (self._choice, self._graph)

    def on(self, graph: StageGraph) -> Programs:
        """Those where other stages feed each other: what a model sends may depend on its inputs."""
        if graph == self._graph:
            return self
        if graph not in self._others:
            self._others[graph] = Programs(replace(self._choice, graph=graph), graph)
        return self._others[graph]

    def whole(self, size: Size) -> tuple[Program, Phase]:
        """All in one go."""
        if size not in self._whole:
            program = lower(self._schedule(size), self._graph)
            self._whole[size] = program, whole(program)
        return self._whole[size]

    def halves(self, size: Size) -> tuple[Program, Phase, Phase]:
        """All forwards, and the whole backwards that may follow."""
        if size not in self._halves:
            program = lower(forwards_first(joined(self._schedule(size))), self._graph)
            phase = whole(program)
            self._halves[size] = program, phase.only(is_forward), phase.only(is_backward)
        return self._halves[size]

    def _schedule(self, size: Size) -> Schedule:
        schedule = self._choice(size.chunks)
        if size.trains:
            return recompute(schedule, recompute_mode(size.checkpoint, size.chunks))
        return without_recompute(schedule)

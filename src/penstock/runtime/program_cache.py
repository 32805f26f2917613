"""The programs of a pipe, for each number of micro-batches: made when they are first needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from penstock.runtime.worker import BoundAction, bind_lane
from penstock.schedules.ir import Action, Compute, Op, Program, Schedule, StageGraph
from penstock.schedules.lowering import (
    forwards_first,
    join_split_backwards,
    lower,
    recompute,
    recompute_mode,
    remove_recompute,
)
from penstock.schedules.registry import ScheduleFactory
from penstock.schedules.simulator import play

# -------------------------------------------------------------------------------------------------
# A program made ready to be carried out, whole or as a forward and a backward phase.
# -------------------------------------------------------------------------------------------------


class Phase(NamedTuple):
    """The steps of each rank, and all of them in the one order in which they could be played."""

    lanes: tuple[tuple[BoundAction, ...], ...]
    execution_order: tuple[tuple[int, BoundAction], ...]

    def filter_actions(self, predicate: Callable[[Action], bool]) -> Phase:
        """Those steps alone."""
        return Phase(
            tuple(tuple(s for s in lane if predicate(s.action)) for lane in self.lanes),
            tuple((rank, s) for rank, s in self.execution_order if predicate(s.action)),
        )


def bind_program(program: Program) -> Phase:
    """All of a program."""
    lanes = tuple(bind_lane(program, rank) for rank in range(program.schedule.ranks))
    order = tuple((span.rank, lanes[span.rank][span.step]) for span in play(program))
    return Phase(lanes, order)


def is_forward(action: Action) -> bool:
    """A forward, or a message of activations?"""
    if isinstance(action, Compute):
        return action.op is Op.F
    return action.message.src < action.message.dst


def is_backward(action: Action) -> bool:
    """Anything else."""
    return not is_forward(action)


# -------------------------------------------------------------------------------------------------


class ProgramKey(NamedTuple):
    """How many micro-batches there are, and which are recomputed: none, unless it `trains`."""

    chunks: int
    allow_recompute: bool
    checkpoint: str


class ProgramCache:
    """Of one choice of a schedule. A copy makes its own."""

    def __init__(self, schedule_choice: ScheduleFactory, graph: StageGraph) -> None:
        self._schedule_choice, self._graph = schedule_choice, graph
        self._step_phases: dict[ProgramKey, tuple[Program, Phase]] = {}
        self._forward_backward_phases: dict[ProgramKey, tuple[Program, Phase, Phase]] = {}
        self._caches_by_graph: dict[StageGraph, ProgramCache] = {}

    def __reduce__(self) -> tuple[type[ProgramCache], tuple[ScheduleFactory, StageGraph]]:
        return ProgramCache, (self._schedule_choice, self._graph)

    def for_graph(self, graph: StageGraph) -> ProgramCache:
        """Those where other stages feed each other: what a model sends may depend on its inputs."""
        if graph == self._graph:
            return self
        if graph not in self._caches_by_graph:
            self._caches_by_graph[graph] = ProgramCache(
                replace(self._schedule_choice, graph=graph), graph
            )
        return self._caches_by_graph[graph]

    def get_step_phase(self, key: ProgramKey) -> tuple[Program, Phase]:
        """All in one go."""
        if key not in self._step_phases:
            program = lower(self._build_schedule(key), self._graph)
            self._step_phases[key] = program, bind_program(program)
        return self._step_phases[key]

    def get_forward_backward_phases(self, key: ProgramKey) -> tuple[Program, Phase, Phase]:
        """All forwards, and the whole backwards that may follow."""
        if key not in self._forward_backward_phases:
            program = lower(
                forwards_first(join_split_backwards(self._build_schedule(key))), self._graph
            )
            phase = bind_program(program)
            self._forward_backward_phases[key] = (
                program,
                phase.filter_actions(is_forward),
                phase.filter_actions(is_backward),
            )
        return self._forward_backward_phases[key]

    def _build_schedule(self, key: ProgramKey) -> Schedule:
        schedule = self._schedule_choice(key.chunks)
        if key.allow_recompute:
            return recompute(schedule, recompute_mode(key.checkpoint, key.chunks))
        return remove_recompute(schedule)

"""The programs of a pipe, ready to run, made when a call first needs them.

A schedule becomes runnable in three steps:

    ScheduleFactory(chunks) -> Schedule -> lower -> Program -> bind_program -> Phase

`ProgramCache` keeps the results by number of micro-batches and kind of recomputation, so a later
call with the same key repeats none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from penstock.runtime.worker import BoundAction, bind_lane
from penstock.schedules.ir import (
    OP_RULES,
    Action,
    Compute,
    Program,
    Schedule,
    StageGraph,
    is_forward,
)
from penstock.schedules.lowering import (
    RecomputeTable,
    forwards_first,
    join_split_backwards,
    lower,
    recompute,
    recompute_mode,
    remove_recompute,
)
from penstock.schedules.registry import ScheduleFactory

# ---- phases --------------------------------------------------------------------------------------


class Phase(NamedTuple):
    """The actions that are run in one go: a whole program, its forwards, or its backwards."""

    # the actions of each rank
    lanes: tuple[tuple[BoundAction, ...], ...]
    # the actions of all ranks, with their ranks, in an order in which one thread can run them
    execution_order: tuple[tuple[int, BoundAction], ...]
    # whether layers run in it, in forwards or recomputations, which keep activations
    runs_layers: bool = True

    def filter_actions(self, predicate: Callable[[Action], bool]) -> Phase:
        """Return a phase with the actions that fulfil the predicate."""
        order = tuple((rank, s) for rank, s in self.execution_order if predicate(s.action))
        computes = (s.action for _, s in order if isinstance(s.action, Compute))
        return Phase(
            tuple(tuple(s for s in lane if predicate(s.action)) for lane in self.lanes),
            order,
            any(OP_RULES[action.op].keeps for action in computes),
        )


def bind_program(program: Program) -> Phase:
    """Return a phase with all actions of a program that `lower` made."""
    lanes = tuple(bind_lane(program, rank) for rank in range(program.schedule.ranks))
    remaining = [iter(lane) for lane in lanes]
    return Phase(lanes, tuple((rank, next(remaining[rank])) for rank in program.order))


# ---- the cache -----------------------------------------------------------------------------------


class ProgramKey(NamedTuple):
    """The key of a program: the number of micro-batches, and which of them are recomputed.

    `checkpoint` is the option of the pipe. It is used only if `allow_recompute` is set.
    """

    chunks: int
    allow_recompute: bool
    checkpoint: RecomputeTable


class ProgramCache:
    """The programs of one schedule. A copy of the pipe starts with an empty cache."""

    def __init__(self, schedule_choice: ScheduleFactory, graph: StageGraph) -> None:
        self._schedule_choice, self._graph = schedule_choice, graph
        self._step_phases: dict[ProgramKey, tuple[Program, Phase]] = {}
        self._forward_backward_phases: dict[ProgramKey, tuple[Program, Phase, Phase]] = {}
        self._caches_by_graph: dict[StageGraph, ProgramCache] = {}

    def __reduce__(self) -> tuple[type[ProgramCache], tuple[ScheduleFactory, StageGraph]]:
        return ProgramCache, (self._schedule_choice, self._graph)

    def for_graph(self, graph: StageGraph) -> ProgramCache:
        """Return the cache for a stage graph.

        In a traced model the inputs may decide which stage sends to which.
        """
        if graph == self._graph:
            return self
        if graph not in self._caches_by_graph:
            self._caches_by_graph[graph] = ProgramCache(
                replace(self._schedule_choice, graph=graph), graph
            )
        return self._caches_by_graph[graph]

    def get_step_phase(self, key: ProgramKey) -> tuple[Program, Phase]:
        """Return the program of `pipe.step`, as one phase."""
        if key not in self._step_phases:
            program = lower(self._build_schedule(key), self._graph)
            self._step_phases[key] = program, bind_program(program)
        return self._step_phases[key]

    def get_forward_backward_phases(self, key: ProgramKey) -> tuple[Program, Phase, Phase]:
        """Return the program of `pipe(x)`, as a forward phase and a backward phase.

        The loss is computed by the caller in between, so all forwards come first. Backwards are
        not split into I and W: the gradients of the parameters are due when the phase ends.
        """
        if key not in self._forward_backward_phases:
            program = lower(
                forwards_first(join_split_backwards(self._build_schedule(key))), self._graph
            )
            phase = bind_program(program)
            self._forward_backward_phases[key] = (
                program,
                phase.filter_actions(is_forward),
                phase.filter_actions(lambda action: not is_forward(action)),
            )
        return self._forward_backward_phases[key]

    def _build_schedule(self, key: ProgramKey) -> Schedule:
        schedule = self._schedule_choice(key.chunks)
        # `recompute` adds R actions according to `checkpoint`. A schedule of the user may have R
        # actions of its own; `remove_recompute` drops them.
        if key.allow_recompute:
            return recompute(schedule, recompute_mode(key.checkpoint, key.chunks))
        return remove_recompute(schedule)

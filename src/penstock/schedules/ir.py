"""What a pipeline does, as plain values.

A `Schedule` says which rank computes what, in which order. A `Program` is a schedule with its
messages written in. What an action needs and gives is said once, under "the one rule" below:
whoever verifies, lowers, plays or draws asks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from penstock.errors import ArgumentError

# ---- actions ------------------------------------------------------------------------------


class Op(StrEnum):
    """What a compute action does with one stage and one micro-batch."""

    F = "F"  # forward
    B = "B"  # full backward: I and W in one
    I = "I"  # gradient of the inputs
    W = "W"  # gradient of the weights
    R = "R"  # recompute what the forward did not keep


class Compute(NamedTuple):
    """`op` of `stage` on `microbatch`. In text `2F0`: stage 2, forward, micro-batch 0."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"


class Message(NamedTuple):
    """What stage `src` tells stage `dst` about a micro-batch. In text `0>1:3`.

    To a later stage it carries activations, to an earlier one gradients.
    """

    src: int
    dst: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.src}>{self.dst}:{self.microbatch}"


@dataclass(frozen=True, order=True, slots=True)
class Send:
    """Hand a message to the transport. In text `!0>1:3`."""

    message: Message

    def __str__(self) -> str:
        return f"!{self.message}"


@dataclass(frozen=True, order=True, slots=True)
class Recv:
    """Ask the transport for a message. In text `?0>1:3`."""

    message: Message

    def __str__(self) -> str:
        return f"?{self.message}"


Action = Compute | Send | Recv

# ---- the stage graph ----------------------------------------------------------------------


@dataclass(frozen=True)
class StageGraph:
    """Who feeds whom. A skip connection is one more edge.

    >>> graph = StageGraph.chain(4, skips=[(0, 3)])
    >>> graph.after(0), graph.before(3)
    ((1, 3), (0, 2))
    """

    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        wrong = [f"{src}>{dst}" for src, dst in self.edges if not 0 <= src < dst]
        if wrong:
            raise ArgumentError(
                f"edge {', '.join(wrong)}: an edge goes from a stage to a later one; number the "
                "stages in the order in which data passes through them"
            )
        object.__setattr__(self, "edges", tuple(sorted(set(self.edges))))

    @staticmethod
    def chain(stages: int, skips: Iterable[tuple[int, int]] = ()) -> StageGraph:
        """Each stage feeds the next; `skips` come on top."""
        skips = tuple(skips)
        wrong = [f"{src}:{dst}" for src, dst in skips if not 0 <= src < dst < stages]
        if wrong:
            raise ArgumentError(
                f"skip {', '.join(wrong)}: a skip SRC:DST goes from a stage to a later one, and "
                f"the stages here are 0 to {stages - 1}"
            )
        return StageGraph(tuple((s, s + 1) for s in range(stages - 1)) + skips)

    def strays(self, stages: int) -> list[str]:
        """The edges that lead to a stage that is not there, each with what is wrong."""
        return [
            f"edge {src}>{dst} names stage {dst}, but there are {stages}"
            for src, dst in self.edges
            if dst >= stages
        ]

    def before(self, stage: int) -> tuple[int, ...]:
        """The stages that feed this one."""
        return self._neighbours[0].get(stage, ())

    def after(self, stage: int) -> tuple[int, ...]:
        """The stages that this one feeds."""
        return self._neighbours[1].get(stage, ())

    @cached_property
    def _neighbours(self) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
        before: dict[int, tuple[int, ...]] = {}
        after: dict[int, tuple[int, ...]] = {}
        for src, dst in self.edges:
            before[dst] = (*before.get(dst, ()), src)
            after[src] = (*after.get(src, ()), dst)
        return before, after


# ---- the one rule -------------------------------------------------------------------------


def consumes(action: Compute, graph: StageGraph) -> list[Message]:
    """The messages that must be there before the action starts."""
    if action.op is Op.F:
        sources = graph.before(action.stage)
    elif action.op is Op.B or action.op is Op.I:
        sources = graph.after(action.stage)
    else:
        return []
    return [Message(src, action.stage, action.microbatch) for src in sources]


def produces(action: Compute, graph: StageGraph) -> list[Message]:
    """The messages that the action makes."""
    if action.op is Op.F:
        targets = graph.after(action.stage)
    elif action.op is Op.B or action.op is Op.I:
        targets = graph.before(action.stage)
    else:
        return []
    return [Message(action.stage, dst, action.microbatch) for dst in targets]


def follows(action: Compute) -> list[Compute]:
    """What comes first on the same stage and micro-batch. (R: only where one is scheduled.)"""
    return [Compute(op, action.stage, action.microbatch) for op in _FOLLOWS[action.op]]


_FOLLOWS: dict[Op, tuple[Op, ...]] = {
    Op.F: (),
    Op.R: (Op.F,),
    Op.B: (Op.F, Op.R),
    Op.I: (Op.F, Op.R),
    Op.W: (Op.I,),
}


def lifetimes(lane: Sequence[Compute]) -> dict[tuple[int, int], tuple[int, int]]:
    """Where the activations of each (stage, micro-batch) live: first and last step in the lane.

    From its F, or its R if it has one, to the last action that uses them.
    """
    lives: dict[tuple[int, int], tuple[int, int]] = {}
    for step, action in enumerate(lane):
        key = action.stage, action.microbatch
        born = step if action.op is Op.F or action.op is Op.R else lives.get(key, (step, step))[0]
        lives[key] = born, step
    return lives


# ---- schedules and programs ---------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """The compute actions of every rank, in order, and which rank owns which stage.

    `placement[stage]` is a rank. `overlaps` names neighbours in a lane that may run at the same
    time (a forward and a backward, in DualPipe); everything else treats them as two actions.
    """

    placement: tuple[int, ...]
    chunks: int
    lanes: tuple[tuple[Compute, ...], ...]
    overlaps: frozenset[tuple[Compute, Compute]] = frozenset()

    def __post_init__(self) -> None:
        if self.chunks < 1 or not self.lanes:
            raise ArgumentError(
                f"a schedule has at least one micro-batch and one lane, not chunks={self.chunks} "
                f"and {self.ranks} lanes"
            )
        strays = sorted({rank for rank in self.placement if not 0 <= rank < self.ranks})
        if strays:
            raise ArgumentError(
                f"the placement names rank {', '.join(map(str, strays))}, but there are "
                f"{self.ranks} lanes, for ranks 0 to {self.ranks - 1}"
            )

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.lanes)

    @property
    def stages(self) -> int:
        """How many there are, over all ranks."""
        return len(self.placement)

    def crosses(self, message: Message) -> bool:
        """Between ranks? Within one rank there is nothing to send."""
        return self.placement[message.src] != self.placement[message.dst]

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs that have an R."""
        return self._cells(Op.R)

    @cached_property
    def divided(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs that have a W: their backwards are split."""
        return self._cells(Op.W)

    def _cells(self, op: Op) -> frozenset[tuple[int, int]]:
        return frozenset((a.stage, a.microbatch) for lane in self.lanes for a in lane if a.op is op)


@dataclass(frozen=True)
class Program:
    """A schedule lowered: the same lanes, with every message that crosses ranks written in."""

    schedule: Schedule
    graph: StageGraph
    lanes: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if len(self.lanes) != self.schedule.ranks:
            raise ArgumentError(
                f"the program has {len(self.lanes)} lanes, its schedule {self.schedule.ranks}"
            )


def schedule_of(work: Schedule | Program) -> Schedule:
    """The schedule itself, or the one that a program was lowered from."""
    return work if isinstance(work, Schedule) else work.schedule

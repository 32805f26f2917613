"""The intermediate representation: the actions of a pipeline as plain values.

A `Schedule` says which rank computes what, in which order. A `Program` is a schedule with its
messages written in. What an action needs and produces is defined once, in the section "the one
rule" below. The verifier, the lowering, the simulator and the drawings all use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Literal, NamedTuple

from penstock.display import render_html
from penstock.errors import ArgumentError
from penstock.text_format import format_plural

# ---- actions ------------------------------------------------------------------------------


class Op(StrEnum):
    """The kinds of compute actions on one stage and one micro-batch.

    `OP_RULES` says what each of them needs and makes. A new op needs a row there, colours in
    `draw/style.py`, and a branch in `runtime/worker.py` that runs it.
    """

    F = "F"  # forward
    B = "B"  # full backward: I and W in one
    I = "I"  # gradient of the inputs
    W = "W"  # gradient of the weights
    R = "R"  # recompute what the forward did not keep


class Compute(NamedTuple):
    """An action that computes `op` of `stage` on `microbatch`.

    Its text form is `2F0`: stage 2, forward, micro-batch 0.

    Args:
        op: What is computed: forward, backward or a part of it.
        stage: The stage.
        microbatch: The micro-batch.

    >>> str(Compute(Op.F, stage=2, microbatch=0))
    '2F0'
    """

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"


class Message(NamedTuple):
    """A message from stage `src` to stage `dst` about one micro-batch. Its text form is `0>1:3`.

    A message to a later stage carries activations, one to an earlier stage carries gradients.

    Args:
        src: The stage that sends.
        dst: The stage that receives.
        microbatch: The micro-batch.
    """

    src: int
    dst: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.src}>{self.dst}:{self.microbatch}"


@dataclass(frozen=True, order=True, slots=True)
class Send:
    """An action that hands a message to the transport. Its text form is `!0>1:3`.

    Args:
        message: The message.
    """

    message: Message

    def __str__(self) -> str:
        return f"!{self.message}"


@dataclass(frozen=True, order=True, slots=True)
class Recv:
    """An action that gets a message from the transport. Its text form is `?0>1:3`.

    Args:
        message: The message.
    """

    message: Message

    def __str__(self) -> str:
        return f"?{self.message}"


Action = Compute | Send | Recv

# ---- the stage graph ----------------------------------------------------------------------


@dataclass(frozen=True)
class StageGraph:
    """The graph of which stage feeds which. A skip connection is one more edge.

    Attributes:
        edges: Pairs (source stage, target stage). The source always has the smaller number.

    Raises:
        ArgumentError: An edge does not lead to a later stage.

    Example:
        >>> graph = StageGraph.chain(4, skips=[(0, 3)])
        >>> graph.after(0), graph.before(3)
        ((1, 3), (0, 2))
    """

    edges: tuple[tuple[int, int], ...]

    def __repr__(self) -> str:
        edges = self.edges if len(self.edges) <= 16 else f"<{len(self.edges)} of them>"
        return f"StageGraph(edges={edges})"

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
        """Return the graph in which each stage feeds the next, with `skips` as further edges.

        Args:
            stages: The number of stages.
            skips: Further edges: pairs (source stage, target stage).
        """
        skips = tuple(skips)
        wrong = [f"{src}:{dst}" for src, dst in skips if not 0 <= src < dst < stages]
        if wrong:
            raise ArgumentError(
                f"skip {', '.join(wrong)}: a skip SRC:DST goes from a stage to a later one, and "
                f"the stages here are 0 to {stages - 1}"
            )
        return StageGraph(tuple((s, s + 1) for s in range(stages - 1)) + skips)

    def strays(self, stages: int) -> list[str]:
        """Return one message for each edge that leads to a stage that does not exist.

        Args:
            stages: The number of stages that exist.
        """
        return [
            f"edge {src}>{dst} names stage {dst}, but there are {stages}"
            for src, dst in self.edges
            if dst >= stages
        ]

    def before(self, stage: int) -> tuple[int, ...]:
        """Return the stages that feed this one.

        Args:
            stage: The number of a stage.
        """
        return self._neighbours[0].get(stage, ())

    def after(self, stage: int) -> tuple[int, ...]:
        """Return the stages that this one feeds.

        Args:
            stage: The number of a stage.
        """
        return self._neighbours[1].get(stage, ())

    @cached_property
    def _neighbours(self) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
        before: dict[int, list[int]] = {}
        after: dict[int, list[int]] = {}
        for src, dst in self.edges:
            before.setdefault(dst, []).append(src)
            after.setdefault(src, []).append(dst)
        return _freeze_lists(before), _freeze_lists(after)


def _freeze_lists(lists: dict[int, list[int]]) -> dict[int, tuple[int, ...]]:
    return {key: tuple(values) for key, values in lists.items()}


# ---- the one rule -------------------------------------------------------------------------


class OpRule(NamedTuple):
    """The name of an op, and what it needs, makes and costs. All other modules read it from here.

    Attributes:
        name: The name in legends.
        is_forward: Whether it runs before the caller has the loss, in `loss = pipe(x)`.
        carries: What its messages carry. Activations come from the stages before and go to the
            stages after, gradients the other way round. None: it has no messages.
        after: The ops that come first on the same cell, which is one stage on one micro-batch.
        cost: The columns of `Cost` that add up to its seconds.
        keeps: Whether the activations of its cell are alive from its start on, until the last
            action of the cell ends.
        optional: Whether a cell may do without it. It then holds nothing up.
    """

    name: str
    is_forward: bool
    carries: Literal["activations", "gradients"] | None
    after: tuple[Op, ...]
    cost: tuple[Literal["F", "I", "W", "R"], ...]
    keeps: bool = False
    optional: bool = False


OP_RULES: dict[Op, OpRule] = {
    Op.F: OpRule("forward", True, "activations", (), cost=("F",), keeps=True),
    Op.B: OpRule("backward", False, "gradients", (Op.F, Op.R), cost=("I", "W")),
    Op.I: OpRule("input gradient", False, "gradients", (Op.F, Op.R), cost=("I",)),
    Op.W: OpRule("weight gradient", False, None, (Op.I,), cost=("W",)),
    Op.R: OpRule("recompute", False, None, (Op.F,), cost=("R",), keeps=True, optional=True),
}


def consumes(action: Compute, graph: StageGraph) -> list[Message]:
    """Return the messages that must have arrived before the action starts."""
    carries = OP_RULES[action.op].carries
    if carries is None:
        return []
    sources = (graph.before if carries == "activations" else graph.after)(action.stage)
    return [Message(src, action.stage, action.microbatch) for src in sources]


def produces(action: Compute, graph: StageGraph) -> list[Message]:
    """Return the messages that the action makes."""
    carries = OP_RULES[action.op].carries
    if carries is None:
        return []
    targets = (graph.after if carries == "activations" else graph.before)(action.stage)
    return [Message(action.stage, dst, action.microbatch) for dst in targets]


def follows(action: Compute) -> list[Compute]:
    """Return the actions that come first on the same stage and micro-batch.

    The list includes those of optional ops, which count only if the schedule has them.
    """
    return [Compute(op, action.stage, action.microbatch) for op in OP_RULES[action.op].after]


def is_forward(action: Action) -> bool:
    """Return whether an action is part of the forward, or a message that carries activations."""
    if isinstance(action, Compute):
        return OP_RULES[action.op].is_forward
    # Stages are numbered in topological order, so activations go to higher stages and gradients to
    # lower ones.
    return action.message.src < action.message.dst


def lifetimes(lane: Sequence[Compute]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return where in a lane the activations of each (stage, micro-batch) live.

    They live from the index of its F, or of its R if it has one, to the index of the last action
    that uses them.
    """
    lives: dict[tuple[int, int], tuple[int, int]] = {}
    for step, action in enumerate(lane):
        key = action.stage, action.microbatch
        # An R replaces the start that its F set: between the two, only the inputs are kept.
        born = step if OP_RULES[action.op].keeps else lives.get(key, (step, step))[0]
        lives[key] = born, step
    return lives


# ---- schedules and programs ---------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """The compute actions of every rank, in order, and which rank owns which stage.

    Attributes:
        placement: The rank of each stage.
        chunks: The number of micro-batches.
        lanes: The actions of each rank, in order.
        overlaps: Neighbours in a lane that may run at the same time (a forward and a backward, in
            DualPipe). The simulator and the drawings treat them as two actions in a row.

    Raises:
        ArgumentError: There is no micro-batch or no lane, or the placement names a rank without
            a lane.
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

    def __repr__(self) -> str:
        return f"Schedule({self._describe_sizes()})"

    def _repr_html_(self) -> str | None:
        return render_html(self)

    def _describe_sizes(self) -> str:
        """Return the sizes in words. The actions themselves would fill pages: see `dumps`."""
        sizes = {
            "rank": self.ranks,
            "stage": self.stages,
            "micro-batch": self.chunks,
            "action": sum(map(len, self.lanes)),
        }
        return ", ".join(format_plural(size, noun) for noun, size in sizes.items())

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.lanes)

    @property
    def stages(self) -> int:
        """The number of stages of all ranks together."""
        return len(self.placement)

    def crosses(self, message: Message) -> bool:
        """Return True if the message goes to another rank. Within one rank nothing is sent.

        Args:
            message: A message between two stages of this schedule.
        """
        return self.placement[message.src] != self.placement[message.dst]

    @cached_property
    def optional_ops(self) -> dict[tuple[int, int], tuple[Op, ...]]:
        """The optional ops of each (stage, micro-batch) pair that has some."""
        ops: dict[tuple[int, int], tuple[Op, ...]] = {}
        optional = {op for op, rule in OP_RULES.items() if rule.optional}
        for op, stage, microbatch in (a for lane in self.lanes for a in lane if a.op in optional):
            ops[stage, microbatch] = (*ops.get((stage, microbatch), ()), op)
        return ops

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
    """A lowered schedule: the same lanes, with every message that crosses ranks written in.

    Attributes:
        schedule: The schedule that was lowered.
        graph: The stage graph that says which messages there are.
        lanes: The compute, send and receive actions of each rank, in order.
        order: An order in which one thread can run all actions, as the ranks whose turn it is.
            `lower` writes it; a program that was read from a text has none.
    """

    schedule: Schedule
    graph: StageGraph
    lanes: tuple[tuple[Action, ...], ...]
    order: tuple[int, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.lanes) != self.schedule.ranks:
            raise ArgumentError(
                f"the program has {len(self.lanes)} lanes, but its schedule has "
                f"{self.schedule.ranks}"
            )

    def __repr__(self) -> str:
        messages = sum(isinstance(action, Send) for lane in self.lanes for action in lane)
        sizes = self.schedule._describe_sizes()
        return f"Program({sizes}, {format_plural(messages, 'message')})"

    def _repr_html_(self) -> str | None:
        return render_html(self)


def schedule_of(work: Schedule | Program) -> Schedule:
    """Return the schedule itself, or the schedule that a program was lowered from."""
    return work if isinstance(work, Schedule) else work.schedule

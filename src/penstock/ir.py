"""What a pipeline does, as plain values.

A `Schedule` says which rank computes what, in which order. A `Program` is a schedule with its
messages written in. What an action needs and gives is said once, under "the one rule" below:
verifying, lowering, playing, drawing and running all ask it. The last part is the text form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from penstock.errors import ArgumentError, FormatError

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

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank owns."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def crosses(self, message: Message) -> bool:
        """Between ranks? Within one rank there is nothing to send."""
        return self.placement[message.src] != self.placement[message.dst]

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs that have an R."""
        return frozenset(
            (a.stage, a.microbatch) for lane in self.lanes for a in lane if a.op is Op.R
        )

    def __str__(self) -> str:
        return dumps(self)


@dataclass(frozen=True)
class Program:
    """A schedule lowered: the same lanes, with every message that crosses ranks written in."""

    schedule: Schedule
    graph: StageGraph
    lanes: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        return dumps(self)


# ---- the text form ------------------------------------------------------------------------
#
#     # comments and empty lines are skipped
#     placement: 0 1        each stage's rank      (left out: where its actions stand)
#     chunks: 2                                    (left out: as many as are in use)
#     overlaps: 0F1+1B0     pairs, if there are any
#     edges: 0>1            makes it a program
#     0F0 0F1 0B0 0B1       then one line a rank; "-" for a rank that does nothing
#     1F0 1B0 1F1 1B1

_COMPUTE = re.compile(r"(\d+)([FBIWR])(\d+)")
_MESSAGE = re.compile(r"([!?])(\d+)>(\d+):(\d+)")
_EDGE = re.compile(r"(\d+)>(\d+)")
_HEAD = re.compile(r"(placement|chunks|overlaps|edges):(.*)")


def dumps(work: Schedule | Program) -> str:
    """The text form; `loads` gives the same value back."""
    schedule = work if isinstance(work, Schedule) else work.schedule
    lines = ["placement: " + " ".join(map(str, schedule.placement)), f"chunks: {schedule.chunks}"]
    if schedule.overlaps:
        pairs = sorted(schedule.overlaps)
        lines.append("overlaps: " + " ".join(f"{first}+{second}" for first, second in pairs))
    if isinstance(work, Program):
        lines.append("edges: " + " ".join(f"{src}>{dst}" for src, dst in work.graph.edges))
    lines += [" ".join(map(str, lane)) or "-" for lane in work.lanes]
    return "\n".join(lines) + "\n"


def loads(text: str) -> Schedule | Program:
    """Read the text form, also one written by hand; a `FormatError` lists every bad line.

    >>> loads("0F0 0F1 0B0 0B1 \\n 1F0 1B0 1F1 1B1").placement
    (0, 1)
    """
    problems: list[str] = []
    head: dict[str, list[str]] = {}
    lanes: list[tuple[Action, ...]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if header := _HEAD.fullmatch(line):
            head[header[1]] = header[2].split()
        elif line:
            words = [] if line == "-" else line.split()
            actions = [_parse_action(word) for word in words]
            lanes.append(tuple(a for a in actions if not isinstance(a, str)))
            problems += [f"line {number}: {a}" for a in actions if isinstance(a, str)]
    if not lanes and not problems:
        problems = ["it has no lanes: write one line a rank, such as '0F0 0F1 0B0 0B1'"]
    if problems:
        raise FormatError("this is not a schedule:", problems)
    return _assemble(head, tuple(lanes))


def _parse_action(word: str) -> Action | str:
    """The action, or what is wrong with the word."""
    if compute := _COMPUTE.fullmatch(word):
        return Compute(Op(compute[2]), int(compute[1]), int(compute[3]))
    if found := _MESSAGE.fullmatch(word):
        message = Message(int(found[2]), int(found[3]), int(found[4]))
        return Send(message) if found[1] == "!" else Recv(message)
    return (
        f"'{word}' is no action; actions look like 2F0 (stage 2, forward, micro-batch 0; also "
        "B, I, W, R), !0>1:3 (send from stage 0 to 1, micro-batch 3) and ?0>1:3 (receive)"
    )


def _assemble(
    head: dict[str, list[str]], lanes: tuple[tuple[Action, ...], ...]
) -> Schedule | Program:
    computes = tuple(tuple(a for a in lane if isinstance(a, Compute)) for lane in lanes)
    try:
        if "placement" in head:
            placement = tuple(map(int, head["placement"]))
        else:
            placement = _placement(computes)
        if "chunks" in head:
            (chunks,) = map(int, head["chunks"])
        else:
            chunks = 1 + max((a.microbatch for lane in computes for a in lane), default=0)
        pairs = [word.split("+") for word in head.get("overlaps", [])]
        overlaps = frozenset((_compute(first), _compute(second)) for first, second in pairs)
        edges = tuple(_edge(word) for word in head["edges"]) if "edges" in head else None
    except ValueError as error:
        raise FormatError("the header does not read:", [str(error)]) from None
    schedule = Schedule(placement, chunks, computes, overlaps)
    if edges is not None:
        return Program(schedule, StageGraph(edges), lanes)
    if computes != lanes:
        raise FormatError(
            "this is not a schedule:",
            ["it sends or receives, so it is a program: add a line such as 'edges: 0>1 1>2'"],
        )
    return schedule


def _placement(lanes: tuple[tuple[Compute, ...], ...]) -> tuple[int, ...]:
    owners = {action.stage: rank for rank, lane in enumerate(lanes) for action in lane}
    missing = sorted(set(range(max(owners, default=-1) + 1)) - set(owners))
    if missing:
        raise ValueError(
            f"no rank runs stage {', '.join(map(str, missing))}, so its rank is unknown: "
            "add its actions, or a line 'placement: ...'"
        )
    return tuple(owners[stage] for stage in range(len(owners)))


def _compute(word: str) -> Compute:
    action = _parse_action(word)
    if not isinstance(action, Compute):
        raise ValueError(f"'{word}' is no compute action, which look like 2F0")
    return action


def _edge(word: str) -> tuple[int, int]:
    edge = _EDGE.fullmatch(word)
    if not edge:
        raise ValueError(f"'{word}' is no edge, which look like 0>1")
    return int(edge[1]), int(edge[2])

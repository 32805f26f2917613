"""The most bytes that are alive between two actions: measured, and as the schedule says.

Measured: by `pipe.memory`, with ranks that share no memory. On paper: what one cell keeps after
each of its actions is measured with a single micro-batch; the program, played, says which cells
are alive together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from penstock.checking.report import Memory
from penstock.checking.subject import Subject
from penstock.ir import Compute, Message, Op, Program, Schedule, consumes, lifetimes, produces
from penstock.play import play
from penstock.run.memory import Memory as Weighed
from penstock.schedules.choice import Asked
from penstock.stage.parcel import Parcel
from penstock.stage.places import Cpu

REST = 64  # bytes that a cell may leave: the loss and its weight stay until the step ends


class Apart(Cpu):
    """A place of its own for a rank: what arrives there is copied, as it is between devices."""

    def arrived(self, parcel: Parcel) -> Parcel:
        """As between devices."""
        return parcel.moved(Tensor.clone)


# ---- what one cell keeps ------------------------------------------------------------------


class Manner(NamedTuple):
    """How a cell is computed backward."""

    recomputed: bool
    divided: bool  # into I and W

    @staticmethod
    def of(schedule: Schedule, stage: int, microbatch: int) -> Manner:
        """The manner of a cell."""
        cell = stage, microbatch
        return Manner(cell in schedule.recomputed, cell in schedule.divided)


@dataclass(frozen=True)
class Footprints:
    """Bytes that a cell keeps after each of its actions, and that a message keeps on its way."""

    kept: dict[tuple[Op, int], int]  # by op and stage
    carried: dict[tuple[int, int], int]  # by source and destination


class Scales:
    """Weighs cells, each kind once."""

    def __init__(self, subject: Subject) -> None:
        first = subject.values.first_of(subject.chunks)
        self._subject = subject.with_values(first, chunks=1).activations_only()
        self._stages = len(subject.partition.stages)
        self._known: dict[Manner, Footprints] = {}

    def footprints(self, manner: Manner) -> Footprints:
        """Of the cells of every stage, in this manner."""
        if manner not in self._known:
            places = [Apart() for _ in range(self._stages)]
            checkpoint = "always" if manner.recomputed else "never"
            schedule = "zb-h1" if manner.divided else "naive"
            pipe = self._subject.pipe(schedule, self._stages, checkpoint, "inline", places)
            self._known[manner] = _footprints(self._subject.weighed(pipe))
        return self._known[manner]


def _footprints(weighed: Weighed) -> Footprints:
    """Of a run with one stage a rank, and one micro-batch.

    When a message is taken, its sender's bytes go down by what it kept.
    """
    graph, alive = weighed.program.graph, [reading.alive for reading in weighed.readings]
    actions = enumerate(reading.action for reading in weighed.readings)
    computes = [(at, action) for at, action in actions if isinstance(action, Compute)]
    carried = {}
    for at, action in computes:
        for message in consumes(action, graph):
            drop = alive[at - 1][message.src] - alive[at][message.src]
            carried[message.src, message.dst] = max(drop, 0)
    kept, waiting = {}, set[Message]()
    for at, action in computes:
        waiting.difference_update(consumes(action, graph))
        waiting.update(produces(action, graph))
        mine = [m for m in waiting if m.src == action.stage]
        on_the_way = sum(carried[m.src, m.dst] for m in mine)
        kept[action.op, action.stage] = alive[at][action.stage] - on_the_way
    return Footprints(kept, carried)


# ---- what a rank keeps --------------------------------------------------------------------


def peak_on_paper(program: Program, scales: Scales) -> tuple[int, ...]:
    """The most that each rank has between two actions, if no cell stays beyond its last use."""
    schedule, graph = program.schedule, program.graph
    last = {lane[at] for lane in schedule.lanes for _, at in lifetimes(lane).values()}
    cells: dict[tuple[int, int], int] = {}
    now, peaks = [0] * schedule.ranks, [0] * schedule.ranks

    def footprints(stage: int, microbatch: int) -> Footprints:
        return scales.footprints(Manner.of(schedule, stage, microbatch))

    def carried(message: Message) -> int:
        return footprints(message.src, message.microbatch).carried[message.src, message.dst]

    for action in (span.action for span in play(program)):
        if not isinstance(action, Compute):
            continue
        op, stage, microbatch = action
        for message in consumes(action, graph):
            now[schedule.placement[message.src]] -= carried(message)
        kept = footprints(stage, microbatch).kept[op, stage]
        if action in last:
            kept = min(kept, REST)
        rank = schedule.placement[stage]
        now[rank] += kept - cells.get((stage, microbatch), 0)
        cells[stage, microbatch] = kept
        now[rank] += sum(map(carried, produces(action, graph)))
        peaks = list(map(max, peaks, now))
    return tuple(peaks)


def weigh(subject: Subject, scales: Scales, schedule: Asked, ranks: int, checkpoint: str) -> Memory:
    """Measured and on paper."""
    subject = subject.activations_only()
    places = [Apart() for _ in range(ranks)]
    pipe = subject.pipe(schedule, ranks, checkpoint, "inline", places)
    weighed = subject.weighed(pipe)
    paper = peak_on_paper(weighed.program, scales)
    # A unit that stages share has gradients of its own on each, until the step ends.
    shared = sum(one.size for one in pipe._split.partition.outline.shared)
    return Memory(weighed.peak, paper, 2 * sum(buffer.nbytes for buffer in pipe.buffers()) + shared)

"""The most bytes that are alive between two actions: measured, and as the schedule says.

Measured: the pipe runs inline, on places that know which rank computes, and every storage that is
allocated while a rank computes belongs to that rank until it dies. What arrives is copied, as it
is between devices. On paper: what one cell keeps after each of its actions is measured with a
single micro-batch; the program, played, says which cells are alive together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from penstock.checking.report import Memory
from penstock.checking.subject import Subject
from penstock.ir import Compute, Message, Op, Program, Schedule, consumes, lifetimes, produces
from penstock.pipe import Pipe
from penstock.play import play
from penstock.schedules.choice import Asked
from penstock.stage.parcel import Parcel
from penstock.stage.places import Cpu

REST = 64  # bytes that a cell may leave: the loss and its weight stay until the step ends


class Meter(TorchDispatchMode):
    """Counts the bytes that each rank has allocated and that are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rank: int | None = None
        self.before: list[int] = []  # of the rank that takes a step: when it begins
        self.after: list[dict[int, int]] = []  # of all ranks: when it has ended
        self._owned: dict[int, WeakSet[torch.UntypedStorage]] = defaultdict(WeakSet)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether to load the compiler, which takes seconds, only to keep it from tracing this."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if self.rank is not None:
            given = {_storage(t)._cdata for t in _tensors((args, kwargs))}
            for tensor in _tensors(made):
                storage = _storage(tensor)
                if storage._cdata not in given:
                    self._owned[self.rank].add(storage)
        return made

    def alive(self, rank: int) -> int:
        """Bytes of a rank, now."""
        return sum(storage.nbytes() for storage in self._owned[rank])

    @contextmanager
    def step(self, rank: int) -> Iterator[None]:
        """Within, a rank takes a step."""
        self.before.append(self.alive(rank))
        self.rank = rank
        try:
            yield
        finally:
            self.rank = None
            self.after.append({each: self.alive(each) for each in list(self._owned)})


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(values) if isinstance(leaf, Tensor))


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


@dataclass
class Metered(Cpu):
    """A place of its own for a rank: what arrives there is copied, and what lives is counted."""

    rank: int
    meter: Meter | None = field(default=None, repr=False)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The inline runtime enters for each step."""
        if self.meter is None:
            yield
            return
        with self.meter.step(self.rank):
            yield

    def arrived(self, parcel: Parcel) -> Parcel:
        """As between devices."""
        return parcel.moved(Tensor.clone)


class Reading(NamedTuple):
    """The steps of a measured run, in order: who did what, and what was alive."""

    program: Program
    order: list[tuple[int, Any]]
    before: list[int]
    after: list[dict[int, int]]


def measured(subject: Subject, pipe: Pipe, places: Sequence[Metered]) -> Reading:
    """Run a step to warm up (gradients are there then), and one that is measured."""
    values = subject.values.mapped(Tensor.detach)
    subject.step(pipe, values, outputs=False)
    meter = Meter()
    for place in places:
        place.meter = meter
    try:
        with meter:
            result = subject.step(pipe, values, outputs=False)
    finally:
        for place in places:
            place.meter = None
    program = result.timeline.program
    order = [(span.rank, span.action) for span in play(program)]
    return Reading(program, order, meter.before, meter.after)


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
            places = [Metered(rank) for rank in range(self._stages)]
            checkpoint = "always" if manner.recomputed else "never"
            schedule = "zb-h1" if manner.divided else "naive"
            pipe = self._subject.pipe(schedule, self._stages, checkpoint, "inline", places)
            self._known[manner] = _footprints(measured(self._subject, pipe, places))
        return self._known[manner]


def _footprints(reading: Reading) -> Footprints:
    """Of a run with one stage a rank, and one micro-batch.

    When a message is taken, its sender's bytes go down by what it kept.
    """
    graph = reading.program.graph
    computes = [(at, a) for at, (_, a) in enumerate(reading.order) if isinstance(a, Compute)]
    carried = {}
    for at, action in computes:
        for message in consumes(action, graph):
            before, after = reading.after[at - 1], reading.after[at]
            drop = before.get(message.src, 0) - after.get(message.src, 0)
            carried[message.src, message.dst] = max(drop, 0)
    kept, waiting = {}, set[Message]()
    for at, action in computes:
        waiting.difference_update(consumes(action, graph))
        waiting.update(produces(action, graph))
        mine = [m for m in waiting if m.src == action.stage]
        on_the_way = sum(carried[m.src, m.dst] for m in mine)
        kept[action.op, action.stage] = reading.after[at].get(action.stage, 0) - on_the_way
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
    places = [Metered(rank) for rank in range(ranks)]
    pipe = subject.pipe(schedule, ranks, checkpoint, "inline", places)
    reading = measured(subject, pipe, places)
    found = tuple(max(now.get(rank, 0) for now in reading.after) for rank in range(ranks))
    paper = peak_on_paper(reading.program, scales)
    # A unit that stages share has gradients of its own on each, until the step ends.
    shared = sum(one.size for one in pipe._split.partition.outline.shared)
    return Memory(found, paper, 2 * sum(buffer.nbytes for buffer in pipe.buffers()) + shared)

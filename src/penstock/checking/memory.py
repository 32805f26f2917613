"""The most bytes that are alive between two actions: measured, and as the schedule says.

Measured: by `pipe.memory`, with ranks that share no memory. On paper: what one cell keeps after
each of its actions is measured with a single micro-batch; the program, played, says which cells
are alive together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from penstock.checking.report import MemoryComparison
from penstock.checking.subject import CheckedModel
from penstock.ir import Compute, Message, Op, Program, Schedule, consumes, lifetimes, produces
from penstock.play import play
from penstock.run.memory import Memory as Weighed
from penstock.schedules.choice import ScheduleLike
from penstock.stage.parcel import Payload
from penstock.stage.places import Cpu

RESIDUAL_BYTES = 64  # bytes that a cell may leave: the loss and its weight stay until the step ends


class CopyingCpu(Cpu):
    """A place of its own for a rank: what arrives there is copied, as it is between devices."""

    def receive(self, payload: Payload) -> Payload:
        """As between devices."""
        return payload.map_tensors(Tensor.clone)


# ---- what one cell keeps ------------------------------------------------------------------


class CellBackwardMode(NamedTuple):
    """How a cell is computed backward."""

    recomputed: bool
    split_backward: bool  # into I and W

    @staticmethod
    def of_cell(schedule: Schedule, stage: int, microbatch: int) -> CellBackwardMode:
        """The manner of a cell."""
        cell = stage, microbatch
        return CellBackwardMode(cell in schedule.recomputed, cell in schedule.divided)


@dataclass(frozen=True)
class CellFootprints:
    """Bytes that a cell keeps after each of its actions, and that a message keeps on its way."""

    cell_bytes: dict[tuple[Op, int], int]  # by op and stage
    message_bytes: dict[tuple[int, int], int]  # by source and destination


class FootprintProfiler:
    """Weighs cells, each kind once."""

    def __init__(self, checked: CheckedModel) -> None:
        first = checked.arguments.take_first_part(checked.chunks)
        self._checked = checked.with_arguments(first, chunks=1).activations_only()
        self._num_stages = len(checked.partition.stages)
        self._cache: dict[CellBackwardMode, CellFootprints] = {}

    def measure(self, mode: CellBackwardMode) -> CellFootprints:
        """Of the cells of every stage, in this manner."""
        if mode not in self._cache:
            places = [CopyingCpu() for _ in range(self._num_stages)]
            checkpoint = "always" if mode.recomputed else "never"
            schedule = "zb-h1" if mode.split_backward else "naive"
            pipe = self._checked.build_pipe(
                schedule, self._num_stages, checkpoint, "inline", places
            )
            self._cache[mode] = _derive_footprints(self._checked.measure_memory(pipe))
        return self._cache[mode]


def _derive_footprints(measurement: Weighed) -> CellFootprints:
    """Of a run with one stage a rank, and one micro-batch.

    When a message is taken, its sender's bytes go down by what it kept.
    """
    graph, alive = measurement.program.graph, [reading.alive for reading in measurement.readings]
    actions = enumerate(reading.action for reading in measurement.readings)
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
    return CellFootprints(kept, carried)


# ---- what a rank keeps --------------------------------------------------------------------


def forecast_peak(program: Program, profiler: FootprintProfiler) -> tuple[int, ...]:
    """The most that each rank has between two actions, if no cell stays beyond its last use."""
    schedule, graph = program.schedule, program.graph
    last = {lane[at] for lane in schedule.lanes for _, at in lifetimes(lane).values()}
    cells: dict[tuple[int, int], int] = {}
    now, peaks = [0] * schedule.ranks, [0] * schedule.ranks

    def get_footprints(stage: int, microbatch: int) -> CellFootprints:
        return profiler.measure(CellBackwardMode.of_cell(schedule, stage, microbatch))

    def get_message_bytes(message: Message) -> int:
        return get_footprints(message.src, message.microbatch).message_bytes[
            message.src, message.dst
        ]

    for action in (span.action for span in play(program)):
        if not isinstance(action, Compute):
            continue
        op, stage, microbatch = action
        for message in consumes(action, graph):
            now[schedule.placement[message.src]] -= get_message_bytes(message)
        kept = get_footprints(stage, microbatch).cell_bytes[op, stage]
        if action in last:
            kept = min(kept, RESIDUAL_BYTES)
        rank = schedule.placement[stage]
        now[rank] += kept - cells.get((stage, microbatch), 0)
        cells[stage, microbatch] = kept
        now[rank] += sum(map(get_message_bytes, produces(action, graph)))
        peaks = list(map(max, peaks, now))
    return tuple(peaks)


def compare_memory(
    checked: CheckedModel,
    profiler: FootprintProfiler,
    schedule: ScheduleLike,
    ranks: int,
    checkpoint: str,
) -> MemoryComparison:
    """Measured and on paper."""
    checked = checked.activations_only()
    places = [CopyingCpu() for _ in range(ranks)]
    pipe = checked.build_pipe(schedule, ranks, checkpoint, "inline", places)
    weighed = checked.measure_memory(pipe)
    paper = forecast_peak(weighed.program, profiler)
    # A unit that stages share has gradients of its own on each, until the step ends.
    shared = sum(
        one.parameter_bytes for one in pipe._placed_partition.partition.outline.shared_parameters
    )
    return MemoryComparison(
        weighed.peak, paper, 2 * sum(buffer.nbytes for buffer in pipe.buffers()) + shared
    )

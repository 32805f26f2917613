"""One pipe, run and compared with what the unsplit model gave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.checker.case import CheckedModel, StepArguments
from penstock.checker.reference import (
    BatchDependence,
    StepOutcome,
    collect_eval_outcome,
    collect_training_outcome,
    detect_batch_dependence,
    run_unsplit,
)
from penstock.checker.report import (
    Case,
    Compared,
    Difference,
    Failed,
    MemoryComparison,
    Refused,
    Run,
)
from penstock.device.device import Cpu
from penstock.errors import PenstockError
from penstock.pipe import Pipe
from penstock.runtime.memory import Memory as Weighed
from penstock.schedules.ir import (
    Compute,
    Message,
    Op,
    Program,
    Schedule,
    consumes,
    lifetimes,
    produces,
)
from penstock.schedules.registry import ScheduleLike
from penstock.schedules.simulator import play
from penstock.stage.payload import Payload

# -------------------------------------------------------------------------------------------------
# The most bytes that are alive between two actions: measured, and as the schedule says.
#
# Measured: by `pipe.memory`, with ranks that share no memory. On paper: what one cell keeps after
# each of its actions is measured with a single micro-batch; the program, played, says which cells
# are alive together.
# -------------------------------------------------------------------------------------------------

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


# -------------------------------------------------------------------------------------------------

SEED = 20_010  # of every run: what is drawn is the same


@dataclass(frozen=True)
class ReferenceOutcomes:
    """What the unsplit model gave: two steps, and eval mode, also on half of the batch."""

    first: StepOutcome
    second: StepOutcome
    eval_outcomes: tuple[tuple[str, StepArguments, StepOutcome], ...]
    dependence: BatchDependence
    inputs_require_grad: bool  # can every input have a gradient?


def compute_reference(checked: CheckedModel) -> ReferenceOutcomes:
    """Run the unsplit model: a step, another that adds to the gradients, and eval mode."""
    nature, calm = (
        detect_batch_dependence(checked),
        detect_batch_dependence(checked, training=False),
    )
    learning = _can_require_input_grad(checked)
    torch.manual_seed(SEED)
    model = checked.copy_model()
    first = collect_training_outcome(
        model, *run_unsplit(checked, model, checked.arguments, nature.is_independent)
    )
    values = _make_second_arguments(checked, learning)
    second = collect_training_outcome(
        model, *run_unsplit(checked, model, values, nature.is_independent), values
    )
    evaluated = [
        ("the batch", checked.arguments, _run_unsplit_eval(checked, model, checked.arguments, calm))
    ]
    with suppress(Exception):  # a mask that is cut by mistake, say: training will show it
        half = checked.arguments.take_first_part(2)
        evaluated.append(("half of the batch", half, _run_unsplit_eval(checked, model, half, calm)))
    return ReferenceOutcomes(first, second, tuple(evaluated), nature, learning)


def _make_second_arguments(checked: CheckedModel, inputs_require_grad: bool) -> StepArguments:
    """The batch of the second step: its inputs want gradients, too, if that is possible."""
    return (
        checked.arguments.require_input_grads()
        if inputs_require_grad
        else checked.arguments.map_tensors(torch.Tensor.detach)
    )


def _can_require_input_grad(checked: CheckedModel) -> bool:
    """A model that changes its input in place, say, cannot give it a gradient."""
    values = checked.arguments.require_input_grads()
    before = [tensor._version for tensor in values.get_named_tensors().values()]
    try:
        run_unsplit(checked, checked.copy_model(), values, whole_batch=True)
    except RuntimeError:
        return False
    return before == [tensor._version for tensor in values.get_named_tensors().values()]


def _run_unsplit_eval(
    checked: CheckedModel,
    model: nn.Module,
    arguments: StepArguments,
    eval_dependence: BatchDependence,
) -> StepOutcome:
    model.eval()
    with torch.no_grad():
        return collect_eval_outcome(
            *run_unsplit(checked, model, arguments, eval_dependence.is_independent)
        )


@dataclass(frozen=True)
class TrialConfig:
    """A schedule, and in which ways it is run."""

    schedule: ScheduleLike
    name: str
    ranks: int
    checkpoint: str
    runtime: str

    @property
    def case(self) -> Case:
        """As it is reported."""
        return Case(self.name, self.ranks, self.checkpoint, self.runtime)


def run_trial(
    checked: CheckedModel,
    expected: ReferenceOutcomes,
    profiler: FootprintProfiler,
    config: TrialConfig,
) -> Run:
    """Run the pipe, and compare."""
    try:
        found = list(_compare_pipe(checked, expected, config))
        return Run(
            config.case, Compared(tuple(found), _compare_inline_memory(checked, profiler, config))
        )
    except PenstockError as error:
        return Run(config.case, Refused(str(error)))
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        text = f"{type(error).__name__}: {error} {notes}".strip()
        return Run(config.case, Failed(text))


def _build_seeded_pipe(checked: CheckedModel, config: TrialConfig) -> Pipe:
    """With the generator where every run begins."""
    torch.manual_seed(SEED)
    return checked.build_pipe(config.schedule, config.ranks, config.checkpoint, config.runtime)


def _compare_pipe(
    checked: CheckedModel, expected: ReferenceOutcomes, config: TrialConfig
) -> Iterator[Difference]:
    pipe = _build_seeded_pipe(checked, config)
    first = _run_pipe_step(checked, pipe, checked.arguments)
    yield from first.compare_to(expected.first)
    values = _make_second_arguments(checked, expected.inputs_require_grad)
    result = checked.run_step(pipe, values)
    second = collect_training_outcome(pipe, result.loss, result.outputs, values)
    for found in second.compare_to(expected.second):
        yield found if found.kind == "inputs" else _relabel(found, "again")
    if expected.dependence.uses_rng:
        yield from _compare_randomness(checked, expected, config, first, second)
    pipe.eval()
    with torch.no_grad():
        for what, given, wanted in expected.eval_outcomes:
            result = checked.run_step(pipe, given)
            for found in collect_eval_outcome(result.loss, result.outputs).compare_to(wanted):
                yield _relabel(found, "eval", f" of {what}")


def _relabel(difference: Difference, kind: str, suffix: str = "") -> Difference:
    """The same among others of that kind."""
    name = f"{difference.kind} {difference.name}".strip() + suffix
    return Difference(kind, name, difference.size, difference.note)


def _run_pipe_step(checked: CheckedModel, pipe: Pipe, arguments: StepArguments) -> StepOutcome:
    result = checked.run_step(pipe, arguments)
    return collect_training_outcome(pipe, result.loss, result.outputs)


def _compare_randomness(
    checked: CheckedModel,
    expected: ReferenceOutcomes,
    config: TrialConfig,
    first: StepOutcome,
    second: StepOutcome,
) -> Iterator[Difference]:
    """The same seed gives the same bits; the next one gives others, if the model's own do."""
    again = _run_pipe_step(checked, _build_seeded_pipe(checked, config), checked.arguments)
    same = max((found.size for found in again.compare_to(first)), default=0.0)
    yield Difference("random", "of a second run with the same seed", same)
    kinds = "loss", "outputs"
    if expected.first.differs_from(expected.second, *kinds):
        moved = first.differs_from(second, *kinds)
        note = "" if moved else "are the same with another seed"
        yield Difference("random", "numbers", 0.0 if moved else float("inf"), note)


def _compare_inline_memory(
    checked: CheckedModel, profiler: FootprintProfiler, config: TrialConfig
) -> MemoryComparison | None:
    if config.runtime != "inline":
        return None
    return compare_memory(checked, profiler, config.schedule, config.ranks, config.checkpoint)

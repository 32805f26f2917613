"""One trial: a pipe is run and compared with the unsplit model.

A trial compares two training steps (the second accumulates gradients), and eval mode on the batch
and on half of it. For a model that draws random numbers it compares runs with equal and with
different seeds. With the inline runtime it also compares the peak memory with a forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

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
from penstock.runtime.memory import Memory
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

# ---- peak memory: measured and forecast ----------------------------------------------------------
#
# The peak is the most bytes alive on a rank between two actions.
#
#     measured    by `pipe.memory`, with ranks that share no memory
#     forecast    1. the footprint of one cell: the bytes that it keeps after each of its actions,
#                    measured once, with a single micro-batch
#                 2. the simulator plays the program, and adds up the cells that are alive together
#
# A measured peak above the forecast means that something outlives its last use.

RESIDUAL_BYTES = 64  # bytes that a cell may leave: the loss and its weight stay until the step ends


class CopyingCpu(Cpu):
    """A CPU device whose ranks share no memory: it copies what it receives, as between GPUs.

    Ranks on one CPU otherwise pass tensors by reference, and one tensor belongs to two ranks.
    """

    copies_received = True


@dataclass(frozen=True)
class CellFootprints:
    """The bytes that a cell keeps after each action, and those of a message until it is received.

    `cell_bytes` is by op and stage, `message_bytes` by source and destination.
    """

    cell_bytes: dict[tuple[Op, int], int]
    message_bytes: dict[tuple[int, int], int]


class FootprintProfiler:
    """Measures the footprints of cells, once for each sequence of ops that a cell goes through."""

    def __init__(self, checked: CheckedModel) -> None:
        microbatch = checked.arguments.take_first_part(checked.chunks)
        self._checked = replace(checked, arguments=microbatch, chunks=1).activations_only()
        self._num_stages = len(checked.partition.stages)
        self._cache: dict[tuple[Op, ...], CellFootprints] = {}

    def measure(self, ops: tuple[Op, ...]) -> CellFootprints:
        """Return the footprints of the cells of every stage, if each goes through these ops."""
        if ops not in self._cache:
            stages = range(self._num_stages)
            lanes = tuple(tuple(Compute(op, stage, 0) for op in ops) for stage in stages)
            pipe = self._checked.build_pipe(
                Schedule(tuple(stages), 1, lanes),
                self._num_stages,
                "never",  # adds no R to those of the schedule
                "inline",
                [CopyingCpu() for _ in stages],
            )
            self._cache[ops] = _derive_footprints(self._checked.measure_memory(pipe))
        return self._cache[ops]


def _derive_footprints(measurement: Memory) -> CellFootprints:
    """Return the footprints from a run with one stage per rank and one micro-batch.

    A sender keeps a message until the receiver takes it. At that moment the sender's bytes go down
    by the size of the message. All other bytes of a rank belong to its one cell.
    """
    graph, alive = measurement.program.graph, [reading.alive for reading in measurement.readings]
    actions = enumerate(reading.action for reading in measurement.readings)
    computes = [(index, action) for index, action in actions if isinstance(action, Compute)]
    message_bytes = {}
    for index, action in computes:
        for message in consumes(action, graph):
            drop = alive[index - 1][message.src] - alive[index][message.src]
            message_bytes[message.src, message.dst] = max(drop, 0)
    cell_bytes, in_flight = {}, set[Message]()
    for index, action in computes:
        in_flight.difference_update(consumes(action, graph))
        in_flight.update(produces(action, graph))
        outgoing = [m for m in in_flight if m.src == action.stage]
        outgoing_bytes = sum(message_bytes[m.src, m.dst] for m in outgoing)
        cell_bytes[action.op, action.stage] = alive[index][action.stage] - outgoing_bytes
    return CellFootprints(cell_bytes, message_bytes)


def forecast_peak(program: Program, profiler: FootprintProfiler) -> tuple[int, ...]:
    """Return the peak of each rank, if no cell keeps anything beyond its last action."""
    schedule, graph = program.schedule, program.graph
    last_actions = {lane[index] for lane in schedule.lanes for _, index in lifetimes(lane).values()}
    cells: dict[tuple[int, int], int] = {}  # bytes of each cell, by stage and micro-batch
    cell_ops: dict[tuple[int, int], tuple[Op, ...]] = {}
    for op, stage, microbatch in (action for lane in schedule.lanes for action in lane):
        cell_ops[stage, microbatch] = (*cell_ops.get((stage, microbatch), ()), op)
    alive, peaks = [0] * schedule.ranks, [0] * schedule.ranks

    def get_footprints(stage: int, microbatch: int) -> CellFootprints:
        return profiler.measure(cell_ops[stage, microbatch])

    def get_message_bytes(message: Message) -> int:
        return get_footprints(message.src, message.microbatch).message_bytes[
            message.src, message.dst
        ]

    remaining = [iter(lane) for lane in program.lanes]
    for action in (next(remaining[rank]) for rank in program.order):
        if not isinstance(action, Compute):
            continue
        op, stage, microbatch = action
        for message in consumes(action, graph):
            alive[schedule.placement[message.src]] -= get_message_bytes(message)
        cell_bytes = get_footprints(stage, microbatch).cell_bytes[op, stage]
        if action in last_actions:
            cell_bytes = min(cell_bytes, RESIDUAL_BYTES)
        rank = schedule.placement[stage]
        alive[rank] += cell_bytes - cells.get((stage, microbatch), 0)
        cells[stage, microbatch] = cell_bytes
        alive[rank] += sum(map(get_message_bytes, produces(action, graph)))
        peaks = list(map(max, peaks, alive))
    return tuple(peaks)


def compare_memory(
    checked: CheckedModel, profiler: FootprintProfiler, schedule: ScheduleLike, case: Case
) -> MemoryComparison:
    """Measure the peak memory of a pipe, and compare it with the forecast."""
    checked = checked.activations_only()
    devices = [CopyingCpu() for _ in range(case.ranks)]
    pipe = checked.build_pipe(schedule, case.ranks, case.checkpoint, "inline", devices)
    measurement = checked.measure_memory(pipe)
    forecast = forecast_peak(measurement.program, profiler)
    # Each stage that shares a unit has gradients of its own for it, until the step ends.
    shared_bytes = sum(
        parameters.parameter_bytes
        for parameters in pipe._placed_partition.partition.outline.shared_parameters
    )
    return MemoryComparison(
        measurement.peak,
        forecast,
        2 * sum(buffer.nbytes for buffer in pipe.buffers()) + shared_bytes,
    )


# ---- the outcomes of the unsplit model -----------------------------------------------------------

SEED = 20_010  # every run starts from it, so that pipe and reference draw the same numbers


@dataclass(frozen=True)
class ReferenceOutcomes:
    """The outcomes of the unsplit model, with which every pipe is compared.

    Attributes:
        first_step: The first training step.
        second_step: A second step, which adds to the gradients of the first.
        eval_outcomes: Forwards in eval mode: a description, the arguments and the outcome.
        dependence: Why the reference ran micro-batch by micro-batch, if it did.
        inputs_require_grad: Whether the second step computes gradients of the inputs.
    """

    first_step: StepOutcome
    second_step: StepOutcome
    eval_outcomes: tuple[tuple[str, StepArguments, StepOutcome], ...]
    dependence: BatchDependence
    inputs_require_grad: bool


def compute_reference(checked: CheckedModel) -> ReferenceOutcomes:
    """Run the unsplit model: a step, another that adds to the gradients, and eval mode."""
    dependence = detect_batch_dependence(checked)
    eval_dependence = detect_batch_dependence(checked, training=False)
    inputs_require_grad = _can_require_input_grad(checked)
    torch.manual_seed(SEED)
    model = checked.copy_model()
    first_step = collect_training_outcome(
        model, *run_unsplit(checked, model, checked.arguments, dependence.is_independent)
    )
    arguments = _make_second_arguments(checked, inputs_require_grad)
    second_step = collect_training_outcome(
        model, *run_unsplit(checked, model, arguments, dependence.is_independent), arguments
    )
    eval_outcome = _run_unsplit_eval(checked, model, checked.arguments, eval_dependence)
    eval_outcomes = [("the batch", checked.arguments, eval_outcome)]
    # A smaller last batch is common in evaluation. The model may fail on half of the batch: a mask
    # that should not be split is split, for example. The training steps report that.
    with suppress(Exception):
        half = checked.arguments.take_first_part(2)
        half_outcome = _run_unsplit_eval(checked, model, half, eval_dependence)
        eval_outcomes.append(("half of the batch", half, half_outcome))
    return ReferenceOutcomes(
        first_step, second_step, tuple(eval_outcomes), dependence, inputs_require_grad
    )


def _make_second_arguments(checked: CheckedModel, inputs_require_grad: bool) -> StepArguments:
    """Return the batch of the second step, whose inputs require gradients if that is possible."""
    if inputs_require_grad:
        return checked.arguments.require_input_grads()
    return checked.arguments.map_tensors(torch.Tensor.detach)


def _can_require_input_grad(checked: CheckedModel) -> bool:
    """Return whether the model can compute gradients of its inputs.

    A model that changes an input in place cannot: autograd refuses it for a leaf.
    """
    arguments = checked.arguments.require_input_grads()
    versions = [tensor._version for tensor in arguments.get_named_tensors().values()]
    try:
        run_unsplit(checked, checked.copy_model(), arguments, whole_batch=True)
    except RuntimeError:
        return False
    return versions == [tensor._version for tensor in arguments.get_named_tensors().values()]


def _run_unsplit_eval(
    checked: CheckedModel,
    model: nn.Module,
    arguments: StepArguments,
    eval_dependence: BatchDependence,
) -> StepOutcome:
    model.eval()
    torch.manual_seed(SEED)
    with torch.no_grad():
        return collect_eval_outcome(
            *run_unsplit(checked, model, arguments, eval_dependence.is_independent)
        )


# ---- one trial -----------------------------------------------------------------------------------


def run_trial(
    checked: CheckedModel,
    expected: ReferenceOutcomes,
    profiler: FootprintProfiler | None,
    schedule: ScheduleLike,
    case: Case,
) -> Run:
    """Run a pipe and compare it with the reference. An error becomes a result.

    Without a profiler, memory is not measured.
    """
    try:
        build_pipe = partial(_build_seeded_pipe, checked, schedule, case)
        differences = tuple(_compare_pipe(checked, expected, build_pipe))
        memory = None
        # Memory is always measured inline, so once is enough.
        if profiler is not None and case.runtime == "inline":
            memory = compare_memory(checked, profiler, schedule, case)
        return Run(case, Compared(differences, memory))
    # An error of Penstock's is a refusal with a reason. Any other error is a failure, since the
    # unsplit model has run with the same batch.
    except PenstockError as error:
        return Run(case, Refused(str(error)))
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        text = f"{type(error).__name__}: {error} {notes}".strip()
        return Run(case, Failed(text))


def _build_seeded_pipe(checked: CheckedModel, schedule: ScheduleLike, case: Case) -> Pipe:
    """Return a pipe, with torch's generator at the state that every run starts from."""
    torch.manual_seed(SEED)
    return checked.build_pipe(schedule, case.ranks, case.checkpoint, case.runtime)


def _compare_pipe(
    checked: CheckedModel, expected: ReferenceOutcomes, build_pipe: Callable[[], Pipe]
) -> Iterator[Difference]:
    """Yield all differences of a pipe, in the order in which the reference ran."""
    pipe = build_pipe()
    first_step = _run_pipe_step(checked, pipe, checked.arguments)
    yield from first_step.compare_to(expected.first_step)
    arguments = _make_second_arguments(checked, expected.inputs_require_grad)
    result = checked.run_step(pipe, arguments)
    second_step = collect_training_outcome(pipe, result.loss, result.outputs, arguments)
    for difference in second_step.compare_to(expected.second_step):
        yield difference if difference.kind == "inputs" else _relabel(difference, "again")
    if expected.dependence.uses_rng:
        yield from _compare_randomness(checked, expected, build_pipe, first_step, second_step)
    pipe.eval()
    with torch.no_grad():
        for description, eval_arguments, eval_outcome in expected.eval_outcomes:
            torch.manual_seed(SEED)
            result = checked.run_step(pipe, eval_arguments)
            outcome = collect_eval_outcome(result.loss, result.outputs)
            for difference in outcome.compare_to(eval_outcome):
                yield _relabel(difference, "eval", f" of {description}")


def _relabel(difference: Difference, kind: str, suffix: str = "") -> Difference:
    """Return a difference for another column of the table; its name tells the old kind."""
    name = f"{difference.kind} {difference.name}".strip() + suffix
    return Difference(kind, name, difference.size, difference.note)


def _run_pipe_step(checked: CheckedModel, pipe: Pipe, arguments: StepArguments) -> StepOutcome:
    result = checked.run_step(pipe, arguments)
    return collect_training_outcome(pipe, result.loss, result.outputs)


def _compare_randomness(
    checked: CheckedModel,
    expected: ReferenceOutcomes,
    build_pipe: Callable[[], Pipe],
    first: StepOutcome,
    second: StepOutcome,
) -> Iterator[Difference]:
    """Yield whether an equal seed gives equal bits, and the next seed gives other numbers.

    The second is compared only if the steps of the unsplit model differ.
    """
    repeated = _run_pipe_step(checked, build_pipe(), checked.arguments)
    size = max((difference.size for difference in repeated.compare_to(first)), default=0.0)
    yield Difference("random", "of a second run with the same seed", size)
    kinds = "loss", "outputs"
    if expected.first_step.differs_from(expected.second_step, *kinds):
        differs = first.differs_from(second, *kinds)
        note = "" if differs else "are the same with another seed"
        yield Difference("random", "numbers", 0.0 if differs else float("inf"), note)

"""One pipe, run and compared with what the unsplit model gave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn

from penstock.checking.memory import FootprintProfiler, compare_memory
from penstock.checking.reference import (
    BatchDependence,
    StepOutcome,
    collect_eval_outcome,
    collect_training_outcome,
    detect_batch_dependence,
    run_unsplit,
)
from penstock.checking.report import (
    Case,
    Compared,
    Difference,
    Failed,
    MemoryComparison,
    Refused,
    Run,
)
from penstock.checking.subject import CheckedModel, StepArguments
from penstock.errors import PenstockError
from penstock.pipe import Pipe
from penstock.schedules.choice import ScheduleLike

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

"""`penstock.check`: the proof, on a user's own model, that a pipe computes the same."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from penstock.checker.case import (
    CheckedModel,
    StepArguments,
    call_like_pipe,
    count_ranks,
    default_loss,
)
from penstock.checker.hints import find_hints
from penstock.checker.reference import detect_batch_dependence
from penstock.checker.report import Case, Refused, Report, Run
from penstock.checker.trial import (
    FootprintProfiler,
    ReferenceOutcomes,
    TrialConfig,
    compute_reference,
    run_trial,
)
from penstock.config import RUNTIMES
from penstock.errors import ArgumentError, PenstockError, RunError
from penstock.model.sequential import is_plain_sequential
from penstock.model.traced.units import UnitSelector as AskedUnits
from penstock.schedules.ir import Program, Schedule
from penstock.schedules.lowering import CHECKPOINT_MODES
from penstock.schedules.registry import FAMILIES, ScheduleLike, family_of, resolve_schedule
from penstock.stage.aux_loss import added_losses
from penstock.stage.loss import LossFn, extract_model_loss, parse_loss

ProgressCallback = Callable[[int, int, str], None]  # runs done, runs in all, what comes next


def check(
    model: nn.Module,
    *batch: Any,
    target: Any = None,
    loss_fn: LossFn | None = None,
    reduction: str | None = None,
    stages: int | Sequence[int] = 4,
    chunks: int = 4,
    schedules: str | Sequence[ScheduleLike] = "all",
    checkpoints: Sequence[str] = ("never", "always"),
    runtimes: Sequence[str] = ("inline", "threads"),
    units: AskedUnits = None,
    tolerance: float = 1e-10,
    quiet: bool = False,
    progress: ProgressCallback | None = None,
    **side: Any,
) -> Report:
    """Run the model unsplit and as a pipe, under every schedule, and compare all numbers.

    Everything runs on copies, in float64 on the CPU: the model, its gradients and buffers, and
    the random state stay as they are. The batch of a model that is no Sequential may be a dict of
    inputs by name. Without a `loss_fn` the loss is the model's own, or, if it gives none, a mean
    over all numbers of its output. Prints the report unless `quiet`.

    >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    >>> report = check(layers, torch.randn(8, 4), schedules=["1f1b"], quiet=True)
    >>> report.ok
    True
    """
    named = _name_schedules(schedules)
    _check_choices("checkpoints", checkpoints, CHECKPOINT_MODES)
    _check_choices("runtimes", runtimes, RUNTIMES)
    if target is not None and loss_fn is None:
        raise ArgumentError("a target needs a loss_fn, which is called with output and target")
    with _preserve_global_state():
        given = _collect_arguments(model, batch, side, target)
        subject = CheckedModel.from_user_model(
            model, given, loss_fn, reduction, stages, chunks, units
        )
        expected, subject = _prepare_reference(subject)
        rows = tuple(_run_trials(subject, expected, named, checkpoints, runtimes, progress))
        report = Report(_describe_model(subject), str(expected.dependence), tolerance, rows)
        if report.problems:
            hints = tuple(find_hints(subject, expected.dependence, report))
            report = replace(report, hints=hints)
    if not quiet:
        print(report)  # noqa: T201
    return report


def _collect_arguments(
    model: nn.Module, batch: tuple[Any, ...], side: dict[str, Any], target: Any
) -> StepArguments:
    """A dict of inputs by name is what a call with these would be."""
    named = batch[0] if len(batch) == 1 and not is_plain_sequential(model) else None
    if isinstance(named, Mapping):
        return StepArguments((), {**named, **side}, target)
    return StepArguments(batch, side, target)


def _name_schedules(schedules: str | Sequence[ScheduleLike]) -> list[tuple[str, str | Schedule]]:
    """Each with what it is called in the report."""
    if isinstance(schedules, str):
        schedules = _list_training_schedules() if schedules == "all" else [schedules]
    if not schedules:
        raise ArgumentError(
            f"schedules is empty: give 'all', or some of {', '.join(_list_training_schedules())}"
        )
    return [_name_schedule(asked) for asked in schedules]


def _name_schedule(requested: ScheduleLike) -> tuple[str, str | Schedule]:
    schedule = resolve_schedule(requested) or "gpipe"
    if isinstance(schedule, Schedule):
        return "your own" if isinstance(requested, Schedule | Program) else str(requested), schedule
    if schedule != "fit" and not family_of(schedule).trains:
        raise ArgumentError(f"{schedule} has no backwards, so it has no gradients to check")
    return schedule, schedule


def _list_training_schedules() -> list[str]:
    return [*(name for name, family in FAMILIES.items() if family.trains), "fit"]


def _check_choices(option: str, choices: Sequence[str], allowed: Sequence[str]) -> None:
    if isinstance(choices, str) or not choices or not set(choices) <= set(allowed):
        listed = ", ".join(repr(one) for one in allowed)
        raise ArgumentError(f"{option} is a list of some of {listed}, not {choices!r}")


def _prepare_reference(checked: CheckedModel) -> tuple[ReferenceOutcomes, CheckedModel]:
    """What the unsplit model gives, with a loss of our own where none can be told."""
    nature = ""
    try:
        if checked.loss_fn is None and not _returns_loss(checked):
            checked = replace(checked, loss_fn=default_loss)
        nature = str(detect_batch_dependence(checked))
        return compute_reference(checked), checked
    except PenstockError:
        raise
    except Exception as error:
        where = nature or "the unsplit model on the whole batch, in float64"
        error.add_note(f"This was a copy on the CPU, the reference: {where}.")
        raise


def _returns_loss(checked: CheckedModel) -> bool:
    with torch.no_grad(), added_losses():
        output = call_like_pipe(checked.copy_model(), checked.arguments.take_whole_batch())
    try:
        parse_loss(extract_model_loss(output), "the model gave")
    except RunError:
        return False
    return True


def _run_trials(
    checked: CheckedModel,
    expected: ReferenceOutcomes,
    named_schedules: Sequence[tuple[str, str | Schedule]],
    checkpoints: Sequence[str],
    runtimes: Sequence[str],
    progress: ProgressCallback | None,
) -> Iterator[Run]:
    scales = FootprintProfiler(checked)
    ways = [
        (one, checkpoint, runtime)
        for one in named_schedules
        for checkpoint in checkpoints
        for runtime in runtimes
    ]
    for at, ((name, schedule), checkpoint, runtime) in enumerate(ways):
        if progress is not None:
            progress(at, len(ways), f"{name}, {checkpoint}, {runtime}")
        try:
            ranks = count_ranks(schedule, len(checked.partition.stages))
        except ArgumentError as error:
            yield Run(Case(name, 0, checkpoint, runtime), Refused(str(error)))
            continue
        asking = TrialConfig(schedule, name, ranks, checkpoint, runtime)
        yield run_trial(checked, expected, scales, asking)
    if progress is not None:
        progress(len(ways), len(ways), "done")


def _describe_model(checked: CheckedModel) -> str:
    numbers = sum(parameter.numel() for parameter in checked.model.parameters())
    cuts = " + ".join(map(str, checked.partition.counts))
    parts = "layers" if checked.traced_model is None else "units"
    rows = checked.arguments.split_microbatches(checked.chunks)[1].counts
    return (
        f"{numbers:,} parameters; stages of {cuts} {parts}; "
        f"{sum(rows)} rows in micro-batches of {', '.join(map(str, rows))}"
    )


@contextmanager
def _preserve_global_state() -> Iterator[None]:
    """Random states stay as they are; gradients are on, and each rank computes in one thread."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy and numpy.random.get_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng([]), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])

"""`penstock.check`: show, on a user's own model, that a pipe computes the same numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

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
    compute_reference,
    run_trial,
)
from penstock.config import RUNTIMES
from penstock.display import shown_progress, write_line
from penstock.errors import ArgumentError, PenstockError, RunError
from penstock.model.isolation import preserve_rng
from penstock.model.outside_state import preserve_outside_state
from penstock.model.sequential import is_plain_sequential
from penstock.model.traced.units import UnitSelector
from penstock.schedules.families import FAMILIES, family_of
from penstock.schedules.ir import Program, Schedule
from penstock.schedules.lowering import CHECKPOINT_MODES
from penstock.schedules.registry import ScheduleLike, resolve_schedule
from penstock.stage.aux_loss import added_losses
from penstock.stage.loss import LossFn, extract_model_loss, parse_loss
from penstock.tracebacks import entry_point

ALL_SCHEDULES = "all"
DEFAULT_CHECKPOINTS, DEFAULT_RUNTIMES = ("never", "always"), ("inline", "threads")

# Called with the number of runs done, the number of all runs, and the name of the next run.
ProgressCallback = Callable[[int, int, str], None]


@entry_point
def check(
    model: nn.Module,
    *batch: Any,
    target: Any = None,
    loss_fn: LossFn | None = None,
    reduction: str | None = None,
    stages: int | Sequence[int] = 4,
    chunks: int = 4,
    schedules: str | Sequence[ScheduleLike] = ALL_SCHEDULES,
    checkpoints: Sequence[str] = DEFAULT_CHECKPOINTS,
    runtimes: Sequence[str] = DEFAULT_RUNTIMES,
    units: UnitSelector = None,
    tolerance: float = 1e-10,
    quick: bool = False,
    quiet: bool = False,
    progress: ProgressCallback | bool | None = None,
    **side: Any,
) -> Report:
    """Run a model unsplit and as a pipe, under every schedule, and compare all numbers.

    Compares the loss, outputs, gradients, buffers, gradients of the inputs, a second step, eval
    mode, and the peak memory with its forecast. Everything runs on copies, in float64 on the CPU:
    the model, its gradients and buffers, and the random state stay as they are.

    Args:
        model: The unsplit model. Its mode counts: call `model.train()` before to check training.
        *batch: The positional inputs of a step, or one tuple of them. For a model that is not an
            `nn.Sequential`, it may be one dict of inputs by name.
        target: The target of the loss. Needs a `loss_fn`.
        loss_fn: The loss, called with the output and the target. Without it the loss is the one
            that the model returns; if it returns none, a mean over all numbers of its output. The
            report says which one it was.
        reduction: How the losses of micro-batches are combined, as in `Pipe`.
        stages: The number of stages, or the number of layers or units of each.
        chunks: The number of micro-batches.
        schedules: "all", one schedule, or a list of schedules.
        checkpoints: Checkpoint modes to try.
        runtimes: Runtimes to try.
        units: Which submodules are units, as in `Pipe`.
        tolerance: The largest difference, relative to the largest number of a tensor if that is
            above 1, that still counts as equal.
        quick: Try two combinations only, and do not measure memory: recomputation in threads
            under 1F1B, and a split backward under ZB-H1. This takes seconds.
        quiet: Do not print the report.
        progress: True to show a bar, in a notebook or a terminal; or a function that is called
            before each run with the number of runs done, the number of all runs, and the name of
            the next one.
        **side: Inputs by name.

    Returns:
        The report. It is true if something ran and everything was equal.

    Raises:
        ArgumentError: An option is not valid.

    Example:
        >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
        >>> report = check(layers, torch.randn(8, 4), schedules=["1f1b"], quiet=True)
        >>> report.ok
        True
    """
    combinations = _list_combinations(schedules, checkpoints, runtimes)
    if not 0 <= tolerance <= 1:  # differences are relative: above 1, anything would be equal
        raise ArgumentError(f"tolerance must be a number from 0 to 1, not {tolerance}")
    if quick:
        options = schedules, tuple(checkpoints), tuple(runtimes)
        if options != (ALL_SCHEDULES, DEFAULT_CHECKPOINTS, DEFAULT_RUNTIMES):
            raise ArgumentError(
                "quick=True chooses schedules, checkpoints and runtimes itself. Leave these out, "
                "or leave out quick."
            )
        combinations = [c for c in combinations if (c.schedule_name, *c[2:]) in _QUICK_COMBINATIONS]
    if target is not None and loss_fn is None:
        raise ArgumentError("a target needs a loss_fn, which is called with output and target")
    with (
        _preserve_global_state(),
        preserve_outside_state(model, loss_fn, drops_losses=False),
        _shown_runs(progress) as shown,
    ):
        arguments = _collect_arguments(model, batch, side, target)
        checked = CheckedModel(model, arguments, loss_fn, reduction, stages, chunks, units)
        expected, checked = _prepare_reference(checked.copy_to_float64())
        rows = tuple(_run_trials(checked, expected, combinations, not quick, shown))
        report = Report(
            _describe_model(checked),
            str(expected.dependence),
            tolerance,
            rows,
            loss=_describe_loss(loss_fn, checked.loss_fn),
            left_out=_QUICK_LEFT_OUT if quick else "",
        )
        # Hints take several more runs of the unsplit model, so they are only sought when needed.
        if report.problems:
            hints = tuple(find_hints(checked, expected.dependence, report))
            report = replace(report, hints=hints)
    if not quiet:
        write_line(str(report))
    return report


def _collect_arguments(
    model: nn.Module, batch: tuple[Any, ...], side: dict[str, Any], target: Any
) -> StepArguments:
    """Return the arguments of a step. A single dict becomes keyword inputs.

    A single tuple becomes several inputs if the model does not take one alone.
    """
    inputs_by_name = batch[0] if len(batch) == 1 and not is_plain_sequential(model) else None
    if isinstance(inputs_by_name, Mapping):
        return StepArguments((), {**inputs_by_name, **side}, target)
    is_tuple = len(batch) == 1 and type(batch[0]) is tuple
    if is_tuple and not _accepts(model, batch, side) and _accepts(model, batch[0], side):
        batch = batch[0]
    return StepArguments(batch, side, target)


def _accepts(model: nn.Module, batch: tuple[Any, ...], side: dict[str, Any]) -> bool:
    """Return whether the model, or the first layer of a Sequential, can be called like this."""
    is_sequential = is_plain_sequential(model)
    entry = next(iter(model.children()), model) if is_sequential else model
    try:
        # The inputs by name of a Sequential may belong to any layer.
        inspect.signature(entry.forward).bind(*batch, **({} if is_sequential else side))
    except TypeError:
        return False
    return True


# ---- the combinations to try ---------------------------------------------------------------------


class _Combination(NamedTuple):
    """The options of one pipe."""

    schedule_name: str
    schedule: str | Schedule
    checkpoint: str
    runtime: str


def _list_combinations(
    schedules: str | Sequence[ScheduleLike], checkpoints: Sequence[str], runtimes: Sequence[str]
) -> list[_Combination]:
    """Return every combination of these options."""
    named_schedules = _name_schedules(schedules)
    _check_choices("checkpoints", checkpoints, CHECKPOINT_MODES)
    _check_choices("runtimes", runtimes, RUNTIMES)
    return [
        _Combination(*named_schedule, checkpoint, runtime)
        for named_schedule in named_schedules
        for checkpoint in checkpoints
        for runtime in runtimes
    ]


# Together these two have every mechanism that changes how a cell is computed: recomputation,
# concurrent stages, and a backward in two parts. Other schedules change the order of cells.
_QUICK_COMBINATIONS = {("1f1b", "always", "threads"), ("zb-h1", "never", "inline")}
_QUICK_LEFT_OUT = (
    "all other schedules, checkpoint modes and runtimes, and memory; check without quick"
)


def _name_schedules(schedules: str | Sequence[ScheduleLike]) -> list[tuple[str, str | Schedule]]:
    """Return each schedule with its name in the report."""
    if isinstance(schedules, str):
        schedules = _list_training_schedules() if schedules == ALL_SCHEDULES else [schedules]
    if not schedules:
        raise ArgumentError(
            f"schedules is empty. Pass 'all', or some of {', '.join(_list_training_schedules())}."
        )
    return [_name_schedule(requested) for requested in schedules]


def _name_schedule(requested: ScheduleLike) -> tuple[str, str | Schedule]:
    schedule = resolve_schedule(requested) or "gpipe"
    if isinstance(schedule, Schedule):
        return "your own" if isinstance(requested, Schedule | Program) else str(requested), schedule
    if schedule != "fit" and not family_of(schedule).trains:
        raise ArgumentError(
            f"{schedule} has no backwards, so it has no gradients to check. Use one of "
            f"{', '.join(_list_training_schedules())}."
        )
    return schedule, schedule


def _list_training_schedules() -> list[str]:
    return [*(name for name, family in FAMILIES.items() if family.trains), "fit"]


def _check_choices(option: str, choices: Sequence[str], allowed: Sequence[str]) -> None:
    if isinstance(choices, str) or not choices or not set(choices) <= set(allowed):
        listed = ", ".join(repr(choice) for choice in allowed)
        raise ArgumentError(f"{option} must be a list of some of {listed}, not {choices!r}")


def _prepare_reference(checked: CheckedModel) -> tuple[ReferenceOutcomes, CheckedModel]:
    """Run the unsplit model. Use `default_loss` if the model returns no loss.

    An error in it is the user's: it is raised with a note, and not turned into a row of the report.
    """
    reference = ""
    try:
        if checked.loss_fn is None and not _returns_loss(checked):
            checked = replace(checked, loss_fn=default_loss)
        reference = str(detect_batch_dependence(checked))
        expected = compute_reference(checked)
        _require_numbers(expected)
        return expected, checked
    except PenstockError:
        raise
    except Exception as error:
        where = reference or "the unsplit model on the whole batch, in float64"
        error.add_note(f"The error is from the reference, a copy of the model on the CPU: {where}.")
        raise


def _require_numbers(expected: ReferenceOutcomes) -> None:
    """Raise if the outputs of the unsplit model are empty, or its loss or a gradient not finite.

    A pipe would compute nothing as well, or nan, and that would count as equal.
    """
    tensors = expected.first_step.tensors.items()
    outputs = [tensor for (kind, _), tensor in tensors if kind == "outputs" and tensor is not None]
    if outputs and not any(output.numel() for output in outputs):
        raise ArgumentError(
            "the outputs of the unsplit model are empty, so a comparison would prove nothing. "
            "Check it with a batch that has rows."
        )
    for step in (expected.first_step, expected.second_step):
        for (kind, name), tensor in step.tensors.items():
            if kind in ("loss", "gradients") and tensor is not None and not tensor.isfinite().all():
                raise ArgumentError(
                    f"the unsplit model's {f'{kind} {name}'.strip()} is not finite, so a "
                    "comparison would prove nothing. Check it with weights and a batch that give "
                    "finite numbers."
                )


def _returns_loss(checked: CheckedModel) -> bool:
    """Return whether the output of the model is, or contains, a loss."""
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
    combinations: Sequence[_Combination],
    measures_memory: bool,
    progress: ProgressCallback | None,
) -> Iterator[Run]:
    """Run a pipe for every combination of options, and yield its result."""
    profiler = FootprintProfiler(checked) if measures_memory else None
    for index, (name, schedule, checkpoint, runtime) in enumerate(combinations):
        if progress is not None:
            progress(index, len(combinations), f"{name}, {checkpoint}, {runtime}")
        case = Case(name, 0, checkpoint, runtime)
        try:
            case = replace(case, ranks=count_ranks(schedule, len(checked.partition.stages)))
        except ArgumentError as error:
            # The schedule does not suit this number of stages. The other schedules go on.
            yield Run(case, Refused(str(error)))
            continue
        yield run_trial(checked, expected, profiler, schedule, case)
    if progress is not None:
        progress(len(combinations), len(combinations), "done")


@contextmanager
def _shown_runs(progress: ProgressCallback | bool | None) -> Iterator[ProgressCallback | None]:
    """Yield the function to report runs to: the caller's own, or for True one that shows a bar."""
    if not isinstance(progress, bool):
        yield progress
        return
    with shown_progress(progress) as shown:

        def report(done: int, total: int, next_run: str) -> None:
            if shown is not None:
                shown(f"{done} of {total} runs: {next_run}", done / max(total, 1))

        yield report


def _describe_loss(loss_fn: LossFn | None, checked_loss_fn: LossFn | None) -> str:
    """Return one line on the loss that the gradients come from, for the report."""
    if loss_fn is not None:
        return "loss_fn"
    if checked_loss_fn is None:
        return "the one that the model returns"
    return (
        "a stand-in, the mean over all outputs that have rows: the model returns no loss, and no "
        "loss_fn was given"
    )


def _describe_model(checked: CheckedModel) -> str:
    """Return one line on the model, its cut and its micro-batches, for the report."""
    numel = sum(parameter.numel() for parameter in checked.model.parameters())
    counts = " + ".join(map(str, checked.partition.counts))
    parts = "layers" if checked.traced_model is None else "units"
    rows = checked.arguments.split_microbatches(checked.chunks)[1].counts
    return (
        f"{numel:,} parameters; stages of {counts} {parts}; "
        f"{sum(rows)} rows in micro-batches of {', '.join(map(str, rows))}"
    )


@contextmanager
def _preserve_global_state() -> Iterator[None]:
    """Enable gradients inside the context. Restore random states and thread count afterwards."""
    threads = torch.get_num_threads()
    # The ranks are threads of this process. Each of them gets one core.
    torch.set_num_threads(1)
    try:
        with preserve_rng(), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)

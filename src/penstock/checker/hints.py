"""Hints: why a pipe differs from the unsplit model.

Most differences come from the model: its results change when the batch is split. A few more runs of
the unsplit model, recorded layer by layer, find the cause. The first that applies is reported:

    1. two equal runs differ                   random numbers from outside of torch, a clock
    2. a run on micro-batches fails            an input that should not be split, or the model
    3. a Python attribute of a layer changes   state that every micro-batch advances
    4. whole batch and micro-batches differ    an input that should not be split; else the first
                                               layer whose rows differ; else the loss, a backward,
                                               or a buffer
    5. none of these                           the pipe: name the setting that the bad runs share
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.checker.case import CheckedModel, StepArguments
from penstock.checker.reference import (
    BatchDependence,
    StepOutcome,
    collect_training_outcome,
    compute_difference,
    detect_batch_dependence,
    run_unsplit,
)
from penstock.checker.report import Compared, Failed, Report
from penstock.checker.trial import SEED
from penstock.microbatch import NoChunk
from penstock.stage.deferred_batchnorm import DeferredStatsBatchNorm
from penstock.torch_compat import pytree


class _RecordedCall(NamedTuple):
    """The tensors among the inputs and outputs of one call of a module."""

    name: str
    class_name: str
    inputs: list[Tensor]
    outputs: list[Tensor]


class _RecordedRun(NamedTuple):
    """A recorded run of the unsplit model."""

    calls: list[_RecordedCall]
    outcome: StepOutcome
    changed_attributes: list[str]  # Python attributes of layers that the run changed


def find_hints(checked: CheckedModel, dependence: BatchDependence, report: Report) -> Iterator[str]:
    """Yield the cause of the differences. If none is found, yield settings that bad runs share."""
    try:
        hints = list(_find_causes(checked, dependence, report.tolerance))
    except Exception as error:  # the report is worth more than a hint
        hints = [f"the search for the cause failed: {type(error).__name__}: {error}"]
    yield from hints or _find_common_setting(report)


def _find_causes(
    checked: CheckedModel, dependence: BatchDependence, tolerance: float
) -> Iterator[str]:
    """Yield causes that lie in the model or its arguments."""
    whole_run, repeated = (
        _record_run(checked, checked.arguments, 1, training=True) for _ in range(2)
    )
    layer = _find_first_difference(whole_run.calls, repeated.calls, 0.0)
    kinds = "loss", "outputs", "gradients"
    if layer is not None or whole_run.outcome.differs_from(repeated.outcome, *kinds):
        where = f"layer {layer}" if layer else "the loss"
        yield (
            f"{where} returns a different result each time, with the same seed. It draws "
            "random numbers outside of torch's generator (Python's random, NumPy), or reads a "
            "clock. Draw with torch"
        )
        return
    # With dropout or BatchNorm, training mode always differs between whole batch and
    # micro-batches. Eval mode shows any other difference, unless the model draws there as well.
    draws_in_eval = False
    if not dependence.is_independent:
        draws_in_eval = detect_batch_dependence(checked, training=False).uses_rng
        whole_run = _record_run(checked, checked.arguments, 1, training=False)
    try:
        split_run = _record_run(
            checked, checked.arguments, checked.chunks, dependence.is_independent
        )
    except Exception as error:
        hint = _find_wrongly_split_input(checked, dependence, whole_run.outcome, tolerance)
        yield hint or f"the unsplit model fails on a micro-batch as well: {error}"
        return
    changed = sorted({*whole_run.changed_attributes, *split_run.changed_attributes})
    for attribute in changed:
        yield (
            f"{attribute} changes when its layer is called. A pipe calls the layer once for each "
            "micro-batch, and again to recompute. Keep state in buffers, or outside of the model"
        )
    if not changed and not draws_in_eval:
        yield from _explain_split_difference(checked, dependence, tolerance, whole_run, split_run)


def _explain_split_difference(
    checked: CheckedModel,
    dependence: BatchDependence,
    tolerance: float,
    whole_run: _RecordedRun,
    split_run: _RecordedRun,
) -> Iterator[str]:
    """Yield why the unsplit model differs between the whole batch and its micro-batches."""
    wrong = [d for d in split_run.outcome.compare_to(whole_run.outcome) if d.size > tolerance]
    buffers = [d for d in wrong if d.kind == "buffers"]
    numbers = [d for d in wrong if d.kind != "buffers"]
    layer = _find_first_difference(
        whole_run.calls, _merge_microbatch_calls(split_run.calls), tolerance
    )
    input_hint = None
    if numbers:
        input_hint = _find_wrongly_split_input(checked, dependence, whole_run.outcome, tolerance)
    if input_hint is not None:
        yield input_hint
    elif layer is not None:
        yield (
            f"layer {layer} returns different rows when the batch is split: it computes across "
            "the rows of its micro-batch (equal with chunks=1)"
        )
    elif any(d.kind == "loss" for d in numbers):
        yield (
            "the outputs are equal, but the losses of the micro-batches, weighted by their rows, "
            "do not add up to the loss of the batch (equal with chunks=1). The loss is not a mean "
            "over rows (ignore_index, class weights, a sum, a mean that a layer adds to another "
            "kind of loss); see 'Loss and reduction' in the guide"
        )
    elif numbers:
        yield (
            f"{numbers[0].kind} {numbers[0].name} differ when the batch is split, in the unsplit "
            "model as well (equal with chunks=1): a backward depends on the number of rows"
        )
    elif buffers:
        yield (
            f"buffer {buffers[0].name} advances with every call, so once for each micro-batch "
            "(equal with chunks=1)"
        )


def _find_common_setting(report: Report) -> Iterator[str]:
    """Yield the settings that all wrong runs share and no right run has.

    If the model is not the cause, the pipe is, and a setting narrows it down.
    """
    wrong = list(dict.fromkeys(run for runs in report.problems.values() for run in runs))
    right = [r for r in report.rows if isinstance(r.result, Compared) and r not in wrong]
    for option in ("checkpoint", "runtime", "schedule"):
        wrong_settings = {getattr(run.case, option) for run in wrong}
        right_settings = {getattr(run.case, option) for run in right}
        if right and len(wrong_settings) == 1 and not wrong_settings & right_settings:
            yield f"only with {option} {wrong_settings.pop()}"
    if any(isinstance(run.result, Failed) for run in wrong):
        yield "the unsplit model runs with this batch and with its micro-batches"
    elif all(problem.startswith("memory") for problem in report.problems):
        yield (
            "the numbers are right, but something keeps the activations of a cell after its last "
            "backward"
        )
    else:
        yield (
            "the unsplit model computes the same on the whole batch and on its micro-batches, so "
            "the pipe is wrong. Please report it, with this table"
        )


# ---- recorded runs of the unsplit model ----------------------------------------------------------


def _record_run(
    checked: CheckedModel, arguments: StepArguments, chunks: int, training: bool
) -> _RecordedRun:
    """Run a copy of the unsplit model in `chunks` micro-batches, and record every module call."""
    model = checked.copy_model()
    if not training:
        model.eval()
    calls: list[_RecordedCall] = []
    torch.manual_seed(SEED)
    attributes_before = _snapshot_attributes(model)
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                record = partial(_record_call, calls, name)
                hook = module.register_forward_hook(record, with_kwargs=True)
                hooks.callback(hook.remove)
        result = run_unsplit(
            replace(checked, chunks=chunks), model, arguments, whole_batch=chunks == 1
        )
    attributes = _snapshot_attributes(model)
    changed = [
        name
        for name, value in attributes.items()
        if _has_changed(attributes_before.get(name), value)
    ]
    return _RecordedRun(calls, collect_training_outcome(model, *result), changed)


def _record_call(
    calls: list[_RecordedCall], name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
) -> None:
    # Cloned, because a later layer may change its input in place.
    inputs, outputs = _clone_tensors((args, kwargs)), _clone_tensors(output)
    calls.append(_RecordedCall(name, type(module).__name__, inputs, outputs))


def _clone_tensors(values: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(values)
    return [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)]


def _snapshot_attributes(model: nn.Module) -> dict[str, Any]:
    """Return shallow copies of the plain Python attributes of all layers, by description."""
    module_attributes = {*nn.Module().__dict__, "training"}
    attributes = {}
    for name, module in model.named_modules():
        if isinstance(module, DeferredStatsBatchNorm):  # counts micro-batches, on purpose
            continue
        for key, value in module.__dict__.items():
            if key not in module_attributes and isinstance(
                value, bool | int | float | str | list | Tensor
            ):
                attributes[f"attribute '{key}' of layer '{name}'"] = copy.copy(value)
    return attributes


def _has_changed(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape != after.shape or not torch.equal(before, after)
    try:
        return type(before) is not type(after) or bool(before != after)
    except RuntimeError:  # lists of tensors, whose comparison has no truth value
        return True


def _merge_microbatch_calls(calls: Sequence[_RecordedCall]) -> list[_RecordedCall]:
    """Return one call per module, with the rows of all its micro-batches."""
    calls_by_name: dict[str, list[_RecordedCall]] = {}
    for call in calls:
        calls_by_name.setdefault(call.name, []).append(call)
    return [
        _RecordedCall(
            name,
            module_calls[0].class_name,
            _concat_rows([call.inputs for call in module_calls]),
            _concat_rows([call.outputs for call in module_calls]),
        )
        for name, module_calls in calls_by_name.items()
    ]


def _concat_rows(pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Concatenate pieces by rows. For values without rows, such as scalars, keep the first."""
    return [
        torch.cat(column)
        if column[0].dim() and len({tensor.shape[1:] for tensor in column}) == 1
        else column[0]
        for column in zip(*pieces, strict=False)
    ]


def _find_first_difference(
    first_calls: Sequence[_RecordedCall], second_calls: Sequence[_RecordedCall], tolerance: float
) -> str | None:
    """Return the first module that got equal inputs in both runs and returned different outputs."""
    # A module that is called several times is compared by its first call. A later call has other
    # inputs, and is skipped.
    by_name: dict[str, _RecordedCall] = {}
    for call in second_calls:
        by_name.setdefault(call.name, call)
    for call in first_calls:
        other = by_name.get(call.name)
        if other is None or not _are_close(call.inputs, other.inputs, tolerance):
            continue
        if not _are_close(call.outputs, other.outputs, tolerance):
            return f"'{call.name}' ({call.class_name})"
    return None


def _are_close(first: Sequence[Tensor], second: Sequence[Tensor], tolerance: float) -> bool:
    return len(first) == len(second) and all(
        compute_difference("", "", a, b).size <= tolerance
        for a, b in zip(first, second, strict=True)
    )


def _find_wrongly_split_input(
    checked: CheckedModel, dependence: BatchDependence, expected: StepOutcome, tolerance: float
) -> str | None:
    """Return a hint if the results are right once one of the inputs is not split.

    A mask of shape (length, length) is such an input. The first input is assumed to be the batch.
    """
    named_tensors = list(checked.arguments.get_named_tensors().items())
    # One input at a time, with a run for each.
    for name, tensor in named_tensors[1:]:
        arguments = _wrap_in_nochunk(checked.arguments, tensor)
        try:
            outcome = _record_run(
                checked, arguments, checked.chunks, dependence.is_independent
            ).outcome
        except Exception:  # this input has to be split
            continue
        if all(d.size <= tolerance for d in outcome.compare_to(expected) if d.kind != "buffers"):
            return (
                f"{name}, of shape {tuple(tensor.shape)}, is split on dim 0 as if it had rows, and "
                "the results are equal if it is not split. Wrap it in penstock.NoChunk"
            )
    return None


def _wrap_in_nochunk(arguments: StepArguments, tensor: Tensor) -> StepArguments:
    """Return the arguments with one tensor wrapped in `NoChunk`."""
    wrapped: StepArguments = pytree.tree_map(
        lambda leaf: NoChunk(leaf) if leaf is tensor else leaf, arguments
    )
    return wrapped

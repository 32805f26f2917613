"""Why the numbers differ, as far as a few more runs of the unsplit model can tell."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.checker.case import CheckedModel, StepArguments
from penstock.checker.reference import (
    BatchDependence,
    StepOutcome,
    collect_training_outcome,
    compute_difference,
    run_unsplit,
)
from penstock.checker.report import Compared, Failed, Report, Run
from penstock.checker.trial import SEED
from penstock.microbatch import NoChunk
from penstock.stage.deferred_batchnorm import DeferredStatsBatchNorm
from penstock.torch_compat import pytree


class _RecordedCall(NamedTuple):
    """What a module was given and what it gave: the tensors."""

    name: str
    class_name: str
    inputs: list[Tensor]
    outputs: list[Tensor]


class _RecordedRun(NamedTuple):
    """A run of the unsplit model, watched."""

    calls: list[_RecordedCall]
    outcome: StepOutcome
    changed_attributes: list[str]  # Python attributes of layers


def find_hints(checked: CheckedModel, dependence: BatchDependence, report: Report) -> Iterator[str]:
    """The first cause that is found, and otherwise in which runs it shows."""
    try:
        found = list(_find_causes(checked, dependence, report.tolerance))
    except Exception as error:  # a hint is no place to fail
        found = [f"the cause could not be looked for: {type(error).__name__}: {error}"]
    yield from found or _find_common_setting(report)


def _find_causes(
    checked: CheckedModel, dependence: BatchDependence, tolerance: float
) -> Iterator[str]:
    one, other = (_record_run(checked, checked.arguments, 1, training=True) for _ in range(2))
    at = _find_first_difference(one.calls, other.calls, 0.0)
    if at is not None or one.outcome.differs_from(other.outcome, "loss", "outputs", "gradients"):
        where = f"layer {at}" if at else "the loss"
        yield (
            f"{where} gives another result each time, with the same seed: it draws random numbers "
            "outside of torch's generator (Python's random, numpy), or reads a clock; draw with "
            "torch"
        )
        return
    whole = (
        one
        if dependence.is_independent
        else _record_run(checked, checked.arguments, 1, training=False)
    )
    try:
        cut = _record_run(checked, checked.arguments, checked.chunks, dependence.is_independent)
    except Exception as error:
        uncut = _find_wrongly_split_input(checked, dependence, whole.outcome, tolerance)
        yield uncut or f"the unsplit model fails on a micro-batch, too: {error}"
        return
    changed = sorted({*whole.changed_attributes, *cut.changed_attributes})
    for attribute in changed:
        yield (
            f"{attribute} changes when its layer is called, and a pipe calls it once for each "
            "micro-batch, and again to recompute: keep state in buffers, or outside"
        )
    if not changed:
        yield from _explain_split_difference(checked, dependence, tolerance, whole, cut)


def _explain_split_difference(
    checked: CheckedModel,
    dependence: BatchDependence,
    tolerance: float,
    whole_run: _RecordedRun,
    split_run: _RecordedRun,
) -> Iterator[str]:
    """The unsplit model on the whole batch, and the same on its pieces."""
    wrong = [d for d in split_run.outcome.compare_to(whole_run.outcome) if d.size > tolerance]
    buffers = [d for d in wrong if d.kind == "buffers"]
    numbers = [d for d in wrong if d.kind != "buffers"]
    at = _find_first_difference(
        whole_run.calls, _merge_microbatch_calls(split_run.calls), tolerance
    )
    uncut = (
        _find_wrongly_split_input(checked, dependence, whole_run.outcome, tolerance)
        if numbers
        else None
    )
    if uncut is not None:
        yield uncut
    elif at is not None:
        yield (
            f"layer {at} gives other rows when the batch is cut: it looks across the rows of its "
            "micro-batch (equal with chunks=1)"
        )
    elif any(d.kind == "loss" for d in numbers):
        yield (
            "the outputs are equal, and the losses of the micro-batches, weighted by their rows, "
            "are not the loss of the batch (equal with chunks=1): the loss is no mean by rows "
            "(ignore_index, weights of classes, a sum, a mean that a layer adds to another kind of "
            "loss); see 'Loss and reduction' in the guide"
        )
    elif numbers:
        yield (
            f"{numbers[0].kind} {numbers[0].name} differ when the batch is cut, in the unsplit "
            "model, too (equal with chunks=1): a backward that depends on the number of rows"
        )
    elif buffers:
        yield (
            f"buffer {buffers[0].name} advances with every call, so once for each micro-batch "
            "(equal with chunks=1)"
        )


def _find_common_setting(report: Report) -> Iterator[str]:
    """Not the model's doing. In which runs does it show?"""
    wrong = list(dict.fromkeys(run for runs in report.problems.values() for run in runs))
    right = [r for r in report.rows if isinstance(r.result, Compared) and r not in wrong]
    for what, of in _RUN_SETTINGS.items():
        seen, spared = {of(run) for run in wrong}, {of(run) for run in right}
        if right and len(seen) == 1 and not seen & spared:
            yield f"only with {what} {seen.pop()}"
    if any(isinstance(run.result, Failed) for run in wrong):
        yield "the unsplit model runs with this batch, and with its micro-batches"
    elif all(problem.startswith("memory") for problem in report.problems):
        yield (
            "the numbers are right, and something keeps what a cell has computed after its last "
            "backward"
        )
    else:
        yield (
            "the unsplit model gives the same on the whole batch and on its pieces, so this is "
            "the pipe's doing: please report it, with this table"
        )


_RUN_SETTINGS: dict[str, Callable[[Run], str]] = {
    "checkpoint": lambda run: run.case.checkpoint,
    "runtime": lambda run: run.case.runtime,
    "schedule": lambda run: run.case.schedule,
}


# ---- watching the unsplit model -----------------------------------------------------------


def _record_run(
    checked: CheckedModel, arguments: StepArguments, chunks: int, training: bool
) -> _RecordedRun:
    model = checked.copy_model()
    if not training:
        model.eval()
    calls: list[_RecordedCall] = []
    torch.manual_seed(SEED)
    before = _snapshot_attributes(model)
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hook = module.register_forward_hook(
                    _make_call_recorder(calls, name), with_kwargs=True
                )
                hooks.callback(hook.remove)
        result = run_unsplit(
            replace(checked, chunks=chunks), model, arguments, whole_batch=chunks == 1
        )
    after = _snapshot_attributes(model)
    changed = [name for name, value in after.items() if _has_changed(before.get(name), value)]
    return _RecordedRun(calls, collect_training_outcome(model, *result), changed)


def _make_call_recorder(calls: list[_RecordedCall], name: str) -> Callable[..., None]:
    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given, made = _clone_tensors((args, kwargs)), _clone_tensors(output)
        calls.append(_RecordedCall(name, type(module).__name__, given, made))

    return record


def _clone_tensors(values: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(values)
    return [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)]


def _snapshot_attributes(model: nn.Module) -> dict[str, Any]:
    """The plain Python attributes of layers, copied where that is possible."""
    own = {*nn.Module().__dict__, "training"}
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, DeferredStatsBatchNorm):
            continue
        for key, value in module.__dict__.items():
            if key not in own and isinstance(value, bool | int | float | str | list | Tensor):
                found[f"attribute '{key}' of layer '{name}'"] = copy.copy(value)
    return found


def _has_changed(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape != after.shape or not torch.equal(before, after)
    try:
        return type(before) is not type(after) or bool(before != after)
    except RuntimeError:  # lists of tensors
        return True


def _merge_microbatch_calls(calls: Sequence[_RecordedCall]) -> list[_RecordedCall]:
    """The calls of each module over all micro-batches, as one."""
    found: dict[str, list[_RecordedCall]] = {}
    for call in calls:
        found.setdefault(call.name, []).append(call)
    return [
        _RecordedCall(
            name,
            those[0].class_name,
            _concat_rows([c.inputs for c in those]),
            _concat_rows([c.outputs for c in those]),
        )
        for name, those in found.items()
    ]


def _concat_rows(pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    columns = zip(*pieces, strict=False)
    return [torch.cat(c) if c[0].dim() and _have_same_row_shape(c) else c[0] for c in columns]


def _have_same_row_shape(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.shape[1:] for tensor in tensors}) == 1


def _find_first_difference(
    first_calls: Sequence[_RecordedCall], second_calls: Sequence[_RecordedCall], tolerance: float
) -> str | None:
    """The first module that was given the same and made something else."""
    by_name: dict[str, _RecordedCall] = {}
    for call in second_calls:
        by_name.setdefault(call.name, call)
    for call in first_calls:
        twin = by_name.get(call.name)
        if twin is None or not _are_close(call.inputs, twin.inputs, tolerance):
            continue
        if not _are_close(call.outputs, twin.outputs, tolerance):
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
    """The input without whose cut everything is equal."""
    names = list(checked.arguments.get_named_tensors().items())
    for name, tensor in names[1:]:
        values = _wrap_in_nochunk(checked.arguments, tensor)
        try:
            found = _record_run(checked, values, checked.chunks, dependence.is_independent).outcome
        except Exception:  # not this one, then
            continue
        if all(d.size <= tolerance for d in found.compare_to(expected) if d.kind != "buffers"):
            return (
                f"{name}, of shape {tuple(tensor.shape)}, is cut on dim 0 as if that were its "
                "rows, and all is equal if it is not: wrap it in penstock.NoChunk"
            )
    return None


def _wrap_in_nochunk(arguments: StepArguments, tensor: Tensor) -> StepArguments:
    def wrap_leaf(leaf: Any) -> Any:
        return NoChunk(leaf) if leaf is tensor else leaf

    batch, side, target = pytree.tree_map(
        wrap_leaf, (arguments.batch, arguments.side, arguments.target)
    )
    return StepArguments(batch, side, target)

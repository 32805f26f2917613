"""Why the numbers differ, as far as a few more runs of the unsplit model can tell."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.batch import NoChunk
from penstock.checking.reference import Nature, Outcome, difference, outcome, unsplit
from penstock.checking.report import Compared, Failed, Report, Run
from penstock.checking.subject import Subject, Values
from penstock.checking.trial import SEED
from penstock.stage.batchnorm import DeferredBatchNorm


class _Call(NamedTuple):
    """What a module was given and what it gave: the tensors."""

    name: str
    kind: str
    given: list[Tensor]
    made: list[Tensor]


class _Trace(NamedTuple):
    """A run of the unsplit model, watched."""

    calls: list[_Call]
    outcome: Outcome
    changed: list[str]  # Python attributes of layers


def hints_for(subject: Subject, nature: Nature, report: Report) -> Iterator[str]:
    """The first cause that is found, and otherwise in which runs it shows."""
    try:
        found = list(_causes(subject, nature, report.tolerance))
    except Exception as error:  # a hint is no place to fail
        found = [f"the cause could not be looked for: {type(error).__name__}: {error}"]
    yield from found or _pattern(report)


def _causes(subject: Subject, nature: Nature, tolerance: float) -> Iterator[str]:
    one, other = (_watched(subject, subject.values, 1, training=True) for _ in range(2))
    at = _first_difference(one.calls, other.calls, 0.0)
    if at is not None or one.outcome.differs_from(other.outcome, "loss", "outputs", "gradients"):
        where = f"layer {at}" if at else "the loss"
        yield (
            f"{where} gives another result each time, with the same seed: it draws random numbers "
            "outside of torch's generator (Python's random, numpy), or reads a clock; draw with "
            "torch"
        )
        return
    whole = one if nature.whole else _watched(subject, subject.values, 1, training=False)
    try:
        cut = _watched(subject, subject.values, subject.chunks, nature.whole)
    except Exception as error:
        uncut = _better_uncut(subject, nature, whole.outcome, tolerance)
        yield uncut or f"the unsplit model fails on a micro-batch, too: {error}"
        return
    changed = sorted({*whole.changed, *cut.changed})
    for attribute in changed:
        yield (
            f"{attribute} changes when its layer is called, and a pipe calls it once for each "
            "micro-batch, and again to recompute: keep state in buffers, or outside"
        )
    if not changed:
        yield from _of_the_cut(subject, nature, tolerance, whole, cut)


def _of_the_cut(
    subject: Subject, nature: Nature, tolerance: float, whole: _Trace, cut: _Trace
) -> Iterator[str]:
    """The unsplit model on the whole batch, and the same on its pieces."""
    wrong = [d for d in cut.outcome.against(whole.outcome) if d.size > tolerance]
    buffers = [d for d in wrong if d.kind == "buffers"]
    numbers = [d for d in wrong if d.kind != "buffers"]
    at = _first_difference(whole.calls, _joined(cut.calls), tolerance)
    uncut = _better_uncut(subject, nature, whole.outcome, tolerance) if numbers else None
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


def _pattern(report: Report) -> Iterator[str]:
    """Not the model's doing. In which runs does it show?"""
    wrong = list(dict.fromkeys(run for runs in report.problems.values() for run in runs))
    right = [r for r in report.rows if isinstance(r.result, Compared) and r not in wrong]
    for what, of in _ASPECTS.items():
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


_ASPECTS: dict[str, Callable[[Run], str]] = {
    "checkpoint": lambda run: run.case.checkpoint,
    "runtime": lambda run: run.case.runtime,
    "schedule": lambda run: run.case.schedule,
}


# ---- watching the unsplit model -----------------------------------------------------------


def _watched(subject: Subject, values: Values, chunks: int, training: bool) -> _Trace:
    model = subject.fresh()
    if not training:
        model.eval()
    calls: list[_Call] = []
    torch.manual_seed(SEED)
    before = _attributes(model)
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hook = module.register_forward_hook(_noting(calls, name), with_kwargs=True)
                hooks.callback(hook.remove)
        result = unsplit(replace(subject, chunks=chunks), model, values, whole=chunks == 1)
    after = _attributes(model)
    changed = [name for name, value in after.items() if _other(before.get(name), value)]
    return _Trace(calls, outcome(model, *result), changed)


def _noting(calls: list[_Call], name: str) -> Callable[..., None]:
    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given, made = _tensors((args, kwargs)), _tensors(output)
        calls.append(_Call(name, type(module).__name__, given, made))

    return note


def _tensors(values: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(values)
    return [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)]


def _attributes(model: nn.Module) -> dict[str, Any]:
    """The plain Python attributes of layers, copied where that is possible."""
    own = {*nn.Module().__dict__, "training"}
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, DeferredBatchNorm):
            continue
        for key, value in module.__dict__.items():
            if key not in own and isinstance(value, bool | int | float | str | list | Tensor):
                found[f"attribute '{key}' of layer '{name}'"] = copy.copy(value)
    return found


def _other(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape != after.shape or not torch.equal(before, after)
    try:
        return type(before) is not type(after) or bool(before != after)
    except RuntimeError:  # lists of tensors
        return True


def _joined(calls: Sequence[_Call]) -> list[_Call]:
    """The calls of each module over all micro-batches, as one."""
    found: dict[str, list[_Call]] = {}
    for call in calls:
        found.setdefault(call.name, []).append(call)
    return [
        _Call(
            name,
            those[0].kind,
            _by_rows([c.given for c in those]),
            _by_rows([c.made for c in those]),
        )
        for name, those in found.items()
    ]


def _by_rows(pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    columns = zip(*pieces, strict=False)
    return [torch.cat(c) if c[0].dim() and _alike(c) else c[0] for c in columns]


def _alike(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.shape[1:] for tensor in tensors}) == 1


def _first_difference(one: Sequence[_Call], other: Sequence[_Call], tolerance: float) -> str | None:
    """The first module that was given the same and made something else."""
    by_name: dict[str, _Call] = {}
    for call in other:
        by_name.setdefault(call.name, call)
    for call in one:
        twin = by_name.get(call.name)
        if twin is None or not _same(call.given, twin.given, tolerance):
            continue
        if not _same(call.made, twin.made, tolerance):
            return f"'{call.name}' ({call.kind})"
    return None


def _same(one: Sequence[Tensor], other: Sequence[Tensor], tolerance: float) -> bool:
    return len(one) == len(other) and all(
        difference("", "", a, b).size <= tolerance for a, b in zip(one, other, strict=True)
    )


def _better_uncut(
    subject: Subject, nature: Nature, expected: Outcome, tolerance: float
) -> str | None:
    """The input without whose cut everything is equal."""
    names = list(subject.values.inputs().items())
    for name, tensor in names[1:]:
        values = _uncut(subject.values, tensor)
        try:
            found = _watched(subject, values, subject.chunks, nature.whole).outcome
        except Exception:  # not this one, then
            continue
        if all(d.size <= tolerance for d in found.against(expected) if d.kind != "buffers"):
            return (
                f"{name}, of shape {tuple(tensor.shape)}, is cut on dim 0 as if that were its "
                "rows, and all is equal if it is not: wrap it in penstock.NoChunk"
            )
    return None


def _uncut(values: Values, which: Tensor) -> Values:
    def wrapped(leaf: Any) -> Any:
        return NoChunk(leaf) if leaf is which else leaf

    batch, side, target = pytree.tree_map(wrapped, (values.batch, values.side, values.target))
    return Values(batch, side, target)

"""A loss that a model computes itself: what of its targets counts in it.

If the loss is PyTorch's own cross-entropy, and a mean, then it is one over the targets that are not
ignored. They follow from the inputs, so what each micro-batch counts for is known before it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.partition.forward.trace import New, Ref, Step, Trace
from penstock.partition.forward.trees import unflatten
from penstock.stage.loss import own_loss
from penstock.stage.reduction import IGNORED

_NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
LOSSES = frozenset([functional.cross_entropy, functional.nll_loss])

# Of one tensor, and perhaps a number: what they give is as many times as large.
_SCALING = frozenset(
    getattr(home, name)
    for home in (torch, Tensor)
    for name in (
        *("mul", "div", "neg", "clone", "squeeze", "reshape", "__mul__", "__rmul__", "__neg__"),
        *("__truediv__", "float", "double", "half", "bfloat16", "to", "type", "contiguous", "view"),
    )
    if hasattr(home, name)
)


@dataclass(frozen=True)
class Counted:
    """Values of a trace: the targets, and the weights of the classes, if there are any."""

    target: int
    classes: int | None
    ignored: int


def counted_in(trace: Trace) -> Counted | None:
    """None, if the model's loss is another, or it has none."""
    step = _loss_step(trace)
    while step is not None and step.func in _SCALING and len(step.takes) == 1:
        maker = trace.values[step.takes[0]].maker
        step = None if maker is None else trace.steps[maker]
    if step is None or step.func not in LOSSES or step.arguments is None:
        return None
    args, kwargs = step.arguments
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    if given.get("reduction", "mean") != "mean" or given.get("reduce") is not None:
        return None
    target, classes = given["target"], given.get("weight")
    if given.get("size_average") is not None or not isinstance(target, Ref):
        return None
    known = [ref.value for ref in (target, classes) if isinstance(ref, Ref)]
    if not all(trace.values[value].free for value in known):
        return None
    ignored = given.get("ignore_index", IGNORED)
    return Counted(target.value, classes.value if isinstance(classes, Ref) else None, ignored)


def _loss_step(trace: Trace) -> Step | None:
    """The step that makes the loss: it is found in a copy of the output, as a step finds it."""
    marks = {at: torch.empty(0) for at, leaf in enumerate(trace.output.leaves) if _is_value(leaf)}
    leaves = [marks.get(at, leaf) for at, leaf in enumerate(trace.output.leaves)]
    loss = own_loss(unflatten(leaves, trace.output.spec))
    loss = loss["loss"] if isinstance(loss, dict) and "loss" in loss else loss
    for at, mark in marks.items():
        if mark is loss:
            maker = trace.values[trace.output.leaves[at].value].maker
            return None if maker is None else trace.steps[maker]
    return None


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, New)

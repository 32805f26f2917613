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

from penstock.partition.forward.trace import Trace, TraceNode, ValueLeaf, ValueRef
from penstock.partition.forward.trees import unflatten
from penstock.stage.loss import extract_model_loss
from penstock.stage.reduction import DEFAULT_IGNORE_INDEX

_CROSS_ENTROPY_PARAMETERS = (
    "input",
    "target",
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
)
CROSS_ENTROPY_FUNCTIONS = frozenset([functional.cross_entropy, functional.nll_loss])

# Of one tensor, and perhaps a number: what they give is as many times as large.
_SCALING_FUNCTIONS = frozenset(
    getattr(home, name)
    for home in (torch, Tensor)
    for name in (
        *("mul", "div", "neg", "clone", "squeeze", "reshape", "__mul__", "__rmul__", "__neg__"),
        *("__truediv__", "float", "double", "half", "bfloat16", "to", "type", "contiguous", "view"),
    )
    if hasattr(home, name)
)


@dataclass(frozen=True)
class LossTargets:
    """Values of a trace: the targets, and the weights of the classes, if there are any."""

    target: int
    class_weights: int | None
    ignore_index: int


def find_loss_targets(trace: Trace) -> LossTargets | None:
    """None, if the model's loss is another, or it has none."""
    step = _find_loss_node(trace)
    while step is not None and step.func in _SCALING_FUNCTIONS and len(step.inputs) == 1:
        maker = trace.values[step.inputs[0]].producer
        step = None if maker is None else trace.nodes[maker]
    if step is None or step.func not in CROSS_ENTROPY_FUNCTIONS or step.arg_template is None:
        return None
    args, kwargs = step.arg_template
    given = {**dict(zip(_CROSS_ENTROPY_PARAMETERS, args, strict=False)), **kwargs}
    if given.get("reduction", "mean") != "mean" or given.get("reduce") is not None:
        return None
    target, classes = given["target"], given.get("weight")
    if given.get("size_average") is not None or not isinstance(target, ValueRef):
        return None
    known = [ref.value for ref in (target, classes) if isinstance(ref, ValueRef)]
    if not all(trace.values[value].input_only for value in known):
        return None
    ignored = given.get("ignore_index", DEFAULT_IGNORE_INDEX)
    return LossTargets(
        target.value, classes.value if isinstance(classes, ValueRef) else None, ignored
    )


def _find_loss_node(trace: Trace) -> TraceNode | None:
    """The step that makes the loss: it is found in a copy of the output, as a step finds it."""
    marks = {at: torch.empty(0) for at, leaf in enumerate(trace.output.leaves) if _is_value(leaf)}
    leaves = [marks.get(at, leaf) for at, leaf in enumerate(trace.output.leaves)]
    loss = extract_model_loss(unflatten(leaves, trace.output.tree_spec))
    loss = loss["loss"] if isinstance(loss, dict) and "loss" in loss else loss
    for at, mark in marks.items():
        if mark is loss:
            maker = trace.values[trace.output.leaves[at].value].producer
            return None if maker is None else trace.nodes[maker]
    return None


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, ValueLeaf)

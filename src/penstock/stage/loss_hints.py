"""A hint for an error inside a loss function: how it was called, and the likely mistake."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_TARGET_NAMES = frozenset({"gt", "label", "labels", "target", "targets", "truth", "y", "y_true"})
_OUTPUT_NAMES = frozenset(
    {"input", "logits", "out", "output", "outputs", "pred", "preds", "y_hat", "y_pred"}
)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.uint8)


def explain_loss_call(loss_fn: Callable[..., Any], output: Any, targets: tuple[Any, ...]) -> str:
    """Return how a loss function was called for a micro-batch, and what to change, if known."""
    if not targets:
        if not _takes(loss_fn, 1) and _takes(loss_fn, 2):
            return "loss_fn takes a target, but the step has none. Write pipe.step(x, target=y)."
        return f"loss_fn was called as loss_fn(output), with {_describe(output)}."
    target = targets[0]
    call = "loss_fn was called as loss_fn(output, target)"
    if not _takes(loss_fn, 2):
        return (
            f"{call}, but it does not take two arguments. Let it take both, or leave target= out "
            "of the step."
        )
    names = _list_names(loss_fn)
    if len(names) > 1 and (names[0] in _TARGET_NAMES or names[1] in _OUTPUT_NAMES):
        return (
            f"{call}, but its first parameters are called ({names[0]}, {names[1]}). Take the "
            "output first."
        )
    advice = ""
    if isinstance(output, Tensor) and isinstance(target, Tensor):
        advice = _compare(output, target)
    advice = advice or "If it takes the target first, swap its arguments."
    return f"{call}, with {_describe(output)} and {_describe(target)}. {advice}"


def _compare(output: Tensor, target: Tensor) -> str:
    """Return what is wrong with a target for this output, or an empty text."""
    if target.shape == output.shape:
        if output.is_floating_point() and not target.is_floating_point():
            return "A target of the shape of the output has its dtype, too: pass target.float()."
        return ""
    if output.shape == (*target.shape, 1):
        return "The output has a last dim of size 1: pass target.unsqueeze(-1), or squeeze(-1) it."
    if output.dim() == 3 and target.shape == output.shape[:2]:
        return (
            "Cross-entropy has its classes on dim 1: use "
            "cross_entropy(output.flatten(0, 1), target.flatten())."
        )
    if target.dim() == output.dim() and target.shape[-1] == 1 and output.shape[-1] > 1:
        return "Class labels have no dim of their own: pass target.squeeze(-1)."
    if target.dim() == output.dim() and target.shape[:-1] == output.shape[:-1]:
        return f"The target has {target.shape[-1]} columns, and the output {output.shape[-1]}."
    if target.dim() != output.dim() - 1:
        return ""
    if target.is_floating_point() or target.dtype in _INTEGERS:
        return "Class labels are of dtype torch.int64: pass target.long()."
    # Reading values of another device would wait for it, and it may have failed.
    if target.device.type != "cpu" or not target.numel():
        return ""
    if int(target.min()) < 0:
        return (
            f"The labels go down to {int(target.min())}, and classes are numbered from 0. Labels "
            "that a loss should leave out are -100, or what you pass as ignore_index."
        )
    if int(target.max()) >= output.shape[1]:
        return (
            f"The labels go up to {int(target.max())}, but the output has {output.shape[1]} "
            "classes, numbered from 0. Give the last layer more outputs, or check the labels."
        )
    return ""


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with that many arguments."""
    try:
        inspect.signature(_unwrap(function)).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # some functions that are written in C have no signature
        return True
    return True


def _list_names(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(_unwrap(function)).parameters)
    except (TypeError, ValueError):
        return []


def _unwrap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a module: its `__call__` takes any arguments."""
    return function.forward if isinstance(function, torch.nn.Module) else function


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"

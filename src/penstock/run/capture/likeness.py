"""When one recording may stand for a step: if all is alike that it depends on, but numbers.

Numbers in tensors may change from step to step; their places may not, nor anything that Python
looks at: shapes, modes, hooks, and plain numbers that layers have as attributes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.partition.forward.state import state_of
from penstock.partition.forward.trees import Itself
from penstock.partition.forward.whole import Handed
from penstock.run.asking import Ready
from penstock.run.capture.standing import Inputs
from penstock.stage.context import Context

_PLAIN = (bool, int, float, str, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Likeness(NamedTuple):
    """Two steps with the same are done by the same recording."""

    asked: tuple[Any, ...]
    inputs: tuple[Any, ...]
    places: tuple[Any, ...]  # in memory: of parameters and buffers
    numbers: tuple[Any, ...]  # that layers have as attributes


def likeness_of(
    ready: Ready, inputs: Inputs, modules: Iterable[nn.Module], kinds: frozenset[str]
) -> Likeness | None:
    """Of one step; None if something is asked for that none is like."""
    settings, lesson, fed = ready.settings, ready.lesson, ready.fed
    context = Context.here(kinds)
    if context.inference or context.saved_hooks is not None:
        return None
    asked = (
        (settings.chunks, settings.checkpoint, settings.training, settings.reduction),
        (Itself(lesson.loss_fn), lesson.outputs, lesson.scaler is None),
        _of_optimizer(lesson.optimizer),
        (fed.rows, fed.chunks, fed.graph, fed.target, fed.divided),
        context,
    )
    modules = list(modules)
    if isinstance(lesson.loss_fn, nn.Module):
        modules += lesson.loss_fn.modules()
    tensors = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values())]
    places = [(t.data_ptr(), t.requires_grad) for t in tensors if t is not None]
    return Likeness(asked, _of_inputs(inputs), tuple(places), numbers_of(modules))


def _of_inputs(inputs: Inputs) -> tuple[Any, ...]:
    kinds = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in inputs.tensors]
    return tuple(kinds), inputs.places, tuple(map(_value, inputs.rest)), str(inputs.spec)


def numbers_of(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """What Python could look at: plain attributes, and hooks."""
    hooks = [tuple(table) for m in modules for name in _HOOKS if (table := vars(m).get(name))]
    return state_of(modules), tuple(hooks)


def changed_number(modules: Iterable[nn.Module], before: tuple[Any, ...]) -> str | None:
    """The name of an attribute that is not as it was; None if all are."""
    now, then = state_of(modules), before[0]
    different = {pair for a, b in zip(now, then, strict=True) for pair in set(a) ^ set(b)}
    return min((name for name, _ in different), default=None)


def _of_optimizer(optimizer: torch.optim.Optimizer | None) -> Any:
    if optimizer is None:
        return None
    groups = [
        tuple((k, _value(v)) for k, v in group.items() if k != "params")
        for group in optimizer.param_groups
    ]
    return Itself(optimizer), tuple(groups), len(optimizer.state)


def _value(value: Any) -> Any:
    """What it is, if that can be told; else which one."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, Handed):
        told = tuple(map(_value, value.leaves))
        return Itself(value.scores), told, value.places, str(value.spec), value.state
    if isinstance(value, tuple | list):
        return tuple(map(_value, value))
    return value if isinstance(value, _PLAIN) else Itself(value)

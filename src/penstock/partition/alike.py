"""Which calls cost the same: those of modules that are built alike, with arguments alike.

Numbers that only say which block of many this is do not count, nor do fractions, such as how
likely something is dropped, beyond whether they are zero.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.partition.forward.trees import Itself

_WHICH_ONE = re.compile(r"(^|_)(idx|index|id|number|name)$")
_OF_TORCH = frozenset(vars(nn.Module()))  # hooks, and what is named below


def alike(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Hashable:
    """A key: if it is the same for two calls, one measurement does for both.

    >>> x = torch.ones(2, 4)
    >>> alike(nn.Linear(4, 4), (x,)) == alike(nn.Linear(4, 4), (x + 1,))
    True
    >>> alike(nn.Linear(4, 4), (x,)) == alike(nn.Linear(4, 4, bias=False), (x,))
    False
    """
    known: dict[int, int] = {}  # modules that were met, by id
    parts = tuple(_module(name, part, known) for name, part in module.named_modules())
    return parts, _value(tuple(args), set()), _value(dict(kwargs or {}), set())


def _module(name: str, module: nn.Module, known: dict[int, int]) -> Hashable:
    own = {
        attribute: _value(value, set())
        for attribute, value in vars(module).items()
        if attribute not in _OF_TORCH and _counts(attribute, value)
    }
    tensors = {**module._parameters, **module._buffers}
    shared = tuple(known.setdefault(id(t), len(known)) for t in tensors.values())
    return (
        name,
        type(module),
        module.training,
        tuple(own.items()),
        tuple((key, _value(tensor, set())) for key, tensor in tensors.items()),
        shared,
        tuple(_hooks(module)),
    )


def _hooks(module: nn.Module) -> Iterator[Hashable]:
    for kind, hooks in vars(module).items():
        if kind in _OF_TORCH and isinstance(hooks, dict) and kind.endswith("hooks") and hooks:
            yield kind, tuple(_written(hook) for hook in hooks.values())


def _written(hook: Any) -> Hashable:
    """A function that was made for each block, with the block's number in it, is one function."""
    return hook.__code__ if isinstance(hook, FunctionType) else _value(hook, set())


def _counts(name: Any, value: Any) -> bool:
    """Does it say more than which one of many this is?"""
    named = isinstance(name, str) and _WHICH_ONE.search(name)
    return not (named and isinstance(value, int | str))


def _value(value: Any, around: set[int]) -> Hashable:
    """What counts of it; `around` are the containers that it is in."""
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, float):
        return float, value == 0
    if value is None or isinstance(value, bool | int | str | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, MethodType):
        return Itself(value.__func__)
    if isinstance(value, partial):
        return Itself(value.func), _value(value.args, around), _value(value.keywords, around)
    if is_dataclass(value) and not isinstance(value, type | dict) and hasattr(value, "__dict__"):
        return type(value), _value(vars(value), around)
    if isinstance(value, list | tuple | dict | set | frozenset):
        if id(value) in around:
            return type(value), len(value)
        inside = around | {id(value)}
        if isinstance(value, dict):
            own = ((k, v) for k, v in value.items() if _counts(k, v))
            return type(value), tuple((_value(k, inside), _value(v, inside)) for k, v in own)
        if isinstance(value, set | frozenset):
            return type(value), frozenset(_value(entry, inside) for entry in value)
        return type(value), tuple(_value(entry, inside) for entry in value)
    if isinstance(value, nn.Module):
        return type(value), Itself(value)
    return Itself(value)


def _tensor(tensor: Tensor) -> Hashable:
    layout = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    return (
        type(tensor),
        tuple(tensor.shape),
        layout,
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )

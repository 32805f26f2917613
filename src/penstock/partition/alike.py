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

from penstock.partition.forward.trees import IdentityKey

_IDENTITY_ATTRIBUTE = re.compile(r"(^|_)(idx|index|id|number|name)$")
_MODULE_INTERNALS = frozenset(vars(nn.Module()))  # hooks, and what is named below


def build_cost_key(
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
    parts = tuple(_fingerprint_module(name, part, known) for name, part in module.named_modules())
    return (
        parts,
        _fingerprint_value(tuple(args), set()),
        _fingerprint_value(dict(kwargs or {}), set()),
    )


def _fingerprint_module(name: str, module: nn.Module, tensor_numbers: dict[int, int]) -> Hashable:
    own = {
        attribute: _fingerprint_value(value, set())
        for attribute, value in vars(module).items()
        if attribute not in _MODULE_INTERNALS and _affects_cost(attribute, value)
    }
    tensors = {**module._parameters, **module._buffers}
    shared = tuple(tensor_numbers.setdefault(id(t), len(tensor_numbers)) for t in tensors.values())
    return (
        name,
        type(module),
        module.training,
        tuple(own.items()),
        tuple((key, _fingerprint_value(tensor, set())) for key, tensor in tensors.items()),
        shared,
        tuple(_fingerprint_hooks(module)),
    )


def _fingerprint_hooks(module: nn.Module) -> Iterator[Hashable]:
    for kind, hooks in vars(module).items():
        if (
            kind in _MODULE_INTERNALS
            and isinstance(hooks, dict)
            and kind.endswith("hooks")
            and hooks
        ):
            yield kind, tuple(_fingerprint_hook(hook) for hook in hooks.values())


def _fingerprint_hook(hook: Any) -> Hashable:
    """A function that was made for each block, with the block's number in it, is one function."""
    return hook.__code__ if isinstance(hook, FunctionType) else _fingerprint_value(hook, set())


def _affects_cost(name: Any, value: Any) -> bool:
    """Does it say more than which one of many this is?"""
    named = isinstance(name, str) and _IDENTITY_ATTRIBUTE.search(name)
    return not (named and isinstance(value, int | str))


def _fingerprint_value(value: Any, enclosing_ids: set[int]) -> Hashable:
    """What counts of it; `around` are the containers that it is in."""
    if isinstance(value, Tensor):
        return _fingerprint_tensor(value)
    if isinstance(value, float):
        return float, value == 0
    if value is None or isinstance(value, bool | int | str | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, MethodType):
        return IdentityKey(value.__func__)
    if isinstance(value, partial):
        return (
            IdentityKey(value.func),
            _fingerprint_value(value.args, enclosing_ids),
            _fingerprint_value(value.keywords, enclosing_ids),
        )
    if is_dataclass(value) and not isinstance(value, type | dict) and hasattr(value, "__dict__"):
        return type(value), _fingerprint_value(vars(value), enclosing_ids)
    if isinstance(value, list | tuple | dict | set | frozenset):
        if id(value) in enclosing_ids:
            return type(value), len(value)
        inside = enclosing_ids | {id(value)}
        if isinstance(value, dict):
            own = ((k, v) for k, v in value.items() if _affects_cost(k, v))
            return type(value), tuple(
                (_fingerprint_value(k, inside), _fingerprint_value(v, inside)) for k, v in own
            )
        if isinstance(value, set | frozenset):
            return type(value), frozenset(_fingerprint_value(entry, inside) for entry in value)
        return type(value), tuple(_fingerprint_value(entry, inside) for entry in value)
    if isinstance(value, nn.Module):
        return type(value), IdentityKey(value)
    return IdentityKey(value)


def _fingerprint_tensor(tensor: Tensor) -> Hashable:
    layout = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    return (
        type(tensor),
        tuple(tensor.shape),
        layout,
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )

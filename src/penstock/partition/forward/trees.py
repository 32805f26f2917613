"""Values inside values: what goes into a forward and comes out of it, taken apart."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def _entries(value: Any) -> tuple[list[Any], list[Any]]:
    return list(value.values()), list(value)


def _entries_with_keys(value: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], list[Any]]:
    return [(pytree.MappingKey(key), one) for key, one in value.items()], list(value)


def _user_dict(values: Any, keys: list[Any]) -> Any:
    return UserDict(zip(keys, values, strict=True))


if UserDict not in pytree.SUPPORTED_NODES:  # a dict like any other, for who has no reason to ask
    pytree.register_pytree_node(
        UserDict, _entries, _user_dict, flatten_with_keys_fn=_entries_with_keys
    )


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and what held them; dataclasses are taken apart as well."""
    leaves, spec = pytree.tree_flatten(value)
    new = {type(leaf) for leaf in leaves if _is_record(leaf)}
    if not new:
        return leaves, spec
    for kind in new:
        pytree.register_pytree_node(
            kind, _fields, _record(kind), flatten_with_keys_fn=_fields_with_keys
        )
    return flatten(value)


def unflatten(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """Put together again."""
    return pytree.tree_unflatten(leaves, spec)


def _is_record(leaf: Any) -> bool:
    return (
        dataclasses.is_dataclass(leaf)
        and not isinstance(leaf, type)
        and any(isinstance(v, Tensor) for v in pytree.tree_leaves(_values(leaf)))
    )


def _values(record: Any) -> list[Any]:
    return [getattr(record, field.name, None) for field in dataclasses.fields(record)]


def _fields(record: Any) -> tuple[list[Any], list[str]]:
    """All that it has, also what is no field."""
    names = list(vars(record)) if hasattr(record, "__dict__") else []
    names += [f.name for f in dataclasses.fields(record) if f.name not in names]
    return [getattr(record, name, None) for name in names], names


def _fields_with_keys(record: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], list[str]]:
    values, names = _fields(record)
    return [(pytree.GetAttrKey(name), v) for name, v in zip(names, values, strict=True)], names


def _record(kind: type) -> Callable[[Any, Any], Any]:
    def together(values: Any, names: list[str]) -> Any:
        made: Any = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    return together


def changed_in_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a unit, each tensor changed; most hold none that must be sought."""
    if all(isinstance(v, _SIMPLE) for v in (*args, *kwargs.values())):
        return (
            tuple([change(v) if isinstance(v, Tensor) else v for v in args]),
            {k: change(v) if isinstance(v, Tensor) else v for k, v in kwargs.items()},
        )
    leaves, spec = flatten((args, kwargs))
    leaves = [change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    found: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(leaves, spec)
    return found


_SIMPLE = (Tensor, type(None), bool, int, float, str, torch.dtype, torch.device)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among the arguments of an operation, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The arguments of an operation, each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([mapped(one, change) for one in value])
    if kind is dict:
        return {key: mapped(one, change) for key, one in value.items()}
    if kind is slice:
        return slice(*mapped((value.start, value.stop, value.step), change))
    if isinstance(value, tuple | list | dict):  # a named tuple, torch.Size, ...
        leaves, spec = pytree.tree_flatten(value)
        return pytree.tree_unflatten([mapped(leaf, change) for leaf in leaves], spec)
    return value


def said_in(arguments: Any) -> str:
    """What is plain among the arguments of an operation, as text: the same on every rank.

    >>> said_in((("x", 2), {"dim": -1}))
    "'x' 2 -1"
    """
    leaves = pytree.tree_leaves(arguments)
    parts = [(v.start, v.stop, v.step) if isinstance(v, slice) else (v,) for v in leaves]
    plain = (bool, int, float, str)
    return " ".join(repr(one) for part in parts for one in part if isinstance(one, plain))


def hidden_in(leaf: Any, depth: int = 3) -> Iterator[Tensor]:
    """Tensors in an object that cannot be taken apart."""
    if isinstance(leaf, Tensor):
        yield leaf
    elif depth and isinstance(leaf, tuple | list | set | frozenset):
        for one in leaf:
            yield from hidden_in(one, depth - 1)
    elif depth and isinstance(leaf, dict):
        yield from hidden_in(list(leaf.values()), depth)
    elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, type):
        yield from hidden_in(list(vars(leaf).values()), depth)


class Itself:
    """An object that is like no other; a function, say, or a configuration that blocks share."""

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        self._of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other._of is self._of

    def __hash__(self) -> int:
        return id(self._of)


@dataclasses.dataclass(frozen=True)
class Called:
    """A function with its arguments, and the tensors among them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: Callable[..., Any]
    tensors: list[Tensor]

    def with_each(self, change: Callable[[Tensor], Any]) -> tuple[Any, list[Any]]:
        """What it gives with each tensor changed, and those."""
        args, kwargs = mapped((self.args, self.kwargs), change)
        return self.call(*args, **kwargs), list(tensors_in((args, kwargs)))

"""Values inside values: what goes into a forward and comes out of it, taken apart."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from penstock.torch_compat import pytree


def _flatten_user_dict(value: Any) -> tuple[list[Any], list[Any]]:
    return list(value.values()), list(value)


def _flatten_user_dict_with_keys(value: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], list[Any]]:
    return [(pytree.MappingKey(key), one) for key, one in value.items()], list(value)


def _unflatten_user_dict(values: Any, keys: list[Any]) -> Any:
    return UserDict(zip(keys, values, strict=True))


if UserDict not in pytree.SUPPORTED_NODES:  # a dict like any other, for who has no reason to ask
    pytree.register_pytree_node(
        UserDict,
        _flatten_user_dict,
        _unflatten_user_dict,
        flatten_with_keys_fn=_flatten_user_dict_with_keys,
    )


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and what held them; dataclasses are taken apart as well."""
    leaves, spec = pytree.tree_flatten(value)
    new = {type(leaf) for leaf in leaves if _is_tensor_dataclass(leaf)}
    if not new:
        return leaves, spec
    for kind in new:
        pytree.register_pytree_node(
            kind,
            _flatten_dataclass,
            _make_dataclass_unflatten(kind),
            flatten_with_keys_fn=_flatten_dataclass_with_keys,
        )
    return flatten(value)


def unflatten(leaves: list[Any], tree_spec: pytree.TreeSpec) -> Any:
    """Put together again."""
    return pytree.tree_unflatten(leaves, tree_spec)


def _is_tensor_dataclass(leaf: Any) -> bool:
    return (
        dataclasses.is_dataclass(leaf)
        and not isinstance(leaf, type)
        and any(isinstance(v, Tensor) for v in pytree.tree_leaves(_get_field_values(leaf)))
    )


def _get_field_values(record: Any) -> list[Any]:
    return [getattr(record, field.name, None) for field in dataclasses.fields(record)]


def _flatten_dataclass(record: Any) -> tuple[list[Any], list[str]]:
    """All that it has, also what is no field."""
    names = list(vars(record)) if hasattr(record, "__dict__") else []
    names += [f.name for f in dataclasses.fields(record) if f.name not in names]
    return [getattr(record, name, None) for name in names], names


def _flatten_dataclass_with_keys(
    record: Any,
) -> tuple[list[tuple[pytree.KeyEntry, Any]], list[str]]:
    values, names = _flatten_dataclass(record)
    return [(pytree.GetAttrKey(name), v) for name, v in zip(names, values, strict=True)], names


def _make_dataclass_unflatten(dataclass_type: type) -> Callable[[Any, Any], Any]:
    def unflatten_dataclass(values: Any, names: list[str]) -> Any:
        made: Any = object.__new__(dataclass_type)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    return unflatten_dataclass


def map_call_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], transform: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a unit, each tensor changed; most hold none that must be sought."""
    if all(isinstance(v, _LEAF_TYPES) for v in (*args, *kwargs.values())):
        return (
            tuple([transform(v) if isinstance(v, Tensor) else v for v in args]),
            {k: transform(v) if isinstance(v, Tensor) else v for k, v in kwargs.items()},
        )
    leaves, spec = flatten((args, kwargs))
    leaves = [transform(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    found: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(leaves, spec)
    return found


_LEAF_TYPES = (Tensor, type(None), bool, int, float, str, torch.dtype, torch.device)


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors among the arguments of an operation, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from iter_tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from iter_tensors(one)
    elif isinstance(value, slice):
        yield from iter_tensors((value.start, value.stop, value.step))


def map_tensors(value: Any, transform: Callable[[Tensor], Any]) -> Any:
    """The arguments of an operation, each tensor changed."""
    if isinstance(value, Tensor):
        return transform(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([map_tensors(one, transform) for one in value])
    if kind is dict:
        return {key: map_tensors(one, transform) for key, one in value.items()}
    if kind is slice:
        return slice(*map_tensors((value.start, value.stop, value.step), transform))
    if isinstance(value, tuple | list | dict):  # a named tuple, torch.Size, ...
        leaves, spec = pytree.tree_flatten(value)
        return pytree.tree_unflatten([map_tensors(leaf, transform) for leaf in leaves], spec)
    return value


def format_literals(arguments: Any) -> str:
    """What is plain among the arguments of an operation, as text: the same on every rank.

    >>> format_literals((("x", 2), {"dim": -1}))
    "'x' 2 -1"
    """
    leaves = pytree.tree_leaves(arguments)
    parts = [(v.start, v.stop, v.step) if isinstance(v, slice) else (v,) for v in leaves]
    plain = (bool, int, float, str)
    return " ".join(repr(one) for part in parts for one in part if isinstance(one, plain))


def iter_hidden_tensors(leaf: Any, depth: int = 3) -> Iterator[Tensor]:
    """Tensors in an object that cannot be taken apart."""
    if isinstance(leaf, Tensor):
        yield leaf
    elif depth and isinstance(leaf, tuple | list | set | frozenset):
        for one in leaf:
            yield from iter_hidden_tensors(one, depth - 1)
    elif depth and isinstance(leaf, dict):
        yield from iter_hidden_tensors(list(leaf.values()), depth)
    elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, type):
        yield from iter_hidden_tensors(list(vars(leaf).values()), depth)


class IdentityKey:
    """An object that is like no other; a function, say, or a configuration that blocks share."""

    __slots__ = ("_of",)

    def __init__(self, target: Any) -> None:
        self._of = target

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and other._of is self._of

    def __hash__(self) -> int:
        return id(self._of)


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """A function with its arguments, and the tensors among them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: Callable[..., Any]
    tensors: list[Tensor]

    def call_with_mapped_tensors(self, transform: Callable[[Tensor], Any]) -> tuple[Any, list[Any]]:
        """What it gives with each tensor changed, and those."""
        args, kwargs = map_tensors((self.args, self.kwargs), transform)
        return self.call(*args, **kwargs), list(iter_tensors((args, kwargs)))

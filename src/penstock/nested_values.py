"""Nested values: find or replace the tensors in them, take them apart and put them together.

| function | looks into | for |
|---|---|---|
| `flatten`, `unflatten` | pytrees, dataclasses, `UserDict` | a traced model and its units |
| `iter_tensors`, `map_tensors` | tuples, lists, dicts, slices | operations between units |
| `iter_hidden_tensors` | any object with attributes | tensors that cannot be sent |
| `iter_captured_values` | closure and default values of a function | hooks, loss functions |
| `find_referred_values` | closure and global variables of a function | dry runs |

Code that needs pytrees and nothing else uses `torch_compat.pytree`.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from penstock.torch_compat import pytree

# PyTorch does not register `UserDict`, although it is a dict to most code. Another library may have
# registered it already, and registering a class twice raises.
if UserDict not in pytree.SUPPORTED_NODES:
    pytree.register_pytree_node(
        UserDict,
        lambda value: (list(value.values()), list(value)),
        lambda values, keys: UserDict(zip(keys, values, strict=True)),
        flatten_with_keys_fn=lambda value: (
            [(pytree.MappingKey(key), item) for key, item in value.items()],
            list(value),
        ),
    )


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a nested value and its structure.

    Dataclasses that contain tensors are registered as pytree nodes when they are first seen.
    """
    if isinstance(value, Tensor):  # most outputs of operations and units
        return [value], _LEAF_SPEC
    leaves, spec = pytree.tree_flatten(value)
    dataclass_types = {
        type(leaf)
        for leaf in leaves
        if type(leaf) not in _LEAF_TYPES and _is_tensor_dataclass(leaf)
    }
    if not dataclass_types:
        return leaves, spec
    for dataclass_type in dataclass_types:
        pytree.register_pytree_node(
            dataclass_type,
            _flatten_dataclass,
            partial(_unflatten_dataclass, dataclass_type),
            flatten_with_keys_fn=_flatten_dataclass_with_keys,
        )
    return flatten(value)


_LEAF_SPEC = pytree.tree_structure(0)


def unflatten(leaves: list[Any], tree_spec: pytree.TreeSpec) -> Any:
    """Return the nested value that has this structure and these leaves."""
    return pytree.tree_unflatten(leaves, tree_spec)


def _is_tensor_dataclass(leaf: Any) -> bool:
    """Return whether a leaf is an instance of a dataclass with a tensor in one of its fields."""
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return False
    values = [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
    return any(isinstance(value, Tensor) for value in pytree.tree_leaves(values))


def _flatten_dataclass(record: Any) -> tuple[list[Any], list[str]]:
    """Return the values and names of all attributes, also of those that are not fields."""
    names = list(vars(record)) if hasattr(record, "__dict__") else []
    names += [f.name for f in dataclasses.fields(record) if f.name not in names]
    return [getattr(record, name, None) for name in names], names


def _flatten_dataclass_with_keys(
    record: Any,
) -> tuple[list[tuple[pytree.KeyEntry, Any]], list[str]]:
    values, names = _flatten_dataclass(record)
    return [(pytree.GetAttrKey(name), v) for name, v in zip(names, values, strict=True)], names


def _unflatten_dataclass(dataclass_type: type, values: Any, names: list[str]) -> Any:
    """Return an instance of a dataclass with these attributes.

    Neither `__init__` nor `__post_init__` runs: they may check or change the values. The
    `__setattr__` of a frozen dataclass would raise.
    """
    record: Any = object.__new__(dataclass_type)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(record, name, value)
    return record


def map_call_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], transform: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a unit with each tensor transformed."""
    # Most units take plain tensors and numbers, which need no flattening. This runs for every call
    # of a unit on a stage.
    if all(isinstance(v, _LEAF_TYPES) for v in (*args, *kwargs.values())):
        return (
            tuple([transform(v) if isinstance(v, Tensor) else v for v in args]),
            {k: transform(v) if isinstance(v, Tensor) else v for k, v in kwargs.items()},
        )
    leaves, spec = flatten((args, kwargs))
    leaves = [transform(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(leaves, spec)
    return arguments


_LEAF_TYPES = (Tensor, type(None), bool, int, float, str, torch.dtype, torch.device)


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of an operation, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from iter_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from iter_tensors(item)
    elif isinstance(value, slice):
        yield from iter_tensors((value.start, value.stop, value.step))


def list_operands(values: Any) -> list[Tensor]:
    """Return the tensors among the arguments of an operation. It is called for each operation."""
    kind = type(values)
    if kind in _TENSOR_TYPES:
        return [values]
    if kind in _PLAIN_TYPES:  # PyTorch asks Python whether one is a tensor
        return []
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif isinstance(values, slice):
        values = values.start, values.stop, values.step
    elif not isinstance(values, tuple | list):
        return []
    tensors: list[Tensor] = []
    for value in values:
        if type(value) in _TENSOR_TYPES:
            tensors.append(value)
        elif type(value) not in _PLAIN_TYPES:
            tensors += list_operands(value)
    return tensors


_TENSOR_TYPES = frozenset((Tensor, torch.nn.Parameter))
_PLAIN_TYPES = frozenset((bool, int, float, complex, str, bytes, type(None)))


def map_tensors(value: Any, transform: Callable[[Any], Any], leaf_type: type = Tensor) -> Any:
    """Return the arguments of an operation with each tensor, or other leaf, transformed."""
    if isinstance(value, leaf_type):
        return transform(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([map_tensors(item, transform, leaf_type) for item in value])
    if kind is dict:
        return {key: map_tensors(item, transform, leaf_type) for key, item in value.items()}
    if kind is slice:
        return slice(*map_tensors((value.start, value.stop, value.step), transform, leaf_type))
    if kind is torch.Size:  # `x.new(size)` makes another tensor from a plain tuple
        return value
    if isinstance(value, tuple | list | dict):  # a named tuple, ...
        leaves, spec = pytree.tree_flatten(value, lambda item: isinstance(item, leaf_type))
        mapped = [map_tensors(leaf, transform, leaf_type) for leaf in leaves]
        return pytree.tree_unflatten(mapped, spec)
    return value


def iter_hidden_tensors(leaf: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors inside an object that is not a pytree node, up to a nesting depth."""
    if isinstance(leaf, Tensor):
        yield leaf
    elif depth and isinstance(leaf, tuple | list | set | frozenset):
        for item in leaf:
            yield from iter_hidden_tensors(item, depth - 1)
    elif depth and isinstance(leaf, dict):
        yield from iter_hidden_tensors(list(leaf.values()), depth)
    elif depth and not isinstance(leaf, type):
        slots = [name for kind in type(leaf).__mro__ for name in kind.__dict__.get("__slots__", ())]
        attributes = [getattr(leaf, name) for name in slots if hasattr(leaf, name)]
        attributes += getattr(leaf, "__dict__", {}).values()
        if attributes:
            yield from iter_hidden_tensors(attributes, depth)


def iter_captured_values(function: FunctionType) -> Iterator[Any]:
    """Yield the default arguments of a function and the variables that it closes over."""
    yield from function.__defaults__ or ()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell: the variable has no value yet
            continue


def find_referred_values(function: Any) -> dict[str, Any]:
    """Return the globals and the closure variables that the code of a function names."""
    if not isinstance(function, FunctionType):
        return {}
    code, cells = function.__code__, function.__closure__ or ()
    names = {name: function.__globals__.get(name) for name in code.co_names}
    for name, cell in zip(code.co_freevars, cells, strict=True):
        with suppress(ValueError):  # an empty cell: the variable has no value yet
            names[name] = cell.cell_contents
    return names

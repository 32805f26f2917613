"""What a value is, as far as it can be told: two that are told alike lead Python the same way.

Of a tensor its place and its kind count, and not its numbers. An object that cannot be taken apart
is like no other, and is not kept alive by being told.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.partition.forward.whole import ForwardRequest

_VALUE_TYPES = (str, int, type(None), Enum, torch.dtype, torch.device, type)
_CONTAINERS = (tuple, list, set, frozenset)
_INSPECTED_TYPES = (
    Tensor,
    ForwardRequest,
    *_CONTAINERS,
    dict,
    MethodType,
    partial,
    FunctionType,
)  # told inside
_MAX_ENTRIES = 256  # entries: a longer list is told by its length
_MAX_DEPTH = 5
_MAX_OBJECTS = 20_000


class ObjectIdentity:
    """An object that is like no other."""

    __slots__ = ("_hash", "_ref")

    def __init__(self, target: Any) -> None:
        self._hash = id(target)
        try:
            self._ref: Any = weakref.ref(target)
        except TypeError:  # as a number of some library's: kept
            self._ref = lambda: target

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ObjectIdentity)
            and (mine := self._ref()) is not None
            and mine is other._ref()
        )

    def __hash__(self) -> int:
        return self._hash


class CachedHash:
    """Something whose hash is reckoned once, and which is compared if it is not the same."""

    __slots__ = ("_hash", "_value")

    def __init__(self, value: Hashable) -> None:
        self._value, self._hash = value, hash(value)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, CachedHash)
            and self._hash == other._hash
            and self._value == other._value
        )

    def __hash__(self) -> int:
        return self._hash


class Fingerprinter:
    """Of the values of one step: what several of them hold is told once."""

    def __init__(self) -> None:
        self._index_by_id: dict[int, int] = {}
        self._visited: list[Any] = []  # so that no id is another's

    def __call__(self, value: Any, depth: int = _MAX_DEPTH) -> Hashable:
        """Something that can be compared."""
        if isinstance(value, float):
            return float, value
        if isinstance(value, _VALUE_TYPES):
            return value
        if isinstance(value, Tensor):
            return fingerprint_tensor(value)
        if isinstance(value, ForwardRequest):
            told = self(value.plain_leaves, depth)
            return (
                ObjectIdentity(value.programs),
                told,
                value.tensor_positions,
                str(value.tree_spec),
                value.settings,
            )
        if id(value) in self._index_by_id:
            return "again", self._index_by_id[id(value)]
        self._index_by_id[id(value)] = len(self._visited)
        self._visited.append(value)
        far = not depth or len(self._visited) > _MAX_OBJECTS
        return ObjectIdentity(value) if far else self._fingerprint_contents(value, depth - 1)

    def _fingerprint_contents(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, _CONTAINERS):
            if len(value) > _MAX_ENTRIES:
                return ObjectIdentity(value), len(value)
            return type(value), tuple([self(one, depth) for one in value])
        if isinstance(value, dict):
            if len(value) > _MAX_ENTRIES:
                return ObjectIdentity(value), len(value)
            pairs = [(self(k, depth), self(v, depth)) for k, v in value.items()]
            return type(value), tuple(pairs)
        if isinstance(value, MethodType):
            return value.__func__, self(value.__self__, depth)
        if isinstance(value, partial):
            return self(value.func, depth), self(value.args, depth), self(value.keywords, depth)
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if _has_contents(cell)]
            defaults = value.__defaults__ or (), value.__kwdefaults__ or {}
            return value.__code__, self(cells, depth), self(defaults, depth)
        if _is_opaque(value):
            return ObjectIdentity(value)
        which = type(value) if is_dataclass(value) else ObjectIdentity(value)
        return which, self(vars(value), depth)


def has_constant_fingerprint(value: Any) -> bool:
    """Is the same object told alike at all times? Of some it is told which they are, and no more.

    >>> is_still((1, "a")), is_still([1]), is_still(len)
    (True, False, True)
    """
    if isinstance(value, tuple | frozenset):
        return len(value) > _MAX_ENTRIES or all(map(has_constant_fingerprint, value))
    if isinstance(value, (*_VALUE_TYPES, float)):
        return True
    return not isinstance(value, _INSPECTED_TYPES) and _is_opaque(value)


def _is_opaque(value: Any) -> bool:
    """It is like no other, whatever is inside."""
    ours = type(value).__module__.partition(".")[0] in ("penstock", "torch")
    return ours or isinstance(value, nn.Module) or not hasattr(value, "__dict__")


def _has_contents(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # nothing was put into it yet
        return False


def fingerprint_tensor(tensor: Tensor) -> Hashable:
    """Where it is in memory, and how it lies there."""
    try:
        where = tensor.data_ptr()
    except RuntimeError:  # it has no memory of its own
        return ObjectIdentity(tensor)
    return where, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def fingerprint_tensors_by_column(tensors: Sequence[Tensor]) -> Any:
    """What `place_of` tells of each, one kind of fact after the other: in half the time."""
    try:
        where = [tensor.data_ptr() for tensor in tensors]
    except RuntimeError:  # one has no memory of its own
        return [*map(fingerprint_tensor, tensors)]
    return (
        where,
        [tensor.shape for tensor in tensors],
        [tensor.stride() for tensor in tensors],
        [tensor.dtype for tensor in tensors],
        [tensor.requires_grad for tensor in tensors],
    )

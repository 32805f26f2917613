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

from penstock.partition.forward.whole import Handed

_PLAIN = (str, int, type(None), Enum, torch.dtype, torch.device, type)
_CONTAINERS = (tuple, list, set, frozenset)
_OPEN = (Tensor, Handed, *_CONTAINERS, dict, MethodType, partial, FunctionType)  # told inside
_MANY = 256  # entries: a longer list is told by its length
_DEEP = 5
_IN_ALL = 20_000


class Which:
    """An object that is like no other."""

    __slots__ = ("_hash", "_of")

    def __init__(self, of: Any) -> None:
        self._hash = id(of)
        try:
            self._of: Any = weakref.ref(of)
        except TypeError:  # as a number of some library's: kept
            self._of = lambda: of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Which) and (mine := self._of()) is not None and mine is other._of()

    def __hash__(self) -> int:
        return self._hash


class Once:
    """Something whose hash is reckoned once, and which is compared if it is not the same."""

    __slots__ = ("_hash", "_value")

    def __init__(self, value: Hashable) -> None:
        self._value, self._hash = value, hash(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Once) and self._hash == other._hash and self._value == other._value

    def __hash__(self) -> int:
        return self._hash


class Telling:
    """Of the values of one step: what several of them hold is told once."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._held: list[Any] = []  # so that no id is another's

    def __call__(self, value: Any, deep: int = _DEEP) -> Hashable:
        """Something that can be compared."""
        if isinstance(value, float):
            return float, value
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, Tensor):
            return place_of(value)
        if isinstance(value, Handed):
            told = self(value.leaves, deep)
            return Which(value.scores), told, value.places, str(value.spec), value.state
        if id(value) in self._known:
            return "again", self._known[id(value)]
        self._known[id(value)] = len(self._held)
        self._held.append(value)
        far = not deep or len(self._held) > _IN_ALL
        return Which(value) if far else self._inside(value, deep - 1)

    def _inside(self, value: Any, deep: int) -> Hashable:
        if isinstance(value, _CONTAINERS):
            if len(value) > _MANY:
                return Which(value), len(value)
            return type(value), tuple([self(one, deep) for one in value])
        if isinstance(value, dict):
            if len(value) > _MANY:
                return Which(value), len(value)
            pairs = [(self(k, deep), self(v, deep)) for k, v in value.items()]
            return type(value), tuple(pairs)
        if isinstance(value, MethodType):
            return value.__func__, self(value.__self__, deep)
        if isinstance(value, partial):
            return self(value.func, deep), self(value.args, deep), self(value.keywords, deep)
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
            defaults = value.__defaults__ or (), value.__kwdefaults__ or {}
            return value.__code__, self(cells, deep), self(defaults, deep)
        if _is_closed(value):
            return Which(value)
        which = type(value) if is_dataclass(value) else Which(value)
        return which, self(vars(value), deep)


def is_still(value: Any) -> bool:
    """Is the same object told alike at all times? Of some it is told which they are, and no more.

    >>> is_still((1, "a")), is_still([1]), is_still(len)
    (True, False, True)
    """
    if isinstance(value, tuple | frozenset):
        return len(value) > _MANY or all(map(is_still, value))
    if isinstance(value, (*_PLAIN, float)):
        return True
    return not isinstance(value, _OPEN) and _is_closed(value)


def _is_closed(value: Any) -> bool:
    """It is like no other, whatever is inside."""
    ours = type(value).__module__.partition(".")[0] in ("penstock", "torch")
    return ours or isinstance(value, nn.Module) or not hasattr(value, "__dict__")


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # nothing was put into it yet
        return False


def place_of(tensor: Tensor) -> Hashable:
    """Where it is in memory, and how it lies there."""
    try:
        where = tensor.data_ptr()
    except RuntimeError:  # it has no memory of its own
        return Which(tensor)
    return where, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def places_in_columns(tensors: Sequence[Tensor]) -> Any:
    """What `place_of` tells of each, one kind of fact after the other: in half the time."""
    try:
        where = [tensor.data_ptr() for tensor in tensors]
    except RuntimeError:  # one has no memory of its own
        return [*map(place_of, tensors)]
    return (
        where,
        [tensor.shape for tensor in tensors],
        [tensor.stride() for tensor in tensors],
        [tensor.dtype for tensor in tensors],
        [tensor.requires_grad for tensor in tensors],
    )

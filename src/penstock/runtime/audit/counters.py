"""Numbers and lengths that a forward moves, set far ahead, and other values that it changes.

A layer may read a counter only when it has grown, or at every hundredth call. `CounterWalk` goes
through the state of modules and variables, and finds what a forward has moved. `MovedValue.advance`
lets that be far ahead:

    a number             moved by the same step millions of times, to a multiple of many numbers;
                         or almost 0, for a number that decreases
    tensor, array        the same, or 1,000 times as large
    list, deque, set,    with many more entries
    dict, tuple, str
    itertools.count      goes on from a large number

The next value cannot be predicted for other types: the name of a phase, a date, a list that becomes
shorter, a deque that is rotated, an iterator. They are *opaque*, and a model that changes one in
each forward is refused.

A value that is computed once and then kept, such as a scale or a table, is not a counter. So most
values count only if they move in two forwards, and the others only if they do or become something
else with other rows (`MovedValue.is_certain`).
"""

from __future__ import annotations

import copy
import itertools
import math
import numbers
import operator
from collections import deque
from collections.abc import Callable, Iterator
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.runtime.audit.counter_probe import unwrap_number
from penstock.state_copy import (
    COPYABLE_ITERATORS,
    SCALAR_TYPES,
    STREAMS,
    StructureCopier,
    describe_iterator,
    get_attributes,
    is_of_numpy,
    is_read_further,
)

# A multiple of all numbers up to 16, and of 20, 25, 30, 50, 100 and 1,000.
_FAR_AHEAD = 18_018_000
_LONGER = 100_800  # entries of a list: a multiple of all numbers up to 10, of 16, 50 and 100
_LARGER = 1_000.0
_SMALLER = 1e-9
_RESERVE = 16  # steps before the largest number of a dtype, which would become the smallest one
_MAX_STATE = 1 << 20  # numbers of a tensor
_MAX_ENTRIES = 1_000  # of a container that is looked through
_MAX_SHOWN, _MAX_TEXT = 16, 80  # entries that are described, and letters of each
_MAX_DEPTH = 4  # of containers in containers

_KEY_TYPES = (int, float, str)
_OPAQUE_TYPES = (str, bytes, complex, Enum, date, time, timedelta, frozenset, range)

Key = tuple[Any, ...]
SetValue = Callable[[Any], object]


class Text(NamedTuple):
    """The description of a string, or of a tuple of plain values."""

    value: str | tuple[Any, ...]

    def goes_on_from(self, before: Any) -> bool:
        """Return whether it begins as an earlier one, which was empty if there is none."""
        old = before.value if isinstance(before, Text) else self.value[:0]
        return bool(self.value[: len(old)] == old)


class MovedValue(NamedTuple):
    """A value that a forward has moved.

    Attributes:
        key: Where it is, the same in each run.
        value: The value that it has now.
        before: The value from before the forward.
        set: Gives the place another value. None: there is no way.
        is_in_place: Whether the same object was there before the forward. Another one may share
            its memory with a parameter, so it is not written to.
        is_opaque: Whether it is not known how it goes on.
        is_certain: Whether it counts although the next forward does not move it, unless it is the
            same for all rows. That is so for whole numbers, lists, iterators and buffers right in a
            module or a variable.
    """

    key: Key
    value: Any
    before: Any
    set: SetValue | None
    is_in_place: bool
    is_certain: bool
    is_opaque: bool = False

    def describe(self) -> Any:
        """Return something that differs from that of another time if the value has moved."""
        value = self.value
        if isinstance(value, Tensor):
            values = value.detach().double()
            if value.numel() <= _MAX_ENTRIES:
                return values.cpu().numpy().tobytes()
            return float(values.sum()), float(torch.linalg.vector_norm(values))
        if self.is_opaque and isinstance(value, COPYABLE_ITERATORS):
            return describe_iterator(value)
        if self.is_opaque and isinstance(value, STREAMS):
            return value.tell()
        if self.is_opaque and isinstance(value, list | deque):
            return [repr(entry)[:_MAX_TEXT] for entry in itertools.islice(value, _MAX_SHOWN)]
        if isinstance(value, str) or _is_plain_tuple(value):
            return Text(value)
        if isinstance(value, list | deque | set | tuple | dict):
            return len(value)
        return value.tobytes() if is_of_numpy(value) else repr(value)

    def advance(self, steps_before: int, moves_again: bool, is_constant: bool = False) -> bool:
        """Let the value be far ahead. Return whether it has been moved.

        Args:
            steps_before: By how many steps a number stays below the multiple of many numbers: a
                layer may count before it asks, or after.
            moves_again: Whether the next forward moves the value, too.
            is_constant: Whether forwards of all rows leave the same value, such as a table.
        """
        value, before = self.value, self.before
        if self.is_opaque:
            return False
        if not moves_again and (is_constant or not self.is_certain):
            return False
        if self.set is None and not self.is_in_place:
            return False
        is_new = True
        if isinstance(value, list | deque | set | dict):
            new = _lengthen(value if self.is_in_place else copy.copy(value), before, steps_before)
        elif isinstance(value, tuple | str):
            added = _count_added(len(value), len(before), steps_before)
            new = operator.add(value, operator.mul(value[-1:], added))
        elif isinstance(value, Tensor):
            new = value if self.is_in_place else value.detach().clone()
            is_new = _advance_tensor(new, before, steps_before, moves_again)
        elif _is_array(value):
            new = value if self.is_in_place else value.copy()
            tensors = torch.from_numpy(new), torch.from_numpy(before)
            is_new = _advance_tensor(*tensors, steps_before, moves_again)
        elif isinstance(value, itertools.count):
            new = itertools.count(_move_number(next(copy.copy(value)), 1, steps_before))
        else:
            new = _move_number(value, value - before, steps_before)
            is_new = new is not None
        if new is not value and new is not None and self.set is not None:
            self.set(new)
        return is_new


class CounterWalk:
    """Finds what has moved in values, and in the containers and objects in them.

    Attributes:
        has_copies: Whether the values are copies that an isolation has made. Otherwise it puts back
            what they hold, except for attributes in `__slots__`.

    Args:
        copier: Has copied the state from before the forward.
    """

    def __init__(self, copier: StructureCopier) -> None:
        self._copier = copier
        self.has_copies = False
        self._visited: set[int] = set()

    def find_moved(
        self, key: Key, value: Any, before: Any, put: SetValue | None, *, is_buffer: bool = False
    ) -> Iterator[MovedValue]:
        """Yield what has moved in a value since it was copied.

        Args:
            key: Where it is.
            value: The value.
            before: What was there before the forward.
            put: Gives the place another value.
            is_buffer: Whether it is a buffer of a module.
        """
        before = self._copier.find_copy(before)
        is_direct = len(key) == 2
        if _is_number(value):
            kind = type(unwrap_number(value))
            if kind is type(before) and _differ(value, before):
                is_certain = kind is int and is_direct
                yield MovedValue(key, value, before, put, False, is_certain)
            return
        if (
            type(value) in (str, tuple)
            and type(before) is type(value)
            and _has_grown(value, before)
        ):
            yield MovedValue(key, value, before, put, False, is_certain=False)
            return
        if _is_opaque_change(value, before) or _has_advanced(value, before):
            yield MovedValue(key, value, before, put, False, is_certain=False, is_opaque=True)
            return
        if type(value) in SCALAR_TYPES or id(value) in self._visited:
            return
        self._visited.add(id(value))
        is_in_place = self._copier.find_copy(value) is not value
        moved = partial(MovedValue, key, value, before, put, is_in_place)
        if isinstance(value, Tensor):
            if _have_moved(value, before):
                yield moved(is_certain=is_buffer)
        elif _is_array(value):
            if _have_arrays_moved(value, before):
                yield moved(is_certain=False)
        elif isinstance(value, itertools.count):
            if put is not None and repr(value) != repr(before):
                yield MovedValue(key, value, before, put, False, is_certain=is_direct)
        elif isinstance(value, list | deque | set) and len(value) > _measure(before):
            yield moved(is_certain=type(value) is type(before) is list and is_direct)
        elif len(key) < 2 + _MAX_DEPTH:
            if _has_more_keys(value, before):
                yield moved(is_certain=False)
            yield from self._find_in_parts(key, value, before)

    def _find_in_parts(self, key: Key, value: Any, before: Any) -> Iterator[MovedValue]:
        """Yield what has moved in the entries of a container, or in the attributes of an object."""
        if type(value) is not type(before) or isinstance(value, nn.Module | type):
            return
        entries: dict[Any, Any] = {}
        old_entries: dict[Any, Any] = {}
        put_entry: Callable[[Any, Any], object] | None = None
        if isinstance(value, dict):
            entries, old_entries, put_entry = value, before, value.__setitem__
        elif isinstance(value, list | tuple | deque):
            entries, old_entries = dict(enumerate(value)), dict(enumerate(before))
            put_entry = None if isinstance(value, tuple) else value.__setitem__
        elif before is not value:  # an object that has been copied
            read: Callable[[Any], dict[str, Any]] = (
                get_attributes if self.has_copies else _read_dict
            )
            entries, old_entries = read(value), read(before)
            self._visited.add(id(getattr(value, "__dict__", None)))
            put_entry = partial(object.__setattr__, value)
        if len(entries) > _MAX_ENTRIES:
            return
        for name, entry in list(entries.items()):
            # A counter of a class becomes one of the object when it is first raised, and a
            # `collections.Counter` begins without entries.
            kind = type(unwrap_number(entry))
            in_class = getattr(type(value), name, None) if isinstance(name, str) else None
            default = in_class if type(in_class) is kind else None
            old = old_entries.get(name, 0 if default is None and kind is int else default)
            put = None if put_entry is None else partial(put_entry, name)
            yield from self.find_moved((*key, name), entry, old, put)


def is_counter(value: Any) -> bool:
    """Return whether a tensor is a whole number."""
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_meta or value.is_complex():
        return False
    return value.dtype is not torch.bool and float(value).is_integer()  # no infinite number is


def is_state(value: Any) -> bool:
    """Return whether a tensor has numbers that a forward may move, and is not large."""
    if type(value) is not Tensor or value.is_meta or value.is_inference() or value.requires_grad:
        return False
    is_plain = value.layout is torch.strided and value.numel() <= _MAX_STATE
    return is_plain and (value.is_floating_point() or is_counter(value))


def _is_number(value: Any) -> bool:
    """Return whether a value is a number of Python or NumPy, or one such as a `Decimal`."""
    return isinstance(value, numbers.Real | Decimal) and not isinstance(value, bool)


def _is_array(value: Any) -> bool:
    is_array = is_of_numpy(value) and hasattr(value, "flags") and hasattr(value, "__setitem__")
    return is_array and value.flags.writeable


def _differ(value: Any, before: Any) -> bool:
    try:
        return bool(value != before) and math.isfinite(value - before)
    except (ArithmeticError, TypeError, ValueError):  # too large, or of a library
        return False


def _have_moved(value: Any, before: Any) -> bool:
    if not (is_state(value) and isinstance(before, Tensor)) or value.shape != before.shape:
        return False
    return value.device == before.device and not torch.equal(value, before)


def _have_arrays_moved(value: Any, before: Any) -> bool:
    if not _is_array(before) or value.dtype != before.dtype:
        return False
    try:
        return _have_moved(torch.from_numpy(value), torch.from_numpy(before))
    except (TypeError, ValueError):  # a dtype or strides that PyTorch does not have
        return False


def _has_grown(value: Any, before: Any) -> bool:
    """Return whether a string or a tuple begins as before, and goes on.

    What was empty before may be anything: it is known when it has changed twice.
    """
    if len(value) <= len(before):
        return False
    if isinstance(value, str):
        return value.startswith(before)
    return all(entry is old or entry == old for entry, old in zip(value, before, strict=False))


def _has_more_keys(value: Any, before: Any) -> bool:
    """Return whether a dict has become larger, and more keys of its kind can be made."""
    if not isinstance(value, dict) or len(value) <= _measure(before):
        return False
    return type(next(reversed(value))) in _KEY_TYPES


def _is_opaque_change(value: Any, before: Any) -> bool:
    """Return whether a value has become another one, and it is not known how it goes on."""
    is_plain = isinstance(value, _OPAQUE_TYPES) or _is_plain_tuple(value)
    if type(value) is not type(before):
        return is_plain and before is None
    if is_plain:
        return repr(value) != repr(before)  # nan equals nan
    if not isinstance(value, list | deque) or len(value) > _MAX_ENTRIES:
        return False
    if len(value) < len(before):
        return True
    # The same entries in another order.
    return len(value) == len(before) and (
        [*map(_describe_entry, value)] != [*map(_describe_entry, before)]
        and sorted(map(_describe_entry, value)) == sorted(map(_describe_entry, before))
    )


def _is_plain_tuple(value: Any) -> bool:
    return type(value) is tuple and SCALAR_TYPES.issuperset(map(type, value))


def _has_advanced(value: Any, before: Any) -> bool:
    """Return whether an iterator or a stream has gone on. A count is a number."""
    if is_read_further(value, before):
        return True
    if not isinstance(value, COPYABLE_ITERATORS) or isinstance(value, itertools.count):
        return False
    return type(value) is type(before) and describe_iterator(value) != describe_iterator(before)


def _describe_entry(entry: Any) -> str:
    return repr(entry) if type(entry) in SCALAR_TYPES else str(id(entry))


def _read_dict(value: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    return attributes


def _measure(value: Any) -> int:
    return len(value) if isinstance(value, list | deque | set | dict) else 0


def _move_number(value: Any, step: Any, steps_before: int) -> Any:
    """Return a number after millions of steps, or None if it cannot be computed.

    It is a multiple of many numbers, less some steps, if the value is a number of steps itself. One
    that is not whole and becomes smaller is close to 0 in one of two runs.
    """
    try:
        is_whole = isinstance(value, numbers.Integral)
        if not (is_whole or steps_before) and abs(value) < abs(value - step):
            return type(value)(float(value) * _SMALLER)
        count = value / step
        whole = round(count)
        if abs(count - whole) > 1e-6:
            return type(value)(value + step * _FAR_AHEAD)
        multiple = max(whole, 0) // _FAR_AHEAD + 1
        return type(value)(step * (multiple * _FAR_AHEAD - steps_before))
    except (ArithmeticError, TypeError, ValueError):
        return None


def _advance_tensor(value: Tensor, before: Tensor, steps_before: int, moves_again: bool) -> bool:
    """Let the numbers of a tensor that have changed be far ahead. Return whether that is new.

    The other numbers may belong to rows with other ids.
    """
    is_whole = is_counter(value) and is_counter(before)
    if not (is_whole or value.is_floating_point()):
        return False
    is_smaller = value.numel() == 1 and abs(float(value)) < abs(float(before))
    is_one_number = is_whole or (value.numel() == 1 and (is_smaller or not steps_before))
    with torch.no_grad():
        if not is_one_number:
            value.copy_(torch.where(value != before, value * _LARGER, value))
            return bool(steps_before)
        if not (is_whole or moves_again):
            return False
        kind = int if is_whole else float
        number = _move_number(kind(value), kind(value) - kind(before), steps_before)
        if number is None:
            return False
        if not value.is_floating_point():
            limits = torch.iinfo(value.dtype)
            number = min(max(number, limits.min), limits.max - _RESERVE)
        value.fill_(number)
    return True


def _count_added(length: int, length_before: int, steps_before: int) -> int:
    """Return how many entries are added, some steps before a multiple of many numbers."""
    growth = length - length_before
    return (length // _LONGER + 1) * _LONGER - growth * steps_before - length


def _lengthen(value: Any, before: Any, steps_before: int) -> Any:
    """Give a list, a deque, a set or a dict many more entries, and return it."""
    length = len(value)
    added = _count_added(length, _measure(before), steps_before)
    if isinstance(value, list | deque):
        value.extend([value[-1]] * added)
        return value
    kind = type(next(iter(value)))
    make = kind if kind in _KEY_TYPES else _make_object
    largest = max((entry for entry in value if type(entry) is int), default=0)
    new = map(make, itertools.count(max(largest, length) + 1))
    last_entry = value[next(reversed(value))] if isinstance(value, dict) else None
    while len(value) < length + added:
        entries = itertools.islice(new, length + added - len(value))
        value.update(dict.fromkeys(entries, last_entry) if isinstance(value, dict) else entries)
    return value


def _make_object(_: int) -> object:
    return object()

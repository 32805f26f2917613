"""Lists and dicts that a unit is given, and fills: what it puts there is a part of what it gives.

A unit computes with copies of what it is given, in which the tensors are others. So its caller's
lists and dicts are filled afterwards, on every stage, also where the unit does not run.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any, NamedTuple

from torch import Tensor

from penstock.partition.forward.boxes import refill, same_inside

_LISTS = (list, deque)
_DICTS = (dict, OrderedDict, defaultdict, UserDict)


class Filled(NamedTuple):
    """What a unit gives, and what is in the boxes that it was given, of those that it changed."""

    found: Any
    boxes: dict[int, Any]  # by their places among all that it was given


class _Inside(NamedTuple):
    """In a box: another one of those that the unit was given."""

    place: int


def filled(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call it, with copies; a Filled, if it changed one of them."""
    boxes = list(_boxes_in((*args, *kwargs.values())))
    if not boxes:
        return target(*args, **kwargs)
    before = [_inside(box) for box in boxes]
    found = target(*args, **kwargs)
    places = {id(box): _Inside(place) for place, box in enumerate(boxes)}
    changed = {
        place: _each(now, lambda one: places.get(id(one), one))
        for place, (box, then) in enumerate(zip(boxes, before, strict=True))
        if not same_inside(now := _inside(box), then)
    }
    return Filled(found, changed) if changed else found


def taken_over(found: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the unit gives; the boxes of its caller's own have in them what the unit put there."""
    if not isinstance(found, Filled):
        return found
    boxes = list(_boxes_in((*args, *kwargs.values())))
    for place, now in found.boxes.items():
        box = boxes[place] if type(boxes[place]) in (*_LISTS, *_DICTS) else vars(boxes[place])
        refill(box, _each(now, lambda x: boxes[x.place] if isinstance(x, _Inside) else x))
    return found.found


def _boxes_in(value: Any) -> Iterator[Any]:
    if value is None or isinstance(value, Tensor | bool | int | float | str):
        return
    kind = type(value)
    record = is_dataclass(value) and not isinstance(value, type | dict)
    if kind in _LISTS or kind in _DICTS or record:
        yield value
    if isinstance(value, tuple | list | deque):
        inner = list(value)
    elif isinstance(value, dict | UserDict):
        inner = list(value.values())
    else:
        inner = list(vars(value).values()) if record and hasattr(value, "__dict__") else []
    for one in inner:
        yield from _boxes_in(one)


def _inside(box: Any) -> list[Any] | dict[Any, Any]:
    if type(box) in _LISTS:
        return list(box)
    if type(box) in _DICTS:
        return dict(box)
    return dict(getattr(box, "__dict__", {}))


def _each(inside: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(inside, dict):
        return {key: change(one) for key, one in inside.items()}
    return [change(one) for one in inside]

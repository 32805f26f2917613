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

from penstock.partition.forward.boxes import has_same_contents, set_contents

_LIST_TYPES = (list, deque)
_DICT_TYPES = (dict, OrderedDict, defaultdict, UserDict)


class OutputWithContainerUpdates(NamedTuple):
    """What a unit gives, and what is in the boxes that it was given, of those that it changed."""

    output: Any
    container_updates: dict[int, Any]  # by their places among all that it was given


class _ContainerRef(NamedTuple):
    """In a box: another one of those that the unit was given."""

    position: int


def call_tracking_containers(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call it, with copies; a Filled, if it changed one of them."""
    boxes = list(_iter_nested_containers((*args, *kwargs.values())))
    if not boxes:
        return target(*args, **kwargs)
    before = [_get_contents(box) for box in boxes]
    found = target(*args, **kwargs)
    places = {id(box): _ContainerRef(place) for place, box in enumerate(boxes)}
    changed = {
        place: _map_contents(now, lambda one: places.get(id(one), one))
        for place, (box, then) in enumerate(zip(boxes, before, strict=True))
        if not has_same_contents(now := _get_contents(box), then)
    }
    return OutputWithContainerUpdates(found, changed) if changed else found


def apply_container_updates(output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the unit gives; the boxes of its caller's own have in them what the unit put there."""
    if not isinstance(output, OutputWithContainerUpdates):
        return output
    boxes = list(_iter_nested_containers((*args, *kwargs.values())))
    for place, now in output.container_updates.items():
        box = (
            boxes[place]
            if type(boxes[place]) in (*_LIST_TYPES, *_DICT_TYPES)
            else vars(boxes[place])
        )
        set_contents(
            box,
            _map_contents(now, lambda x: boxes[x.position] if isinstance(x, _ContainerRef) else x),
        )
    return output.output


def _iter_nested_containers(value: Any) -> Iterator[Any]:
    if value is None or isinstance(value, Tensor | bool | int | float | str):
        return
    kind = type(value)
    record = is_dataclass(value) and not isinstance(value, type | dict)
    if kind in _LIST_TYPES or kind in _DICT_TYPES or record:
        yield value
    if isinstance(value, tuple | list | deque):
        inner = list(value)
    elif isinstance(value, dict | UserDict):
        inner = list(value.values())
    else:
        inner = list(vars(value).values()) if record and hasattr(value, "__dict__") else []
    for one in inner:
        yield from _iter_nested_containers(one)


def _get_contents(container: Any) -> list[Any] | dict[Any, Any]:
    if type(container) in _LIST_TYPES:
        return list(container)
    if type(container) in _DICT_TYPES:
        return dict(container)
    return dict(getattr(container, "__dict__", {}))


def _map_contents(contents: Any, transform: Callable[[Any], Any]) -> Any:
    if isinstance(contents, dict):
        return {key: transform(one) for key, one in contents.items()}
    return [transform(one) for one in contents]

"""What layers are and have, as far as a replay depends on it: told, and seen again at a glance.

To tell it anew takes the host as long as all else of a replayed step together. So what was told in
one step is kept with the objects that it was told of, and holds while they are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from penstock.run.capture.told import Telling, is_still, place_of, places_in_columns
from penstock.run.capture.watching import Uncapturable

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = tuple(sorted(name for name in _OF_TORCH if name.endswith("_hooks")))
_TABLES = ("_parameters", "_buffers", "_modules", *_HOOKS)
_SIMPLE = frozenset((bool, int, str, type(None)))

Attributes = Mapping[nn.Module, Mapping[str, Hashable]]

# ---- places --------------------------------------------------------------------------------


def places_of(modules: Iterable[nn.Module]) -> Hashable:
    """Of all tensors of the layers; and hooks."""
    return tuple(_places(modules, Telling()))


def _places(modules: Iterable[nn.Module], tell: Telling) -> Iterator[Hashable]:
    for module in modules:
        own = vars(module)
        for table in (own["_parameters"], own["_buffers"]):
            for value in table.values():
                if value is not None:
                    yield place_of(value)
                    yield from [_hooks_in(table, tell) for table in _hooks_on(value) if table]
        for name, value in own.items():
            if name not in _OF_TORCH:
                if isinstance(value, Tensor):
                    yield place_of(value)
            elif value and name in _HOOKS:
                yield _hooks_in(value, tell)


def _hooks_in(table: Mapping[Any, Any], tell: Telling) -> Hashable:
    return tuple([(key, tell(hook)) for key, hook in table.items()])


def _hooks_on(tensor: Tensor) -> tuple[Any, Any]:
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


# ---- attributes ----------------------------------------------------------------------------


def attributes_of(modules: Iterable[nn.Module]) -> Attributes:
    """What layers have that is no tensor, and that Python could go by."""
    tell = Telling()
    return {module: dict(_attributes(module, tell)) for module in modules}


def _attributes(module: nn.Module, tell: Telling) -> list[tuple[str, Hashable]]:
    return [
        (name, value if type(value) in _SIMPLE else tell(value))
        for name, value in vars(module).items()
        if name not in _OF_TORCH and not isinstance(value, Tensor)
    ]


def check_same(before: Attributes, now: Attributes, called: Callable[[nn.Module], str]) -> None:
    """No layer has changed an attribute: a replay would not."""
    for module, own in now.items():
        was = before.get(module, own)
        if was == own:
            continue
        names = [name for name in (*was, *own) if was.get(name, was) != own.get(name, own)]
        raise Uncapturable(
            f"{called(module)}: it changes its attribute '{names[0]}' in every step, and a replay "
            "would not: keep the number in a buffer, as a tensor"
        )


# ---- at a glance ---------------------------------------------------------------------------


class Glance:
    """Modules as they are now, and whether they are so still.

    They are if they have the same objects by the same names: what these are can change no more, or
    is looked at again, as the places of tensors, and what is in a list.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._names, self._values = _own(modules)
        self._tensors = _tensors(modules)
        self._hooks = _hooks_of(self._tensors)
        tables = [vars(module)[name] for module in modules for name in _TABLES] + [
            table for table in self._hooks if table is not None
        ]
        self._empty = [table for table in tables if not table]
        self._full = [table for table in tables if table]
        self._entries = _entries(self._full)
        pairs = zip(self._names, self._values, strict=True)
        given = [value for name, value in pairs if name not in _OF_TORCH]
        self._inside = [  # of each of both, what may change inside
            [v for v in values if not isinstance(v, Tensor) and not is_still(v)]
            for values in (given, self._entries)
        ]
        self._places, self._told = self._look()

    def still(self) -> bool:
        """Is all as it was?"""
        names, values = _own(self._modules)
        return (
            names == self._names
            and same(values, self._values)
            and not any(self._empty)
            and same(_entries(self._full), self._entries)
            and same(_hooks_of(self._tensors), self._hooks)
            and self._look() == (self._places, self._told)
        )

    def _look(self) -> tuple[Any, list[Hashable]]:
        told = [tell(v) for values in self._inside for tell in [Telling()] for v in values]
        return places_in_columns(self._tensors), told


def _hooks_of(tensors: Sequence[Tensor]) -> list[Any]:
    others = [tensor._post_accumulate_grad_hooks for tensor in tensors]
    return [tensor._backward_hooks for tensor in tensors] + others


def _own(modules: Iterable[nn.Module]) -> tuple[list[str], list[Any]]:
    """What each has, and by which names, one after the other."""
    names: list[str] = []
    values: list[Any] = []
    for module in modules:
        own = vars(module)
        names += own
        values += own.values()
    return names, values


def _entries(tables: Iterable[Mapping[Any, Any]]) -> list[Any]:
    found: list[Any] = []
    for table in tables:
        found += table.keys()
        found += table.values()
    return found


def _tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters, buffers and others, each once."""
    found: dict[int, Tensor] = {}
    for module in modules:
        own = vars(module)
        for table in (own["_parameters"], own["_buffers"], own):
            found.update((id(v), v) for v in table.values() if isinstance(v, Tensor))
    return list(found.values())


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Are they the same objects?"""
    return len(some) == len(others) and all(map(is_, some, others))

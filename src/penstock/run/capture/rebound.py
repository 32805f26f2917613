"""Tensors that layers replace in every step: `self.mean = 0.9 * self.mean + 0.1 * new`.

A replay reads what was there when it was captured, and writes what was there afterwards. So such a
tensor gets a place of its own. At the end of a capture, as a part of it, the new numbers are copied
there, and the layer has the tensor of that place again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from penstock.run.capture.watching import Uncapturable

Called = Callable[[nn.Module], str]


class Name(NamedTuple):
    """Of a tensor of a module's: a buffer, or a plain attribute."""

    buffer: bool
    name: str

    def table(self, module: nn.Module) -> dict[str, Any]:
        """Where the module has it."""
        return module._buffers if self.buffer else vars(module)


Bound = dict[tuple[nn.Module, Name], Tensor]


def bound(modules: Sequence[nn.Module]) -> Bound:
    """All of the modules' buffers, and tensors that are plain attributes."""
    return dict(_bound(modules))


def _bound(modules: Sequence[nn.Module]) -> Iterator[tuple[tuple[nn.Module, Name], Tensor]]:
    for module in modules:
        for buffer, table in ((True, module._buffers), (False, vars(module))):
            for name, value in table.items():
                if isinstance(value, Tensor):
                    yield (module, Name(buffer, name)), value


class Rebound:
    """The places of those that were seen to be replaced, as long as their modules are there."""

    def __init__(self) -> None:
        self._places: WeakKeyDictionary[nn.Module, dict[Name, Tensor]] = WeakKeyDictionary()

    @torch.no_grad()
    def settle(self) -> None:
        """Before a step, whoever has taken the one before: each is in its place."""
        for module, places in list(self._places.items()):
            for name, place in list(places.items()):
                table = name.table(module)
                value = table.get(name.name)
                if value is place:
                    continue
                if isinstance(value, Tensor) and _alike(value, place):
                    place.copy_(value)
                    table[name.name] = place
                else:
                    del places[name]

    def notice(self, before: Bound, modules: Sequence[nn.Module], called: Called) -> None:
        """After a step: give those a place that it has replaced."""
        for (module, name), value in bound(modules).items():
            old = before.get((module, name))
            if old is value:
                continue
            if old is not None and not _alike(value, old):
                raise Uncapturable(_another(called(module), name.name, old, value))
            if value.requires_grad:
                raise Uncapturable(
                    f"{called(module)}: it keeps a tensor with its history as its "
                    f"'{name.name}' in every step: keep it detached"
                )
            places = self._places.setdefault(module, {})
            if name not in places:  # else it has one
                places[name] = value.detach().clone()
        self.settle()

    @torch.no_grad()
    def put_back(self, before: Bound, modules: Sequence[nn.Module], called: Called) -> None:
        """At the end of a capture, as a part of it."""
        for (module, name), value in bound(modules).items():
            old = before.get((module, name))
            if old is value:
                continue
            if old is None or name not in self._places.get(module, ()) or not _alike(value, old):
                raise Uncapturable(_another(called(module), name.name, old, value))
            old.copy_(value)
            name.table(module)[name.name] = old


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _another(layer: str, name: str, old: Tensor | None, new: Tensor) -> str:
    was = "none" if old is None else f"{tuple(old.shape)} of {old.dtype} on {old.device}"
    return (
        f"{layer}: its '{name}' is another tensor after the step ({was} before, "
        f"{tuple(new.shape)} of {new.dtype} on {new.device} now), and a replay would not replace "
        "it: change it in place, or let it keep its shape, its dtype and its device"
    )


class AsItWas:
    """What modules have, to be put back if a capture fails."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        tables = [t for m in modules for t in (vars(m), m._buffers, m._parameters)]
        self._kept = [(table, dict(table)) for table in tables]

    def put_back(self) -> None:
        """The names, not the numbers: nothing has been computed."""
        for table, kept in self._kept:
            table.clear()
            table.update(kept)

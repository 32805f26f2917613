"""What one stage computes: its layers, one after the other, as a module of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from penstock.partition.side import Side, picked
from penstock.stage.skip import SkipKey, Skips, popped_keys, stashed_keys, use_skips
from penstock.stage.stage import OUTSIDE

Route = tuple[SkipKey, int, int]  # from a stage to another


class StageModule(nn.Module):
    """The layers of one stage, under their names.

    It takes what the stage before gives (the first stage: the batch) and then the skips that come
    from other stages, and side inputs by name. It gives what the stage after takes; with skips that
    go to other stages, a tuple of that and those. So whatever is wrapped around it sees everything.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        unpack: bool,
        begins: bool,
        takes: Sequence[frozenset[str]],
        skips: tuple[Sequence[SkipKey], Sequence[SkipKey]],
    ) -> None:
        super().__init__()
        self._modules.update(layers)
        self._unpack, self._begins, self._takes = unpack, begins, tuple(takes)
        self._arriving, self._departing = skips
        self._uses_skips = any(
            popped_keys(m) or stashed_keys(m) for l in layers.values() for m in l.modules()
        )

    def forward(self, *values: Any, **side: Any) -> Any:
        """Layer after layer."""
        if not self._uses_skips:
            return self._through(values, side)
        skips = Skips()
        main = len(values) - len(self._arriving)
        for key, value in zip(self._arriving, values[main:], strict=True):
            skips.stash(key, value, shared=True)
        with use_skips(skips):
            value = self._through(values[:main], side)
        if not self._departing:
            return value
        return value, *(skips.pop(key) for key in self._departing)

    def apart(self) -> StageModule:
        """Itself, with code of its own: a compiler takes equal code of stages for one function.

        What it compiles for one of them would have to fit all, and it soon gives up.
        """
        written = type(self).forward
        code = written.__code__.replace()
        own = FunctionType(code, written.__globals__, code.co_name, written.__defaults__)
        self.__dict__["forward"] = MethodType(own, self)
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.pop("forward", None)  # it has no name by which to be found again
        return state

    def _through(self, given: tuple[Any, ...], side: Mapping[str, Any]) -> Any:
        """The first layer of all takes the batch as its arguments; later ones, one value."""
        value: Any = given if self._begins else given[0]
        for at, layer in enumerate(self._modules.values()):
            assert layer is not None
            if (self._begins and not at) or (self._unpack and isinstance(value, tuple)):
                values = value
            else:
                values = (value,)
            value = layer(*values, **picked(side, self._takes[at])) if side else layer(*values)
        return value


@dataclass(frozen=True)
class Chain:
    """A stage's computation: from what came, by source, to what goes on, by destination.

    From the stage before come the value and the skips that begin there; from others, skips; from
    outside, side inputs.
    """

    module: StageModule
    run: Callable[..., Any]  # the module's forward, or what stands in its place
    before: int
    after: int
    arriving: Mapping[int, int]  # how many skips, by neighbour
    departing: Mapping[int, int]

    def running(self, module: nn.Module) -> Chain:
        """As it is, but the module computes."""
        return replace(self, run=module)

    def __call__(self, arrived: Mapping[int, tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
        """As a stage computes."""
        main = arrived[self.before]
        side: dict[str, Any] = {}
        given = arrived.get(OUTSIDE)
        if given and isinstance(given[-1], Side):
            side = given[-1].values
            main = given[:-1] if self.before == OUTSIDE else main
        if self.arriving:
            values = main if self.before == OUTSIDE else main[:1]
            for source in self.arriving:
                values += arrived[source][1:] if source == self.before else arrived[source]
        else:
            values = main
        found = self.run(*values, **side)
        if not self.departing:
            return {self.after: (found,)}
        value, *stashed = found
        departing: dict[int, tuple[Any, ...]] = {self.after: (value,)}
        for neighbour, number in self.departing.items():
            departing[neighbour] = (*departing.get(neighbour, ()), *stashed[:number])
            del stashed[:number]
        return departing


def chain(
    index: int,
    layers: Mapping[str, nn.Module],
    unpack: bool,
    routes: Iterable[Route],
    last: bool,
    takes: Sequence[frozenset[str]],
) -> Chain:
    """That of a stage, with the skips that come to it and go from it."""
    routes = tuple(routes)
    arriving = _by_neighbour((src, key) for key, src, dst in routes if dst == index)
    departing = _by_neighbour((dst, key) for key, src, dst in routes if src == index)
    skips = tuple(
        [key for keys in found.values() for key in keys] for found in (arriving, departing)
    )
    module = StageModule(layers, unpack, not index, takes, (skips[0], skips[1]))
    return Chain(
        module,
        module.forward,
        index - 1 if index else OUTSIDE,
        OUTSIDE if last else index + 1,
        {neighbour: len(keys) for neighbour, keys in arriving.items()},
        {neighbour: len(keys) for neighbour, keys in departing.items()},
    )


def _by_neighbour(pairs: Iterable[tuple[int, SkipKey]]) -> dict[int, tuple[SkipKey, ...]]:
    found: dict[int, tuple[SkipKey, ...]] = {}
    for neighbour, key in pairs:
        found[neighbour] = (*found.get(neighbour, ()), key)
    return found

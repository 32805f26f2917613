"""What one stage computes: its layers, one after the other, as a module of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import nn

from penstock.errors import PenstockTypeError
from penstock.stage.skip import SkipKey, Skips, popped_keys, stashed_keys, use_skips
from penstock.stage.stage import OUTSIDE

# -------------------------------------------------------------------------------------------------
# Side inputs: what a caller gives by name goes to the layers whose forward names it.
#
# A mask or positions need not be handed from layer to layer. A layer that wants one has a parameter
# of that name, and gets it straight from the caller.
# -------------------------------------------------------------------------------------------------

_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class SideInputs(NamedTuple):
    """Side inputs on their way to a stage, after its other inputs."""

    values: dict[str, Any]


@runtime_checkable
class ForwardsSideInputs(Protocol):
    """A layer that passes side inputs on to layers inside of it."""

    def side_names(self, first: bool) -> frozenset[str]:
        """Those that the layers inside name."""


def find_side_names(layer: nn.Module, first: bool) -> frozenset[str]:
    """The side inputs that a layer takes: its forward's parameters.

    Its first is what the layer before gives, unless it is the `first` layer of all: that one has
    no other before it, so a caller may name all of its inputs.
    """
    layer = getattr(layer, "_orig_mod", layer)  # of a compiled one
    if isinstance(layer, ForwardsSideInputs):
        return layer.side_names(first)
    try:
        parameters = list(inspect.signature(layer.forward).parameters.values())
    except (TypeError, ValueError):  # not written in Python
        return frozenset()
    by_place = parameters and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    rest = parameters if first or not by_place else parameters[1:]
    return frozenset(p.name for p in rest if p.kind in _KEYWORD_KINDS)


def find_side_names_per_layer(layers: Iterable[nn.Module], first: bool) -> list[frozenset[str]]:
    """The side inputs that each takes of layers that run one after the other."""
    return [find_side_names(layer, first and not at) for at, layer in enumerate(layers)]


def select_side_inputs(side: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Those of these names."""
    return {name: value for name, value in side.items() if name in names}


def check_side_inputs(
    side: Iterable[str], layers: Sequence[str], side_names: Sequence[frozenset[str]]
) -> None:
    """Each is taken by some layer: what nobody takes was meant for somebody."""
    strays = [name for name in side if not any(name in names for names in side_names)]
    if not strays:
        return
    takers: dict[str, list[str]] = {}
    for layer, names in zip(layers, side_names, strict=True):
        for name in sorted(names):
            takers.setdefault(name, []).append(layer)
    known = "; ".join(f"{name} (layer {', '.join(takers[name])})" for name in sorted(takers))
    raise PenstockTypeError(
        f"no layer takes {', '.join(map(repr, strays))}: a side input goes to the layers whose "
        f"forward has a parameter of that name, and here they name {known or 'nothing'}"
    )


# -------------------------------------------------------------------------------------------------

SkipRoute = tuple[SkipKey, int, int]  # from a stage to another


class StageModule(nn.Module):
    """The layers of one stage, under their names.

    It takes what the stage before gives (the first stage: the batch) and then the skips that come
    from other stages, and side inputs by name. It gives what the stage after takes; with skips that
    go to other stages, a tuple of that and those. So whatever is wrapped around it sees everything.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        unpack_tuples: bool,
        is_first: bool,
        side_names: Sequence[frozenset[str]],
        skips: tuple[Sequence[SkipKey], Sequence[SkipKey]],
    ) -> None:
        super().__init__()
        self._modules.update(layers)
        self._unpack_tuples, self._is_first, self._side_names = (
            unpack_tuples,
            is_first,
            tuple(side_names),
        )
        self._incoming_skips, self._outgoing_skips = skips
        self._uses_skips = any(
            popped_keys(m) or stashed_keys(m) for l in layers.values() for m in l.modules()
        )

    def forward(self, *values: Any, **side: Any) -> Any:
        """Layer after layer."""
        if not self._uses_skips:
            return self._run_layers(values, side)
        skips = Skips()
        main = len(values) - len(self._incoming_skips)
        for key, value in zip(self._incoming_skips, values[main:], strict=True):
            skips.stash(key, value, shared=True)
        with use_skips(skips):
            value = self._run_layers(values[:main], side)
        if not self._outgoing_skips:
            return value
        return value, *(skips.pop(key) for key in self._outgoing_skips)

    def with_own_code(self) -> StageModule:
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

    def _run_layers(self, inputs: tuple[Any, ...], side: Mapping[str, Any]) -> Any:
        """The first layer of all takes the batch as its arguments; later ones, one value."""
        value: Any = inputs if self._is_first else inputs[0]
        for at, layer in enumerate(self._modules.values()):
            assert layer is not None
            if (self._is_first and not at) or (self._unpack_tuples and isinstance(value, tuple)):
                values = value
            else:
                values = (value,)
            value = (
                layer(*values, **select_side_inputs(side, self._side_names[at]))
                if side
                else layer(*values)
            )
        return value


@dataclass(frozen=True)
class SequentialStage:
    """A stage's computation: from what came, by source, to what goes on, by destination.

    From the stage before come the value and the skips that begin there; from others, skips; from
    outside, side inputs.
    """

    module: StageModule
    forward_fn: Callable[..., Any]  # the module's forward, or what stands in its place
    previous_stage: int
    next_stage: int
    incoming_skip_counts: Mapping[int, int]  # how many skips, by neighbour
    outgoing_skip_counts: Mapping[int, int]

    def with_module(self, module: nn.Module) -> SequentialStage:
        """As it is, but the module computes."""
        return replace(self, forward_fn=module)

    def __call__(
        self, inputs_by_source: Mapping[int, tuple[Any, ...]]
    ) -> dict[int, tuple[Any, ...]]:
        """As a stage computes."""
        main = inputs_by_source[self.previous_stage]
        side: dict[str, Any] = {}
        given = inputs_by_source.get(OUTSIDE)
        if given and isinstance(given[-1], SideInputs):
            side = given[-1].values
            main = given[:-1] if self.previous_stage == OUTSIDE else main
        if self.incoming_skip_counts:
            values = main if self.previous_stage == OUTSIDE else main[:1]
            for source in self.incoming_skip_counts:
                values += (
                    inputs_by_source[source][1:]
                    if source == self.previous_stage
                    else inputs_by_source[source]
                )
        else:
            values = main
        found = self.forward_fn(*values, **side)
        if not self.outgoing_skip_counts:
            return {self.next_stage: (found,)}
        value, *stashed = found
        departing: dict[int, tuple[Any, ...]] = {self.next_stage: (value,)}
        for neighbour, number in self.outgoing_skip_counts.items():
            departing[neighbour] = (*departing.get(neighbour, ()), *stashed[:number])
            del stashed[:number]
        return departing


def build_sequential_stage(
    index: int,
    layers: Mapping[str, nn.Module],
    unpack_tuples: bool,
    skip_routes: Iterable[SkipRoute],
    is_last: bool,
    side_names: Sequence[frozenset[str]],
) -> SequentialStage:
    """That of a stage, with the skips that come to it and go from it."""
    skip_routes = tuple(skip_routes)
    arriving = _group_by_neighbour((src, key) for key, src, dst in skip_routes if dst == index)
    departing = _group_by_neighbour((dst, key) for key, src, dst in skip_routes if src == index)
    skips = tuple(
        [key for keys in found.values() for key in keys] for found in (arriving, departing)
    )
    module = StageModule(layers, unpack_tuples, not index, side_names, (skips[0], skips[1]))
    return SequentialStage(
        module,
        module.forward,
        index - 1 if index else OUTSIDE,
        OUTSIDE if is_last else index + 1,
        {neighbour: len(keys) for neighbour, keys in arriving.items()},
        {neighbour: len(keys) for neighbour, keys in departing.items()},
    )


def _group_by_neighbour(pairs: Iterable[tuple[int, SkipKey]]) -> dict[int, tuple[SkipKey, ...]]:
    found: dict[int, tuple[SkipKey, ...]] = {}
    for neighbour, key in pairs:
        found[neighbour] = (*found.get(neighbour, ()), key)
    return found

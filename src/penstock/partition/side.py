"""Side inputs: what a caller gives by name goes to the layers whose forward names it.

A mask or positions need not be handed from layer to layer. A layer that wants one has a parameter
of that name, and gets it straight from the caller.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import nn

from penstock.errors import PenstockTypeError

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

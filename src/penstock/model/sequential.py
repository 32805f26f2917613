"""`nn.Sequential` cut into stages: each child is a unit, skip connections are edges."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

from penstock.errors import ArgumentError, PenstockTypeError, RunError
from penstock.model.describe import describe_sequential
from penstock.model.partition import Partition, SequentialLayout
from penstock.model.sequential_stage import (
    build_sequential_stage,
    check_side_inputs,
    find_side_names,
    find_side_names_per_layer,
    select_side_inputs,
)
from penstock.schedules.ir import StageGraph
from penstock.stage.skip import SkipKey, popped_keys, stashed_keys, verify_skippables
from penstock.stage.stage import Stage


class PipeSequential(nn.Sequential):
    """A Sequential that passes a tuple on as several arguments, and side inputs by their names.

    >>> class Twice(nn.Module):
    ...     def forward(self, x):
    ...         return x, x
    >>> class Both(nn.Module):
    ...     def forward(self, a, b, factor=1):
    ...         return (a + b) * factor
    >>> PipeSequential(Twice(), Both())(torch.ones(2), factor=5)
    tensor([10., 10.])
    """

    def forward(self, *inputs: Any, **side: Any) -> Any:
        """Layer after layer. A side input goes to every layer whose forward names it."""
        value: Any = inputs
        if not side:
            for layer in self:
                value = layer(*value) if isinstance(value, tuple) else layer(value)
            return value
        takes = find_side_names_per_layer(self, first=True)
        check_side_inputs(side, list(self._modules), takes)
        for layer, names in zip(self, takes, strict=True):
            values = value if isinstance(value, tuple) else (value,)
            value = layer(*values, **select_side_inputs(side, names))
        return value

    def side_names(self, first: bool) -> frozenset[str]:
        """The side inputs that its layers take."""
        return frozenset().union(*find_side_names_per_layer(self, first))


class WithDevice(nn.Module):
    """A layer that has no parameters to tell its device, placed: `WithDevice(relu, "cuda:1")`."""

    def __init__(self, module: nn.Module, device: torch.device | str) -> None:
        super().__init__()
        self.module = module
        self.device = torch.device(device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's."""
        return self.module(*args, **kwargs)

    def side_names(self, first: bool) -> frozenset[str]:
        """The side inputs that the layer takes."""
        return find_side_names(self.module, first)


def list_module_tensors(layer: nn.Module) -> list[torch.Tensor]:
    """Its parameters and buffers."""
    return [*layer.parameters(), *layer.buffers()]


def find_layer_device(
    layer: nn.Module, owned_by_earlier_layers: Collection[torch.Tensor] = ()
) -> torch.device | None:
    """Where the layer's parameters and buffers are; None if it has none.

    Those of others count if it has no others.
    """
    if isinstance(layer, WithDevice):
        return layer.device
    held = list_module_tensors(layer)
    found = {t.device for t in held if t not in owned_by_earlier_layers} or {t.device for t in held}
    if len(found) > 1:
        where = ", ".join(sorted(map(str, found)))
        raise ArgumentError(
            f"one child has parameters on several devices, {where}: {layer}\n"
            "A child is on one device; split it into several children"
        )
    return found.pop() if found else None


def group_by_device(
    children: Sequence[nn.Module],
) -> tuple[list[int], list[torch.device]]:
    """The neighbours on one device make a stage: how many each takes, and where it is.

    A child without parameters stays with the one before it, if that has a device.
    """
    counts: list[int] = []
    devices: list[torch.device] = []
    homes: list[torch.device | None] = []
    seen: set[torch.Tensor] = set()
    for child in children:
        homes.append(find_layer_device(child, seen))
        seen.update(list_module_tensors(child))
    first = next((home for home in homes if home is not None), torch.device("cpu"))
    for home in homes:
        here = home or (devices[-1] if devices else first)
        if devices and devices[-1] == here:
            counts[-1] += 1
        else:
            counts.append(1)
            devices.append(here)
    return counts, devices


def is_plain_sequential(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Is it a Sequential, whose children run one after the other?"""
    plain = (nn.Sequential.forward, PipeSequential.forward)
    return isinstance(module, nn.Sequential) and type(module).forward in plain


def check_model(module: nn.Module) -> None:
    """A module; if it is a Sequential, one that can be cut between its children."""
    if not isinstance(module, nn.Module):
        raise PenstockTypeError(f"a pipe is made of a module, not of {type(module).__name__}")
    if is_plain_sequential(module):
        check_children(module)
        verify_skippables(module)


def check_children(module: nn.Module) -> None:
    """It is a Sequential with children, none of them twice."""
    if not isinstance(module, nn.Sequential):
        raise PenstockTypeError(
            f"a pipe is made of an nn.Sequential, not of {type(module).__name__}: write the model "
            "as nn.Sequential(layer, layer, ...), or take penstock.Pipe, which cuts any module"
        )
    if not is_plain_sequential(module):
        raise PenstockTypeError(
            f"{type(module).__name__} has a forward of its own, which a pipe would not run: give "
            "the layers as a plain nn.Sequential, and put the rest into a layer"
        )
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name, None) for name in hooks):
        raise ArgumentError(
            "the Sequential itself has hooks, which a pipe would not run: register them on its "
            "layers, or on the pipe"
        )
    if not len(module):
        raise ArgumentError("the Sequential is empty: a pipe needs at least one layer")
    places: dict[int, list[str]] = {}
    for name, child in module._modules.items():
        places.setdefault(id(child), []).append(name)
    twice = [" and ".join(names) for names in places.values() if len(names) > 1]
    if twice:
        raise ArgumentError(
            f"the same layer stands in several places, {', '.join(twice)}: duplicate children are "
            "not supported; make one layer for each place"
        )


def check_layers_unchanged(
    children: Mapping[str, nn.Module | None], stages: Sequence[Stage]
) -> None:
    """They are still the layers that the stages were cut from."""
    known = [name for stage in stages for name in stage.names]
    if list(children) != known:
        raise RunError(
            f"the pipe was made of the layers {', '.join(known)}, and now has "
            f"{', '.join(children)}: make the Pipe after the change"
        )
    for stage in stages:
        for name, layer in zip(stage.names, stage.layers, strict=True):
            if children.get(name) is not layer:
                raise RunError(
                    f"layer '{name}' was replaced after the pipe was made, and would not run: "
                    "make the Pipe after the change, or change what is inside the layer"
                )


def cut_sequential(module: nn.Sequential, counts: Sequence[int]) -> Partition:
    """Cut after so many children each time; `counts` add up to them all."""
    names, children = zip(*module._modules.items(), strict=True)
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    slices = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    routes = tuple(_find_skip_routes([children[part] for part in slices]))
    graph = StageGraph.chain(len(counts), [(src, dst) for _, src, dst in routes])
    unpack = isinstance(module, PipeSequential)
    named = find_side_names_per_layer(children, first=True)
    takes = tuple(tuple(named[part]) for part in slices)
    stages = tuple(
        Stage(
            index,
            names[part],
            children[part],
            build_sequential_stage(
                index,
                dict(zip(names[part], children[part], strict=True)),
                unpack,
                routes,
                is_last=index == len(counts) - 1,
                side_names=takes[index],
            ),
        )
        for index, part in enumerate(slices)
    )
    outline = describe_sequential(module, counts, routes)
    return Partition(stages, graph, SequentialLayout(routes, takes), outline)


def _find_skip_routes(stages: Sequence[Sequence[nn.Module]]) -> Iterator[tuple[SkipKey, int, int]]:
    stashed: dict[SkipKey, int] = {}
    for stage, children in enumerate(stages):
        inner = [module for child in children for module in child.modules()]
        for dst_key in dict.fromkeys(key for module in inner for key in popped_keys(module)):
            if dst_key in stashed:
                yield dst_key, stashed[dst_key], stage
        for module in inner:
            stashed.update(dict.fromkeys(stashed_keys(module), stage))

"""What a process keeps of a model: what is its own, and of the rest what can be looked at.

The parents are copied; the process's own units are the user's objects, and those of others are
hollow: they have their code, and parameters without numbers. So the forward can be followed here,
and the model itself need not be kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.partition.forward.absent import Absent, Look
from penstock.partition.forward.boxes import boxes_of
from penstock.partition.forward.hollow import hollow
from penstock.partition.forward.skeleton import (
    ELSEWHERE,
    NOWHERE,
    Elsewhere,
    Skeleton,
    absent_of,
    elsewhere,
    holds_module,
    twin,
)

SMALL = 1024  # numbers of a buffer that are kept in any case: a forward may look at them

Cast = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Own:
    """What a process has of a model, by the model's names."""

    units: Collection[str]
    parameters: Collection[str]  # also those that are in units of others, and used here
    written: Collection[str]  # buffers that the forward changes elsewhere, between units
    read: Collection[str]  # buffers that it reads between units
    same: Mapping[str, str]  # further names of what is tied


@dataclass(frozen=True)
class Excerpt:
    """The model without what others have."""

    model: nn.Module
    units: Mapping[str, nn.Module]
    parents: Mapping[str, nn.Module]
    away: tuple[nn.Module, ...]  # the hollow units

    def cast(self, cast: Cast) -> None:
        """What was done to the process's own is done to the looks of the rest."""
        for parent in self.parents.values():
            rest = elsewhere(parent)
            parameters = {k: _cast(t, cast) for k, t in rest.parameters.items()}
            buffers = {k: _cast(t, cast) for k, t in rest.buffers.items()}
            parent.__dict__[ELSEWHERE] = replace(rest, parameters=parameters, buffers=buffers)
        for unit in self.away:
            for module in unit.modules():
                homes: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for held in homes:
                    for key, tensor in held.items():
                        own = isinstance(tensor, nn.Parameter) and not isinstance(tensor, Absent)
                        if tensor is not None and not own:
                            held[key] = _cast(tensor, cast)


def _cast(tensor: Tensor, cast: Cast) -> Tensor:
    if not isinstance(tensor, Absent):
        return cast(tensor)
    dtype = cast(torch.empty(0, dtype=tensor.dtype, device=tensor.device)).dtype
    made = Absent.of(replace(Look.of(tensor), dtype=dtype), tensor.device, NOWHERE)
    made._is_param = isinstance(tensor, nn.Parameter)
    return made


def excerpt_of(
    model: nn.Module, units: Mapping[str, nn.Module], own: Own, device: torch.device
) -> Excerpt:
    """The model is left as it is."""
    stand_ins: dict[int, Tensor] = {}

    def absent(tensor: Tensor) -> Tensor:
        if id(tensor) not in stand_ins:
            stand_ins[id(tensor)] = absent_of(tensor, device)
        return stand_ins[id(tensor)]

    here = dict(_own_tensors(model, units, own))
    kept: dict[str, nn.Module] = {}
    shells: dict[int, nn.Module | None] = {}
    for name, unit in units.items():
        kept[name] = unit
        if name not in own.units:
            kept[name] = hollow(unit, absent)
            _fill(name, kept[name], unit, own, here)
            shells[id(kept[name])] = _shell(name, kept[name], own)
    skeleton = Skeleton(model, {id(unit): kept[name] for name, unit in units.items()})
    for name, (original, parent) in skeleton.parents.items():
        _prune(f"{name}." if name else "", parent, own, absent, shells, device)
        _hold_originals(original, parent)
    parents = {name: parent for name, (_, parent) in skeleton.parents.items()}
    away = tuple(unit for name, unit in kept.items() if name not in own.units)
    return Excerpt(skeleton.model, kept, parents, away)


def _own_tensors(
    model: nn.Module, units: Mapping[str, nn.Module], own: Own
) -> Iterator[tuple[str, Tensor]]:
    """By the first of their names."""
    inside = {id(m) for name in own.units for m in units[name].modules()}
    for path, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            name = f"{path}.{key}" if path else key
            if tensor is not None and (id(module) in inside or name in own.parameters):
                yield own.same.get(name, name), tensor


def _fill(
    name: str, empty: nn.Module, unit: nn.Module, own: Own, here: Mapping[str, Tensor]
) -> None:
    """What is tied to something of the process is that, and buffers have numbers, if few."""
    for (path, made), module in zip(empty.named_modules(prefix=name), unit.modules(), strict=True):
        for key in made._parameters:
            first = own.same.get(f"{path}.{key}", f"{path}.{key}")
            if first in here:
                made._parameters[key] = here[first]
        for key, buffer in module._buffers.items():
            few = buffer is not None and buffer.numel() <= SMALL and not buffer.is_meta
            if few or f"{path}.{key}" in own.read:
                made._buffers[key] = buffer


def _shell(name: str, unit: nn.Module, own: Own) -> nn.Module | None:
    """What the process has of another's unit: parameters that it uses between units."""
    if not any(f"{path}.{key}" in own.parameters
               for path, module in unit.named_modules(prefix=name)
               for key in module._parameters):  # fmt: skip
        return None
    made = twin(unit)
    for path, module in made.named_modules(prefix=name):
        module._buffers.clear()
        for key in list(module._parameters):
            if f"{path}.{key}" not in own.parameters:
                module.__dict__[key] = module._parameters.pop(key)
    return made


def _hold_originals(original: nn.Module, parent: nn.Module) -> None:
    """The lists and dicts of the model's own, as hooks of units may know them, and itself."""
    for key, box in boxes_of(original):
        if not holds_module(box):
            parent.__dict__[key] = box
    rest = elsewhere(parent)
    parent.__dict__[ELSEWHERE] = replace(rest, origin=weakref.ref(original))


def _prune(
    prefix: str,
    parent: nn.Module,
    own: Own,
    absent: Callable[[Tensor], Tensor],
    shells: Mapping[int, nn.Module | None],
    device: torch.device,
) -> None:
    """What is not the process's is none of the parent's own, but it can be looked at."""
    parameters = {
        key: absent(tensor)
        for key, tensor in parent._parameters.items()
        if tensor is not None and prefix + key not in own.parameters
    }
    buffers = {
        key: absent(tensor)
        for key, tensor in parent._buffers.items()
        if tensor is not None and prefix + key in own.written
    }
    children = dict(parent._modules)
    parent.__dict__[ELSEWHERE] = Elsewhere(parameters, buffers, children)
    for held, gone in ((parent._parameters, parameters), (parent._buffers, buffers)):
        for key in gone:
            del held[key]
    for key, buffer in parent._buffers.items():
        if buffer is not None and not buffer.is_meta:
            parent._buffers[key] = buffer.to(device)
    seen = {key: shells.get(id(child), child) for key, child in children.items()}
    parent.__dict__["_modules"] = {
        key: child for key, child in seen.items() if child is not None or children[key] is None
    }

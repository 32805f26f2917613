"""Units that another process has: their code is here, and what they have can be looked at."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.traced.containers import iter_containers
from penstock.model.traced.dry_run import FakeTensorFactory
from penstock.model.traced.proxies import (
    NO_VALUE,
    REMOTE_MEMBERS_KEY,
    ProxyModel,
    RemoteMembers,
    build_remote_tensor,
    copy_module_tree,
    copy_sharing_tensors,
    get_remote_members,
    holds_module,
)
from penstock.model.traced.remote_tensor import RemoteTensor, TensorSpec

_REMOTE_UNIT_KEY = "_hollow"  # the attribute


def build_remote_unit(module: nn.Module, transform: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy with other tensors: what a process keeps of another's unit."""
    made = copy_module_tree(module, transform)
    made.__dict__[_REMOTE_UNIT_KEY] = True
    return made


def is_remote_unit(module: nn.Module) -> bool:
    """Is it another process's?"""
    return _REMOTE_UNIT_KEY in module.__dict__


@contextmanager
def fake_remote_tensors(
    modules: Collection[nn.Module], fake_factory: FakeTensorFactory
) -> Iterator[None]:
    """Within, what is elsewhere can be computed with; what is set on the modules is undone."""
    before = [(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in modules]
    made: dict[int, Tensor] = {}
    for module in modules:
        homes: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in homes:
            for key, tensor in held.items():
                if isinstance(tensor, RemoteTensor):
                    if id(tensor) not in made:
                        made[id(tensor)] = _make_fake(tensor, fake_factory)
                    held[key] = made[id(tensor)]
    try:
        yield
    finally:
        for module, attributes, parameters, buffers in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)


def _make_fake(tensor: RemoteTensor, fake_factory: FakeTensorFactory) -> Tensor:
    look = TensorSpec.from_tensor(tensor)
    with fake_factory.mode:
        made = torch.empty_strided(
            look.shape, look.strides, dtype=look.dtype, device=fake_factory.device
        )
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, look.requires_grad)
    return made


# -------------------------------------------------------------------------------------------------
# What a process keeps of a model: what is its own, and of the rest what can be looked at.
#
# The parents are copied; the process's own units are the user's objects, and those of others are
# hollow: they have their code, and parameters without numbers. So the forward can be followed here,
# and the model itself need not be kept.
# -------------------------------------------------------------------------------------------------

SMALL_BUFFER_NUMEL = (
    1024  # numbers of a buffer that are kept in any case: a forward may look at them
)

TensorCast = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LocalMembers:
    """What a process has of a model, by the model's names."""

    units: Collection[str]
    parameters: Collection[str]  # also those that are in units of others, and used here
    remotely_written_buffers: Collection[
        str
    ]  # buffers that the forward changes elsewhere, between units
    read_buffers: Collection[str]  # buffers that it reads between units
    tied_aliases: Mapping[str, str]  # further names of what is tied


@dataclass(frozen=True)
class LocalModel:
    """The model without what others have."""

    model: nn.Module
    units: Mapping[str, nn.Module]
    parents: Mapping[str, nn.Module]
    remote_units: tuple[nn.Module, ...]  # the hollow units

    def apply_cast(self, cast_fn: TensorCast) -> None:
        """What was done to the process's own is done to the looks of the rest."""
        for parent in self.parents.values():
            rest = get_remote_members(parent)
            parameters = {k: _cast_tensor(t, cast_fn) for k, t in rest.parameters.items()}
            buffers = {k: _cast_tensor(t, cast_fn) for k, t in rest.buffers.items()}
            parent.__dict__[REMOTE_MEMBERS_KEY] = replace(
                rest, parameters=parameters, buffers=buffers
            )
        for unit in self.remote_units:
            for module in unit.modules():
                homes: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for held in homes:
                    for key, tensor in held.items():
                        own = isinstance(tensor, nn.Parameter) and not isinstance(
                            tensor, RemoteTensor
                        )
                        if tensor is not None and not own:
                            held[key] = _cast_tensor(tensor, cast_fn)


def _cast_tensor(tensor: Tensor, cast_fn: TensorCast) -> Tensor:
    if not isinstance(tensor, RemoteTensor):
        return cast_fn(tensor)
    dtype = cast_fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device)).dtype
    made = RemoteTensor.from_spec(
        replace(TensorSpec.from_tensor(tensor), dtype=dtype), tensor.device, NO_VALUE
    )
    made._is_param = isinstance(tensor, nn.Parameter)
    return made


def build_local_model(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    local_members: LocalMembers,
    device: torch.device,
) -> LocalModel:
    """The model is left as it is."""
    stand_ins: dict[int, Tensor] = {}

    def remote_tensor(tensor: Tensor) -> Tensor:
        if id(tensor) not in stand_ins:
            stand_ins[id(tensor)] = build_remote_tensor(tensor, device)
        return stand_ins[id(tensor)]

    here = dict(_find_local_tensors(model, units, local_members))
    kept: dict[str, nn.Module] = {}
    shells: dict[int, nn.Module | None] = {}
    for name, unit in units.items():
        kept[name] = unit
        if name not in local_members.units:
            kept[name] = build_remote_unit(unit, remote_tensor)
            _attach_local_tensors(name, kept[name], unit, local_members, here)
            shells[id(kept[name])] = _copy_with_local_parameters(name, kept[name], local_members)
    skeleton = ProxyModel(model, {id(unit): kept[name] for name, unit in units.items()})
    for name, (original, parent) in skeleton.parent_copies.items():
        _prune_parent(
            f"{name}." if name else "", parent, local_members, remote_tensor, shells, device
        )
        _keep_original_containers(original, parent)
    parents = {name: parent for name, (_, parent) in skeleton.parent_copies.items()}
    away = tuple(unit for name, unit in kept.items() if name not in local_members.units)
    return LocalModel(skeleton.model, kept, parents, away)


def _find_local_tensors(
    model: nn.Module, units: Mapping[str, nn.Module], local_members: LocalMembers
) -> Iterator[tuple[str, Tensor]]:
    """By the first of their names."""
    inside = {id(m) for name in local_members.units for m in units[name].modules()}
    for path, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            name = f"{path}.{key}" if path else key
            if tensor is not None and (id(module) in inside or name in local_members.parameters):
                yield local_members.tied_aliases.get(name, name), tensor


def _attach_local_tensors(
    name: str,
    remote_unit: nn.Module,
    unit: nn.Module,
    local_members: LocalMembers,
    local_tensors: Mapping[str, Tensor],
) -> None:
    """What is tied to something of the process is that, and buffers have numbers, if few."""
    for (path, made), module in zip(
        remote_unit.named_modules(prefix=name), unit.modules(), strict=True
    ):
        for key in made._parameters:
            first = local_members.tied_aliases.get(f"{path}.{key}", f"{path}.{key}")
            if first in local_tensors:
                made._parameters[key] = local_tensors[first]
        for key, buffer in module._buffers.items():
            few = buffer is not None and buffer.numel() <= SMALL_BUFFER_NUMEL and not buffer.is_meta
            if few or f"{path}.{key}" in local_members.read_buffers:
                made._buffers[key] = buffer


def _copy_with_local_parameters(
    name: str, unit: nn.Module, local_members: LocalMembers
) -> nn.Module | None:
    """What the process has of another's unit: parameters that it uses between units."""
    if not any(f"{path}.{key}" in local_members.parameters
               for path, module in unit.named_modules(prefix=name)
               for key in module._parameters):  # fmt: skip
        return None
    made = copy_sharing_tensors(unit)
    for path, module in made.named_modules(prefix=name):
        module._buffers.clear()
        for key in list(module._parameters):
            if f"{path}.{key}" not in local_members.parameters:
                module.__dict__[key] = module._parameters.pop(key)
    return made


def _keep_original_containers(original: nn.Module, parent: nn.Module) -> None:
    """The lists and dicts of the model's own, as hooks of units may know them, and itself."""
    for key, box in iter_containers(original):
        if not holds_module(box):
            parent.__dict__[key] = box
    rest = get_remote_members(parent)
    parent.__dict__[REMOTE_MEMBERS_KEY] = replace(rest, original_ref=weakref.ref(original))


def _prune_parent(
    prefix: str,
    parent: nn.Module,
    local_members: LocalMembers,
    remote_tensor: Callable[[Tensor], Tensor],
    partial_units: Mapping[int, nn.Module | None],
    device: torch.device,
) -> None:
    """What is not the process's is none of the parent's own, but it can be looked at."""
    parameters = {
        key: remote_tensor(tensor)
        for key, tensor in parent._parameters.items()
        if tensor is not None and prefix + key not in local_members.parameters
    }
    buffers = {
        key: remote_tensor(tensor)
        for key, tensor in parent._buffers.items()
        if tensor is not None and prefix + key in local_members.remotely_written_buffers
    }
    children = dict(parent._modules)
    parent.__dict__[REMOTE_MEMBERS_KEY] = RemoteMembers(parameters, buffers, children)
    for held, gone in ((parent._parameters, parameters), (parent._buffers, buffers)):
        for key in gone:
            del held[key]
    for key, buffer in parent._buffers.items():
        if buffer is not None and not buffer.is_meta:
            parent._buffers[key] = buffer.to(device)
    seen = {key: partial_units.get(id(child), child) for key, child in children.items()}
    parent.__dict__["_modules"] = {
        key: child for key, child in seen.items() if child is not None or children[key] is None
    }

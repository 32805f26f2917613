"""The local model: the part of a model that one process keeps under torchrun.

Under torchrun each process holds the parameters of its own stages only, but it traces new
micro-batches of the whole forward by itself. So it keeps a copy of the model with three kinds of
modules:

    parents         copies; tensors of other processes are remote tensors in `RemoteMembers`
    local units     the user's own objects
    remote units    copies with their code, whose parameters are remote tensors

The user's model itself is left as it is, and the memory of its other parameters can be freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
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
from penstock.model.traced.remote_tensor import RemoteTensor
from penstock.state_copy import MODULE_INTERNALS
from penstock.tensor_spec import TensorSpec
from penstock.torch_compat import mark_as_parameter

# ---- remote units --------------------------------------------------------------------------------

_REMOTE_UNIT_KEY = "_hollow"  # the attribute that marks a remote unit


def build_remote_unit(module: nn.Module, transform: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of a unit that belongs to another process, with every tensor transformed."""
    remote_unit = copy_module_tree(module, transform)
    remote_unit.__dict__[_REMOTE_UNIT_KEY] = True
    return remote_unit


def is_remote_unit(module: nn.Module) -> bool:
    """Return whether a unit belongs to another process."""
    return _REMOTE_UNIT_KEY in module.__dict__


def fake_remote_tensors(modules: Collection[nn.Module], fake_factory: FakeTensorFactory) -> None:
    """Replace remote tensors of isolated modules by fake tensors.

    A trace has to compute with all units, and a remote tensor raises in every operation.
    """
    fakes: dict[int, Tensor] = {}  # by the id of the remote tensor, so that tied ones stay tied
    for module in modules:
        tensor_dicts: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in tensor_dicts:
            for key, tensor in tensors.items():
                if isinstance(tensor, RemoteTensor):
                    if id(tensor) not in fakes:
                        fakes[id(tensor)] = _make_fake(tensor, fake_factory)
                    tensors[key] = fakes[id(tensor)]


def _make_fake(tensor: RemoteTensor, fake_factory: FakeTensorFactory) -> Tensor:
    """Return a fake tensor, or parameter, with the metadata of a remote one."""
    spec = TensorSpec.from_tensor(tensor)
    with fake_factory.mode:
        device, sharding = fake_factory.device, tensor.sharding
        fake = spec.allocate(device) if sharding is None else sharding.allocate(spec, device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, spec.requires_grad)
    return fake


# ---- the local model -----------------------------------------------------------------------------

# Buffers of up to this many elements keep their data in remote units, too: the forward may read
# their values on the host.
SMALL_BUFFER_NUMEL = 1024

TensorCast = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LocalMembers:
    """The names of the units, parameters and buffers that a process has of a model.

    Attributes:
        units: Units that run in this process.
        parameters: Parameters that this process has, also those in units of other processes that
            an operation between units uses here.
        remotely_written_buffers: Buffers that the forward changes between units in another process.
        read_buffers: Buffers that the forward reads between units.
        tied_aliases: For every further name of a tied parameter, its first name.
    """

    units: Collection[str]
    parameters: Collection[str]
    remotely_written_buffers: Collection[str]
    read_buffers: Collection[str]
    tied_aliases: Mapping[str, str]


@dataclass(frozen=True)
class LocalModel:
    """A model whose tensors of other processes are remote tensors."""

    model: nn.Module
    units: Mapping[str, nn.Module]
    parents: Mapping[str, nn.Module]
    remote_units: tuple[nn.Module, ...]

    def apply_cast(self, cast_fn: TensorCast) -> None:
        """Apply a cast of the local parameters to the remote tensors as well.

        `pipe.half()` reaches only the modules that the process has registered. The dtypes of the
        other processes' tensors must follow, or the next trace would be wrong.
        """
        for parent in self.parents.values():
            remote = get_remote_members(parent)
            parameters = {k: _cast_tensor(t, cast_fn) for k, t in remote.parameters.items()}
            buffers = {k: _cast_tensor(t, cast_fn) for k, t in remote.buffers.items()}
            parent.__dict__[REMOTE_MEMBERS_KEY] = replace(
                remote, parameters=parameters, buffers=buffers
            )
        for unit in self.remote_units:
            for module in unit.modules():
                tensor_dicts: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for tensors in tensor_dicts:
                    for key, tensor in tensors.items():
                        # A real parameter in a remote unit is tied to a local one, which the cast
                        # has reached.
                        is_local = isinstance(tensor, nn.Parameter) and not isinstance(
                            tensor, RemoteTensor
                        )
                        if tensor is not None and not is_local:
                            tensors[key] = _cast_tensor(tensor, cast_fn)


def _cast_tensor(tensor: Tensor, cast_fn: TensorCast) -> Tensor:
    if not isinstance(tensor, RemoteTensor):
        return cast_fn(tensor)
    # Casting an empty tensor shows the new dtype.
    dtype = cast_fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device)).dtype
    remote_tensor = RemoteTensor.from_spec(
        TensorSpec.from_tensor(tensor)._replace(dtype=dtype), tensor.device, NO_VALUE
    )
    remote_tensor.sharding = tensor.sharding
    mark_as_parameter(remote_tensor, isinstance(tensor, nn.Parameter))
    return remote_tensor


def build_local_model(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    local_members: LocalMembers,
    device: torch.device,
) -> LocalModel:
    """Return the local model of this process. The user's model is not changed.

    Args:
        model: The user's model.
        units: Its units by name.
        local_members: The parts of the model that belong to this process.
        device: The device that remote tensors report.
    """

    @cache  # tied tensors stay tied
    def remote_tensor(tensor: Tensor) -> Tensor:
        return build_remote_tensor(tensor, device)

    local_tensors = dict(_find_local_tensors(model, units, local_members))
    local_units: dict[str, nn.Module] = {}
    partial_units: dict[int, nn.Module | None] = {}
    for name, unit in units.items():
        local_units[name] = unit
        if name not in local_members.units:
            local_units[name] = build_remote_unit(unit, remote_tensor)
            _attach_local_tensors(name, local_units[name], unit, local_members, local_tensors)
            partial_units[id(local_units[name])] = _copy_with_local_parameters(
                name, local_units[name], local_members
            )
    proxy_model = ProxyModel(model, {id(unit): local_units[name] for name, unit in units.items()})
    for name, (original, parent) in proxy_model.parent_copies.items():
        _prune_parent(
            f"{name}." if name else "", parent, local_members, remote_tensor, partial_units, device
        )
        _keep_original_containers(original, parent)
    parents = {name: parent for name, (_, parent) in proxy_model.parent_copies.items()}
    remote_units = tuple(
        unit for name, unit in local_units.items() if name not in local_members.units
    )
    return LocalModel(proxy_model.model, local_units, parents, remote_units)


def _find_local_tensors(
    model: nn.Module, units: Mapping[str, nn.Module], local_members: LocalMembers
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of this process, each by the first of its names."""
    local_modules = {id(m) for name in local_members.units for m in units[name].modules()}
    for path, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            name = f"{path}.{key}" if path else key
            is_local = id(module) in local_modules or name in local_members.parameters
            if tensor is not None and is_local:
                yield local_members.tied_aliases.get(name, name), tensor


def _attach_local_tensors(
    name: str,
    remote_unit: nn.Module,
    unit: nn.Module,
    local_members: LocalMembers,
    local_tensors: Mapping[str, Tensor],
) -> None:
    """Put real tensors into a remote unit where this process has them.

    These are parameters tied to local ones, small buffers, and buffers that the forward reads.
    """
    for (path, remote_module), module in zip(
        remote_unit.named_modules(prefix=name), unit.modules(), strict=True
    ):
        for key in remote_module._parameters:
            first_name = local_members.tied_aliases.get(f"{path}.{key}", f"{path}.{key}")
            if first_name in local_tensors:
                remote_module._parameters[key] = local_tensors[first_name]
        for key, buffer in module._buffers.items():
            is_small = (
                buffer is not None and buffer.numel() <= SMALL_BUFFER_NUMEL and not buffer.is_meta
            )
            if is_small or f"{path}.{key}" in local_members.read_buffers:
                remote_module._buffers[key] = buffer


def _copy_with_local_parameters(
    name: str, unit: nn.Module, local_members: LocalMembers
) -> nn.Module | None:
    """Return a copy of a remote unit in which only parameters of this process are registered.

    An operation between units may use a parameter of another process's unit (a tied embedding, for
    example). `pipe.parameters()` then yields that parameter here, and no other one of the unit.
    Returns None if this process has no parameter of the unit.
    """
    if not any(f"{path}.{key}" in local_members.parameters
               for path, module in unit.named_modules(prefix=name)
               for key in module._parameters):  # fmt: skip
        return None
    unit_copy = copy_sharing_tensors(unit)
    for path, module in unit_copy.named_modules(prefix=name):
        module._buffers.clear()
        for key in list(module._parameters):
            if f"{path}.{key}" not in local_members.parameters:
                # A plain attribute: the forward can read it, and `parameters()` skips it.
                module.__dict__[key] = module._parameters.pop(key)
    return unit_copy


def _keep_original_containers(original: nn.Module, parent: nn.Module) -> None:
    """Give a parent the user's own lists and dicts, and a reference to the user's module.

    Hooks of units may close over these. They are rebound by the identity of the originals; see
    `ProxyModel._find_unit_hooks`. The reference is weak, so that the model can be freed.
    """
    for key, container in iter_containers(original):
        if not holds_module(container):
            parent.__dict__[key] = container
    remote = get_remote_members(parent)
    parent.__dict__[REMOTE_MEMBERS_KEY] = replace(remote, original_ref=weakref.ref(original))


def _prune_parent(
    prefix: str,
    parent: nn.Module,
    local_members: LocalMembers,
    remote_tensor: Callable[[Tensor], Tensor],
    partial_units: Mapping[int, nn.Module | None],
    device: torch.device,
) -> None:
    """Move the members of other processes from a parent into its `RemoteMembers`.

    The forward still sees them, because `ProxyModel` adds them back to its copies. `parameters()`,
    `state_dict()` and `to()` of the local model do not.
    """
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
    for registered, moved in ((parent._parameters, parameters), (parent._buffers, buffers)):
        for key in moved:
            del registered[key]
    # The other buffers are in every process, on its device: any stage may read them.
    for key, buffer in parent._buffers.items():
        if buffer is not None and not buffer.is_meta:
            parent._buffers[key] = buffer.to(device)
    # A remote unit is replaced by the copy with this process's parameters, or left out.
    local_children = {key: partial_units.get(id(child), child) for key, child in children.items()}
    parent.__dict__["_modules"] = {
        key: child
        for key, child in local_children.items()
        if child is not None or children[key] is None
    }


# ---- attributes that change later ----------------------------------------------------------------


class AttributeMirror:
    """Passes on what a program sets on its own module, after the pipe was made, to the local model.

    The modules of the local model are copies, except for the units of this process. So `training`,
    and an attribute such as `model.beta = 0.5` between steps, would not be seen by the copies.
    Values that a forward has set on a copy stay, unless the program sets the attribute, too.

    Args:
        original: The user's model.
        local: The local model. If it is the same object, there is nothing to do.
    """

    def __init__(self, original: nn.Module, local: nn.Module) -> None:
        self._pairs = list(_iter_copies(original, local))
        self._latest = [self._read(original) for original, _ in self._pairs]

    def sync(self) -> None:
        """Set the attributes that have changed on the user's modules since the last call."""
        for index, (original, module_copy) in enumerate(self._pairs):
            current, latest = self._read(original), self._latest[index]
            for name, value in current.items():
                is_changed = name not in latest or latest[name] is not value
                if is_changed and not isinstance(value, Tensor) and not holds_module(value):
                    module_copy.__dict__[name] = value
            for name in latest.keys() - current.keys():
                module_copy.__dict__.pop(name, None)
            module_copy.training = original.training
            self._latest[index] = current

    @staticmethod
    def _read(module: nn.Module) -> dict[str, Any]:
        return {name: v for name, v in vars(module).items() if name not in MODULE_INTERNALS}


def _iter_copies(original: nn.Module, module: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield the user's modules whose copies are in a local model, each with its copy."""
    if original is module:
        return
    yield original, module
    children = get_remote_members(module).children or module._modules
    for name, child in children.items():
        original_child = original._modules.get(name)
        if child is not None and original_child is not None:
            yield from _iter_copies(original_child, child)

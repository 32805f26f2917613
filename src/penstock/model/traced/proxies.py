"""Proxies: a copy of the model per stage, in which units are replaced by unit proxies.

A *unit* is a submodule that is never cut. A *parent* is a module that contains units, down to the
model itself. Each stage runs the forward of the parents, and only its own units:

    user's model            proxy model of one stage
    ------------            ------------------------
    parent module           shallow copy (same parameters, its own attributes)
    unit                    UnitProxy (same class, same attributes, another `__call__`)
    list or dict            copy, restored after every forward

The parents are copied because stages run at the same time in several threads: an attribute that one
stage's forward sets on a parent must not be visible to another stage. A unit proxy reports the call
to the interceptor of its thread, which runs the unit or returns a placeholder for its output.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.data_parallel.dtensor import Sharding
from penstock.fingerprint import are_same_objects
from penstock.model.traced.containers import (
    PLAIN_TYPES,
    ContainerCopy,
    ReboundHooks,
    copy_attributes,
    find_held_objects,
    has_same_state,
    is_state_object,
    iter_containers,
    iter_undecorated_methods,
    rebind_function,
)
from penstock.model.traced.interception import get_current_interceptor
from penstock.model.traced.remote_tensor import RemoteTensor
from penstock.nested_values import iter_captured_values
from penstock.tensor_spec import TensorSpec
from penstock.torch_compat import (
    COMPILED_CALL_ATTRIBUTE,
    get_eager_function,
    mark_as_parameter,
)

NO_VALUE = -1  # the value index of a remote tensor that stands for a parameter or buffer


class UnitProxy:
    """A mix-in that goes before the unit's own class and intercepts its calls.

    The call is intercepted in `__call__` of a subclass and not by a forward pre-hook. A hook cannot
    skip the forward, and some layers define a `__call__` of their own.
    """

    _unit: str
    _target: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Report the call to the interceptor of this thread. Without one, run the unit."""
        interceptor = get_current_interceptor()
        if interceptor is None:
            return self._target(*args, **kwargs)
        return interceptor.intercept_unit(self._unit, self._target, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Treat a direct call of `forward` like a call of the unit."""
        return self(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return build_unit_proxy, (self._unit, self._target)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return build_unit_proxy(self._unit, copy.deepcopy(self._target, memo))


class _FallbackUnitProxy(UnitProxy, nn.Module):
    """A proxy for a unit whose class cannot be subclassed; `isinstance` does not recognise it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self)._target, name)


def build_unit_proxy(
    name: str, module: nn.Module, on_read: Callable[[str, str], None] | None = None
) -> nn.Module:
    """Return a proxy for a unit: an object of a subclass of the unit's class.

    The proxy shares the unit's `__dict__`, so a parent that reads or sets an attribute of the unit
    (`self.block.scale`) sees the real one. `on_read` is called with the names of the unit and of
    each attribute that is read.
    """
    class_attributes: dict[str, Any] = {"_unit": name, "_target": module}
    module_class = type(module)
    if on_read is not None:

        def read_attribute(proxy: Any, key: str) -> Any:
            on_read(name, key)
            return module_class.__getattribute__(proxy, key)

        class_attributes["__getattribute__"] = read_attribute
    try:
        metaclass: Any = type(module_class)
        proxy_class = metaclass(
            module_class.__name__,
            (UnitProxy, module_class),
            {"__module__": module_class.__module__, **class_attributes},
        )
        # Without `__init__`: that would build the unit's parameters again.
        proxy = object.__new__(proxy_class)
        proxy.__dict__ = module.__dict__
    except (TypeError, RuntimeError, AttributeError):
        # A class may refuse subclasses, by its metaclass or `__init_subclass__`.
        proxy = type(module_class.__name__, (_FallbackUnitProxy,), class_attributes)()
    assert isinstance(proxy, nn.Module)
    return proxy


class ProxyModel:
    """Copies of the model's parents, with proxies in place of the units.

    Args:
        model: The user's model, or the part of it that this process keeps. It is not changed.
        proxies: The replacement of each unit, by the `id` of the unit.
        disables_kv_cache: Whether models of transformers fill no cache of keys and values.
    """

    def __init__(
        self,
        model: nn.Module,
        proxies: Mapping[int, nn.Module],
        disables_kv_cache: bool = True,
    ) -> None:
        self._disables_kv_cache = disables_kv_cache
        # Original and copy of each parent, by the parent's name in the model.
        self.parent_copies: dict[str, tuple[nn.Module, nn.Module]] = {}
        # Each module and what a stage has in its place. Pairs, because a copy of this object has
        # copies of the modules, with other ids.
        self._replacements: list[tuple[nn.Module, nn.Module]] = []
        copies = dict(proxies)
        self.model = self._copy_parent(model, "", copies)
        # Attributes of the originals as they were copied, by the name of the parent.
        self._seen_attributes: dict[str, dict[str, Any]] = {}
        self._containers: dict[int, ContainerCopy] = {}  # by the id of the original container
        self._config_copies: dict[int, Any] = {}
        # The second pass needs all copies: a plain list in one parent may hold any other module.
        for name, (original, parent_copy) in self.parent_copies.items():
            _replace_held_modules(original, parent_copy, copies)
            self._seen_attributes[name] = dict(vars(original))
            for key, contents in iter_containers(parent_copy):
                # Two parents that share a list share its copy, too.
                original_container = original.__dict__[key]
                container_copy = self._containers.setdefault(
                    id(original_container),
                    ContainerCopy.from_original(original_container, contents),
                )
                parent_copy.__dict__[key] = container_copy.stage_copy
            self._disable_kv_cache(parent_copy)
        self.unit_hooks = self._find_unit_hooks(proxies.values())

    def _copy_parent(self, module: nn.Module, name: str, copies: dict[int, nn.Module]) -> nn.Module:
        if id(module) in copies:  # a unit, or a parent that is registered under two names
            self._replacements.append((module, copies[id(module)]))
            return copies[id(module)]
        parent_copy: nn.Module = object.__new__(type(module))
        copies[id(module)] = parent_copy
        self._replacements.append((module, parent_copy))
        self.parent_copies[name] = module, parent_copy
        parent_copy.__dict__.update(module.__dict__)
        # A method with `functools.lru_cache` has one cache for all stages and micro-batches, which
        # would return tensors of another one, and a compiled method calls no unit. The copy gets
        # the method without its decorator.
        for key, method, takes_self in iter_undecorated_methods(type(module)):
            parent_copy.__dict__.setdefault(
                key, MethodType(method, parent_copy) if takes_self else method
            )
        # A compiled parent would run as one graph, in which no unit can be intercepted.
        parent_copy.__dict__[COMPILED_CALL_ATTRIBUTE] = None
        # Under torchrun a process keeps only its own tensors registered. The forward still has to
        # see all of them, so the remote ones are added back here.
        remote = get_remote_members(module)
        parent_copy.__dict__["_parameters"] = {**module._parameters, **remote.parameters}
        parent_copy.__dict__["_buffers"] = {**module._buffers, **remote.buffers}
        parent_copy.__dict__["_modules"] = {
            key: None
            if child is None
            else self._copy_parent(child, f"{name}.{key}".strip("."), copies)
            for key, child in (remote.children or module._modules).items()
        }
        return parent_copy

    def _find_unit_hooks(self, proxies: Iterable[Any]) -> dict[str, ReboundHooks]:
        """Return the hooks of units that refer to a parent or to one of its containers, by unit.

        A hook such as `lambda m, args, out: model.features.append(out)` closes over the user's
        model. On this stage it has to fill the list of this stage's copy.
        """
        replacements: dict[int, Any] = {
            address: container.stage_copy for address, container in self._containers.items()
        }
        for original, parent_copy in self.parent_copies.values():
            replacements[id(original)] = parent_copy
            # Under torchrun the "original" is itself a copy, and a hook knows the user's module.
            user_module = get_remote_members(original).original_ref()
            if user_module is not None:
                replacements[id(user_module)] = parent_copy
        hooks_by_unit = {
            proxy._unit: ReboundHooks.for_unit(proxy._target, replacements)
            for proxy in proxies
            if isinstance(proxy, UnitProxy)
        }
        return {name: hooks for name, hooks in hooks_by_unit.items() if hooks is not None}

    def _disable_kv_cache(self, parent_copy: nn.Module) -> None:
        """Set `config.use_cache` to False on a copy of the parent's configuration.

        Models of transformers fill a cache of keys and values from inside their blocks, which are
        units. The caller's configuration stays as it is.
        """
        # Parents often share one configuration object; their copies share one copy of it.
        config = parent_copy.__dict__.get("config")
        if self._disables_kv_cache and getattr(config, "use_cache", None) is True:
            if id(config) not in self._config_copies:
                self._config_copies[id(config)] = copy.copy(config)
                self._config_copies[id(config)].use_cache = False
            parent_copy.__dict__["config"] = self._config_copies[id(config)]

    def get_container_copy(self, container: Any) -> ContainerCopy | None:
        """Return the copy of a parent's container, or None for another object."""
        return self._containers.get(id(container))

    def take_state(self, other: ProxyModel) -> None:
        """Take over the attributes, containers and buffers that a forward has left on another."""
        for (_, source), (_, target) in zip(
            other.parent_copies.values(), self.parent_copies.values(), strict=True
        ):
            sync_attributes(source, target)
            target._buffers.update(source._buffers)

    def sync_with_originals(self) -> None:
        """Copy `training`, plain attributes and container contents from the originals.

        Containers that hold modules keep their copies: these hold unit proxies.
        """
        config_copies = list(self._config_copies.values())
        self._config_copies = {}
        containers = {
            address: container
            for address, container in self._containers.items()
            if holds_module(container.original)
        }
        for name, (original, parent_copy) in self.parent_copies.items():
            seen_attributes, current = self._seen_attributes[name], vars(original)
            if are_same_objects(seen_attributes, current) and are_same_objects(
                seen_attributes.values(), current.values()
            ):
                # Nearly always: nobody has set an attribute since, and what a forward sets on the
                # copy is undone. But the configuration itself may have changed.
                config = parent_copy.__dict__.get("config")
                if any(config is config_copy for config_copy in config_copies):
                    parent_copy.__dict__["config"] = current["config"]
            else:
                self._seen_attributes[name] = dict(current)
                # A `forward` that was assigned to the model, or removed again, holds modules.
                for key in sync_attributes(original, parent_copy):
                    if current[key] is not seen_attributes.get(key):
                        copies = {id(module): copy for module, copy in self._replacements}
                        parent_copy.__dict__[key] = _map_modules(current[key], copies)
                for key in seen_attributes.keys() - current.keys():
                    parent_copy.__dict__.pop(key, None)
            for key, value in iter_containers(original):
                if not holds_module(value):
                    container_copy = self._containers.get(id(value)) or ContainerCopy.from_original(
                        value, value
                    )
                    containers[id(value)] = container_copy
                    container_copy.sync_with_original()
                    parent_copy.__dict__[key] = container_copy.stage_copy
            self._disable_kv_cache(parent_copy)
        self._containers = containers

    # Called around every micro-batch of every stage, so it copies dicts and no tensors.
    @contextmanager
    def isolated_forward(
        self, reassigned_buffers: Sequence[str] = (), writes_originals: bool = True
    ) -> Iterator[None]:
        """Run one forward in this context and undo its side effects on the parents.

        Attributes, buffers and containers of the parent copies get their old values back, so that
        no micro-batch sees what another one left behind. The only exceptions are the
        `reassigned_buffers`: this stage assigns them, and their new tensors go to the originals,
        too, but for a recomputation.
        """
        copy_attributes = [parent_copy.__dict__ for _, parent_copy in self.parent_copies.values()]
        snapshots = [
            (dict(attributes), dict(attributes["_buffers"])) for attributes in copy_attributes
        ]
        try:
            yield
        finally:
            reassigned: list[tuple[nn.Module, str, Tensor | None]] = []
            for name in reassigned_buffers:
                path, _, key = name.rpartition(".")
                parent_copy = self.parent_copies[path][1]
                reassigned.append((parent_copy, key, parent_copy._buffers[key]))
            if writes_originals:
                self.write_back_buffers(reassigned_buffers)
            for attributes, (previous, buffers) in zip(copy_attributes, snapshots, strict=True):
                attributes.clear()
                attributes.update(previous)
                attributes["_buffers"].update(buffers)
            for container in self._containers.values():
                container.restore()
            for parent_copy, key, buffer in reassigned:
                parent_copy._buffers[key] = buffer

    def refresh_buffers(self, device: torch.device) -> None:
        """Copy the buffers of the originals again, after the model was cast to another dtype."""
        for original, parent_copy in self.parent_copies.values():
            for key in parent_copy._buffers.keys() & original._buffers.keys():
                buffer = original._buffers[key]
                parent_copy._buffers[key] = None if buffer is None else buffer.to(device)

    def write_back_buffers(self, buffers: Iterable[str]) -> None:
        """Assign buffers that the forward reassigned on the copies to the originals as well."""
        for name in buffers:
            path, _, key = name.rpartition(".")
            original, parent_copy = self.parent_copies[path]
            original._buffers[key] = parent_copy._buffers[key]


# Entries of a module's `__dict__` that differ between an original and its copy on purpose.
_COPY_OWNED_KEYS = ("_parameters", "_buffers", "_modules", COMPILED_CALL_ATTRIBUTE)


class UnitStateTracker:
    """Finds units that see an old state of what they share with the forward.

    The forward works on copies of the parents and of their containers, and a unit may hold the
    originals: a dict that it shares with the model, or the model itself. What the forward has
    changed on the copies is not there. An attribute that the forward sets on a unit is there, but
    for all stages and micro-batches at once.
    """

    def __init__(
        self,
        proxy_model: ProxyModel,
        units: Mapping[str, nn.Module],
        shared_containers: Mapping[str, Sequence[Any]],
    ) -> None:
        self._units = {name: list(unit.modules()) for name, unit in units.items()}
        copies = {id(pair[0]): pair for pair in proxy_model.parent_copies.values()}
        for original, parent in list(copies.values()):
            # Under torchrun the "original" is itself a copy, and a unit knows the user's module.
            copies[id(get_remote_members(original).original_ref())] = original, parent
        copies.pop(id(None), None)
        # By unit: copies of containers, and copies of parents that the unit refers to.
        self._containers, self._parents = dict[str, list[ContainerCopy]](), dict[str, list[Any]]()
        for name, modules in self._units.items():
            pairs = [copies[key] for key in find_held_objects(modules, copies)]
            self._parents[name] = [(parent, dict(vars(parent))) for _, parent in pairs]
            containers = [*shared_containers.get(name, ())]
            containers += [value for original, _ in pairs for value in vars(original).values()]
            self._containers[name] = [
                copy for c in containers if (copy := proxy_model.get_container_copy(c)) is not None
            ]
        self._attributes = {name: self._read_attributes(name) for name in units}
        # Units whose modules another unit refers to.
        owners = {id(module): name for name, modules in self._units.items() for module in modules}
        self._referred_units = {
            owners[key]
            for name, modules in self._units.items()
            for key in find_held_objects(modules, owners)
            if owners[key] != name
        }

    def is_stale(self, unit: str) -> bool:
        """Return whether the forward has changed something that the unit may read."""
        attributes = self._read_attributes(unit), self._attributes[unit]
        return not (
            all(has_same_state(copy.stage_copy, copy.snapshot) for copy in self._containers[unit])
            and all(has_same_state(vars(parent), old, 1) for parent, old in self._parents[unit])
            and all(has_same_state(*pair) for pair in zip(*attributes, strict=True))
        )

    def has_left_state(self, unit: str) -> bool:
        """Return whether a call of a unit has set attributes that another unit may read.

        The attributes after the call count as the unit's own.
        """
        before, self._attributes[unit] = self._attributes[unit], self._read_attributes(unit)
        pairs = zip(before, self._attributes[unit], strict=True)
        return unit in self._referred_units and not all(has_same_state(*p) for p in pairs)

    def _read_attributes(self, unit: str) -> list[dict[str, Any]]:
        return [copy_attributes(module) for module in self._units[unit]]


def _replace_held_modules(
    original: nn.Module, parent_copy: nn.Module, copies: Mapping[int, nn.Module]
) -> None:
    """Replace modules in plain attributes, lists and bound methods, which are not registered."""
    for key, value in original.__dict__.items():
        eager = get_eager_function(value)  # `model.forward = torch.compile(model.forward)`
        held = value if eager is None else eager
        if key not in _COPY_OWNED_KEYS and holds_module(held):
            parent_copy.__dict__[key] = _map_modules(held, copies)


def holds_module(value: Any, depth: int = 4) -> bool:
    """Return whether a value is a module or refers to one.

    Looks into lists, dicts, plain objects, bound methods, closures and partials. The depth is
    limited because a list may contain itself.
    """
    # Every stage asks this about every attribute of every parent, and most are plain values.
    if type(value) in _MODULE_FREE_TYPES or not depth:
        return False
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, _SEQUENCE_TYPES):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, _HOLDER_TYPES) and holds_module(item, depth - 1):
                return True
        return False
    if isinstance(value, MethodType):
        return isinstance(value.__self__, nn.Module)
    if is_state_object(value):
        # Objects in objects and functions in functions are left out: they may form a cycle.
        return any(holds_module(item) for item in vars(value).values() if not is_state_object(item))
    if isinstance(value, FunctionType):
        return any(
            holds_module(captured)
            for captured in iter_captured_values(value)
            if not isinstance(captured, FunctionType)
        )
    return isinstance(value, partial) and holds_module(
        (value.func, *value.args, *value.keywords.values()), depth - 1
    )


_MODULE_FREE_TYPES = PLAIN_TYPES | {set}
_SEQUENCE_TYPES = (list, tuple, dict)
# Items of lists and dicts that are looked into. Other items, such as numbers, are passed over.
_HOLDER_TYPES = (nn.Module, list, tuple, dict, partial, FunctionType, MethodType)


def _map_modules(value: Any, copies: Mapping[int, nn.Module]) -> Any:
    """Return the value with every module replaced by its copy; see `holds_module`."""
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if not holds_module(value):
        return value
    if isinstance(value, MethodType):
        owner = _map_modules(value.__self__, copies)
        # `block.forward` of a unit is a call of the unit.
        is_call = isinstance(owner, UnitProxy) and value.__func__ is getattr(
            type(value.__self__), "forward", None
        )
        return owner.forward if is_call else MethodType(value.__func__, owner)
    if isinstance(value, FunctionType):
        return rebind_function(value, copies)
    if isinstance(value, partial):
        args = [_map_modules(item, copies) for item in value.args]
        keywords = {key: _map_modules(item, copies) for key, item in value.keywords.items()}
        return partial(_map_modules(value.func, copies), *args, **keywords)
    if type(value) in (list, tuple):
        return type(value)(_map_modules(item, copies) for item in value)
    if type(value) is dict:
        return {key: _map_modules(item, copies) for key, item in value.items()}
    if is_state_object(value):
        object_copy = copy.copy(value)
        for key, item in vars(value).items():
            vars(object_copy)[key] = item if is_state_object(item) else _map_modules(item, copies)
        return object_copy
    return value


@dataclass(frozen=True)
class RemoteMembers:
    """The members of a parent that belong to other processes.

    Attributes:
        parameters: Remote tensors for the parameters of other processes, by name.
        buffers: The same for buffers.
        children: All children of the parent in their order, also those of other processes. Empty
            if the whole model is in this process.
        original_ref: Returns the user's module that the parent is a copy of, or None if that
            module no longer exists.
    """

    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    children: Mapping[str, nn.Module | None] = field(default_factory=dict)
    original_ref: Callable[[], nn.Module | None] = lambda: None


def get_remote_members(parent: nn.Module) -> RemoteMembers:
    """Return the members of a parent in other processes: none if the whole model is here."""
    remote: RemoteMembers = parent.__dict__.get(REMOTE_MEMBERS_KEY, _NO_REMOTE_MEMBERS)
    return remote


REMOTE_MEMBERS_KEY = "_elsewhere"  # the attribute of a parent that holds its RemoteMembers
_NO_REMOTE_MEMBERS = RemoteMembers()

_UNSYNCED_KEYS = frozenset((*_COPY_OWNED_KEYS, REMOTE_MEMBERS_KEY))


def sync_attributes(original: nn.Module, copy: nn.Module) -> list[str]:
    """Copy `training` and the other plain attributes of a module to its copy.

    Attributes that hold modules are left out: the copy has other modules there. Returns their
    names.
    """
    held = []
    for key, value in original.__dict__.items():
        if key in _UNSYNCED_KEYS:
            continue
        if holds_module(value):
            held.append(key)
        else:
            copy.__dict__[key] = value
    return held


def copy_sharing_tensors(module: nn.Module) -> nn.Module:
    """Return a copy of a module with the same parameters and buffers.

    A stage needs it if another stage calls the same module: the attributes are its own.
    """
    return copy_module_tree(module, lambda tensor: tensor)


def copy_attribute_tree(module: nn.Module, copies: dict[int, tuple[nn.Module, nn.Module]]) -> Any:
    """Return a copy of a module with attributes of its own, and the same tables of tensors.

    Submodules that are not unit proxies are copied, too. `copies` gets each module and its copy.
    """
    if isinstance(module, UnitProxy):
        return module
    if id(module) not in copies:
        module_copy: nn.Module = object.__new__(type(module))
        copies[id(module)] = module, module_copy
        module_copy.__dict__.update(module.__dict__)
        module_copy.__dict__["_modules"] = {
            name: None if child is None else copy_attribute_tree(child, copies)
            for name, child in module._modules.items()
        }
    return copies[id(module)][1]


def build_remote_tensor(tensor: Tensor, device: torch.device) -> RemoteTensor:
    """Return a placeholder for a parameter or buffer that another stage or process has."""
    remote_tensor = RemoteTensor.from_spec(TensorSpec.from_tensor(tensor), device, NO_VALUE)
    remote_tensor.sharding = Sharding.from_tensor(tensor)
    mark_as_parameter(remote_tensor, isinstance(tensor, nn.Parameter))
    return remote_tensor


def copy_module_tree(module: nn.Module, transform: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of a module and its submodules, with every tensor transformed.

    A tensor or module that occurs twice (tied weights) is transformed and copied once, so the copy
    is tied in the same way.
    """
    modules: dict[int, nn.Module] = {}
    map_once = cache(transform)  # tied tensors stay tied

    def copy_module(module: nn.Module) -> nn.Module:
        if id(module) in modules:
            return modules[id(module)]
        module_copy: nn.Module = object.__new__(type(module))
        modules[id(module)] = module_copy
        for key, value in module.__dict__.items():
            module_copy.__dict__[key] = map_once(value) if isinstance(value, Tensor) else value
        for key in ("_parameters", "_buffers"):
            members = getattr(module, key)
            module_copy.__dict__[key] = {
                name: None if tensor is None else map_once(tensor)
                for name, tensor in members.items()
            }
        module_copy.__dict__["_modules"] = {
            name: None if child is None else copy_module(child)
            for name, child in module._modules.items()
        }
        return module_copy

    return copy_module(module)

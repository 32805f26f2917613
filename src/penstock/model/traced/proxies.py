"""A model's parent modules, copied, so that each stage can run their forward by itself.

The units are not copied. Where a parent calls one, it calls a front: an object of the unit's class
with the unit's own attributes, whose call goes to whoever watches the forward. What a parent
sets on itself while it computes is the stage's own, whatever other threads do meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.traced.containers import (
    ContainerCopy,
    ReboundHooks,
    is_state_object,
    iter_captured_values,
    iter_containers,
    iter_lru_cached_methods,
)
from penstock.model.traced.containers import rebind_function as remade_function
from penstock.model.traced.interception import get_current_interceptor
from penstock.model.traced.remote_tensor import RemoteTensor, TensorSpec


class UnitProxy:
    """In a unit's place: a mix-in before the unit's own class."""

    _unit: str
    _target: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Whoever watches decides; if nobody does, as ever."""
        watcher = get_current_interceptor()
        if watcher is None:
            return self._target(*args, **kwargs)
        return watcher.intercept_unit(self._unit, self._target, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Called by itself, it is a call as well."""
        return self(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return build_unit_proxy, (self._unit, self._target)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return build_unit_proxy(self._unit, copy.deepcopy(self._target, memo))


class _FallbackUnitProxy(UnitProxy, nn.Module):
    """In the place of a unit whose class cannot be derived from."""

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self)._target, name)


def build_unit_proxy(name: str, module: nn.Module) -> nn.Module:
    """Of the unit's class, with the unit's own attributes."""
    own = {"_unit": name, "_target": module}
    kind = type(module)
    try:
        metaclass: Any = type(kind)
        made_of = metaclass(
            kind.__name__, (UnitProxy, kind), {"__module__": kind.__module__, **own}
        )
        made = object.__new__(made_of)
        made.__dict__ = module.__dict__
    except (TypeError, RuntimeError, AttributeError):
        made = type(kind.__name__, (_FallbackUnitProxy,), own)()
    assert isinstance(made, nn.Module)
    return made


class ProxyModel:
    """The copied parents: the model's forward can be run on them."""

    def __init__(self, model: nn.Module, proxies: Mapping[int, nn.Module]) -> None:
        self.parent_copies: dict[
            str, tuple[nn.Module, nn.Module]
        ] = {}  # by name: original and copy
        known = dict(proxies)
        self.model = self._copy_parent(model, "", known)
        self._containers: dict[int, ContainerCopy] = {}
        self._config_copies: dict[int, Any] = {}
        for original, own in self.parent_copies.values():
            _replace_held_modules(original, own, known)
            for key, box in iter_containers(own):
                theirs = original.__dict__[key]
                made = self._containers.setdefault(
                    id(theirs), ContainerCopy.from_original(theirs, box)
                )
                own.__dict__[key] = made.stage_copy
            self._disable_kv_cache(own)
        self.unit_hooks = self._find_unit_hooks(proxies.values())

    def _copy_parent(self, module: nn.Module, name: str, copies: dict[int, nn.Module]) -> nn.Module:
        if id(module) in copies:
            return copies[id(module)]
        made: nn.Module = object.__new__(type(module))
        copies[id(module)] = made
        self.parent_copies[name] = module, made
        made.__dict__.update(module.__dict__)
        for key, method, own in iter_lru_cached_methods(type(module)):
            made.__dict__.setdefault(key, MethodType(method, made) if own else method)
        made.__dict__["_compiled_call_impl"] = None  # what is compiled could not be followed
        rest = get_remote_members(module)
        made.__dict__["_parameters"] = {**module._parameters, **rest.parameters}
        made.__dict__["_buffers"] = {**module._buffers, **rest.buffers}
        made.__dict__["_modules"] = {
            key: None
            if child is None
            else self._copy_parent(child, f"{name}.{key}".strip("."), copies)
            for key, child in (rest.children or module._modules).items()
        }
        return made

    def _find_unit_hooks(self, proxies: Iterable[Any]) -> dict[str, ReboundHooks]:
        """Of units, those that know a parent or one of its lists."""
        own: dict[int, Any] = {id(original): own for original, own in self.parent_copies.values()}
        origins = [
            (get_remote_members(original).original_ref(), own)
            for original, own in self.parent_copies.values()
        ]
        own.update((id(origin), copy) for origin, copy in origins if origin is not None)
        own.update((at, box.stage_copy) for at, box in self._containers.items())
        found = {
            f._unit: ReboundHooks.for_unit(f._target, own)
            for f in proxies
            if isinstance(f, UnitProxy)
        }
        return {name: hooks for name, hooks in found.items() if hooks is not None}

    def _disable_kv_cache(self, parent_copy: nn.Module) -> None:
        """A cache of keys and values is filled inside units: a parent is told not to have one."""
        config = parent_copy.__dict__.get("config")
        if getattr(config, "use_cache", None) is True:
            if id(config) not in self._config_copies:
                self._config_copies[id(config)] = copy.copy(config)
                self._config_copies[id(config)].use_cache = False
            parent_copy.__dict__["config"] = self._config_copies[id(config)]

    def sync_with_originals(self) -> None:
        """Set what can be set on the originals: whether they train, and their own attributes."""
        self._config_copies = {}
        boxes = {at: box for at, box in self._containers.items() if holds_module(box.original)}
        for original, own in self.parent_copies.values():
            sync_attributes(original, own)
            for key, value in iter_containers(original):
                if not holds_module(value):
                    known = self._containers.get(id(value)) or ContainerCopy.from_original(
                        value, value
                    )
                    boxes[id(value)] = known
                    known.sync_with_original()
                    own.__dict__[key] = known.stage_copy
            self._disable_kv_cache(own)
        self._containers = boxes

    @contextmanager
    def isolated_forward(self, reassigned_buffers: Sequence[str] = ()) -> Iterator[None]:
        """Within, a forward runs: what it sets or fills is gone after it, but for some buffers."""
        owns = [own.__dict__ for _, own in self.parent_copies.values()]
        before = [(dict(attributes), dict(attributes["_buffers"])) for attributes in owns]
        try:
            yield
        finally:
            self.write_back_buffers(reassigned_buffers)
            for attributes, (then, buffers) in zip(owns, before, strict=True):
                attributes.clear()
                attributes.update(then)
                attributes["_buffers"].update(buffers)
            for box in self._containers.values():
                box.restore()
            for name in reassigned_buffers:
                path, _, key = name.rpartition(".")
                original, own = self.parent_copies[path]
                own._buffers[key] = original._buffers[key]

    def refresh_buffers(self, device: torch.device) -> None:
        """Take the originals' buffers anew: they were cast."""
        for original, own in self.parent_copies.values():
            for key in own._buffers.keys() & original._buffers.keys():
                buffer = original._buffers[key]
                own._buffers[key] = None if buffer is None else buffer.to(device)

    def write_back_buffers(self, buffers: Iterable[str]) -> None:
        """Buffers that the forward has assigned anew are the originals', too."""
        for name in buffers:
            path, _, key = name.rpartition(".")
            original, own = self.parent_copies[path]
            original._buffers[key] = own._buffers[key]


# What a copy has of its own.
_COPY_OWNED_KEYS = ("_parameters", "_buffers", "_modules", "_compiled_call_impl")


def _replace_held_modules(
    original: nn.Module, parent_copy: nn.Module, copies: Mapping[int, nn.Module]
) -> None:
    """Also in plain lists and bound methods, where nothing is registered."""
    for key, value in original.__dict__.items():
        if key not in _COPY_OWNED_KEYS and holds_module(value):
            parent_copy.__dict__[key] = _map_modules(value, copies)


def holds_module(value: Any) -> bool:
    """Is it a module, or a list of some, or a method of one?"""
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, list | tuple):
        return any(isinstance(one, nn.Module) for one in value)
    if isinstance(value, dict):
        return any(isinstance(one, nn.Module) for one in value.values())
    if isinstance(value, MethodType):
        return isinstance(value.__self__, nn.Module)
    if is_state_object(value):
        return any(holds_module(one) for one in vars(value).values() if not is_state_object(one))
    if isinstance(value, FunctionType):
        return any(
            holds_module(x) for x in iter_captured_values(value) if not isinstance(x, FunctionType)
        )
    return isinstance(value, partial) and holds_module((value.func, *value.args))


def _map_modules(value: Any, copies: Mapping[int, nn.Module]) -> Any:
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _map_modules(value.__self__, copies))
    if isinstance(value, FunctionType):
        return remade_function(value, copies)
    if isinstance(value, partial):
        args = [_map_modules(one, copies) for one in value.args]
        return partial(_map_modules(value.func, copies), *args, **value.keywords)
    if type(value) in (list, tuple):
        return type(value)(_map_modules(one, copies) for one in value)
    if type(value) is dict:
        return {key: _map_modules(one, copies) for key, one in value.items()}
    if is_state_object(value):
        own = copy.copy(value)
        for key, one in vars(value).items():
            vars(own)[key] = one if is_state_object(one) else _map_modules(one, copies)
        return own
    return value


@dataclass(frozen=True)
class RemoteMembers:
    """What a parent has in other processes, to look at, and all of its children in order.

    `origin` is the model's own module, of which the parent is a copy, if it is still there.
    """

    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    children: Mapping[str, nn.Module | None] = field(default_factory=dict)
    original_ref: Callable[[], nn.Module | None] = lambda: None


def get_remote_members(parent: nn.Module) -> RemoteMembers:
    """Nothing, if the whole model is here."""
    found: RemoteMembers = parent.__dict__.get(REMOTE_MEMBERS_KEY, _NO_REMOTE_MEMBERS)
    return found


REMOTE_MEMBERS_KEY = "_elsewhere"  # the attribute
_NO_REMOTE_MEMBERS = RemoteMembers()

_UNSYNCED_KEYS = frozenset((*_COPY_OWNED_KEYS, REMOTE_MEMBERS_KEY))


def sync_attributes(original: nn.Module, copy: nn.Module) -> None:
    """Whether it trains, and its own attributes; those with modules are the copy's own."""
    for key, value in original.__dict__.items():
        if key not in _UNSYNCED_KEYS and not holds_module(value):
            copy.__dict__[key] = value


def copy_sharing_tensors(module: nn.Module) -> nn.Module:
    """A copy with the same parameters and buffers: for a second stage that calls the module."""
    return copy_module_tree(module, lambda tensor: tensor)


def build_remote_tensor(tensor: Tensor, device: torch.device) -> RemoteTensor:
    """What stands for a parameter or buffer that is not here."""
    made = RemoteTensor.from_spec(TensorSpec.from_tensor(tensor), device, NO_VALUE)
    made._is_param = isinstance(tensor, nn.Parameter)
    return made


NO_VALUE = -1


def copy_module_tree(module: nn.Module, transform: Callable[[Tensor], Tensor]) -> nn.Module:
    """The tree copied, each tensor changed, and each once."""
    tensors: dict[int, Tensor] = {}
    modules: dict[int, nn.Module] = {}

    def map_once(tensor: Tensor) -> Tensor:
        if id(tensor) not in tensors:
            tensors[id(tensor)] = transform(tensor)
        return tensors[id(tensor)]

    def copy_module(module: nn.Module) -> nn.Module:
        if id(module) in modules:
            return modules[id(module)]
        made: nn.Module = object.__new__(type(module))
        modules[id(module)] = made
        for key, value in module.__dict__.items():
            made.__dict__[key] = map_once(value) if isinstance(value, Tensor) else value
        for key in ("_parameters", "_buffers"):
            held = getattr(module, key)
            made.__dict__[key] = {n: None if t is None else map_once(t) for n, t in held.items()}
        made.__dict__["_modules"] = {
            n: None if m is None else copy_module(m) for n, m in module._modules.items()
        }
        return made

    return copy_module(module)

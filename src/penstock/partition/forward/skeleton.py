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

from penstock.partition.forward.absent import Absent, Look
from penstock.partition.forward.boxes import Box, Hooks, boxes_of, is_state, known_to, uncached
from penstock.partition.forward.boxes import remade as remade_function
from penstock.partition.forward.watching import watcher_here


class Front:
    """In a unit's place: a mix-in before the unit's own class."""

    _unit: str
    _target: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Whoever watches decides; if nobody does, as ever."""
        watcher = watcher_here()
        if watcher is None:
            return self._target(*args, **kwargs)
        return watcher.unit(self._unit, self._target, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Called by itself, it is a call as well."""
        return self(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return front, (self._unit, self._target)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return front(self._unit, copy.deepcopy(self._target, memo))


class _Plain(Front, nn.Module):
    """In the place of a unit whose class cannot be derived from."""

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self)._target, name)


def front(name: str, module: nn.Module) -> nn.Module:
    """Of the unit's class, with the unit's own attributes."""
    own = {"_unit": name, "_target": module}
    kind = type(module)
    try:
        metaclass: Any = type(kind)
        made_of = metaclass(kind.__name__, (Front, kind), {"__module__": kind.__module__, **own})
        made = object.__new__(made_of)
        made.__dict__ = module.__dict__
    except (TypeError, RuntimeError, AttributeError):
        made = type(kind.__name__, (_Plain,), own)()
    assert isinstance(made, nn.Module)
    return made


class Skeleton:
    """The copied parents: the model's forward can be run on them."""

    def __init__(self, model: nn.Module, fronts: Mapping[int, nn.Module]) -> None:
        self.parents: dict[str, tuple[nn.Module, nn.Module]] = {}  # by name: original and copy
        known = dict(fronts)
        self.model = self._of(model, "", known)
        self._boxes: dict[int, Box] = {}
        self._configs: dict[int, Any] = {}
        for original, own in self.parents.values():
            _hold_copies(original, own, known)
            for key, box in boxes_of(own):
                theirs = original.__dict__[key]
                made = self._boxes.setdefault(id(theirs), Box.of(theirs, box))
                own.__dict__[key] = made.own
            self._uncache(own)
        self.hooks = self._hooks(fronts.values())

    def _of(self, module: nn.Module, name: str, known: dict[int, nn.Module]) -> nn.Module:
        if id(module) in known:
            return known[id(module)]
        made: nn.Module = object.__new__(type(module))
        known[id(module)] = made
        self.parents[name] = module, made
        made.__dict__.update(module.__dict__)
        for key, method, own in uncached(type(module)):
            made.__dict__.setdefault(key, MethodType(method, made) if own else method)
        made.__dict__["_compiled_call_impl"] = None  # what is compiled could not be followed
        rest = elsewhere(module)
        made.__dict__["_parameters"] = {**module._parameters, **rest.parameters}
        made.__dict__["_buffers"] = {**module._buffers, **rest.buffers}
        made.__dict__["_modules"] = {
            key: None if child is None else self._of(child, f"{name}.{key}".strip("."), known)
            for key, child in (rest.children or module._modules).items()
        }
        return made

    def _hooks(self, fronts: Iterable[Any]) -> dict[str, Hooks]:
        """Of units, those that know a parent or one of its lists."""
        own: dict[int, Any] = {id(original): own for original, own in self.parents.values()}
        origins = [(elsewhere(original).origin(), own) for original, own in self.parents.values()]
        own.update((id(origin), copy) for origin, copy in origins if origin is not None)
        own.update((at, box.own) for at, box in self._boxes.items())
        found = {f._unit: Hooks.of(f._target, own) for f in fronts if isinstance(f, Front)}
        return {name: hooks for name, hooks in found.items() if hooks is not None}

    def _uncache(self, own: nn.Module) -> None:
        """A cache of keys and values is filled inside units: a parent is told not to have one."""
        config = own.__dict__.get("config")
        if getattr(config, "use_cache", None) is True:
            if id(config) not in self._configs:
                self._configs[id(config)] = copy.copy(config)
                self._configs[id(config)].use_cache = False
            own.__dict__["config"] = self._configs[id(config)]

    def follow(self) -> None:
        """Set what can be set on the originals: whether they train, and their own attributes."""
        self._configs = {}
        boxes = {at: box for at, box in self._boxes.items() if holds_module(box.original)}
        for original, own in self.parents.values():
            follow(original, own)
            for key, value in boxes_of(original):
                if not holds_module(value):
                    known = self._boxes.get(id(value)) or Box.of(value, value)
                    boxes[id(value)] = known
                    known.follow()
                    own.__dict__[key] = known.own
            self._uncache(own)
        self._boxes = boxes

    @contextmanager
    def running(self, anew: Sequence[str] = ()) -> Iterator[None]:
        """Within, a forward runs: what it sets or fills is gone after it, but for some buffers."""
        owns = [own.__dict__ for _, own in self.parents.values()]
        before = [(dict(attributes), dict(attributes["_buffers"])) for attributes in owns]
        try:
            yield
        finally:
            self.hand_back(anew)
            for attributes, (then, buffers) in zip(owns, before, strict=True):
                attributes.clear()
                attributes.update(then)
                attributes["_buffers"].update(buffers)
            for box in self._boxes.values():
                box.restore()
            for name in anew:
                path, _, key = name.rpartition(".")
                original, own = self.parents[path]
                own._buffers[key] = original._buffers[key]

    def refresh(self, device: torch.device) -> None:
        """Take the originals' buffers anew: they were cast."""
        for original, own in self.parents.values():
            for key in own._buffers.keys() & original._buffers.keys():
                buffer = original._buffers[key]
                own._buffers[key] = None if buffer is None else buffer.to(device)

    def hand_back(self, buffers: Iterable[str]) -> None:
        """Buffers that the forward has assigned anew are the originals', too."""
        for name in buffers:
            path, _, key = name.rpartition(".")
            original, own = self.parents[path]
            original._buffers[key] = own._buffers[key]


# What a copy has of its own.
_KEPT = ("_parameters", "_buffers", "_modules", "_compiled_call_impl")


def _hold_copies(original: nn.Module, own: nn.Module, made: Mapping[int, nn.Module]) -> None:
    """Also in plain lists and bound methods, where nothing is registered."""
    for key, value in original.__dict__.items():
        if key not in _KEPT and holds_module(value):
            own.__dict__[key] = _mapped(value, made)


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
    if is_state(value):
        return any(holds_module(one) for one in vars(value).values() if not is_state(one))
    if isinstance(value, FunctionType):
        return any(holds_module(x) for x in known_to(value) if not isinstance(x, FunctionType))
    return isinstance(value, partial) and holds_module((value.func, *value.args))


def _mapped(value: Any, made: Mapping[int, nn.Module]) -> Any:
    if isinstance(value, nn.Module):
        return made.get(id(value), value)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _mapped(value.__self__, made))
    if isinstance(value, FunctionType):
        return remade_function(value, made)
    if isinstance(value, partial):
        args = [_mapped(one, made) for one in value.args]
        return partial(_mapped(value.func, made), *args, **value.keywords)
    if type(value) in (list, tuple):
        return type(value)(_mapped(one, made) for one in value)
    if type(value) is dict:
        return {key: _mapped(one, made) for key, one in value.items()}
    if is_state(value):
        own = copy.copy(value)
        for key, one in vars(value).items():
            vars(own)[key] = one if is_state(one) else _mapped(one, made)
        return own
    return value


@dataclass(frozen=True)
class Elsewhere:
    """What a parent has in other processes, to look at, and all of its children in order.

    `origin` is the model's own module, of which the parent is a copy, if it is still there.
    """

    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    children: Mapping[str, nn.Module | None] = field(default_factory=dict)
    origin: Callable[[], nn.Module | None] = lambda: None


def elsewhere(parent: nn.Module) -> Elsewhere:
    """Nothing, if the whole model is here."""
    found: Elsewhere = parent.__dict__.get(ELSEWHERE, _NOTHING)
    return found


ELSEWHERE = "_elsewhere"  # the attribute
_NOTHING = Elsewhere()

_NOT_FOLLOWED = frozenset((*_KEPT, ELSEWHERE))


def follow(original: nn.Module, copy: nn.Module) -> None:
    """Whether it trains, and its own attributes; those with modules are the copy's own."""
    for key, value in original.__dict__.items():
        if key not in _NOT_FOLLOWED and not holds_module(value):
            copy.__dict__[key] = value


def twin(module: nn.Module) -> nn.Module:
    """A copy with the same parameters and buffers: for a second stage that calls the module."""
    return remade(module, lambda tensor: tensor)


def absent_of(tensor: Tensor, device: torch.device) -> Absent:
    """What stands for a parameter or buffer that is not here."""
    made = Absent.of(Look.of(tensor), device, NOWHERE)
    made._is_param = isinstance(tensor, nn.Parameter)
    return made


NOWHERE = -1


def remade(module: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """The tree copied, each tensor changed, and each once."""
    tensors: dict[int, Tensor] = {}
    modules: dict[int, nn.Module] = {}

    def changed(tensor: Tensor) -> Tensor:
        if id(tensor) not in tensors:
            tensors[id(tensor)] = change(tensor)
        return tensors[id(tensor)]

    def of(module: nn.Module) -> nn.Module:
        if id(module) in modules:
            return modules[id(module)]
        made: nn.Module = object.__new__(type(module))
        modules[id(module)] = made
        for key, value in module.__dict__.items():
            made.__dict__[key] = changed(value) if isinstance(value, Tensor) else value
        for key in ("_parameters", "_buffers"):
            held = getattr(module, key)
            made.__dict__[key] = {n: None if t is None else changed(t) for n, t in held.items()}
        made.__dict__["_modules"] = {
            n: None if m is None else of(m) for n, m in module._modules.items()
        }
        return made

    return of(module)

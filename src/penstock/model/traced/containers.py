"""Lists, dicts and hooks through which a forward passes values besides its return values.

A model may collect tensors on the side: `self.hidden_states.append(x)` in a parent, a forward hook
that fills a list, a unit that writes into a dict it was called with. Every stage runs the parents'
forward, so this code runs once per stage. Three mechanisms keep it correct:

1. **Copies.** Each stage has its own copies of the parents' containers (`ContainerCopy`). They are
   restored after each micro-batch, so no value of one micro-batch is seen by another.
2. **Rebinding.** A hook or closure that refers to an original parent or container is replaced by a
   copy of the function that refers to the stage's own (`rebind_function`, `ReboundHooks`).
3. **Container updates.** If a unit changes a list or dict that it was called with, the change is
   part of the unit's output (`OutputWithContainerUpdates`), and every stage applies it.

A *container* here is a list, dict, set or deque, or a plain object that holds state for the model's
author (`is_state_object`).
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import _lru_cache_wrapper, partial
from inspect import getattr_static
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from penstock.fingerprint import are_same_objects
from penstock.state_copy import LIBRARY_PACKAGES
from penstock.torch_compat import get_eager_function

_CONTAINER_TYPES = frozenset((list, dict, set, OrderedDict, defaultdict, deque))
# The types of most attributes. Their values are not containers, and do not refer to modules.
PLAIN_TYPES = frozenset(
    (type(None), bool, int, float, str, torch.dtype, torch.device, Tensor, nn.Parameter)
)
MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)  # attributes of PyTorch, such as `_buffers`
# The hooks of a module, by kind.
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Replacements = Mapping[int, Any]  # `id(original)` -> the object that a stage has in its place


# ---- copies of the parents' containers ---------------------------------------------------------


@dataclass
class ContainerCopy:
    """A stage's own copy of a container, and a snapshot of its contents to restore."""

    original: Any
    stage_copy: Any
    snapshot: Any

    @staticmethod
    def from_original(original: Any, contents: Any) -> ContainerCopy:
        """Return a copy of `original` that holds `contents`.

        The contents differ from those of the original if it holds modules: the stage's copy holds
        the proxies of these.
        """
        return ContainerCopy(original, copy_container(contents), copy_container(contents))

    def sync_with_original(self) -> None:
        """Take over the current contents of the original."""
        if not (_is_empty(self.original) and _is_empty(self.snapshot)):
            self.snapshot = copy_container(self.original)
        self.restore()

    def restore(self) -> None:
        """Set the contents back to the snapshot."""
        if not (_is_empty(self.snapshot) and _is_empty(self.stage_copy)):
            set_contents(self.stage_copy, copy_container(self.snapshot))


def _is_empty(container: Any) -> bool:
    return type(container) in _CONTAINER_TYPES and not container


def iter_containers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attribute names and values of the containers that a module holds."""
    for key, value in module.__dict__.items():
        if key not in MODULE_ATTRIBUTES and (
            type(value) in _CONTAINER_TYPES or is_state_object(value)
        ):
            yield key, value


def is_state_object(value: Any) -> bool:
    """Return whether a value is a plain object in which a forward may keep state.

    That is a `SimpleNamespace`, or an instance of a class of the model's author that has no base
    class, no `__call__` and no special behaviour when it is copied or assigned to.
    """
    kind = type(value)
    if kind in PLAIN_TYPES or kind in _CONTAINER_TYPES:
        return False
    if kind is SimpleNamespace:
        return True
    if not hasattr(value, "__dict__") or callable(value) or isinstance(value, _SPECIAL_TYPES):
        return False
    plain = kind.__mro__[1:] == (object,) and not _SPECIAL_METHODS & vars(kind).keys()
    return plain and kind.__module__.partition(".")[0] not in LIBRARY_PACKAGES


_SPECIAL_TYPES = (Enum, BaseException)
# An object with one of these cannot be copied and restored attribute by attribute.
_SPECIAL_METHODS = frozenset(
    ("__copy__", "__del__", "__enter__", "__getattr__", "__reduce__", "__setattr__", "__slots__")
)


def _snapshot_containers(containers: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return each container with a shallow copy, also the containers inside state objects."""
    outer = list(containers)
    inner = [
        value
        for container in outer
        if is_state_object(container)
        for value in vars(container).values()
    ]
    return [
        (container, copy.copy(container))
        for container in (*outer, *(value for value in inner if type(value) in _CONTAINER_TYPES))
    ]


def track_container_changes(containers: Iterable[Any]) -> Callable[[], bool]:
    """Return a function that tells whether any of the containers has changed since now."""
    before = _snapshot_containers(containers)
    return lambda: not all(has_same_contents(container, snapshot) for container, snapshot in before)


def find_shared_containers(
    parents: Sequence[nn.Module], units: Mapping[str, nn.Module]
) -> dict[str, list[Any]]:
    """Return, by unit, the containers through which a tensor could leave the unit.

    These are the containers that the unit shares with a parent or with another unit, and the
    attributes of all parents. The parents themselves are listed under the empty name.
    """
    held: dict[str, dict[int, Any]] = {name: {} for name in ("", *units)}
    unit_modules = [(name, module) for name, unit in units.items() for module in unit.modules()]
    for name, module in [*(("", parent) for parent in parents), *unit_modules]:
        held[name].update((id(container), container) for _, container in iter_containers(module))
    counts = Counter(key for containers in held.values() for key in containers)
    return {
        name: [
            *(container for key, container in containers.items() if counts[key] > 1),
            *map(vars, parents),
        ]
        for name, containers in held.items()
    }


def has_same_contents(container: Any, snapshot: Any) -> bool:
    """Return whether a container holds the same objects as a snapshot of it.

    Items are compared by identity: `==` on tensors compares their contents and returns a tensor.
    """
    if isinstance(container, set):
        return bool(container == snapshot)
    if is_state_object(container):
        return has_same_contents(vars(container), vars(snapshot))
    if isinstance(container, dict):
        return are_same_objects(container, snapshot) and are_same_objects(
            container.values(), snapshot.values()
        )
    return are_same_objects(container, snapshot)


def has_same_state(value: Any, other: Any, depth: int = 3) -> bool:
    """Return whether two containers hold the same objects, in containers of the same structure.

    Plain values are compared by value: a forward often sets one to what it was.
    """
    if value is other:
        return True
    if depth and is_state_object(value) and type(value) is type(other):
        return has_same_state(vars(value), vars(other), depth)
    if type(value) is not type(other) or type(value) not in _CONTAINER_TYPES:
        return isinstance(value, bool | int | float | str) and bool(value == other)
    if isinstance(value, set) or not depth or len(value) != len(other):
        return bool(value == other) if isinstance(value, set) else False
    if isinstance(value, dict):
        pairs = [(item, other.get(key)) for key, item in value.items()]
        return value.keys() == other.keys() and all(has_same_state(*p, depth - 1) for p in pairs)
    return all(has_same_state(*p, depth - 1) for p in zip(value, other, strict=True))


def find_held_objects(modules: Iterable[nn.Module], objects: Mapping[int, Any]) -> list[int]:
    """Return the keys of those objects that modules hold in plain attributes.

    The keys are the ids of the objects. An attribute may be such an object, a list or tuple of
    them, or a function or method that refers to one.
    """
    values = [
        value
        for module in modules
        for key, value in vars(module).items()
        if key not in MODULE_ATTRIBUTES
        and not isinstance(value, bool | int | float | str | None)
        and _refers_to(value, objects)
    ]
    return [key for key in objects if any(_refers_to(value, {key: _HELD}) for value in values)]


_HELD = object()


def copy_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are not PyTorch's own, with copies of containers."""
    attributes = vars(module).items()
    return {k: copy_container(v) for k, v in attributes if k not in MODULE_ATTRIBUTES}


def _refers_to(value: Any, objects: Mapping[int, Any]) -> bool:
    return _rebind_value(value, objects, 6) is not value


def copy_container(value: Any, depth: int = 3) -> Any:
    """Return a copy of a container and of the containers inside it, up to a nesting depth.

    Everything else, tensors and modules above all, is not copied.
    """
    kind = type(value)
    if kind in PLAIN_TYPES or not depth:
        return value
    if kind is set:
        return set(value)
    if kind in _CONTAINER_TYPES:
        if kind is list or kind is deque:
            return kind([copy_container(item, depth - 1) for item in value])
        container_copy = (
            defaultdict(value.default_factory) if isinstance(value, defaultdict) else kind()
        )
        for key, item in value.items():
            container_copy[key] = copy_container(item, depth - 1)
        return container_copy
    if is_state_object(value):
        object_copy = copy.copy(value)
        attributes = vars(object_copy)
        for key, item in vars(value).items():
            attributes[key] = copy_container(item, depth - 1)
        return object_copy
    return value


def set_contents(container: Any, contents: Any) -> None:
    """Replace the contents of a container in place. Its identity stays."""
    if is_state_object(container):
        container, contents = vars(container), vars(contents)
    container.clear()
    if isinstance(container, _SEQUENCE_TYPES):
        container.extend(contents)
    else:
        container.update(contents)


_SEQUENCE_TYPES = (list, deque)


# ---- rebinding functions -----------------------------------------------------------------------
#
# A hook such as `lambda module, args, output: model.hidden.append(output)` closes over the original
# model. On a stage it must fill the list of the stage's copy. A function cannot be changed for one
# thread only, so a new function is made from the same code with other closure cells and defaults.


def rebind_function(function: Any, replacements: Replacements, depth: int = 6) -> Any:
    """Return a function that refers to the replacements where `function` refers to originals.

    Returns `function` itself if it refers to none of them. Bound methods, `functools.partial`,
    closures and default arguments are handled, also of the functions that `function` refers to. The
    depth is limited because a function may refer to itself.
    """
    if not depth:
        return function
    if isinstance(function, MethodType) and id(function.__self__) in replacements:
        return MethodType(function.__func__, replacements[id(function.__self__)])
    if isinstance(function, partial):
        inner = rebind_function(function.func, replacements, depth - 1)
        args = [_rebind_value(arg, replacements, depth) for arg in function.args]
        keywords = {
            key: _rebind_value(arg, replacements, depth) for key, arg in function.keywords.items()
        }
        current, previous = (inner, *args, *keywords.values()), (function.func, *function.args)
        is_same = are_same_objects(current, (*previous, *function.keywords.values()))
        return function if is_same else partial(inner, *args, **keywords)
    if not isinstance(function, FunctionType):
        return function
    cells = tuple(_rebind_cell(cell, replacements, depth) for cell in function.__closure__ or ())
    defaults = tuple(
        _rebind_value(default, replacements, depth) for default in function.__defaults__ or ()
    )
    if are_same_objects(
        (*cells, *defaults), (*(function.__closure__ or ()), *(function.__defaults__ or ()))
    ):
        return function
    rebound = FunctionType(
        function.__code__, function.__globals__, function.__name__, defaults or None, cells or None
    )
    rebound.__kwdefaults__ = function.__kwdefaults__
    return rebound


def _rebind_cell(cell: CellType, replacements: Replacements, depth: int) -> CellType:
    """Return a closure cell with rebound contents, or the cell itself if nothing changes."""
    try:
        contents = cell.cell_contents
    except ValueError:  # an empty cell: the variable has no value yet
        return cell
    rebound = _rebind_value(contents, replacements, depth)
    return cell if rebound is contents else CellType(rebound)


def _rebind_value(value: Any, replacements: Replacements, depth: int) -> Any:
    """Return the replacement of an object, or rebind the functions inside a list or tuple."""
    if id(value) in replacements:
        return replacements[id(value)]
    if type(value) in (list, tuple):
        if depth <= 1:
            return value
        items = [_rebind_value(item, replacements, depth - 1) for item in value]
        return value if are_same_objects(items, value) else type(value)(items)
    return rebind_function(value, replacements, depth - 1)


def iter_undecorated_methods(module_class: type) -> Iterator[tuple[str, Any, bool]]:
    """Yield the methods of a class that are cached or compiled, without their decorators.

    The copies of a parent on several stages would share the cache of `functools.lru_cache`, and one
    stage would find tensors of another in it. In a method that `torch.compile` decorates, no unit
    can be intercepted. Yields the name, the undecorated function, and whether it takes `self`.
    """
    for name in {name for base in module_class.__mro__ for name in vars(base)}:
        method = getattr(module_class, name, None)
        if isinstance(method, _lru_cache_wrapper) or _wraps_lru_cache(method):
            takes_self = not isinstance(
                getattr_static(module_class, name), staticmethod | classmethod
            )
            yield name, method.__wrapped__, takes_self
        elif (eager := get_eager_function(method)) is not None:
            yield name, eager, True


def _wraps_lru_cache(method: Any) -> TypeGuard[Any]:
    """Return whether a function was made by a decorator that uses `lru_cache` internally."""
    if not isinstance(method, FunctionType) or not hasattr(method, "__wrapped__"):
        return False
    contents = (cell.cell_contents for cell in method.__closure__ or ())
    return any(isinstance(value, _lru_cache_wrapper) for value in contents)


# ---- hooks of units ----------------------------------------------------------------------------
#
# Units are not copied, so their hooks still refer to the original parents. While a stage runs a
# unit, the hooks that refer to a parent are exchanged for hooks that refer to the stage's copy.


@dataclass(frozen=True)
class ReboundHooks:
    """The hooks of a unit and its submodules, rebound to a stage's own parents."""

    # The path of a module in the unit, the name of its hook dict, and the dict with the new hooks.
    replacements: tuple[tuple[str, str, Any], ...]

    @staticmethod
    def for_unit(unit: nn.Module, replacements: Replacements) -> ReboundHooks | None:
        """Rebind the hooks of a unit. Return None if no hook refers to a parent."""
        changed_hooks = []
        for path, module in unit.named_modules():
            for key in HOOK_TABLES[:2]:
                hooks = module.__dict__.get(key)
                if hooks:
                    rebound = OrderedDict(
                        (hook_id, rebind_function(hook, replacements))
                        for hook_id, hook in hooks.items()
                    )
                    if any(rebound[hook_id] is not hook for hook_id, hook in hooks.items()):
                        changed_hooks.append((path, key, rebound))
        return ReboundHooks(tuple(changed_hooks)) if changed_hooks else None

    @contextmanager
    def install(self, unit: nn.Module) -> Iterator[None]:
        """Exchange the hooks of the unit for the duration of the context."""
        targets = [
            (unit.get_submodule(path).__dict__, key, hooks)
            for path, key, hooks in self.replacements
        ]
        before = [attributes[key] for attributes, key, _ in targets]
        for attributes, key, hooks in targets:
            attributes[key] = hooks
        try:
            yield
        finally:
            for (attributes, key, _), old_hooks in zip(targets, before, strict=True):
                attributes[key] = old_hooks

    def get_forward_hooks(self, unit: nn.Module) -> Mapping[int, Any]:
        """Return the forward hooks of the unit itself, rebound where they refer to a parent."""
        unit_hooks = (
            hooks for path, key, hooks in self.replacements if not path and key == "_forward_hooks"
        )
        return next(unit_hooks, unit._forward_hooks)

    def wrap(self, unit: nn.Module) -> Callable[..., Any]:
        """Return a function that runs a unit with its rebound hooks."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.install(unit):
                return unit(*args, **kwargs)

        return run


NO_REBOUND_HOOKS = ReboundHooks(())


# ---- containers that a unit is called with -----------------------------------------------------
#
# A unit runs on copies of its arguments, in which remote tensors are replaced by received ones. If
# it appends to a list among them, the caller's list stays as it was. So the new contents of changed
# containers are a part of the unit's output, and every stage writes them into the caller's
# containers, even if the unit runs on another stage. Containers are identified by their position in
# a walk through all arguments.

_LIST_TYPES = (list, deque)
_DICT_TYPES = (dict, OrderedDict, defaultdict, UserDict)


class OutputWithContainerUpdates(NamedTuple):
    """The output of a unit that changed containers among its arguments."""

    output: Any
    container_updates: dict[int, Any]  # position of a container -> its new contents


class _ContainerRef(NamedTuple):
    """An item of a container that is itself a container among the arguments."""

    position: int


def call_tracking_containers(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a unit. If it changed containers among its arguments, return their contents as well.

    The result is then an `OutputWithContainerUpdates`, else the output itself.
    """
    containers = list(_iter_nested_containers((*args, *kwargs.values())))
    if not containers:
        return target(*args, **kwargs)
    before = [_get_contents(container) for container in containers]
    output = target(*args, **kwargs)
    refs = {id(container): _ContainerRef(position) for position, container in enumerate(containers)}
    updates = {
        position: _map_contents(contents, lambda item: refs.get(id(item), item))
        for position, (container, snapshot) in enumerate(zip(containers, before, strict=True))
        if not has_same_contents(contents := _get_contents(container), snapshot)
    }
    return OutputWithContainerUpdates(output, updates) if updates else output


def apply_container_updates(output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write container updates into the caller's arguments, and return the plain output."""
    if not isinstance(output, OutputWithContainerUpdates):
        return output
    containers = list(_iter_nested_containers((*args, *kwargs.values())))
    for position, contents in output.container_updates.items():
        container = containers[position]
        if type(container) not in (*_LIST_TYPES, *_DICT_TYPES):
            container = vars(container)
        set_contents(
            container,
            _map_contents(
                contents, lambda x: containers[x.position] if isinstance(x, _ContainerRef) else x
            ),
        )
    return output.output


def _iter_nested_containers(value: Any) -> Iterator[Any]:
    """Yield the containers inside a value, dataclass instances included, in a fixed order."""
    if value is None or isinstance(value, Tensor | bool | int | float | str):
        return
    kind = type(value)
    is_record = is_dataclass(value) and not isinstance(value, type | dict)
    if kind in _LIST_TYPES or kind in _DICT_TYPES or is_record:
        yield value
    if isinstance(value, tuple | list | deque):
        items = list(value)
    elif isinstance(value, dict | UserDict):
        items = list(value.values())
    else:
        items = list(vars(value).values()) if is_record and hasattr(value, "__dict__") else []
    for item in items:
        yield from _iter_nested_containers(item)


def _get_contents(container: Any) -> list[Any] | dict[Any, Any]:
    """Return the items of a container as a new list or dict."""
    if type(container) in _LIST_TYPES:
        return list(container)
    if type(container) in _DICT_TYPES:
        return dict(container)
    return dict(getattr(container, "__dict__", {}))


def _map_contents(contents: Any, transform: Callable[[Any], Any]) -> Any:
    """Return the contents of a container with each item transformed."""
    if isinstance(contents, dict):
        return {key: transform(item) for key, item in contents.items()}
    return [transform(item) for item in contents]

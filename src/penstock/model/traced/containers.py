"""What a forward fills by the way: lists and dicts of its parents, also through hooks.

Every stage runs the parents' forward by itself, so each has lists and dicts of its own, and hooks
that fill these. After each run they are as they were before: a mask that was kept for the next time
is made again, and no value of one micro-batch is found by another.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import _lru_cache_wrapper, partial
from inspect import getattr_static
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, nn

_CONTAINER_TYPES = (list, dict, set, OrderedDict, defaultdict, deque)
_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)  # hooks and the like, which torch fills
_HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks")

Replacements = Mapping[int, Any]  # by the identity of an original: what a stage has in its place


@dataclass
class ContainerCopy:
    """A list or a dict that a stage has of its own."""

    original: Any
    stage_copy: Any
    snapshot: Any

    @staticmethod
    def from_original(original: Any, contents: Any) -> ContainerCopy:
        """`inside` is what the stage finds in it."""
        return ContainerCopy(original, _copy_container(contents), _copy_container(contents))

    def sync_with_original(self) -> None:
        """The same in it as the original has now."""
        self.snapshot = _copy_container(self.original)
        self.restore()

    def restore(self) -> None:
        """As it was."""
        set_contents(self.stage_copy, _copy_container(self.snapshot))


def iter_containers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's own lists, dicts and objects that hold its state, by their names."""
    for key, value in module.__dict__.items():
        if key not in _MODULE_ATTRIBUTES and (
            type(value) in _CONTAINER_TYPES or is_state_object(value)
        ):
            yield key, value


def is_state_object(value: Any) -> bool:
    """Is it an object of the author's, in which a forward may keep something, and nothing more?"""
    kind = type(value)
    if kind is SimpleNamespace:
        return True
    if not hasattr(value, "__dict__") or callable(value) or isinstance(value, Enum | BaseException):
        return False
    plain = kind.__mro__[1:] == (object,) and not _SPECIAL_METHODS & vars(kind).keys()
    return plain and kind.__module__.partition(".")[0] not in _LIBRARY_PACKAGES


# What it does when it is copied, or set, is its own affair.
_SPECIAL_METHODS = frozenset(
    ("__copy__", "__del__", "__enter__", "__getattr__", "__reduce__", "__setattr__", "__slots__")
)
_LIBRARY_PACKAGES = frozenset((*sys.stdlib_module_names, "numpy", "peft", "torch", "transformers"))


@contextmanager
def preserve_containers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within, what is put into modules' own lists and dicts is taken out again."""
    before = _snapshot_containers(box for module in modules for _, box in iter_containers(module))
    try:
        yield
    finally:
        for box, then in before:
            if not has_same_contents(box, then):
                set_contents(box, then)


def _snapshot_containers(containers: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Each with a copy; also those in objects."""
    found = list(containers)
    inner = [one for box in found if is_state_object(box) for one in vars(box).values()]
    return [
        (box, copy.copy(box))
        for box in (*found, *(b for b in inner if type(b) in _CONTAINER_TYPES))
    ]


def track_container_changes(containers: Iterable[Any]) -> Callable[[], bool]:
    """Asked later: has something been put into one of them since?"""
    before = _snapshot_containers(containers)
    return lambda: not all(has_same_contents(box, then) for box, then in before)


def find_shared_containers(
    parents: Sequence[nn.Module], units: Mapping[str, nn.Module]
) -> dict[str, list[Any]]:
    """By units: what they hold that others hold as well, and the attributes of the parents."""
    held: dict[str, dict[int, Any]] = {name: {} for name in ("", *units)}
    inside = [(name, module) for name, unit in units.items() for module in unit.modules()]
    for name, module in [*(("", parent) for parent in parents), *inside]:
        held[name].update((id(box), box) for _, box in iter_containers(module))
    count = Counter(at for boxes in held.values() for at in boxes)
    return {
        name: [*(box for at, box in boxes.items() if count[at] > 1), *map(vars, parents)]
        for name, boxes in held.items()
    }


def has_same_contents(container: Any, snapshot: Any) -> bool:
    """By identity: there may be tensors."""
    if isinstance(container, set):
        return bool(container == snapshot)
    if is_state_object(container):
        return has_same_contents(vars(container), vars(snapshot))
    if len(container) != len(snapshot):
        return False
    pairs = zip(container, snapshot, strict=True)
    if isinstance(container, dict):
        pairs = zip([*container, *container.values()], [*snapshot, *snapshot.values()], strict=True)
    return all(a is b for a, b in pairs)


def _copy_container(value: Any, depth: int = 3) -> Any:
    """What it holds is the same, but for lists and dicts."""
    if depth and is_state_object(value):
        made = copy.copy(value)
        vars(made).update(
            (key, _copy_container(one, depth - 1)) for key, one in vars(value).items()
        )
        return made
    if type(value) not in _CONTAINER_TYPES or not depth:
        return value
    if isinstance(value, set):
        return set(value)
    if isinstance(value, list | deque):
        return type(value)(_copy_container(one, depth - 1) for one in value)
    made = defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()
    made.update((key, _copy_container(one, depth - 1)) for key, one in value.items())
    return made


def set_contents(container: Any, contents: Any) -> None:
    """Let it hold these, and nothing else."""
    if is_state_object(container):
        container, contents = vars(container), vars(contents)
    container.clear()
    if isinstance(container, list | deque):
        container.extend(contents)
    else:
        container.update(contents)


# ---- functions that know an original ------------------------------------------------------


def rebind_function(function: Any, replacements: Replacements, depth: int = 6) -> Any:
    """The same function for what stands in the originals' place; itself, if it knows none.

    Functions that it knows are made anew with it; not without end, as one may know itself.
    """
    if not depth:
        return function
    if isinstance(function, MethodType) and id(function.__self__) in replacements:
        return MethodType(function.__func__, replacements[id(function.__self__)])
    if isinstance(function, partial):
        inner = rebind_function(function.func, replacements, depth - 1)
        args = [_rebind_value(one, replacements, depth) for one in function.args]
        named = {
            key: _rebind_value(one, replacements, depth) for key, one in function.keywords.items()
        }
        now, before = (inner, *args, *named.values()), (function.func, *function.args)
        same = _all_identical(now, (*before, *function.keywords.values()))
        return function if same else partial(inner, *args, **named)
    if not isinstance(function, FunctionType):
        return function
    cells = tuple(_rebind_cell(cell, replacements, depth) for cell in function.__closure__ or ())
    defaults = tuple(_rebind_value(one, replacements, depth) for one in function.__defaults__ or ())
    if _all_identical(cells, function.__closure__) and _all_identical(
        defaults, function.__defaults__
    ):
        return function
    new = FunctionType(
        function.__code__, function.__globals__, function.__name__, defaults or None, cells or None
    )
    new.__kwdefaults__ = function.__kwdefaults__
    return new


def _all_identical(current: tuple[Any, ...], previous: tuple[Any, ...] | None) -> bool:
    return all(a is b for a, b in zip(current, previous or (), strict=True))


def iter_captured_values(function: FunctionType) -> Iterator[Any]:
    """What a function has from around it."""
    yield from function.__defaults__ or ()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing yet
            continue


def _rebind_cell(cell: CellType, replacements: Replacements, depth: int) -> CellType:
    try:
        inside = cell.cell_contents
    except ValueError:  # nothing yet
        return cell
    new = _rebind_value(inside, replacements, depth)
    return cell if new is inside else CellType(new)


def _rebind_value(value: Any, replacements: Replacements, depth: int) -> Any:
    if id(value) in replacements:
        return replacements[id(value)]
    if type(value) in (list, tuple):
        new = (
            [_rebind_value(one, replacements, depth - 1) for one in value]
            if depth > 1
            else list(value)
        )
        return value if _all_identical(tuple(new), tuple(value)) else type(value)(new)
    return rebind_function(value, replacements, depth - 1)


def iter_lru_cached_methods(module_class: type) -> Iterator[tuple[str, Any, bool]]:
    """Methods that remember what they gave, as they are without: they would remember for all.

    With each: is it called with the module itself?
    """
    for name in {name for base in module_class.__mro__ for name in vars(base)}:
        method = getattr(module_class, name, None)
        if isinstance(method, _lru_cache_wrapper) or _wraps_lru_cache(method):
            own = not isinstance(getattr_static(module_class, name), staticmethod | classmethod)
            yield name, method.__wrapped__, own


def _wraps_lru_cache(method: Any) -> TypeGuard[Any]:
    """A function around one that remembers, and which does so as well."""
    if not isinstance(method, FunctionType) or not hasattr(method, "__wrapped__"):
        return False
    cells = (cell.cell_contents for cell in method.__closure__ or ())
    return any(isinstance(inside, _lru_cache_wrapper) for inside in cells)


# ---- hooks of units -----------------------------------------------------------------------


@dataclass(frozen=True)
class ReboundHooks:
    """Of a unit and what is inside: those that know a parent, made anew for a stage's own."""

    replacements: tuple[
        tuple[str, str, Any], ...
    ]  # where in the unit, which, and what is there instead

    @staticmethod
    def for_unit(unit: nn.Module, replacements: Replacements) -> ReboundHooks | None:
        """None, if no hook knows a parent."""
        found = []
        for path, module in unit.named_modules():
            for key in _HOOK_ATTRIBUTES:
                hooks = module.__dict__.get(key)
                if hooks:
                    new = OrderedDict(
                        (at, rebind_function(hook, replacements)) for at, hook in hooks.items()
                    )
                    if any(new[at] is not hook for at, hook in hooks.items()):
                        found.append((path, key, new))
        return ReboundHooks(tuple(found)) if found else None

    @contextmanager
    def install(self, unit: nn.Module) -> Iterator[None]:
        """Within, they are the unit's."""
        places = [
            (unit.get_submodule(path).__dict__, key, new) for path, key, new in self.replacements
        ]
        before = [attributes[key] for attributes, key, _ in places]
        for attributes, key, new in places:
            attributes[key] = new
        try:
            yield
        finally:
            for (attributes, key, _), old in zip(places, before, strict=True):
                attributes[key] = old


def get_forward_hooks(unit: nn.Module, rebound_hooks: ReboundHooks | None) -> Mapping[int, Any]:
    """The forward hooks of a unit itself, for a stage."""
    new = rebound_hooks.replacements if rebound_hooks is not None else ()
    own = (hooks for path, key, hooks in new if not path and key == "_forward_hooks")
    return next(own, unit._forward_hooks)


def install_hooks(
    unit: nn.Module, rebound_hooks: ReboundHooks | None
) -> AbstractContextManager[None]:
    """Within, the unit computes with a stage's own hooks."""
    return nullcontext() if rebound_hooks is None else rebound_hooks.install(unit)


def wrap_with_hooks(unit: nn.Module, rebound_hooks: ReboundHooks | None) -> Callable[..., Any]:
    """The unit, with a stage's own hooks while it computes."""
    if rebound_hooks is None:
        return unit

    def run(*args: Any, **kwargs: Any) -> Any:
        with rebound_hooks.install(unit):
            return unit(*args, **kwargs)

    return run


# -------------------------------------------------------------------------------------------------
# Lists and dicts that a unit is given, and fills: what it puts there is a part of what it gives.
#
# A unit computes with copies of what it is given, in which the tensors are others. So its caller's
# lists and dicts are filled afterwards, on every stage, also where the unit does not run.
# -------------------------------------------------------------------------------------------------

_LIST_TYPES = (list, deque)
_DICT_TYPES = (dict, OrderedDict, defaultdict, UserDict)


class OutputWithContainerUpdates(NamedTuple):
    """What a unit gives, and what is in the boxes that it was given, of those that it changed."""

    output: Any
    container_updates: dict[int, Any]  # by their places among all that it was given


class _ContainerRef(NamedTuple):
    """In a box: another one of those that the unit was given."""

    position: int


def call_tracking_containers(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call it, with copies; a Filled, if it changed one of them."""
    boxes = list(_iter_nested_containers((*args, *kwargs.values())))
    if not boxes:
        return target(*args, **kwargs)
    before = [_get_contents(box) for box in boxes]
    found = target(*args, **kwargs)
    places = {id(box): _ContainerRef(place) for place, box in enumerate(boxes)}
    changed = {
        place: _map_contents(now, lambda one: places.get(id(one), one))
        for place, (box, then) in enumerate(zip(boxes, before, strict=True))
        if not has_same_contents(now := _get_contents(box), then)
    }
    return OutputWithContainerUpdates(found, changed) if changed else found


def apply_container_updates(output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the unit gives; the boxes of its caller's own have in them what the unit put there."""
    if not isinstance(output, OutputWithContainerUpdates):
        return output
    boxes = list(_iter_nested_containers((*args, *kwargs.values())))
    for place, now in output.container_updates.items():
        box = (
            boxes[place]
            if type(boxes[place]) in (*_LIST_TYPES, *_DICT_TYPES)
            else vars(boxes[place])
        )
        set_contents(
            box,
            _map_contents(now, lambda x: boxes[x.position] if isinstance(x, _ContainerRef) else x),
        )
    return output.output


def _iter_nested_containers(value: Any) -> Iterator[Any]:
    if value is None or isinstance(value, Tensor | bool | int | float | str):
        return
    kind = type(value)
    record = is_dataclass(value) and not isinstance(value, type | dict)
    if kind in _LIST_TYPES or kind in _DICT_TYPES or record:
        yield value
    if isinstance(value, tuple | list | deque):
        inner = list(value)
    elif isinstance(value, dict | UserDict):
        inner = list(value.values())
    else:
        inner = list(vars(value).values()) if record and hasattr(value, "__dict__") else []
    for one in inner:
        yield from _iter_nested_containers(one)


def _get_contents(container: Any) -> list[Any] | dict[Any, Any]:
    if type(container) in _LIST_TYPES:
        return list(container)
    if type(container) in _DICT_TYPES:
        return dict(container)
    return dict(getattr(container, "__dict__", {}))


def _map_contents(contents: Any, transform: Callable[[Any], Any]) -> Any:
    if isinstance(contents, dict):
        return {key: transform(one) for key, one in contents.items()}
    return [transform(one) for one in contents]

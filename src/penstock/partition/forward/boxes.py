"""What a forward fills by the way: lists and dicts of its parents, also through hooks.

Every stage runs the parents' forward by itself, so each has lists and dicts of its own, and hooks
that fill these. After each run they are as they were before: a mask that was kept for the next time
is made again, and no value of one micro-batch is found by another.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import _lru_cache_wrapper, partial
from inspect import getattr_static
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, TypeGuard

from torch import nn

_BOXES = (list, dict, set, OrderedDict, defaultdict, deque)
_OF_MODULES = frozenset(nn.Module().__dict__)  # hooks and the like, which torch fills
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

Made = Mapping[int, Any]  # by the identity of an original: what a stage has in its place


@dataclass
class Box:
    """A list or a dict that a stage has of its own."""

    original: Any
    own: Any
    before: Any

    @staticmethod
    def of(original: Any, inside: Any) -> Box:
        """`inside` is what the stage finds in it."""
        return Box(original, _copied(inside), _copied(inside))

    def follow(self) -> None:
        """The same in it as the original has now."""
        self.before = _copied(self.original)
        self.restore()

    def restore(self) -> None:
        """As it was."""
        refill(self.own, _copied(self.before))


def boxes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's own lists, dicts and objects that hold its state, by their names."""
    for key, value in module.__dict__.items():
        if key not in _OF_MODULES and (type(value) in _BOXES or is_state(value)):
            yield key, value


def is_state(value: Any) -> bool:
    """Is it an object of the author's, in which a forward may keep something, and nothing more?"""
    kind = type(value)
    if kind is SimpleNamespace:
        return True
    if not hasattr(value, "__dict__") or callable(value) or isinstance(value, Enum | BaseException):
        return False
    plain = kind.__mro__[1:] == (object,) and not _SPECIAL & vars(kind).keys()
    return plain and kind.__module__.partition(".")[0] not in _LIBRARIES


# What it does when it is copied, or set, is its own affair.
_SPECIAL = frozenset(
    ("__copy__", "__del__", "__enter__", "__getattr__", "__reduce__", "__setattr__", "__slots__")
)
_LIBRARIES = frozenset((*sys.stdlib_module_names, "numpy", "peft", "torch", "transformers"))


@contextmanager
def boxes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within, what is put into modules' own lists and dicts is taken out again."""
    before = _as_now(box for module in modules for _, box in boxes_of(module))
    try:
        yield
    finally:
        for box, then in before:
            if not same_inside(box, then):
                refill(box, then)


def _as_now(boxes: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Each with a copy; also those in objects."""
    found = list(boxes)
    inner = [one for box in found if is_state(box) for one in vars(box).values()]
    return [(box, copy.copy(box)) for box in (*found, *(b for b in inner if type(b) in _BOXES))]


def filling(boxes: Iterable[Any]) -> Callable[[], bool]:
    """Asked later: has something been put into one of them since?"""
    before = _as_now(boxes)
    return lambda: not all(same_inside(box, then) for box, then in before)


def shared_boxes(
    parents: Sequence[nn.Module], units: Mapping[str, nn.Module]
) -> dict[str, list[Any]]:
    """By units: what they hold that others hold as well, and the attributes of the parents."""
    held: dict[str, dict[int, Any]] = {name: {} for name in ("", *units)}
    inside = [(name, module) for name, unit in units.items() for module in unit.modules()]
    for name, module in [*(("", parent) for parent in parents), *inside]:
        held[name].update((id(box), box) for _, box in boxes_of(module))
    count = Counter(at for boxes in held.values() for at in boxes)
    return {
        name: [*(box for at, box in boxes.items() if count[at] > 1), *map(vars, parents)]
        for name, boxes in held.items()
    }


def same_inside(box: Any, then: Any) -> bool:
    """By identity: there may be tensors."""
    if isinstance(box, set):
        return bool(box == then)
    if is_state(box):
        return same_inside(vars(box), vars(then))
    if len(box) != len(then):
        return False
    pairs = zip(box, then, strict=True)
    if isinstance(box, dict):
        pairs = zip([*box, *box.values()], [*then, *then.values()], strict=True)
    return all(a is b for a, b in pairs)


def _copied(value: Any, depth: int = 3) -> Any:
    """What it holds is the same, but for lists and dicts."""
    if depth and is_state(value):
        made = copy.copy(value)
        vars(made).update((key, _copied(one, depth - 1)) for key, one in vars(value).items())
        return made
    if type(value) not in _BOXES or not depth:
        return value
    if isinstance(value, set):
        return set(value)
    if isinstance(value, list | deque):
        return type(value)(_copied(one, depth - 1) for one in value)
    made = defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()
    made.update((key, _copied(one, depth - 1)) for key, one in value.items())
    return made


def refill(box: Any, values: Any) -> None:
    """Let it hold these, and nothing else."""
    if is_state(box):
        box, values = vars(box), vars(values)
    box.clear()
    if isinstance(box, list | deque):
        box.extend(values)
    else:
        box.update(values)


# ---- functions that know an original ------------------------------------------------------


def remade(function: Any, made: Made, depth: int = 6) -> Any:
    """The same function for what stands in the originals' place; itself, if it knows none.

    Functions that it knows are made anew with it; not without end, as one may know itself.
    """
    if not depth:
        return function
    if isinstance(function, MethodType) and id(function.__self__) in made:
        return MethodType(function.__func__, made[id(function.__self__)])
    if isinstance(function, partial):
        inner = remade(function.func, made, depth - 1)
        args = [_swapped(one, made, depth) for one in function.args]
        named = {key: _swapped(one, made, depth) for key, one in function.keywords.items()}
        now, before = (inner, *args, *named.values()), (function.func, *function.args)
        same = _same(now, (*before, *function.keywords.values()))
        return function if same else partial(inner, *args, **named)
    if not isinstance(function, FunctionType):
        return function
    cells = tuple(_cell(cell, made, depth) for cell in function.__closure__ or ())
    defaults = tuple(_swapped(one, made, depth) for one in function.__defaults__ or ())
    if _same(cells, function.__closure__) and _same(defaults, function.__defaults__):
        return function
    new = FunctionType(
        function.__code__, function.__globals__, function.__name__, defaults or None, cells or None
    )
    new.__kwdefaults__ = function.__kwdefaults__
    return new


def _same(now: tuple[Any, ...], before: tuple[Any, ...] | None) -> bool:
    return all(a is b for a, b in zip(now, before or (), strict=True))


def known_to(function: FunctionType) -> Iterator[Any]:
    """What a function has from around it."""
    yield from function.__defaults__ or ()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing yet
            continue


def _cell(cell: CellType, made: Made, depth: int) -> CellType:
    try:
        inside = cell.cell_contents
    except ValueError:  # nothing yet
        return cell
    new = _swapped(inside, made, depth)
    return cell if new is inside else CellType(new)


def _swapped(value: Any, made: Made, depth: int) -> Any:
    if id(value) in made:
        return made[id(value)]
    if type(value) in (list, tuple):
        new = [_swapped(one, made, depth - 1) for one in value] if depth > 1 else list(value)
        return value if _same(tuple(new), tuple(value)) else type(value)(new)
    return remade(value, made, depth - 1)


def uncached(kind: type) -> Iterator[tuple[str, Any, bool]]:
    """Methods that remember what they gave, as they are without: they would remember for all.

    With each: is it called with the module itself?
    """
    for name in {name for base in kind.__mro__ for name in vars(base)}:
        method = getattr(kind, name, None)
        if isinstance(method, _lru_cache_wrapper) or _wraps_a_cache(method):
            own = not isinstance(getattr_static(kind, name), staticmethod | classmethod)
            yield name, method.__wrapped__, own


def _wraps_a_cache(method: Any) -> TypeGuard[Any]:
    """A function around one that remembers, and which does so as well."""
    if not isinstance(method, FunctionType) or not hasattr(method, "__wrapped__"):
        return False
    cells = (cell.cell_contents for cell in method.__closure__ or ())
    return any(isinstance(inside, _lru_cache_wrapper) for inside in cells)


# ---- hooks of units -----------------------------------------------------------------------


@dataclass(frozen=True)
class Hooks:
    """Of a unit and what is inside: those that know a parent, made anew for a stage's own."""

    anew: tuple[tuple[str, str, Any], ...]  # where in the unit, which, and what is there instead

    @staticmethod
    def of(unit: nn.Module, made: Made) -> Hooks | None:
        """None, if no hook knows a parent."""
        found = []
        for path, module in unit.named_modules():
            for key in _HOOKS:
                hooks = module.__dict__.get(key)
                if hooks:
                    new = OrderedDict((at, remade(hook, made)) for at, hook in hooks.items())
                    if any(new[at] is not hook for at, hook in hooks.items()):
                        found.append((path, key, new))
        return Hooks(tuple(found)) if found else None

    @contextmanager
    def on(self, unit: nn.Module) -> Iterator[None]:
        """Within, they are the unit's."""
        places = [(unit.get_submodule(path).__dict__, key, new) for path, key, new in self.anew]
        before = [attributes[key] for attributes, key, _ in places]
        for attributes, key, new in places:
            attributes[key] = new
        try:
            yield
        finally:
            for (attributes, key, _), old in zip(places, before, strict=True):
                attributes[key] = old


def hooks_after(unit: nn.Module, anew: Hooks | None) -> Mapping[int, Any]:
    """The forward hooks of a unit itself, for a stage."""
    new = anew.anew if anew is not None else ()
    own = (hooks for path, key, hooks in new if not path and key == "_forward_hooks")
    return next(own, unit._forward_hooks)


def hooks_on(unit: nn.Module, anew: Hooks | None) -> AbstractContextManager[None]:
    """Within, the unit computes with a stage's own hooks."""
    return nullcontext() if anew is None else anew.on(unit)


def with_hooks(unit: nn.Module, anew: Hooks | None) -> Callable[..., Any]:
    """The unit, with a stage's own hooks while it computes."""
    if anew is None:
        return unit

    def run(*args: Any, **kwargs: Any) -> Any:
        with anew.on(unit):
            return unit(*args, **kwargs)

    return run

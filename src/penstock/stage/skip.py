"""Skip connections: layers that stash a tensor here and pop it far below.

A skippable layer's `forward` is a generator. What it stashes and pops goes through the skips in
use in its thread: outside a pipe simply a dictionary, in a pipe the ones of its stage, which
sends a tensor straight to the stage that pops it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from torch import nn

from penstock.errors import PenstockTypeError, RunError
from penstock.stage.compile_support import disable_compile

# ---- names --------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Namespace:
    """Keeps equal names of different skip connections apart: see `isolate`."""

    id: str = field(default_factory=lambda: uuid4().hex)


class SkipKey(NamedTuple):
    """What a skip connection is known by: a name, within a namespace or without one."""

    namespace_id: str
    name: str

    def __str__(self) -> str:
        return f"'{self.name}'"


@dataclass(frozen=True)
class SkipDeclaration:
    """The names that a class of layers says it stashes and pops."""

    stash: frozenset[str]
    pop: frozenset[str]
    shared: frozenset[str]


# ---- what a layer yields ------------------------------------------------------------------


@dataclass(frozen=True)
class stash:  # noqa: N801 (yielded like a statement: `yield stash("name", tensor)`)
    """`yield stash("name", tensor)` keeps a tensor, or None, for the layer that pops it."""

    name: str
    value: Any


@dataclass(frozen=True)
class pop:  # noqa: N801
    """`tensor = yield pop("name")` gives what an earlier layer stashed."""

    name: str


# ---- the skips in use ---------------------------------------------------------------------


class Skips:
    """Stashed values by key. A shared one may be popped again."""

    def __init__(self) -> None:
        self._values: dict[SkipKey, tuple[Any, bool]] = {}

    def stash(self, key: SkipKey, value: Any, shared: bool) -> None:
        """Keep it for whoever pops it."""
        self._values[key] = value, shared

    def pop(self, key: SkipKey) -> Any:
        """Give it back; a KeyError if nobody stashed it."""
        value, shared = self._values[key]
        if not shared:
            del self._values[key]
        return value


class _SkipState(threading.local):
    def __init__(self) -> None:
        self.skips = Skips()


_thread_state = _SkipState()


@contextmanager
def use_skips(skips: Skips) -> Iterator[None]:
    """Let the layers of this thread stash into and pop from these."""
    before, _thread_state.skips = _thread_state.skips, skips
    try:
        yield
    finally:
        _thread_state.skips = before


# ---- skippable layers ---------------------------------------------------------------------

M = TypeVar("M", bound=nn.Module)


def get_skip_declaration(module: nn.Module) -> SkipDeclaration | None:
    """What the layer declares, if it is skippable."""
    return getattr(type(module), "_skips", None)


def _find_namespace_id(module: nn.Module, name: str) -> str:
    namespace = getattr(module, "_namespaces", {}).get(name)
    return namespace.id if namespace else ""


def stashed_keys(module: nn.Module) -> dict[SkipKey, bool]:
    """The keys that the layer itself stashes, each with whether several layers may pop it."""
    names = get_skip_declaration(module)
    if not names:
        return {}
    return {
        SkipKey(_find_namespace_id(module, n), n): n in names.shared for n in sorted(names.stash)
    }


def popped_keys(module: nn.Module) -> list[SkipKey]:
    """The keys that the layer itself pops."""
    names = get_skip_declaration(module)
    return [SkipKey(_find_namespace_id(module, n), n) for n in sorted(names.pop)] if names else []


def isolate(self: M, ns: Namespace, *, only: Iterable[str] | None = None) -> M:
    """Put the layer's skip connections, or `only` some of them, into a namespace; gives itself."""
    names = get_skip_declaration(self)
    assert names
    chosen = names.stash | names.pop if only is None else set(only)
    unknown = sorted(chosen - names.stash - names.pop)
    if unknown:
        raise ValueError(f"{type(self).__name__} declares no {_format_names(unknown)} to isolate")
    spaces = {**getattr(self, "_namespaces", {}), **dict.fromkeys(chosen, ns)}
    object.__setattr__(self, "_namespaces", spaces)
    return self


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = (), shared: Iterable[str] = ()
) -> Callable[[type[M]], type[M]]:
    """Declare the names that a class of layers stashes and pops in its `forward`, a generator.

    A name in `shared` is stashed for several layers: each may pop it.

    >>> import torch
    >>> @skippable(stash=["long"])
    ... class Top(nn.Module):
    ...     def forward(self, x):
    ...         yield penstock.stash("long", x)
    ...         return x * 10
    >>> @skippable(pop=["long"])
    ... class Bottom(nn.Module):
    ...     def forward(self, x):
    ...         return x + (yield penstock.pop("long"))
    >>> import penstock
    >>> nn.Sequential(Top(), Bottom())(torch.ones(2))
    tensor([11., 11.])
    """
    given = {"stash": stash, "pop": pop, "shared": shared}
    for argument, value in given.items():
        if isinstance(value, str):
            raise PenstockTypeError(
                f"{argument} is a list of names, not '{value}': write ['{value}']"
            )
    names = SkipDeclaration(frozenset(stash), frozenset(pop), frozenset(shared))
    if not names.shared <= names.stash:
        stray = _format_names(sorted(names.shared - names.stash))
        raise ValueError(f"shared names are stashed names: {stray} is not among stash")

    def decorate(cls: type[M]) -> type[M]:
        if not issubclass(cls, nn.Module):
            raise PenstockTypeError(f"@skippable is for classes of modules, not {cls!r}")
        plain = getattr(cls.forward, "_undriven", cls.forward)  # of a skippable class: its own

        @disable_compile  # the compiler knows no generators that others drive
        @wraps(plain)
        def forward(self: M, *args: Any, **kwargs: Any) -> Any:
            return run_skippable_forward(self, plain(self, *args, **kwargs))

        forward._undriven = plain  # type: ignore[attr-defined]
        for name, value in (("forward", forward), ("isolate", isolate), ("_skips", names)):
            setattr(cls, name, value)
        return cls

    return decorate


def run_skippable_forward(layer: nn.Module, forward_result: Any) -> Any:
    """Carry out what a skippable layer's forward yields, and give what it returns."""
    names = get_skip_declaration(layer)
    assert names
    stashed, popped = set[str](), set[str]()
    output = forward_result
    if isinstance(forward_result, Generator):
        answer: Any = None
        try:
            while True:
                request = forward_result.send(answer)
                answer = _handle_request(layer, names, request, stashed, popped)
        except StopIteration as stop:
            output = stop.value
    for verb, missing in (("stashed", names.stash - stashed), ("popped", names.pop - popped)):
        if missing:
            raise RunError(
                f"{type(layer).__name__} declares {_format_names(sorted(missing))}, but its forward "
                f"has not {verb} it"
            )
    return output


def _handle_request(
    layer: nn.Module,
    declaration: SkipDeclaration,
    request: Any,
    stashed: set[str],
    popped: set[str],
) -> Any:
    who = type(layer).__name__
    if isinstance(request, stash):
        if request.name not in declaration.stash:
            raise RunError(f"{who} has not declared '{request.name}' as a name it stashes")
        stashed.add(request.name)
        key = SkipKey(_find_namespace_id(layer, request.name), request.name)
        _thread_state.skips.stash(key, request.value, request.name in declaration.shared)
        return None
    if isinstance(request, pop):
        if request.name not in declaration.pop:
            raise RunError(f"{who} has not declared '{request.name}' as a name it pops")
        popped.add(request.name)
        key = SkipKey(_find_namespace_id(layer, request.name), request.name)
        try:
            return _thread_state.skips.pop(key)
        except KeyError:
            raise RunError(f"{who} pops {key}, but no layer before it has stashed it") from None
    raise PenstockTypeError(f"{who} yields {request!r}: yield stash(name, tensor) or pop(name)")


# ---- do the names match? ------------------------------------------------------------------


def verify_skippables(module: nn.Module) -> None:
    """Raise a TypeError that lists every stash without its pop, and the other way round."""
    problems: list[str] = []
    stashed: dict[SkipKey, bool] = {}  # shared?
    popped: set[SkipKey] = set()
    for path, layer in module.named_modules():
        who = f"'{path}' ({type(layer).__name__})"
        mine = stashed_keys(layer)
        for key in popped_keys(layer):
            if key in mine:
                problems.append(f"{who} declares {key} both as stashed and as popped")
            elif key not in stashed:
                problems.append(f"{who} pops {key}, but no layer before it stashes it")
            elif key in popped and not stashed[key]:
                problems.append(
                    f"{who} pops {key}, which was popped before: isolate it by a namespace, or "
                    "declare it as shared where it is stashed"
                )
            popped.add(key)
        for key, shared in mine.items():
            if key in stashed:
                problems.append(f"{who} stashes {key} again: isolate it by a namespace")
            stashed[key] = shared
    problems += [f"no layer pops {key}, which is stashed" for key in stashed if key not in popped]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise PenstockTypeError(f"what is stashed and what is popped do not match:\n{listed}")


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)

"""Skip connections between distant layers of an `nn.Sequential`: `skippable`, `stash` and `pop`.

The `forward` of a skippable layer is a generator. It yields requests, and `run_skippable_forward`
answers them:

    yield stash("name", tensor)     keep a tensor
    tensor = yield pop("name")      get a tensor that an earlier layer has stashed

The requests go to the `Skips` object of the current thread. Outside of a pipe that is a plain
dictionary. In a pipe it belongs to the stage, which sends a stashed tensor straight to the stage
that pops it.
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
from penstock.torch_compat import disable_compile

# ---- names -------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Namespace:
    """A namespace for the names of skip connections.

    Two skip connections may have the same name if they are in different namespaces. See the
    `isolate` method of skippable layers.

    Args:
        id: The identity of the namespace. By default a new one.

    >>> Namespace() == Namespace()
    False
    """

    id: str = field(default_factory=lambda: uuid4().hex)


class SkipKey(NamedTuple):
    """The key of a skip connection: its name and its namespace, "" without one."""

    namespace_id: str
    name: str

    def __str__(self) -> str:
        return f"'{self.name}'"


@dataclass(frozen=True)
class SkipDeclaration:
    """The names that a skippable class declares.

    Attributes:
        stash: The names that it stashes.
        pop: The names that it pops.
        shared: The stashed names that several layers may pop.
    """

    stash: frozenset[str]
    pop: frozenset[str]
    shared: frozenset[str]


# ---- requests that a layer yields --------------------------------------------------------------


@dataclass(frozen=True)
class stash:  # noqa: N801 (yielded like a statement: `yield stash("name", tensor)`)
    """A request to keep a tensor, or None, for the layer that pops it.

    Write `yield stash("name", tensor)` in the forward of a skippable layer.

    Args:
        name: A name that the layer declares in `skippable(stash=...)`.
        value: The tensor.

    Example:

    >>> stash("skip", None)
    stash(name='skip', value=None)
    """

    name: str
    value: Any


@dataclass(frozen=True)
class pop:  # noqa: N801
    """A request for the tensor that an earlier layer has stashed.

    Write `tensor = yield pop("name")` in the forward of a skippable layer.

    Args:
        name: A name that the layer declares in `skippable(pop=...)`.

    Example:

    >>> pop("skip")
    pop(name='skip')
    """

    name: str


# ---- the store of the current thread -----------------------------------------------------------


class Skips:
    """A store of stashed values by key. A shared value may be popped several times."""

    def __init__(self) -> None:
        self._values: dict[SkipKey, tuple[Any, bool]] = {}

    def stash(self, key: SkipKey, value: Any, shared: bool) -> None:
        """Keep a value until it is popped."""
        self._values[key] = value, shared

    def pop(self, key: SkipKey) -> Any:
        """Return a stashed value; raise KeyError if there is none."""
        value, shared = self._values[key]
        if not shared:
            del self._values[key]
        return value


class _SkipState(threading.local):
    """The store that skippable layers of this thread use."""

    def __init__(self) -> None:
        self.skips = Skips()


_thread_state = _SkipState()


@contextmanager
def use_skips(skips: Skips) -> Iterator[None]:
    """Let the layers of this thread use another store inside the context."""
    before, _thread_state.skips = _thread_state.skips, skips
    try:
        yield
    finally:
        _thread_state.skips = before


# ---- skippable layers --------------------------------------------------------------------------

M = TypeVar("M", bound=nn.Module)


def get_skip_declaration(module: nn.Module) -> SkipDeclaration | None:
    """Return the declaration of a skippable layer, or None for any other module."""
    return getattr(type(module), "_skips", None)


def _find_namespace_id(module: nn.Module, name: str) -> str:
    namespace = getattr(module, "_namespaces", {}).get(name)
    return namespace.id if namespace else ""


def stashed_keys(module: nn.Module) -> dict[SkipKey, bool]:
    """Return the keys that the layer itself stashes, each with whether it is shared."""
    names = get_skip_declaration(module)
    if not names:
        return {}
    return {
        SkipKey(_find_namespace_id(module, n), n): n in names.shared for n in sorted(names.stash)
    }


def popped_keys(module: nn.Module) -> list[SkipKey]:
    """Return the keys that the layer itself pops."""
    names = get_skip_declaration(module)
    return [SkipKey(_find_namespace_id(module, n), n) for n in sorted(names.pop)] if names else []


def isolate(self: M, ns: Namespace, *, only: Iterable[str] | None = None) -> M:
    """Put skip connections of this layer into a namespace.

    Args:
        self: A skippable layer. The function is a method of every skippable class.
        ns: The namespace.
        only: The names to put into it; by default all names that the layer declares.

    Returns:
        The layer itself.

    Raises:
        ValueError: The layer does not declare one of the names.
    """
    names = get_skip_declaration(self)
    assert names
    chosen = names.stash | names.pop if only is None else set(only)
    unknown = sorted(chosen - names.stash - names.pop)
    if unknown:
        raise ValueError(
            f"{type(self).__name__} cannot isolate {_format_names(unknown)}, which it does not "
            "declare. Pass names that are in its stash or pop."
        )
    spaces = {**getattr(self, "_namespaces", {}), **dict.fromkeys(chosen, ns)}
    object.__setattr__(self, "_namespaces", spaces)
    return self


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = (), shared: Iterable[str] = ()
) -> Callable[[type[M]], type[M]]:
    """Declare the names that a class of layers stashes and pops in its `forward`.

    The `forward` is a generator that yields `stash` and `pop` requests and returns its output. The
    class gets a method `isolate(namespace, only=None)`, which keeps equal names apart.

    Args:
        stash: The names that the layer stashes.
        pop: The names that the layer pops.
        shared: The names in `stash` that several layers may pop.

    Returns:
        A decorator for subclasses of `nn.Module`.

    Raises:
        PenstockTypeError: An argument is a string instead of a list, or the class is not a subclass
            of `nn.Module`.
        ValueError: A shared name is not in `stash`.

    Example:

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
    arguments = {"stash": stash, "pop": pop, "shared": shared}
    for argument, value in arguments.items():
        if isinstance(value, str):
            raise PenstockTypeError(
                f"{argument} must be a list of names, not the string '{value}'. Write ['{value}']."
            )
    names = SkipDeclaration(frozenset(stash), frozenset(pop), frozenset(shared))
    if not names.shared <= names.stash:
        missing_names = _format_names(sorted(names.shared - names.stash))
        raise ValueError(
            f"shared names must also be in stash, but {missing_names} is not. Add it to stash."
        )

    def decorate(cls: type[M]) -> type[M]:
        if not issubclass(cls, nn.Module):
            raise PenstockTypeError(
                f"@skippable is for subclasses of nn.Module, not {cls!r}. Decorate a module class."
            )
        # A subclass of a skippable class inherits a wrapped forward. Wrap the generator instead.
        plain = getattr(cls.forward, "_undriven", cls.forward)

        @disable_compile  # torch.compile cannot trace a generator that is driven by `send`
        @wraps(plain)
        def forward(self: M, *args: Any, **kwargs: Any) -> Any:
            return run_skippable_forward(self, plain(self, *args, **kwargs))

        forward._undriven = plain  # type: ignore[attr-defined]
        for name, value in (("forward", forward), ("isolate", isolate), ("_skips", names)):
            setattr(cls, name, value)
        return cls

    return decorate


def run_skippable_forward(layer: nn.Module, forward_result: Any) -> Any:
    """Answer the requests that the forward of a skippable layer yields, and return its output.

    Args:
        layer: The skippable layer.
        forward_result: The result of its forward: a generator, or the output itself if the forward
            has no `yield`.
    """
    names = get_skip_declaration(layer)
    assert names
    stashed, popped = set[str](), set[str]()
    output = forward_result
    # Drive the generator: send it the answer of the last request, and get its next request. The
    # return value of the generator arrives in StopIteration.
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
                f"{type(layer).__name__} declares {_format_names(sorted(missing))}, but its "
                f"forward has not {verb} it. Yield it in each forward, or take the name out of "
                "@skippable."
            )
    return output


def _handle_request(
    layer: nn.Module,
    declaration: SkipDeclaration,
    request: Any,
    stashed: set[str],
    popped: set[str],
) -> Any:
    """Answer one request, and note its name in `stashed` or `popped`."""
    who = type(layer).__name__
    if isinstance(request, stash):
        option, verb, declared, noted = "stash", "stashes", declaration.stash, stashed
    elif isinstance(request, pop):
        option, verb, declared, noted = "pop", "pops", declaration.pop, popped
    else:
        raise PenstockTypeError(
            f"{who} yields {request!r}, which is not a request. Yield stash(name, tensor) or "
            "pop(name)."
        )
    if request.name not in declared:
        raise RunError(
            f"{who} has not declared '{request.name}' as a name it {verb}. Add it to "
            f"@skippable({option}=[...])."
        )
    noted.add(request.name)
    key = SkipKey(_find_namespace_id(layer, request.name), request.name)
    if isinstance(request, stash):
        _thread_state.skips.stash(key, request.value, request.name in declaration.shared)
        return None
    try:
        return _thread_state.skips.pop(key)
    except KeyError:
        raise RunError(
            f"{who} pops {key}, but no layer before it has stashed it. Stash it in an earlier "
            "layer, in the same namespace."
        ) from None


# ---- verification ------------------------------------------------------------------------------


def verify_skippables(module: nn.Module) -> None:
    """Check that the layers of a module stash and pop the same names.

    Args:
        module: A model with skippable layers, which run in the order of `named_modules`.

    Raises:
        PenstockTypeError: The names do not match. The message lists every problem.

    Example:

    >>> verify_skippables(nn.Sequential(nn.Linear(2, 2)))
    """
    problems: list[str] = []
    stashed: dict[SkipKey, bool] = {}  # whether each key is shared
    popped: set[SkipKey] = set()
    for path, layer in module.named_modules():
        who = f"'{path}' ({type(layer).__name__})"
        layer_stashes = stashed_keys(layer)
        for key in popped_keys(layer):
            if key in layer_stashes:
                problems.append(f"{who} declares {key} both as stashed and as popped")
            elif key not in stashed:
                problems.append(f"{who} pops {key}, but no layer before it stashes it")
            elif key in popped and not stashed[key]:
                problems.append(
                    f"{who} pops {key}, which an earlier layer pops: isolate it in a namespace, or "
                    "declare it as shared where it is stashed"
                )
            popped.add(key)
        for key, shared in layer_stashes.items():
            if key in stashed:
                problems.append(f"{who} stashes {key} again: isolate it in a namespace")
            stashed[key] = shared
    problems += [f"no layer pops {key}, which is stashed" for key in stashed if key not in popped]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise PenstockTypeError(f"the stashed and the popped names do not match:\n{listed}")


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)

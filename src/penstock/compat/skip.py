"""Skip connections of the old libraries: a skippable layer wraps the decorated one, as `.module`.

So the keys of a state dict are the old ones, such as `partitions.0.0.module.weight`. Everything
else is done by Penstock's own skip connections.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from penstock.stage import skip
from penstock.stage.skip import (
    Namespace,
    SkipDeclaration,
    pop,
    run_skippable_forward,
    verify_skippables,
)

__all__ = ["Namespace", "Skippable", "pop", "skippable", "stash", "verify_skippables"]


class TensorStash(skip.stash):
    """A request to keep a tensor, or None, for the layer that pops it.

    A layer yields it: `yield stash("name", tensor)`.
    """

    __qualname__ = "stash"

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        super().__init__(name, tensor)

    @property
    def tensor(self) -> Tensor | None:
        """The tensor that is kept."""
        value: Tensor | None = self.value
        return value


TensorStash.__name__ = "stash"
stash = TensorStash


class Skippable(nn.Module):
    """The base class of all layers that `skippable` makes."""

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]
    _skips: ClassVar[SkipDeclaration]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the decorated layer and carry out its requests to stash and pop."""
        return run_skippable_forward(self, self.module(*args, **kwargs))

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Self:
        """Put its names, or `only` some of them, into a namespace, and return the layer."""
        names = self._skips.stash | self._skips.pop
        return skip.isolate(self, ns, only=names if only is None else names & set(only))

    @property
    def namespaces(self) -> dict[str, Namespace]:
        """The namespaces of its names that are in one."""
        return dict(getattr(self, "_namespaces", {}))

    def namespaced(self, name: str) -> tuple[Namespace | None, str]:
        """Return a name with its namespace."""
        return self.namespaces.get(name), name

    def stashable(self) -> Iterator[tuple[Namespace | None, str]]:
        """Yield the names that it stashes, each with its namespace."""
        yield from map(self.namespaced, self.stashable_names)

    def poppable(self) -> Iterator[tuple[Namespace | None, str]]:
        """Yield the names that it pops, each with its namespace."""
        yield from map(self.namespaced, self.poppable_names)

    def dispatch(
        self,
        input: Any,
        handle_stash: Callable[[str, Tensor | None], None],
        handle_pop: Callable[[str], Tensor | None],
    ) -> Any:
        """Run the decorated layer, and hand its requests to two functions.

        Raises:
            TypeError: The layer yields something else.
        """
        result = self.module(input)
        if not isinstance(result, Generator):
            return result
        answer: Tensor | None = None
        try:
            while True:
                request = result.send(answer)
                if isinstance(request, skip.stash):
                    answer = None
                    handle_stash(request.name, request.value)
                elif isinstance(request, skip.pop):
                    answer = handle_pop(request.name)
                else:
                    raise TypeError(
                        f"{type(self).__name__} yields {request!r}, which is neither a stash nor a "
                        "pop."
                    )
        except StopIteration as stop:
            return stop.value

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    # The decorated class cannot be pickled by name: its name is that of the class made from it. So
    # the state of the decorated layer is pickled, and the layer is made again from `module_cls`.

    def __getstate__(self) -> dict[str, Any]:
        others = {name: m for name, m in self._modules.items() if name != "module"}
        decorated = self.module.__getstate__()
        return {**self.__dict__, "_modules": others, "_decorated": decorated}

    def __setstate__(self, state: dict[str, Any]) -> None:
        own_state = {name: value for name, value in state.items() if name != "_decorated"}
        nn.Module.__setstate__(self, own_state)
        self.module = self.module_cls.__new__(self.module_cls)
        self.module.__setstate__(state["_decorated"])


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Return a decorator for layers whose `forward`, a generator, stashes and pops these names."""
    names = SkipDeclaration(frozenset(stash), frozenset(pop), frozenset())

    def decorate(cls: type[nn.Module]) -> type[Skippable]:
        metadata = {name: getattr(cls, name) for name in ("__doc__", "__module__", "__qualname__")}
        declared = {"stashable_names": names.stash, "poppable_names": names.pop, "_skips": names}
        return type(cls.__name__, (Skippable,), {**metadata, **declared, "module_cls": cls})

    return decorate

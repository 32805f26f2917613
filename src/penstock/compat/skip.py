"""Skip connections as they were: a skippable layer wraps the decorated one, as `.module`.

So the keys of a state dict are the old ones, `partitions.0.0.module.weight`. All else is
Penstock's: a name is stashed for one layer that pops it, through whatever skips are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


class stash(skip.stash):  # noqa: N801 (yielded like a statement)
    """`yield stash("name", tensor)` keeps a tensor, or None, for the layer that pops it."""

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        super().__init__(name, tensor)

    @property
    def tensor(self) -> Tensor | None:
        """What is kept."""
        value: Tensor | None = self.value
        return value


class Skippable(nn.Module):
    """The base of all classes that `skippable` makes."""

    module_cls: ClassVar[type[nn.Module]]
    _skips: ClassVar[SkipDeclaration]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The decorated layer's, with its requests carried out."""
        return run_skippable_forward(self, self.module(*args, **kwargs))

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Self:
        """Put its names, or `only` some of them, into a namespace; gives itself."""
        names = self._skips.stash | self._skips.pop
        return skip.isolate(self, ns, only=names if only is None else names & set(only))

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    # A pickle cannot name the decorated class: its name is that of the class made of it.

    def __getstate__(self) -> dict[str, Any]:
        others = {name: m for name, m in self._modules.items() if name != "module"}
        decorated = self.module.__getstate__()
        return {**self.__dict__, "_modules": others, "_decorated": decorated}

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = {name: value for name, value in state.items() if name != "_decorated"}
        nn.Module.__setstate__(self, own)
        self.module = self.module_cls.__new__(self.module_cls)
        self.module.__setstate__(state["_decorated"])


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Make a class of layers whose `forward`, a generator, stashes and pops these names."""
    names = SkipDeclaration(frozenset(stash), frozenset(pop), frozenset())

    def decorate(cls: type[nn.Module]) -> type[Skippable]:
        told = {name: getattr(cls, name) for name in ("__doc__", "__module__", "__qualname__")}
        return type(cls.__name__, (Skippable,), {**told, "module_cls": cls, "_skips": names})

    return decorate

"""A stage: layers that run as one piece, and what it was seen to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from penstock.stage.rewind import Quietly

OUTSIDE = -1  # the neighbour that feeds the batch in and takes the outputs

# From what each source sent to what each destination gets; OUTSIDE is a neighbour too.
Compute = Callable[[Mapping[int, tuple[Any, ...]]], dict[int, tuple[Any, ...]]]


@dataclass(slots=True)
class Habits:
    """What a stage was seen to do; None: not seen yet."""

    draws: bool | None = None  # random numbers
    mutates: bool | None = None  # its inputs, in place
    closed: bool = False  # learns by nothing but its parameters: seen
    quietly: Quietly = field(default_factory=dict)  # writes its buffers


@dataclass(eq=False)
class Stage:
    """Layers that run as one piece. One of another process has no layers here."""

    index: int
    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]
    compute: Compute
    kinds: tuple[str, ...] = ()  # the layers' types, for people
    around: tuple[nn.Module, ...] = ()  # what the user has put around the layers
    shifting: frozenset[nn.Module] = frozenset()  # whose parameters come and go while it computes
    watched: bool = False  # it may draw random numbers, though it was seen to draw none
    mutates: bool = False  # it may change its inputs in place, though it was seen to change none
    _habits: dict[tuple[Any, ...], Habits] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.kinds = self.kinds or tuple(type(layer).__name__ for layer in self.layers)

    def __str__(self) -> str:
        kinds = ", ".join(self.kinds[:4])
        more = ", ..." if len(self.kinds) > 4 else ""
        names = [name or "the model's own" for name in self.names]  # what is in no part of it
        ends = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        return f"stage {self.index} (layer{'s' * (len(names) > 1)} {ends}: {kinds}{more})"

    def modules(self) -> list[nn.Module]:
        """All of its layers' modules, each once."""
        found: dict[nn.Module, None] = {}
        for layer in self.layers:
            found.update(dict.fromkeys(layer.modules()))
        return list(found)

    def habits(self, modules: Iterable[nn.Module]) -> Habits:
        """Of its modules as they are set now: in training or not, and with which chances."""
        manner = tuple([(m.training, _chances(m)) for m in modules])
        fresh = Habits(mutates=True if self.mutates else None)
        return self._habits.setdefault((type(self.compute), self.mutates, manner), fresh)

    def elsewhere(self) -> Stage:
        """The same, as a process knows it that does not compute it."""
        return Stage(self.index, self.names, (), _computed_elsewhere, self.kinds)

    def forget(self) -> None:
        """Watch it anew."""
        self._habits.clear()


def _computed_elsewhere(arrived: Mapping[int, tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
    raise AssertionError("a stage of another process")


_CHANCES = ("p", "drop_prob", "drop_rate", "dropout")


def _chances(module: nn.Module) -> tuple[float, ...]:
    """How likely it drops something, by the names that such attributes have."""
    found = (module.__dict__.get(name) for name in _CHANCES)
    return tuple(value for value in found if isinstance(value, int | float))

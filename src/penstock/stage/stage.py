"""A stage: layers that run as one piece, and what it was seen to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from penstock.stage.recompute import SilentWrites

OUTSIDE = -1  # the neighbour that feeds the batch in and takes the outputs

# From what each source sent to what each destination gets; OUTSIDE is a neighbour too.
StageFunction = Callable[[Mapping[int, tuple[Any, ...]]], dict[int, tuple[Any, ...]]]


@dataclass(slots=True)
class ObservedBehavior:
    """What a stage was seen to do; None: not seen yet."""

    draws_random: bool | None = None  # random numbers
    mutates_inputs: bool | None = None  # its inputs, in place
    uses_only_parameters: bool = False  # learns by nothing but its parameters: seen
    silent_writes: SilentWrites = field(default_factory=dict)  # writes its buffers


@dataclass(eq=False)
class Stage:
    """Layers that run as one piece. One of another process has no layers here."""

    index: int
    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]
    compute: StageFunction
    layer_types: tuple[str, ...] = ()  # the layers' types, for people
    wrappers: tuple[nn.Module, ...] = ()  # what the user has put around the layers
    resharding_modules: frozenset[nn.Module] = (
        frozenset()
    )  # whose parameters come and go while it computes
    may_draw_random: bool = False  # it may draw random numbers, though it was seen to draw none
    may_mutate_inputs: bool = (
        False  # it may change its inputs in place, though it was seen to change none
    )
    _behaviors: dict[tuple[Any, ...], ObservedBehavior] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.layer_types = self.layer_types or tuple(type(layer).__name__ for layer in self.layers)

    def __str__(self) -> str:
        kinds = ", ".join(self.layer_types[:4])
        more = ", ..." if len(self.layer_types) > 4 else ""
        names = [name or "the model's own" for name in self.names]  # what is in no part of it
        ends = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        return f"stage {self.index} (layer{'s' * (len(names) > 1)} {ends}: {kinds}{more})"

    def modules(self) -> list[nn.Module]:
        """All of its layers' modules, each once."""
        found: dict[nn.Module, None] = {}
        for layer in self.layers:
            found.update(dict.fromkeys(layer.modules()))
        return list(found)

    def behavior_for(self, modules: Iterable[nn.Module]) -> ObservedBehavior:
        """Of its modules as they are set now: in training or not, and with which chances."""
        manner = tuple([(m.training, _dropout_rates(m)) for m in modules])
        fresh = ObservedBehavior(mutates_inputs=True if self.may_mutate_inputs else None)
        return self._behaviors.setdefault(
            (type(self.compute), self.may_mutate_inputs, manner), fresh
        )

    def as_remote(self) -> Stage:
        """The same, as a process knows it that does not compute it."""
        return Stage(self.index, self.names, (), _reject_remote_compute, self.layer_types)

    def reset_behaviors(self) -> None:
        """Watch it anew."""
        self._behaviors.clear()


def _reject_remote_compute(inputs: Mapping[int, tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
    raise AssertionError("a stage of another process")


_DROPOUT_ATTRIBUTES = ("p", "drop_prob", "drop_rate", "dropout")


def _dropout_rates(module: nn.Module) -> tuple[float, ...]:
    """How likely it drops something, by the names that such attributes have."""
    found = (module.__dict__.get(name) for name in _DROPOUT_ATTRIBUTES)
    return tuple(value for value in found if isinstance(value, int | float))

"""What a dry run saw of a model's forward: its steps, and the values that they make and take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.partition.forward.absent import Look
from penstock.partition.forward.tables import called


class Kind(Enum):
    """Of a step."""

    UNIT = auto()  # a unit is called
    GLUE = auto()  # an operation between units
    READ = auto()  # the host looks at numbers, and goes on accordingly
    CALL = auto()  # it has nothing to do with tensors


class Ref(NamedTuple):
    """An argument that is a value."""

    value: int


class New(NamedTuple):
    """A leaf that the step makes: a value."""

    value: int


class Same(NamedTuple):
    """A leaf that is one of the step's own arguments."""

    argument: int  # which of the tensors among them


@dataclass(frozen=True)
class Result:
    """What a step gave: leaves that are New, Same, or plain."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    def __reduce__(self) -> tuple[Any, ...]:
        return Result, (self.leaves, None)  # a copy is to be looked at

    @property
    def made(self) -> tuple[int, ...]:
        """The values among them."""
        return tuple(leaf.value for leaf in self.leaves if isinstance(leaf, New))


@dataclass(frozen=True)
class Value:
    """A tensor, as it is between two changes in place.

    It is `free` if it follows from the inputs and from what is not learned: then every stage can
    have it. `maker` is a step; None: it was there before.
    """

    look: Look
    free: bool
    maker: int | None = None
    name: str = ""  # the same on every rank
    parameter: str = ""  # its name, if it is one
    buffer: str = ""
    given: int | None = None  # which of the tensors that the forward was called with


@dataclass(frozen=True)
class Step:
    """One thing that the forward did."""

    kind: Kind
    func: Any  # what was called; of a unit, its call
    takes: tuple[int, ...]
    result: Result | None
    where: str  # file and line
    free: bool = False
    changes: Mapping[int, int] = field(default_factory=dict)  # in place: values before, after
    lasting: bool = False  # it has an effect beyond this forward, or draws: it runs once
    draws: bool = False  # random numbers; of a unit that is not known
    asks: bool = False  # the outcome is a fact about numbers, on which the rest depends
    outcome: Any = None
    said: str = ""  # the arguments that are no tensors, as text
    arguments: Any = None  # of a unit, or one that is free: with a Ref where a value was
    call: Any = None  # how an operation is called

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is to be looked at: functions cannot all be copied."""
        func = self.func if self.kind is Kind.UNIT else called(self.func)
        plain = replace(self, func=func, arguments=None, call=None)
        return Step, tuple(getattr(plain, one.name) for one in fields(self))


@dataclass(frozen=True)
class CallOf:
    """The n-th call of a unit in a forward."""

    unit: str
    turn: int = 0

    def __str__(self) -> str:
        return self.unit + (f" (call {self.turn + 1})" if self.turn else "")


@dataclass(frozen=True)
class Trace:
    """A whole forward."""

    steps: tuple[Step, ...]
    values: tuple[Value, ...]
    inputs: tuple[int, ...]  # the values of the tensors it was called with
    output: Result
    lasting: Mapping[str, int]  # buffers that were assigned anew: values, by the buffers' names
    measured: frozenset[int] = frozenset()  # values of which the host knows how large they are
    told: Mapping[int, Tensor] = field(default_factory=dict)  # whole numbers that units are given

    @property
    def calls(self) -> list[int]:
        """The steps that call units."""
        return [at for at, step in enumerate(self.steps) if step.kind is Kind.UNIT]

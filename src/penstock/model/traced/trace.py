"""What a dry run saw of a model's forward: its steps, and the values that they make and take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from typing import Any, NamedTuple

from torch import Tensor

from penstock.model.traced.remote_tensor import TensorSpec
from penstock.model.traced.torch_functions import get_function_name
from penstock.torch_compat import pytree


class NodeKind(Enum):
    """Of a step."""

    UNIT = auto()  # a unit is called
    OPERATION = auto()  # an operation between units
    HOST_READ = auto()  # the host looks at numbers, and goes on accordingly
    NON_TENSOR = auto()  # it has nothing to do with tensors


class ValueRef(NamedTuple):
    """An argument that is a value."""

    value: int


class ValueLeaf(NamedTuple):
    """A leaf that the step makes: a value."""

    value: int


class ArgumentLeaf(NamedTuple):
    """A leaf that is one of the step's own arguments."""

    argument_index: int  # which of the tensors among them


@dataclass(frozen=True)
class TracedOutput:
    """What a step gave: leaves that are New, Same, or plain."""

    leaves: tuple[Any, ...]
    tree_spec: pytree.TreeSpec

    def __reduce__(self) -> tuple[Any, ...]:
        return TracedOutput, (self.leaves, None)  # a copy is to be looked at

    @property
    def value_indices(self) -> tuple[int, ...]:
        """The values among them."""
        return tuple(leaf.value for leaf in self.leaves if isinstance(leaf, ValueLeaf))


@dataclass(frozen=True)
class TracedValue:
    """A tensor, as it is between two changes in place.

    It is `free` if it follows from the inputs and from what is not learned: then every stage can
    have it. `maker` is a step; None: it was there before.
    """

    tensor_spec: TensorSpec
    input_only: bool
    producer: int | None = None
    name: str = ""  # the same on every rank
    parameter_name: str = ""  # its name, if it is one
    buffer_name: str = ""
    input_index: int | None = None  # which of the tensors that the forward was called with


@dataclass(frozen=True)
class TraceNode:
    """One thing that the forward did."""

    kind: NodeKind
    func: Any  # what was called; of a unit, its call
    inputs: tuple[int, ...]
    output: TracedOutput | None
    location: str  # file and line
    input_only: bool = False
    mutations: Mapping[int, int] = field(default_factory=dict)  # in place: values before, after
    has_side_effect: bool = False  # it has an effect beyond this forward, or draws: it runs once
    uses_rng: bool = False  # random numbers; of a unit that is not known
    is_guard: bool = False  # the outcome is a fact about numbers, on which the rest depends
    recorded_result: Any = None
    literals: str = ""  # the arguments that are no tensors, as text
    arg_template: Any = None  # of a unit, or one that is free: with a Ref where a value was
    call: Any = None  # how an operation is called

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is to be looked at: functions cannot all be copied."""
        func = self.func if self.kind is NodeKind.UNIT else get_function_name(self.func)
        plain = replace(self, func=func, arg_template=None, call=None)
        return TraceNode, tuple(getattr(plain, one.name) for one in fields(self))


@dataclass(frozen=True)
class UnitCall:
    """The n-th call of a unit in a forward."""

    unit: str
    call_index: int = 0

    def __str__(self) -> str:
        return self.unit + (f" (call {self.call_index + 1})" if self.call_index else "")


@dataclass(frozen=True)
class Trace:
    """A whole forward."""

    nodes: tuple[TraceNode, ...]
    values: tuple[TracedValue, ...]
    inputs: tuple[int, ...]  # the values of the tensors it was called with
    output: TracedOutput
    reassigned_buffers: Mapping[
        str, int
    ]  # buffers that were assigned anew: values, by the buffers' names
    shape_read_values: frozenset[int] = (
        frozenset()
    )  # values of which the host knows how large they are
    unit_integer_inputs: Mapping[int, Tensor] = field(
        default_factory=dict
    )  # whole numbers that units are given

    @property
    def unit_call_indices(self) -> list[int]:
        """The steps that call units."""
        return [at for at, step in enumerate(self.nodes) if step.kind is NodeKind.UNIT]

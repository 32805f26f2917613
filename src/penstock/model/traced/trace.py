"""The intermediate representation: nodes and values of one traced forward.

`tracer.Tracer` writes a `Trace`; `assignment` decides which stage runs which node; `stage_program`
turns the result into one program per stage.

A **node** is one thing that the forward did: a call of a unit, a PyTorch operation between units,
or a read of tensor contents by Python. A **value** is one tensor between two in-place changes: an
in-place operation turns every tensor that shares the memory into a new value. So the trace is in
single-assignment form, although the model is not:

    x = self.embed(ids)      node 0: UNIT       inputs (v0)   output v1
    x += self.bias           node 1: OPERATION  inputs (v1, v2)   mutations {v1: v3}
    if mask.all(): ...       node 2: OPERATION  inputs (v4)   output v5
                             node 3: HOST_READ  inputs (v5)   recorded_result True
    x = self.block(x)        node 4: UNIT       inputs (v3)   output v6

Values and nodes are referred to by their index in `Trace.values` and `Trace.nodes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.model.traced.remote_tensor import RemoteTensor
from penstock.model.traced.torch_functions import get_function_name
from penstock.tensor_spec import TensorSpec
from penstock.torch_compat import pytree


class NodeKind(Enum):
    """The kind of a node."""

    UNIT = auto()  # a call of a unit
    OPERATION = auto()  # a PyTorch operation between units
    HOST_READ = auto()  # Python reads tensor contents (`item()`, `if mask.all()`)
    NON_TENSOR = auto()  # a call without tensors, such as entering or leaving `no_grad`


class ValueRef(NamedTuple):
    """A placeholder for a value inside an argument template."""

    value: int


class ValueLeaf(NamedTuple):
    """An output leaf that is a new value."""

    value: int


class ArgumentLeaf(NamedTuple):
    """An output leaf that is one of the node's own tensor arguments."""

    argument_index: int  # its index among the tensor arguments


@dataclass(frozen=True)
class TracedOutput:
    """The output of a node, flattened.

    A leaf is a `ValueLeaf`, an `ArgumentLeaf`, or a plain Python object.
    """

    leaves: tuple[Any, ...]
    tree_spec: pytree.TreeSpec

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled trace is for inspection. The tree spec may hold classes that cannot be pickled.
        return TracedOutput, (self.leaves, None)

    @property
    def value_indices(self) -> tuple[int, ...]:
        """The new values among the leaves."""
        return tuple(leaf.value for leaf in self.leaves if isinstance(leaf, ValueLeaf))


@dataclass(frozen=True)
class TracedValue:
    """A tensor between two in-place changes.

    It is `input_only` if it depends on the inputs, on buffers and on constants, but on no parameter
    and on no output of a unit. Every stage can compute such a value itself. `producer` is the index
    of the node that makes the value, or None if it existed before the forward.
    """

    tensor_spec: TensorSpec
    input_only: bool
    producer: int | None = None
    name: str = ""  # the same on every rank
    parameter_name: str = ""  # empty if the value is not a parameter
    buffer_name: str = ""  # empty if the value is not a buffer
    input_index: int | None = None  # its index among the tensors that the forward was called with


@dataclass(frozen=True)
class TraceNode:
    """One unit call, operation or host read of a traced forward."""

    kind: NodeKind
    func: Any  # the function that was called; for a unit, a `UnitCall`
    inputs: tuple[int, ...]
    output: TracedOutput | None
    location: str  # file, line and function of the model's code
    input_only: bool = False  # all of its inputs are input-only; it may run on every stage
    mutations: Mapping[int, int] = field(default_factory=dict)  # old value -> new value
    # Has an effect beyond this forward, or draws random numbers. Exactly one stage runs it.
    has_side_effect: bool = False
    uses_rng: bool = False  # unknown for units
    # The result (or its shape) depends on tensor contents, and the rest of the trace depends on it.
    # `guards` computes it for other inputs and compares it with `recorded_result`.
    is_guard: bool = False
    recorded_result: Any = None
    literals: str = ""  # the arguments that are not tensors, as text
    # The arguments with a `ValueRef` for each tensor. Units and operations with a result have it.
    arg_template: Any = None
    call: Any = None  # runs the operation; see `OpInterceptor.intercept_op`
    hooked_values: tuple[int, ...] = ()  # those of its inputs on which it registers a hook
    changed_attributes: tuple[str, ...] = ()  # attributes of a unit that its call has changed

    @property
    def produced_values(self) -> set[int]:
        """The values that the node produces, by its result or by changing a tensor in place."""
        return {*(self.output.value_indices if self.output else ()), *self.mutations.values()}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the node for inspection, with function names for functions.

        Not all functions can be pickled.
        """
        func = self.func if self.kind is NodeKind.UNIT else get_function_name(self.func)
        plain = replace(self, func=func, arg_template=None, call=None)
        return TraceNode, tuple(getattr(plain, item.name) for item in fields(self))


@dataclass(frozen=True)
class UnitCall:
    """The n-th call of a unit in one forward."""

    unit: str
    call_index: int = 0

    def __str__(self) -> str:
        return self.unit + (f" (call {self.call_index + 1})" if self.call_index else "")


class AttributeRead(NamedTuple):
    """A read of an attribute of a unit by the forward around it."""

    unit: str
    path: str  # the module inside the unit that has the attribute; empty for the unit itself
    key: str
    node_index: int  # the node that came next


@dataclass(frozen=True)
class Trace:
    """All nodes and values of one forward."""

    nodes: tuple[TraceNode, ...]
    values: tuple[TracedValue, ...]
    inputs: tuple[int, ...]  # the values of the tensors that the forward was called with
    output: TracedOutput
    reassigned_buffers: Mapping[str, int]  # buffer name -> the value that was assigned to it
    # Values whose "shape", "ndim" or "dtype" Python read. Stages without the tensor must know it.
    metadata_reads: Mapping[str, frozenset[int]] = field(default_factory=dict)
    # Contents of integer and boolean tensors that are passed to units (indices, lengths, masks).
    # The profiler calls the units with these, because a unit may not run with arbitrary indices.
    unit_integer_inputs: Mapping[int, Tensor] = field(default_factory=dict)
    unit_written_buffers: frozenset[str] = frozenset()  # names of buffers that units write to
    attribute_reads: tuple[AttributeRead, ...] = ()

    def make_remote_tensors(self, device: torch.device) -> Callable[[int], RemoteTensor]:
        """Return a function from values to remote tensors, with one tensor for each value.

        So `a is b` gives the same answer as with the real tensors.
        """
        return cache(
            lambda value: RemoteTensor.from_spec(self.values[value].tensor_spec, device, value)
        )

    @property
    def unit_call_indices(self) -> list[int]:
        """The indices of the nodes that call units."""
        return [index for index, node in enumerate(self.nodes) if node.kind is NodeKind.UNIT]

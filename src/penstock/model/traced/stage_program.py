"""Stage programs: what one stage does at each node of a trace, worked out before it runs.

The code generator of the traced model. It turns a `TraceAssignment` into a `StageProgram`: one
`Instruction` for each node, in the order of the trace. `stage_forward.StageInterpreter` executes it
once per micro-batch, so everything that does not depend on the micro-batch is computed here.

An instruction either runs its node or returns a placeholder for the result. Most of the bookkeeping
is about tensors that are changed in place: a stage that receives a tensor, changes it and sends it
on has to send the right version of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.model.traced.assignment import TraceAssignment, locate_value
from penstock.model.traced.containers import OutputWithContainerUpdates
from penstock.model.traced.guards import find_dependencies
from penstock.model.traced.interception import NullHookHandle
from penstock.model.traced.remote_tensor import RemoteTensor
from penstock.model.traced.torch_functions import BACKWARD_CALLS, HOOK_REGISTRATION
from penstock.model.traced.trace import (
    ArgumentLeaf,
    NodeKind,
    Trace,
    TraceNode,
    ValueLeaf,
    ValueRef,
)
from penstock.nested_values import map_tensors
from penstock.torch_compat import pytree


class _AnyTensor:
    """Stands for a tensor in the arguments or the output of a node, in comparisons."""

    def __repr__(self) -> str:
        return "tensor"


ANY_TENSOR = _AnyTensor()


class FlatOutput(NamedTuple):
    """The leaves and the structure of an output."""

    leaves: list[Any]
    tree_spec: pytree.TreeSpec


class ExpectedTensor(NamedTuple):
    """The metadata of a tensor that other stages rely on; None for what nothing depends on."""

    shape: tuple[int, ...] | None
    ndim: int | None
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Instruction:
    """The action of a stage at one node of the trace: run it, or return a placeholder.

    Attributes:
        node: The node.
        runs_here: Whether the stage runs the node. If not, it returns a placeholder.
        placeholder_result: The result of a node that does not run here.
        placeholder_is_static: Whether `placeholder_result` is returned as it is. If not, it is a
            list of leaves, some of which are arguments of the call.
        saved_values: Values that the stage keeps after it has run the node.
        expected_output: The output of a unit in the trace, with `ANY_TENSOR` for tensors: one of
            these, a tuple, or a `FlatOutput` for other structures. Stages that do not run the unit
            go by it. None if there is no such stage.
        expected_tensors: What other stages rely on, for each tensor of a unit's output; None for
            tensors of which nothing depends on the shape or dtype. Empty if nothing is to check.
        rebound_values: Pairs (old, new) of values: another stage changes `old` in place at this
            node, and from here on `new` takes its place.
        fills_container: Whether the unit puts something into a list or dict of its caller.
        guarded_arguments: The arguments of an operation that a guard depends on, None for others.
            `ANY_TENSOR` stands for a tensor that the guards compute with as it is now.
        returns_argument: Whether the result contains one of the arguments, as for `x.add_(1)`.
        must_not_alias: Whether the unit must return new tensors wherever it did so in the trace,
            because they or the arguments are changed in place later.
        watched_attributes: Attributes of a unit, by module inside it and name, that the forward
            around it reads where the unit must not have changed them.
    """

    node: TraceNode
    runs_here: bool
    placeholder_result: Any = None
    placeholder_is_static: bool = True
    saved_values: tuple[SavedValue, ...] = ()
    expected_output: Any = None
    expected_tensors: tuple[ExpectedTensor | None, ...] = ()
    rebound_values: tuple[tuple[int, int], ...] = ()
    fills_container: bool = False
    guarded_arguments: Any = None
    returns_argument: bool = False
    must_not_alias: bool = False
    watched_attributes: tuple[tuple[str, str], ...] = ()


class SavedValue(NamedTuple):
    """A value that the stage still needs after its node has run."""

    value: int
    source: ValueLeaf | ArgumentLeaf | int  # where to find it; see `assignment.locate_value`
    is_sent: bool
    needs_copy: bool  # a later node of this stage changes it in place


@dataclass(frozen=True)
class StageProgram:
    """All that a stage does in one forward.

    Attributes:
        instructions: One for each node of the trace.
        end: The index after the last instruction that matters to this stage; the forward stops
            there.
        input_proxies: A remote tensor for each tensor of the batch, for those that this stage
            does not take.
        input_indices: Which tensors of the batch the stage takes.
        recv_values: The values that arrive, by source stage.
        send_values: The values to send, by destination stage.
        values_to_clone: Received values that the stage changes in place while another stage uses
            them.
        original_values: For a value that results from changes in place, the value before the
            first change.
        is_last: Whether this is the last stage, which returns the output.
        reassigned_buffers: Names of the buffers that the stage assigns anew.
        device: The device of the stage.
        uses_rng: Whether an operation between units draws random numbers.
        mutates_inputs: Whether the stage changes a received tensor or a tensor of the batch in
            place.
        runs_backward: Whether the forward runs a backward between units.
    """

    instructions: tuple[Instruction, ...]
    end: int
    input_proxies: tuple[Any, ...]
    input_indices: tuple[int, ...]
    recv_values: Mapping[int, tuple[int, ...]]
    send_values: Mapping[int, tuple[int, ...]]
    values_to_clone: tuple[int, ...]
    original_values: Mapping[int, int]
    is_last: bool
    reassigned_buffers: tuple[str, ...]
    device: torch.device
    uses_rng: bool
    mutates_inputs: bool
    runs_backward: bool


@dataclass(frozen=True)
class _TraceFacts:
    """The facts about a trace that the programs of all stages share."""

    metadata_dependent: Mapping[str, set[int]]  # by kind of metadata, values that decide it
    changes_in_place: Sequence[Mapping[int, int]]
    guarded_arguments: Mapping[int, tuple[Any, Any]]
    original_values: Mapping[int, int]
    runs_backward: bool


def build_stage_programs(
    assignment: TraceAssignment,
    devices: Mapping[int, torch.device],
    constants: Mapping[int, Tensor],
) -> dict[int, StageProgram]:
    """Return the programs of the stages that have a device here.

    `constants` are the tensors by value that the forward took from attributes and variables.
    """
    trace = assignment.trace
    facts = _TraceFacts(
        {kind: _find_dependent_values(trace, read) for kind, read in trace.metadata_reads.items()},
        [node.mutations for node in trace.nodes if node.mutations],
        _collect_guarded_arguments(trace, constants),
        _find_original_values(trace.nodes),
        any(node.func in BACKWARD_CALLS for node in trace.nodes if node.kind is not NodeKind.UNIT),
    )
    return {
        stage: _build_stage_program(assignment, stage, device, facts)
        for stage, device in devices.items()
    }


def _build_stage_program(
    assignment: TraceAssignment, stage: int, device: torch.device, facts: _TraceFacts
) -> StageProgram:
    trace, stage_assignment = assignment.trace, assignment.stage_assignments[stage]
    remote_tensor = trace.make_remote_tensors(device)
    inplace = _InplaceTracker(assignment, stage)
    guarded_arguments = facts.guarded_arguments
    instructions = []
    for node_index, node in enumerate(trace.nodes):
        # Nodes without tensors run on every stage: they switch modes such as `no_grad`.
        if node_index in stage_assignment.nodes or node.kind is NodeKind.NON_TENSOR:
            output_context = None if node.output is None else node.output.tree_spec.context
            instruction = Instruction(
                node,
                True,
                saved_values=inplace.find_saved_values(node),
                expected_output=_build_expected_output(assignment, stage, node_index),
                expected_tensors=_collect_expected_tensors(trace, node, facts.metadata_dependent),
                fills_container=output_context is OutputWithContainerUpdates,
                guarded_arguments=guarded_arguments.get(node_index),
                returns_argument=node.output is not None
                and any(isinstance(leaf, ArgumentLeaf) for leaf in node.output.leaves),
                must_not_alias=_must_not_alias(node, facts.changes_in_place),
                watched_attributes=_find_watched_attributes(assignment, stage, node_index),
            )
        else:
            placeholder, is_static = _build_placeholder(node, remote_tensor)
            rebound_values = inplace.find_rebound_values(node)
            instruction = Instruction(
                node,
                False,
                placeholder,
                is_static,
                rebound_values=rebound_values,
                guarded_arguments=guarded_arguments.get(node_index),
            )
        instructions.append(instruction)
    is_last = stage == len(assignment.stage_assignments) - 1
    return StageProgram(
        tuple(instructions),
        # The last stage has to reach the `return` of the forward, not only its last node.
        len(instructions) + 1 if is_last else stage_assignment.end,
        tuple(remote_tensor(value) for value in trace.inputs),
        tuple(stage_assignment.input_indices),
        {source: tuple(values) for source, values in stage_assignment.recv_values.items()},
        {dst: tuple(values) for dst, values in stage_assignment.send_values.items()},
        inplace.find_values_to_clone(),
        facts.original_values,
        is_last,
        tuple(
            name for name in trace.reassigned_buffers if assignment.buffer_writers[name] == stage
        ),
        device,
        any(trace.nodes[node_index].uses_rng for node_index in stage_assignment.nodes),
        inplace.mutates_inputs(trace.inputs),
        facts.runs_backward,
    )


def _collect_guarded_arguments(
    trace: Trace, constants: Mapping[int, Tensor]
) -> dict[int, tuple[Any, Any]]:
    """Return the arguments of the operations that guards depend on, by node.

    Guards repeat these operations with the arguments from the trace. A number among them may come
    from anywhere in the program.
    """
    guards = [index for index, node in enumerate(trace.nodes) if node.is_guard]
    arguments = {
        index: map_tensors(
            map_tensors(trace.nodes[index].arg_template, lambda _: ANY_TENSOR),
            lambda ref: constants.get(ref.value, ANY_TENSOR),
            ValueRef,
        )
        for index in find_dependencies(trace, guards)
    }
    # `mask.all()` has nothing to compare.
    return {
        index: template
        for index, template in arguments.items()
        if any(leaf is not ANY_TENSOR for leaf in pytree.tree_leaves(template))
    }


def _find_dependent_values(trace: Trace, read_values: Collection[int]) -> set[int]:
    """Return the values whose metadata the forward relies on, directly or through operations.

    The host has read `x.shape` somewhere, and every stage goes on with the shape from the trace.
    Going back through the operations finds the outputs of units that this shape follows from.
    """
    values = set(read_values)
    for node in reversed(trace.nodes):
        if node.kind is not NodeKind.UNIT and not values.isdisjoint(node.produced_values):
            values.update(node.inputs)
    return values


def _collect_expected_tensors(
    trace: Trace, node: TraceNode, dependent_values: Mapping[str, set[int]]
) -> tuple[ExpectedTensor | None, ...]:
    """Return `Instruction.expected_tensors` of a node."""
    if node.kind is not NodeKind.UNIT or node.output is None:
        return ()
    expected: list[ExpectedTensor | None] = []
    for leaf in node.output.leaves:
        value = leaf.value if isinstance(leaf, ValueLeaf) else None
        kinds = {kind for kind, values in dependent_values.items() if value in values}
        if value is None or not kinds:
            expected.append(None)
            continue
        spec = trace.values[value].tensor_spec
        expected.append(
            ExpectedTensor(
                spec.shape if "shape" in kinds else None,
                len(spec.shape) if "ndim" in kinds else None,
                spec.dtype if "dtype" in kinds else None,
            )
        )
    return tuple(expected) if any(expected) else ()


def _is_reached_elsewhere(assignment: TraceAssignment, stage: int, node_index: int) -> bool:
    """Return whether another stage runs the host code before a node. The last stage runs all."""
    last = len(assignment.stage_assignments) - 1
    return any(
        index != stage and (index == last or node_index <= other.end)
        for index, other in enumerate(assignment.stage_assignments)
    )


def _find_watched_attributes(
    assignment: TraceAssignment, stage: int, node_index: int
) -> tuple[tuple[str, str], ...]:
    """Return `Instruction.watched_attributes` of a node that a stage runs.

    A read after the call, by code that only this stage runs, finds what the call has left. Any
    other read would find what another micro-batch has left.
    """
    node = assignment.trace.nodes[node_index]
    if node.kind is not NodeKind.UNIT:
        return ()
    reads = [read for read in assignment.trace.attribute_reads if read.unit == node.func.unit]
    return tuple(
        dict.fromkeys(
            (read.path, read.key)
            for read in reads
            if read.node_index <= node_index
            or _is_reached_elsewhere(assignment, stage, read.node_index)
        )
    )


def _build_expected_output(assignment: TraceAssignment, stage: int, node_index: int) -> Any:
    """Return `Instruction.expected_output` of a node that a stage runs."""
    node = assignment.trace.nodes[node_index]
    is_seen = _is_reached_elsewhere(assignment, stage, node_index + 1)
    if node.kind is not NodeKind.UNIT or node.output is None or not is_seen:
        return None
    leaves = [
        ANY_TENSOR if isinstance(leaf, ValueLeaf | ArgumentLeaf) else leaf
        for leaf in node.output.leaves
    ]
    if node.output.tree_spec.is_leaf() and leaves == [ANY_TENSOR]:
        return ANY_TENSOR
    # Tuples are common, and need not be flattened to be compared.
    is_plain_tuple = node.output.tree_spec == pytree.tree_structure((0,) * len(leaves))
    return tuple(leaves) if is_plain_tuple else FlatOutput(leaves, node.output.tree_spec)


def _must_not_alias(node: TraceNode, changes_in_place: Sequence[Mapping[int, int]]) -> bool:
    """Return whether the results of a unit must not be in the memory of its arguments.

    One of them is changed in place later, and the trace does not have the other change with it.
    """
    if node.kind is not NodeKind.UNIT:
        return False
    inputs, produced = set(node.inputs), node.produced_values
    changed = [changes.keys() & (inputs | produced) for changes in changes_in_place]
    return any(changed) and not any(values & inputs and values & produced for values in changed)


def _find_original_values(nodes: Sequence[TraceNode]) -> dict[int, int]:
    """Return the value before the first change in place, for each value that such a change made."""
    originals: dict[int, int] = {}
    for node in nodes:
        for old, new in node.mutations.items():
            originals[new] = originals.get(old, old)
    return originals


class _InplaceTracker:
    """The bookkeeping that changes in place require of one stage.

    In a trace, a change in place turns an old value into a new one: `node.mutations` maps old to
    new. The tensor object stays the same, and views of it change along, although they are not
    arguments of the node. To send or replace the new value of such a view, the stage has to
    remember the tensor of the old one. These old values are the *tracked* values.
    """

    def __init__(self, assignment: TraceAssignment, stage: int) -> None:
        nodes, self._assignment = assignment.trace.nodes, assignment.stage_assignments[stage]
        self._sent_values = {v for values in self._assignment.send_values.values() for v in values}
        self._received_values = {
            v for values in self._assignment.recv_values.values() for v in values
        }
        self._user_counts = Counter(
            v
            for stage_assignment in assignment.stage_assignments
            for v in stage_assignment.needed_values
        )
        self._mutated_values: set[int] = set()  # changed in place by this stage
        self._tracked_values: set[int] = set()
        # Backwards, so that a chain of changes is followed from its last value to its first.
        for node_index, node in reversed(list(enumerate(nodes))):
            runs_here = node_index in self._assignment.nodes
            self._mutated_values.update(node.mutations if runs_here else ())
            needed = self._sent_values if runs_here else self._assignment.needed_values
            wanted = needed | self._tracked_values
            self._tracked_values |= {
                old
                for old, new in node.mutations.items()
                if new in wanted and old not in node.inputs
            }

    def find_saved_values(self, node: TraceNode) -> tuple[SavedValue, ...]:
        """Return the values of a node that the stage sends or tracks."""
        return tuple(
            SavedValue(
                value,
                locate_value(node, value),
                value in self._sent_values,
                value in self._mutated_values,
            )
            for value in sorted(node.produced_values & (self._sent_values | self._tracked_values))
        )

    def find_rebound_values(self, node: TraceNode) -> tuple[tuple[int, int], ...]:
        """Return the values that another stage changes at a node and that are used here later."""
        wanted = self._assignment.needed_values | self._tracked_values
        return tuple((old, new) for old, new in node.mutations.items() if new in wanted)

    def find_values_to_clone(self) -> tuple[int, ...]:
        """Return the received values that this stage changes in place and another stage uses.

        Stages in one process may be given the same tensor.
        """
        values = self._received_values & self._mutated_values
        return tuple(sorted(value for value in values if self._user_counts[value] > 1))

    def mutates_inputs(self, inputs: Sequence[int]) -> bool:
        """Return whether the stage changes a received tensor or one of the batch in place."""
        batch_values = {inputs[index] for index in self._assignment.input_indices}
        return not self._mutated_values.isdisjoint(self._received_values | batch_values)


def _build_placeholder(
    node: TraceNode, remote_tensor: Callable[[int], RemoteTensor]
) -> tuple[Any, bool]:
    """Return the result of a node that does not run on this stage, and whether it is static."""
    # The guards have checked the reads that depend on the values of inputs.
    if node.kind is NodeKind.HOST_READ:
        return node.recorded_result, True
    if node.output is None:
        return (NullHookHandle() if node.func in HOOK_REGISTRATION else None), True
    leaves = [
        remote_tensor(leaf.value) if isinstance(leaf, ValueLeaf) else leaf
        for leaf in node.output.leaves
    ]
    # The common case, a single tensor, needs no work per micro-batch.
    if len(leaves) == 1 and isinstance(leaves[0], RemoteTensor) and node.output.tree_spec.is_leaf():
        return leaves[0], True
    return leaves, False

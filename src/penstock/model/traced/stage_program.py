"""What a stage does at each step of a forward, worked out before it is performed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from penstock.model.traced.assignment import TraceAssignment, get_produced_values, locate_value
from penstock.model.traced.containers import OutputWithContainerUpdates
from penstock.model.traced.interception import NullHookHandle
from penstock.model.traced.remote_tensor import RemoteTensor
from penstock.model.traced.torch_functions import HOOK_REGISTRATION
from penstock.model.traced.trace import ArgumentLeaf, NodeKind, Trace, TraceNode, ValueLeaf

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Instruction:
    """What a stage does at a step."""

    node: TraceNode
    runs_here: bool
    placeholder_result: Any = None  # what it gives instead, if it does not run
    placeholder_is_static: bool = True  # `ready` is given as it is
    saved_values: tuple[SavedValue, ...] = ()
    expected_shapes: tuple[Shape | None, ...] = ()  # of what a unit gives, if something rests on it
    rebound_values: tuple[tuple[int, int], ...] = ()  # values that are now others, which arrive
    fills_container: bool = (
        False  # a unit: it puts something into a list or a dict that it is given
    )


class SavedValue(NamedTuple):
    """A value that is needed when the step is over."""

    value: int
    source: (
        ValueLeaf | ArgumentLeaf | int
    )  # in the result, among the arguments, or as an older value
    is_sent: bool
    needs_copy: bool  # it is changed in place, later on


@dataclass(frozen=True)
class StageProgram:
    """All that a stage does in a forward, ready to be performed."""

    instructions: tuple[Instruction, ...]
    end: int
    input_proxies: tuple[Any, ...]  # what stands for inputs that it does not take, by their places
    input_indices: tuple[int, ...]
    recv_values: Mapping[int, tuple[int, ...]]
    send_values: Mapping[int, tuple[int, ...]]
    values_to_clone: tuple[int, ...]  # of what arrives
    original_values: Mapping[
        int, int
    ]  # of what was changed in place: the value that it was at first
    is_last: bool
    reassigned_buffers: tuple[str, ...]  # buffers that it assigns anew
    device: torch.device
    uses_rng: bool  # random numbers, between units
    mutates_inputs: bool  # what arrives, or is given, in place


def build_stage_program(
    assignment: TraceAssignment, stage: int, device: torch.device
) -> StageProgram:
    """Of a stage on a device."""
    trace, portion = assignment.trace, assignment.stage_assignments[stage]
    stand_ins: dict[int, RemoteTensor] = {}

    def remote_tensor(value: int) -> RemoteTensor:
        if value not in stand_ins:
            stand_ins[value] = RemoteTensor.from_spec(
                trace.values[value].tensor_spec, device, value
            )
        return stand_ins[value]

    changing, measured = _InplaceTracker(assignment, stage), _find_shape_dependent_values(trace)
    acts = []
    for at, step in enumerate(trace.nodes):
        runs = at in portion.nodes or step.kind is NodeKind.NON_TENSOR
        if runs:
            fills = (
                step.output is not None
                and step.output.tree_spec.context is OutputWithContainerUpdates
            )
            shapes = _collect_expected_shapes(trace, step, measured)
            acts.append(
                Instruction(
                    step,
                    True,
                    saved_values=changing.find_saved_values(step),
                    expected_shapes=shapes,
                    fills_container=fills,
                )
            )
            continue
        ready, plain = _build_placeholder(step, remote_tensor)
        acts.append(
            Instruction(
                step, False, ready, plain, rebound_values=changing.find_rebound_values(step)
            )
        )
    last = stage == len(assignment.stage_assignments) - 1
    return StageProgram(
        tuple(acts),
        len(acts) + 1 if last else portion.end,
        tuple(remote_tensor(value) for value in trace.inputs),
        tuple(portion.input_indices),
        {source: tuple(values) for source, values in portion.recv_values.items()},
        {dst: tuple(values) for dst, values in portion.send_values.items()},
        changing.find_values_to_clone(),
        _find_original_values(trace.nodes),
        last,
        tuple(
            name for name in trace.reassigned_buffers if assignment.buffer_writers[name] == stage
        ),
        device,
        any(trace.nodes[at].uses_rng for at in portion.nodes),
        changing.mutates_inputs(trace.inputs),
    )


def _find_shape_dependent_values(trace: Trace) -> set[int]:
    """Values on whose shapes something rests that the host knows, and so every stage."""
    found = set(trace.shape_read_values)
    for step in reversed(trace.nodes):
        if step.kind is not NodeKind.UNIT and not found.isdisjoint(get_produced_values(step)):
            found.update(step.inputs)
    return found


def _collect_expected_shapes(
    trace: Trace, node: TraceNode, shape_dependent: set[int]
) -> tuple[Shape | None, ...]:
    """Of what a unit gives."""
    if (
        node.kind is not NodeKind.UNIT
        or node.output is None
        or shape_dependent.isdisjoint(node.output.value_indices)
    ):
        return ()
    return tuple(
        trace.values[leaf.value].tensor_spec.shape
        if isinstance(leaf, ValueLeaf) and leaf.value in shape_dependent
        else None
        for leaf in node.output.leaves
    )


def _find_original_values(nodes: Sequence[TraceNode]) -> dict[int, int]:
    found: dict[int, int] = {}
    for step in nodes:
        for old, new in step.mutations.items():
            found[new] = found.get(old, old)
    return found


class _InplaceTracker:
    """What a stage has to see to because tensors are changed in place."""

    def __init__(self, assignment: TraceAssignment, stage: int) -> None:
        steps, self._assignment = assignment.trace.nodes, assignment.stage_assignments[stage]
        self._sent_values = {v for values in self._assignment.send_values.values() for v in values}
        self._received_values = {
            v for values in self._assignment.recv_values.values() for v in values
        }
        self._user_counts = Counter(
            v for portion in assignment.stage_assignments for v in portion.needed_values
        )
        self._mutated_values: set[int] = set()  # by this stage
        self._tracked_values: set[int] = set()
        for at, step in reversed(list(enumerate(steps))):
            here = at in self._assignment.nodes
            self._mutated_values.update(step.mutations if here else ())
            wanted = (
                self._sent_values | self._tracked_values
                if here
                else self._assignment.needed_values | self._tracked_values
            )
            self._tracked_values |= {
                old
                for old, new in step.mutations.items()
                if new in wanted and old not in step.inputs
            }

    def find_saved_values(self, node: TraceNode) -> tuple[SavedValue, ...]:
        """The values of a step that are sent, or looked for when what they look at is changed."""
        made = set(node.output.value_indices if node.output else ()) | set(node.mutations.values())
        return tuple(
            SavedValue(
                value,
                locate_value(node, value),
                value in self._sent_values,
                value in self._mutated_values,
            )
            for value in sorted(made & (self._sent_values | self._tracked_values))
        )

    def find_rebound_values(self, node: TraceNode) -> tuple[tuple[int, int], ...]:
        """What another stage changes in the step, and is used here afterwards."""
        wanted = self._assignment.needed_values | self._tracked_values
        return tuple((old, new) for old, new in node.mutations.items() if new in wanted)

    def find_values_to_clone(self) -> tuple[int, ...]:
        """What arrives here, is changed here, and is elsewhere, too."""
        found = self._received_values & self._mutated_values
        return tuple(sorted(value for value in found if self._user_counts[value] > 1))

    def mutates_inputs(self, inputs: Sequence[int]) -> bool:
        """Does the stage change what is not its own?"""
        given = {inputs[at] for at in self._assignment.input_indices}
        return not self._mutated_values.isdisjoint(self._received_values | given)


def _build_placeholder(
    node: TraceNode, remote_tensor: Callable[[int], RemoteTensor]
) -> tuple[Any, bool]:
    if node.kind is NodeKind.HOST_READ:
        return node.recorded_result, True
    if node.output is None:
        return (NullHookHandle() if node.func in HOOK_REGISTRATION else None), True
    leaves = [
        remote_tensor(leaf.value) if isinstance(leaf, ValueLeaf) else leaf
        for leaf in node.output.leaves
    ]
    if len(leaves) == 1 and isinstance(leaves[0], RemoteTensor) and node.output.tree_spec.is_leaf():
        return leaves[0], True
    return leaves, False

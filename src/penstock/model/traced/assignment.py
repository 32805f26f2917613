"""The assignment pass: which stage runs each node of a trace, and which values it sends to whom.

The pass works on one trace, in this order:

    1. Units          go where the cut puts their calls.
    2. Operations     between units go to one stage each; see `_NodePlacer.place_operations`.
    3. Needed values  of each stage are traced back: to the inputs, to a node that this stage can
                      run, or to a stage that sends them.
    4. Sends          mirror the receives.
    5. Checks         refuse what the stages cannot compute correctly.

A node or value is *input-only* if it depends on nothing but the inputs, buffers and constants: a
causal mask, position ids. Such a node has no stage of its own. Every stage that needs its result
computes it again, which costs less than sending it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import CutError
from penstock.model.traced.torch_functions import BACKWARD_CALLS, get_function_name
from penstock.model.traced.trace import (
    ArgumentLeaf,
    NodeKind,
    Trace,
    TracedValue,
    TraceNode,
    UnitCall,
    ValueLeaf,
)

# The stages that own a parameter or write a buffer, by the tensor's name.
OwnerStages = Mapping[str, frozenset[int]]


@dataclass
class StageAssignment:
    """One stage's part of a forward. Nodes and values are indices into the trace."""

    nodes: set[int] = field(default_factory=set)  # run on this stage
    needed_values: set[int] = field(default_factory=set)  # used on this stage, wherever they arise
    input_indices: list[int] = field(default_factory=list)  # which tensors of the batch it takes
    recv_values: dict[int, list[int]] = field(default_factory=dict)  # by source stage
    send_values: dict[int, list[int]] = field(default_factory=dict)  # by destination stage
    end: int = 0  # one after its last node


@dataclass(frozen=True)
class TraceAssignment:
    """A trace and the part of it that each stage runs.

    `parameter_users`, `buffer_readers` and `buffer_writers` are about operations between units; the
    parameters and buffers inside units go where their unit goes.
    """

    trace: Trace
    stage_assignments: tuple[StageAssignment, ...]
    node_stages: Mapping[int, int]  # the stage of each node that runs on one stage alone
    parameter_users: Mapping[str, frozenset[int]]  # stages, by name
    buffer_readers: Mapping[str, frozenset[int]]
    buffer_writers: Mapping[str, int]

    @property
    def edges(self) -> list[tuple[int, int]]:
        """The pairs of stages (source, destination) between which values are sent."""
        return [(s, dst) for s, p in enumerate(self.stage_assignments) for dst in p.send_values]


def assign_nodes(
    trace: Trace,
    place_call: Callable[[UnitCall, int], int],
    num_stages: int,
    owners: OwnerStages | None = None,
) -> TraceAssignment:
    """Assign every node of a trace to a stage.

    Args:
        trace: The traced forward.
        place_call: Returns the stage of a unit's call. Its second argument is the stage of the call
            before it.
        num_stages: The number of stages.
        owners: The stages that own each parameter, once these are fixed: the example fixes them,
            and later traces have to follow. None while the example itself is assigned.

    Raises:
        CutError: The stages cannot compute this forward, and the message says why.
    """
    placer = _NodePlacer(trace, num_stages, owners)
    placer.place_units(place_call)
    placer.place_operations()
    assignments = [StageAssignment() for _ in range(num_stages)]
    for node_index, stage in placer.node_stages.items():
        assignments[stage].nodes.add(node_index)
        assignments[stage].needed_values.update(trace.nodes[node_index].inputs)
        # A change in place also changes every tensor that shares the memory. If such a tensor is
        # input-only, this stage computes it before the change, so that it can send its new state.
        mutated = [(old, trace.values[old]) for old in trace.nodes[node_index].mutations]
        assignments[stage].needed_values.update(
            old for old, v in mutated if v.input_only and v.producer is not None
        )
    # The last stage returns the output. A buffer that the forward assigns anew is written by the
    # stage that computes its new tensor; by stage 0 if no single stage does.
    last = assignments[num_stages - 1]
    last.needed_values.update(trace.output.value_indices)
    for value in trace.reassigned_buffers.values():
        producer = trace.values[value].producer
        buffer_stage = placer.node_stages.get(-1 if producer is None else producer, 0)
        assignments[buffer_stage].needed_values.add(value)
    for stage, assignment in enumerate(assignments):
        _resolve_needed_values(stage, assignment, trace, placer.node_stages)
    for stage, assignment in enumerate(assignments):
        for source, values in assignment.recv_values.items():
            assignments[source].send_values[stage] = values
    _check_inplace_changes(trace, placer.node_stages, assignments)
    _check_inner_backward(trace, placer.node_stages)
    _check_hooks(trace, placer.node_stages, assignments)
    _check_counting_units(trace, placer.node_stages)
    users = _find_users(trace, assignments, lambda v: v.parameter_name)
    readers = _find_users(trace, assignments, lambda v: v.buffer_name)
    writers = _find_writers(trace, placer.node_stages, readers)
    return TraceAssignment(
        trace, tuple(assignments), dict(placer.node_stages), users, readers, writers
    )


def fingerprint_assignment(assignment: TraceAssignment) -> str:
    """Return a short hash of an assignment, for processes to compare.

    Two assignments have the same fingerprint if their units are on the same stages and the same
    values go between them. It uses names and shapes, not indices: some models iterate over sets, so
    the nodes of two processes may be numbered differently.
    """
    trace = assignment.trace
    facts: list[Any] = sorted(
        (str(trace.nodes[node_index].func), assignment.node_stages[node_index])
        for node_index in trace.unit_call_indices
    )
    for stage_assignment in assignment.stage_assignments:
        for source, values in sorted(stage_assignment.recv_values.items()):
            received = [trace.values[value] for value in values]
            facts.append((source, [f"{value.name} {value.tensor_spec}" for value in received]))
        facts.append(stage_assignment.input_indices)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


class _NodePlacer:
    """Chooses the stage of each node that runs on one stage alone."""

    def __init__(self, trace: Trace, num_stages: int, owners: OwnerStages | None) -> None:
        self.trace, self._num_stages, self._owners = trace, num_stages, owners
        self.node_stages: dict[int, int] = {}
        self._consumers: dict[int, list[int]] = {}  # nodes that take a value, by value
        for node_index, node in enumerate(trace.nodes):
            for value in node.inputs:
                self._consumers.setdefault(value, []).append(node_index)
        self._output_values = set(trace.output.value_indices)
        # The node that changes a value in place, by value.
        self._mutators = {
            old: node_index for node_index, node in enumerate(trace.nodes) for old in node.mutations
        }

    def place_units(self, place_call: Callable[[UnitCall, int], int]) -> None:
        """Place the calls of units where the cut puts them."""
        previous_stage = 0
        for node_index in self.trace.unit_call_indices:
            node = self.trace.nodes[node_index]
            previous_stage = self.node_stages[node_index] = place_call(node.func, previous_stage)

    def place_operations(self) -> None:
        """Place the operations between units, in two passes.

        The forward pass finds the earliest stage that can run each operation: the last stage among
        the producers of its arguments. The backward pass then moves an operation to the first
        stage that uses its result, if that sends no more bytes. It goes from the end because the
        consumers of an operation must have their stages before it.
        """
        earliest_stages: dict[int, int | None] = {}
        for node_index, node in enumerate(self.trace.nodes):
            if node.kind is NodeKind.UNIT:
                earliest_stages[node_index] = self.node_stages[node_index]
            elif not self._runs_on_every_stage(node):
                earliest_stages[node_index] = self._find_earliest_stage(node, earliest_stages)
        for node_index in reversed(earliest_stages):
            if node_index not in self.node_stages:
                self.node_stages[node_index] = self._choose_stage(
                    node_index, earliest_stages[node_index]
                )

    def _runs_on_every_stage(self, node: TraceNode) -> bool:
        # A host read with a side effect is an assertion. One stage checks it, once.
        is_plain_read = node.kind is NodeKind.HOST_READ and not node.has_side_effect
        return node.input_only or is_plain_read or node.kind is NodeKind.NON_TENSOR

    def _find_earliest_stage(
        self, node: TraceNode, earliest_stages: Mapping[int, int | None]
    ) -> int | None:
        """Return the last stage among the producers of a node's arguments.

        A parameter whose stages are fixed counts as produced on the first of them that can be used.
        None means that no argument comes from a stage.
        """
        stages = self._find_stages(node.inputs, earliest_stages)
        # An input that is changed in place may share its memory with an output of a unit.
        stages = stages or self._find_stages(node.mutations, earliest_stages)
        for _, owner_stages in self._find_owners(node):
            stages.append(min((s for s in owner_stages if s >= max(stages, default=0)), default=0))
        return max(stages) if stages else None

    def _find_stages(
        self, values: Iterable[int], earliest_stages: Mapping[int, int | None]
    ) -> list[int]:
        producers = (self.trace.values[value].producer for value in values)
        stages = (earliest_stages.get(p) for p in producers if p is not None)
        return [stage for stage in stages if stage is not None]

    def _find_owners(self, node: TraceNode) -> Iterator[tuple[str, list[int]]]:
        """Yield the parameters and written buffers of a node whose stages are fixed, with these."""
        for value in (self.trace.values[value_index] for value_index in node.inputs):
            name = value.parameter_name or value.buffer_name
            if self._owners is not None and (value.parameter_name or name in self._owners):
                yield name, sorted(self._owners[name])

    def _choose_stage(self, node_index: int, earliest: int | None) -> int:
        """Return the stage of an operation whose consumers are placed."""
        node = self.trace.nodes[node_index]
        produced = node.produced_values
        users = [self.node_stages[u] for value in produced for u in self._consumers.get(value, ())
                 if u in self.node_stages]  # fmt: skip
        if produced & self._output_values:
            users.append(self._num_stages - 1)
        first_user = min(users, default=earliest or 0)
        mutators = [self.node_stages.get(self._mutators.get(value, -1), 0) for value in produced]
        if node.mutations or not users:
            # A change in place stays with the tensors that it changes. A node whose result is
            # unused, such as an assertion, stays with its arguments.
            chosen = earliest if earliest is not None else first_user
        elif (earliest or 0) < max(mutators, default=0) <= first_user:
            # A view that is changed in place later is made on the stage that changes it. Sent as a
            # tensor of its own, it would no longer share the memory of its base.
            chosen = max(mutators)
        elif earliest is None or (
            first_user > earliest and self._can_sink(node_index, produced, first_user)
        ):
            chosen = first_user
        else:
            chosen = earliest
        return self._move_to_owner(node, chosen, earliest)

    def _can_sink(self, node_index: int, produced: set[int], stage: int) -> bool:
        """Return whether an operation sends no more bytes if it runs on the stage of its consumer.

        Sinking sends the arguments instead of the results. Arguments that the stage has anyway are
        free. An argument that is changed in place later must be read before the change.
        """
        values = self.trace.values
        result_bytes = sum(values[index].tensor_spec.nbytes for index in produced)
        node = self.trace.nodes[node_index]
        argument_bytes = 0
        for index in set(node.inputs):
            value = values[index]
            is_free = value.input_only or value.parameter_name
            if not is_free and not self._is_sent_to(index, stage, node_index):
                argument_bytes += value.tensor_spec.nbytes
        changed_later = {old for n in self.trace.nodes[node_index:] for old in n.mutations}
        return argument_bytes <= result_bytes and not changed_later & set(node.inputs)

    def _is_sent_to(self, value: int, stage: int, excluded_node: int) -> bool:
        """Return whether another node on the stage needs the value anyway."""
        users = self._consumers.get(value, ())
        return any(self.node_stages.get(user) == stage for user in users if user != excluded_node)

    def _move_to_owner(self, node: TraceNode, chosen: int, earliest: int | None) -> int:
        """Return a stage that owns the parameters and written buffers of a node.

        Once the example has fixed the owners, an operation on a parameter runs where that
        parameter is. The parameter cannot move to the operation.
        """
        for name, owner_stages in self._find_owners(node):
            possible_stages = [stage for stage in owner_stages if stage >= (earliest or 0)]
            if not possible_stages:
                raise CutError(
                    f"at {node.location}, {get_function_name(node.func)} uses '{name}', which is "
                    f"on stage {owner_stages[-1]}, together with a value of stage {earliest}. "
                    "With the example it did not. Make the Pipe with an example like these inputs."
                )
            chosen = possible_stages[0] if chosen not in owner_stages else chosen
        return chosen


def _resolve_needed_values(
    stage: int, assignment: StageAssignment, trace: Trace, node_stages: Mapping[int, int]
) -> None:
    """Find out where each value that a stage needs comes from.

    | the value is                      | then the stage                                        |
    |-----------------------------------|-------------------------------------------------------|
    | produced by one of its nodes      | has it                                                |
    | a tensor of the batch             | takes it: `input_indices`                             |
    | input-only                        | runs its producer, and needs what that takes          |
    | produced by a node on another one | receives it: `recv_values`                            |
    """
    pending, needed = list(assignment.needed_values), set(assignment.needed_values)
    while pending:
        value_index = pending.pop()
        producer_index = trace.values[value_index].producer
        if producer_index is None or not trace.nodes[producer_index].input_only:
            continue
        assignment.nodes.add(producer_index)
        producer = trace.nodes[producer_index]
        # A change in place also needs the tensor that it changes, which may be a view or the base
        # of its argument.
        changed = {old for old, new in producer.mutations.items() if new == value_index}
        new = {*producer.inputs, *changed} - needed
        needed |= new
        pending += new
    assignment.needed_values = needed
    for value_index in sorted(needed):
        value = trace.values[value_index]
        if value.input_index is not None:
            assignment.input_indices.append(value.input_index)
        source = None if value.producer is None else node_stages.get(value.producer)
        if source is None or source == stage:
            continue
        if source > stage:
            raise _backward_edge_error(trace, value.producer or 0, source, stage)
        assignment.recv_values.setdefault(source, []).append(value_index)
    # Sender and receiver may be two processes. They order a payload by names, which are the same
    # in both; indices may differ.
    for values in assignment.recv_values.values():
        values.sort(key=lambda value_index: trace.values[value_index].name)
    assignment.input_indices.sort()
    assignment.end = max(assignment.nodes, default=-1) + 1


def _backward_edge_error(trace: Trace, producer: int, source: int, stage: int) -> CutError:
    node = trace.nodes[producer]
    what = f"unit '{node.func}'" if node.kind is NodeKind.UNIT else get_function_name(node.func)
    return CutError(
        f"at {node.location}, {what} runs on stage {source}, but its result is used on stage "
        f"{stage}, which comes before. With these inputs the model calls its units in another "
        "order than with the example. Make the Pipe with an example like these inputs."
    )


def _check_inplace_changes(
    trace: Trace, node_stages: Mapping[int, int], assignments: list[StageAssignment]
) -> None:
    """Raise if a stage changes a tensor in place while another stage uses a view of it.

    The other stage would not see the change: stages share no memory.
    """
    needed = set().union(*(assignment.needed_values for assignment in assignments))
    # A view may be changed several times before it is used again.
    for node in reversed(trace.nodes):
        needed.update(old for old, new in node.mutations.items() if new in needed)
    for node_index, stage in node_stages.items():
        node = trace.nodes[node_index]
        for old, new in node.mutations.items():
            producer = trace.values[old].producer
            if new not in needed or old in node.inputs:
                continue
            view_stage = None if producer is None else node_stages.get(producer, stage)
            if view_stage not in (None, stage) and not _is_local_view(
                trace, node, old, node_stages, stage
            ):
                raise CutError(
                    f"at {node.location}, {get_function_name(node.func)} changes a tensor in "
                    f"place, and stage {view_stage} has a view of it that is used again. Clone "
                    "the tensor before you change it, or put both into one unit with units=."
                )


def _check_hooks(
    trace: Trace, node_stages: Mapping[int, int], assignments: list[StageAssignment]
) -> None:
    """Raise if a hook on a tensor would see only one stage's part of the gradient.

    The stage that computes a tensor has its whole gradient. Another stage that uses the tensor has
    a part of it, unless it is the only one that does.
    """
    for node_index, stage in node_stages.items():
        node = trace.nodes[node_index]
        for value in node.hooked_values:
            producer = trace.values[value].producer
            users = [
                s for s, assignment in enumerate(assignments) if value in assignment.needed_values
            ]
            if len(users) > 1 and (producer is None or node_stages.get(producer) != stage):
                what = f"unit '{node.func}'" if node.kind is NodeKind.UNIT else "register_hook"
                raise CutError(
                    f"at {node.location}, {what} puts a hook on a tensor that stages "
                    f"{', '.join(map(str, users))} use, and each has only a part of its gradient. "
                    "Put the hook on a tensor that a unit returns, in the forward around the "
                    "units, or put all that uses the tensor into one unit with units=."
                )


def _check_counting_units(trace: Trace, node_stages: Mapping[int, int]) -> None:
    """Raise if a unit that counts its calls, or assigns a buffer, is called on several stages.

    Each of them has a copy of the unit. A value that only the first call changes is a cache.
    """
    calls: dict[str, list[int]] = {}
    for node_index in trace.unit_call_indices:
        calls.setdefault(trace.nodes[node_index].func.unit, []).append(node_index)
    for unit, node_indices in calls.items():
        stages = sorted({node_stages[node_index] for node_index in node_indices})
        changed = trace.nodes[node_indices[-1]].changed_attributes
        if len(stages) > 1 and changed:
            raise CutError(
                f"unit '{unit}' changes {', '.join(changed)} in each of its calls, which are on "
                f"stages {', '.join(map(str, stages))}. Each of them has a copy of the unit and "
                "would count for itself. Pass the value to the unit as an argument, or cut with "
                "stages= so that its calls are on one stage."
            )


def _check_inner_backward(trace: Trace, node_stages: Mapping[int, int]) -> None:
    """Raise if `torch.autograd.grad` inside the forward goes through nodes of several stages.

    The graph between its inputs and its outputs has to be on one stage, because autograd cannot go
    through a message inside a forward.
    """
    for node_index, node in enumerate(trace.nodes):
        if node.func not in BACKWARD_CALLS or node_index not in node_stages:
            continue
        # The nodes between are those that depend on an argument of the call (`descendants`) and
        # that an argument of the call depends on (`ancestors`).
        descendants, ancestors = set(node.inputs), set(node.inputs)
        earlier = list(enumerate(trace.nodes[:node_index]))
        for _, previous in earlier:
            if descendants.intersection(previous.inputs):
                descendants |= previous.produced_values
        between = []
        for index, previous in reversed(earlier):
            if ancestors & previous.produced_values:
                ancestors.update(previous.inputs)
                between += [index] if descendants.intersection(previous.inputs) else []
        stages = {node_stages.get(index, node_stages[node_index]) for index in between} | {
            node_stages[node_index]
        }
        if len(stages) > 1:
            raise CutError(
                f"at {node.location}, {get_function_name(node.func)} runs a backward inside the "
                f"forward, through operations of stages {', '.join(map(str, sorted(stages)))}. "
                "Put all of it into one unit with units=, or cut elsewhere with stages=."
            )


def _is_local_view(
    trace: Trace, node: TraceNode, base: int, node_stages: Mapping[int, int], stage: int
) -> bool:
    """Return whether the tensor that a node changes is a view of `base` made on the same stage.

    Then the stage has received the base, and the change reaches it.
    """
    # Follow the changed tensor back through views that this stage made, until the base appears.
    pending = [value for value in node.inputs if value in node.mutations]
    while pending:
        producer = trace.values[pending.pop()].producer
        if producer is None or node_stages.get(producer) != stage:
            continue
        producer_inputs = trace.nodes[producer].inputs
        if base in producer_inputs:
            return True
        pending += [value for value in producer_inputs if value in node.mutations]
    return False


def _find_users(
    trace: Trace, assignments: Sequence[StageAssignment], name_of: Callable[[TracedValue], str]
) -> dict[str, frozenset[int]]:
    """Return the stages that need each parameter or buffer between units, by its name."""
    users: dict[str, set[int]] = {}
    for stage, assignment in enumerate(assignments):
        for value_index in assignment.needed_values:
            value = trace.values[value_index]
            if value.producer is None and name_of(value):
                users.setdefault(name_of(value), set()).add(stage)
    return {name: frozenset(stages) for name, stages in users.items()}


def _find_writers(
    trace: Trace, node_stages: Mapping[int, int], readers: Mapping[str, frozenset[int]]
) -> dict[str, int]:
    """Return the stage that changes each buffer between units.

    A buffer may change in place or be assigned anew. No other stage may use it: stages run the same
    micro-batch at different times and would read the buffer before or after the change at random.
    """
    writers: dict[str, set[int]] = {}
    for node_index, stage in node_stages.items():
        for old in trace.nodes[node_index].mutations:
            if trace.values[old].buffer_name:
                writers.setdefault(trace.values[old].buffer_name, set()).add(stage)
    for name, value in trace.reassigned_buffers.items():
        producer = trace.values[value].producer
        writers.setdefault(name, set()).add(
            node_stages.get(-1 if producer is None else producer, 0)
        )
    for name, stages in writers.items():
        users = sorted(stages | readers.get(name, frozenset()))
        if len(users) > 1:
            raise CutError(
                f"the forward changes the buffer '{name}' between units, and stages "
                f"{', '.join(map(str, users))} use it, each at its own time. Change and read it "
                "in one unit with units=, or cut elsewhere with stages=."
            )
    return {name: min(stages) for name, stages in writers.items()}


def locate_value(node: TraceNode, value: int) -> ValueLeaf | ArgumentLeaf | int:
    """Return where a node has a value that it produces.

    A `ValueLeaf` is a leaf of its result. An `ArgumentLeaf` is an argument that it changes in
    place. An int is an older value that shares memory with a changed argument.
    """
    assert node.output is not None
    for leaf in node.output.leaves:
        if isinstance(leaf, ValueLeaf) and leaf.value == value:
            return leaf
    for old, new in node.mutations.items():
        if new == value:
            return ArgumentLeaf(node.inputs.index(old)) if old in node.inputs else old
    raise AssertionError("a value that the node does not produce")

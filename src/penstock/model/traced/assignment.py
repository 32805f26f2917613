"""A forward divided among stages: who runs which step, and which values go from whom to whom.

Units stand where the cut puts them. An operation between units runs on the last stage among those
that make what it takes, or on the stage that uses what it makes, if that sends no more bytes. What
follows from the inputs alone is computed by every stage that needs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
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

OwnerStages = Mapping[str, frozenset[int]]  # the stages that have a parameter, or write a buffer


@dataclass
class StageAssignment:
    """One stage's part of a forward."""

    nodes: set[int] = field(default_factory=set)  # steps
    needed_values: set[int] = field(default_factory=set)  # values
    input_indices: list[int] = field(default_factory=list)  # inputs that it takes
    recv_values: dict[int, list[int]] = field(default_factory=dict)  # values, by source
    send_values: dict[int, list[int]] = field(default_factory=dict)  # by destination
    end: int = 0  # one after its last step


@dataclass(frozen=True)
class TraceAssignment:
    """A trace and what each stage does of it."""

    trace: Trace
    stage_assignments: tuple[StageAssignment, ...]
    node_stages: Mapping[int, int]  # of the steps that run on one stage alone
    parameter_users: Mapping[
        str, frozenset[int]
    ]  # parameters that are used between units, by stages
    buffer_readers: Mapping[str, frozenset[int]]  # the same of buffers
    buffer_writers: Mapping[str, int]  # buffers that are changed there, by stages

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Who sends to whom."""
        return [(s, dst) for s, p in enumerate(self.stage_assignments) for dst in p.send_values]


def assign_nodes(
    trace: Trace,
    place_call: Callable[[UnitCall, int], int],
    num_stages: int,
    owners: OwnerStages | None = None,
) -> TraceAssignment:
    """`placed` gives the stage of a unit's call, after calls on the stage that it is told.

    With `homes`, parameters are at home there already.
    """
    where = _NodePlacer(trace, num_stages, owners)
    where.place_units(place_call)
    where.place_operations()
    portions = [StageAssignment() for _ in range(num_stages)]
    for at, stage in where.node_stages.items():
        portions[stage].nodes.add(at)
        portions[stage].needed_values.update(where.get_needed_values(at))
        changed = [(old, trace.values[old]) for old in trace.nodes[at].mutations]
        # others that share the memory: made here, so that they can be sent as they are then
        portions[stage].needed_values.update(
            old for old, v in changed if v.input_only and v.producer is not None
        )
    last = portions[num_stages - 1]
    last.needed_values.update(trace.output.value_indices)
    for value in trace.reassigned_buffers.values():
        maker = trace.values[value].producer
        portions[where.node_stages.get(-1 if maker is None else maker, 0)].needed_values.add(value)
    for stage, portion in enumerate(portions):
        _resolve_needed_values(stage, portion, trace, where.node_stages)
    for stage, portion in enumerate(portions):
        for source, values in portion.recv_values.items():
            portions[source].send_values[stage] = values
    _check_inplace_changes(trace, where.node_stages, portions)
    _check_inner_backward(trace, where.node_stages)
    uses = _find_users(trace, portions, lambda v: v.parameter_name)
    reads = _find_users(trace, portions, lambda v: v.buffer_name)
    writes = _find_writers(trace, where.node_stages, reads)
    return TraceAssignment(trace, tuple(portions), dict(where.node_stages), uses, reads, writes)


def fingerprint_assignment(assignment: TraceAssignment) -> str:
    """A few letters: the same where units are on the same stages, and the same values go there."""
    trace = assignment.trace
    told: list[Any] = sorted(
        (str(trace.nodes[at].func), assignment.node_stages[at]) for at in trace.unit_call_indices
    )
    for portion in assignment.stage_assignments:
        for source, values in sorted(portion.recv_values.items()):
            those = [trace.values[value] for value in values]
            told.append((source, [f"{value.name} {value.tensor_spec}" for value in those]))
        told.append(portion.input_indices)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:12]


class _NodePlacer:
    """Where each step that runs on one stage alone does."""

    def __init__(self, trace: Trace, num_stages: int, owners: OwnerStages | None) -> None:
        self.trace, self._num_stages, self._owners = trace, num_stages, owners
        self.node_stages: dict[int, int] = {}
        self._consumers: dict[int, list[int]] = {}
        for at, step in enumerate(trace.nodes):
            for value in step.inputs:
                self._consumers.setdefault(value, []).append(at)
        self._output_values = set(trace.output.value_indices)
        self._mutators = {old: at for at, step in enumerate(trace.nodes) for old in step.mutations}

    def get_needed_values(self, node_index: int) -> Iterable[int]:
        """The values that a step needs."""
        return self.trace.nodes[node_index].inputs

    def place_units(self, place_call: Callable[[UnitCall, int], int]) -> None:
        """As the cut says."""
        before = 0
        for at in self.trace.unit_call_indices:
            step = self.trace.nodes[at]
            before = self.node_stages[at] = place_call(step.func, before)

    def place_operations(self) -> None:
        """First as early as what they take allows; then, from the end, where it is used."""
        early: dict[int, int | None] = {}
        for at, step in enumerate(self.trace.nodes):
            if self._runs_on_every_stage(step):
                continue
            if step.kind is not NodeKind.UNIT:
                early[at] = self._find_earliest_stage(step, early)
                continue
            early[at] = self.node_stages[at]
        for at in reversed(early):
            if at not in self.node_stages:
                self.node_stages[at] = self._choose_stage(at, early[at])

    def _runs_on_every_stage(self, node: TraceNode) -> bool:
        reads = (
            node.kind is NodeKind.HOST_READ and not node.has_side_effect
        )  # else it is a check, made once
        return node.input_only or reads or node.kind is NodeKind.NON_TENSOR

    def _find_earliest_stage(
        self, node: TraceNode, earliest_stages: Mapping[int, int | None]
    ) -> int | None:
        makers = [self.trace.values[value].producer for value in node.inputs]
        found = [earliest_stages[m] for m in makers if m is not None and m in earliest_stages]
        known = [stage for stage in found if stage is not None]
        return max(known) if known else None

    def _choose_stage(self, node_index: int, earliest: int | None) -> int:
        step = self.trace.nodes[node_index]
        made = get_produced_values(step)
        users = [self.node_stages[u] for value in made for u in self._consumers.get(value, ())
                 if u in self.node_stages]  # fmt: skip
        if made & self._output_values:
            users.append(self._num_stages - 1)
        first = min(users, default=earliest or 0)
        changed = [self.node_stages.get(self._mutators.get(value, -1), 0) for value in made]
        if step.mutations or not users:
            chosen = earliest if earliest is not None else first
        elif (earliest or 0) < max(changed, default=0) <= first:
            chosen = max(changed)  # what is changed in place is made there, from what it looks at
        elif earliest is None or (first > earliest and self._can_sink(node_index, made, first)):
            chosen = first
        else:
            chosen = earliest
        return self._move_to_owner(step, chosen, earliest)

    def _can_sink(self, node_index: int, produced: set[int], stage: int) -> bool:
        """Does it send no more bytes, if it runs where its result is used?"""
        values = self.trace.values
        out = sum(values[value].tensor_spec.nbytes for value in produced)
        step = self.trace.nodes[node_index]
        into = 0
        for value in set(step.inputs):
            if (
                values[value].input_only
                or values[value].parameter_name
                or self._is_sent_to(value, stage, node_index)
            ):
                continue
            into += values[value].tensor_spec.nbytes
        changed = {old for s in self.trace.nodes[node_index:] for old in s.mutations}
        return into <= out and not changed & set(step.inputs)

    def _is_sent_to(self, value: int, stage: int, excluded_node: int) -> bool:
        """Is it sent there anyway?"""
        users = self._consumers.get(value, ())
        return any(self.node_stages.get(user) == stage for user in users if user != excluded_node)

    def _move_to_owner(self, node: TraceNode, chosen: int, earliest: int | None) -> int:
        """A parameter that has its home already is used there, and a buffer that is written."""
        if self._owners is None:
            return chosen
        for value in (self.trace.values[at] for at in node.inputs):
            name = value.parameter_name or value.buffer_name
            if not value.parameter_name and name not in self._owners:
                continue
            homes = sorted(self._owners[name])
            fitting = [home for home in homes if home >= (earliest or 0)]
            if not fitting:
                raise CutError(
                    f"at {node.location}, {get_function_name(node.func)} needs '{name}' of stage {homes[-1]} "
                    f"together with a value of stage {earliest}, and with the example it was not so: "
                    "make the Pipe with an example like these inputs"
                )
            chosen = fitting[0] if chosen not in homes else chosen
        return chosen


def _resolve_needed_values(
    stage: int, assignment: StageAssignment, trace: Trace, node_stages: Mapping[int, int]
) -> None:
    """What it needs: made here, taken from the inputs, computed along, or sent by another."""
    waiting, seen = list(assignment.needed_values), set(assignment.needed_values)
    while waiting:
        value = trace.values[waiting.pop()]
        if value.producer is None or value.producer in assignment.nodes:
            continue
        step = trace.nodes[value.producer]
        if not step.input_only:
            continue
        assignment.nodes.add(value.producer)
        new = set(step.inputs) - seen
        seen |= new
        waiting += new
    assignment.needed_values = seen
    for at in sorted(seen):
        value = trace.values[at]
        if value.input_index is not None:
            assignment.input_indices.append(value.input_index)
        source = None if value.producer is None else node_stages.get(value.producer)
        if source is None or source == stage:
            continue
        if source > stage:
            raise _backward_edge_error(trace, value.producer or 0, source, stage)
        assignment.recv_values.setdefault(source, []).append(at)
    for values in assignment.recv_values.values():
        values.sort(key=lambda at: trace.values[at].name)
    assignment.input_indices.sort()
    assignment.end = max(assignment.nodes, default=-1) + 1


def _backward_edge_error(trace: Trace, producer: int, source: int, stage: int) -> CutError:
    step = trace.nodes[producer]
    what = f"unit '{step.func}'" if step.kind is NodeKind.UNIT else get_function_name(step.func)
    return CutError(
        f"at {step.location}, {what} is on stage {source}, and what it makes is used on stage "
        f"{stage}, which is before: with these inputs the model calls its units in another order "
        "than with the example; make the Pipe with an example like these"
    )


def _check_inplace_changes(
    trace: Trace, node_stages: Mapping[int, int], assignments: list[StageAssignment]
) -> None:
    """Who changes a tensor in place must have all that shares its memory, if it is used again."""
    needed = set().union(*(portion.needed_values for portion in assignments))
    for at, stage in node_stages.items():
        step = trace.nodes[at]
        for old, new in step.mutations.items():
            maker = trace.values[old].producer
            if new not in needed or old in step.inputs:
                continue
            home = None if maker is None else node_stages.get(maker, stage)
            if home not in (None, stage) and not _is_local_view(
                trace, step, old, node_stages, stage
            ):
                raise CutError(
                    f"at {step.location}, {get_function_name(step.func)} changes a tensor in place of which "
                    f"stage {home} has a view that is used again: clone it before you change it, "
                    "or put both into one unit with units="
                )


def _check_inner_backward(trace: Trace, node_stages: Mapping[int, int]) -> None:
    """Who goes backward inside the forward must have computed all that lies between."""
    for at, step in enumerate(trace.nodes):
        if step.func not in BACKWARD_CALLS or at not in node_stages:
            continue
        after, before = set(step.inputs), set(step.inputs)
        earlier = list(enumerate(trace.nodes[:at]))
        for _, one in earlier:
            after |= get_produced_values(one) if after.intersection(one.inputs) else set()
        between = []
        for number, one in reversed(earlier):
            if before & get_produced_values(one):
                before.update(one.inputs)
                between += [number] if after.intersection(one.inputs) else []
        homes = {node_stages.get(number, node_stages[at]) for number in between} | {node_stages[at]}
        if len(homes) > 1:
            raise CutError(
                f"at {step.location}, {get_function_name(step.func)} goes backward inside the forward, through "
                f"what stages {', '.join(map(str, sorted(homes)))} compute: put it all into one "
                "unit with units=, or cut elsewhere with stages="
            )


def get_produced_values(node: TraceNode) -> set[int]:
    """The values that there are after it."""
    return {*(node.output.value_indices if node.output else ()), *node.mutations.values()}


def _is_local_view(
    trace: Trace, node: TraceNode, base: int, node_stages: Mapping[int, int], stage: int
) -> bool:
    """Was what the step changes made on this stage, as a view of the base that arrives?"""
    waiting = [value for value in node.inputs if value in node.mutations]
    while waiting:
        maker = trace.values[waiting.pop()].producer
        if maker is None or node_stages.get(maker) != stage:
            continue
        takes = trace.nodes[maker].inputs
        if base in takes:
            return True
        waiting += [value for value in takes if value in node.mutations]
    return False


def _find_users(
    trace: Trace, assignments: Sequence[StageAssignment], name_of: Callable[[TracedValue], str]
) -> dict[str, frozenset[int]]:
    found: dict[str, set[int]] = {}
    for stage, portion in enumerate(assignments):
        for at in portion.needed_values:
            value = trace.values[at]
            if value.producer is None and name_of(value):
                found.setdefault(name_of(value), set()).add(stage)
    return {name: frozenset(where) for name, where in found.items()}


def _find_writers(
    trace: Trace, node_stages: Mapping[int, int], readers: Mapping[str, frozenset[int]]
) -> dict[str, int]:
    """Who changes a buffer must be the only one that has it."""
    found: dict[str, set[int]] = {}
    for at, stage in node_stages.items():
        for old in trace.nodes[at].mutations:
            if trace.values[old].buffer_name:
                found.setdefault(trace.values[old].buffer_name, set()).add(stage)
    for name, value in trace.reassigned_buffers.items():
        maker = trace.values[value].producer
        found.setdefault(name, set()).add(node_stages.get(-1 if maker is None else maker, 0))
    for name, writers in found.items():
        having = sorted(writers | readers.get(name, frozenset()))
        if len(having) > 1:
            raise CutError(
                f"the forward changes the buffer '{name}' between units, and stages "
                f"{', '.join(map(str, having))} would have it, each at its own time: change and "
                "read it in one unit, or cut elsewhere with stages="
            )
    return {name: min(writers) for name, writers in found.items()}


def locate_value(node: TraceNode, value: int) -> ValueLeaf | ArgumentLeaf | int:
    """Where a step has a value: in its result, among its arguments, or as an older value."""
    assert node.output is not None
    for leaf in node.output.leaves:
        if isinstance(leaf, ValueLeaf) and leaf.value == value:
            return leaf
    for old, new in node.mutations.items():
        if new == value:
            return ArgumentLeaf(node.inputs.index(old)) if old in node.inputs else old
    raise AssertionError("a value that the step does not make")

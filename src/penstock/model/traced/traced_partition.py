"""A model whose forward is divided: for each kind of micro-batch, who does what of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CutError, RunError
from penstock.model.huggingface import build_default_kwargs
from penstock.model.traced.assignment import (
    OwnerStages,
    TraceAssignment,
    assign_nodes,
    fingerprint_assignment,
)
from penstock.model.traced.guards import (
    InputGuards,
    LossTargets,
    ModelSettings,
    TraceReplay,
    find_loss_targets,
    read_model_settings,
    read_torch_state,
)
from penstock.model.traced.local_model import LocalModel, TensorCast, is_remote_unit
from penstock.model.traced.pytrees import IdentityKey, flatten
from penstock.model.traced.stage_program import StageProgram, build_stage_program
from penstock.model.traced.trace import Trace, UnitCall
from penstock.model.traced.trace_model import trace_model
from penstock.model.traced.value_table import EscapedTensor
from penstock.stage.loss import TargetCounter

# -------------------------------------------------------------------------------------------------
# What a model was seen to consist of when it was cut: for people to look at.
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitCost:
    """Of one call and one micro-batch: seconds of F, I and W, and bytes kept for its backward.

    `holds` are the bytes there always: parameters and buffers, and for what is trained a gradient
    and an optimizer's state.
    """

    forward: float
    input_grad: float
    weight_grad: float
    activation_bytes: int
    resident_bytes: int

    @property
    def seconds(self) -> float:
        """Of all three."""
        return self.forward + self.input_grad + self.weight_grad


@dataclass(frozen=True)
class CutSummary:
    """The calls of units in order, how many each stage takes, and what goes between stages."""

    calls: tuple[UnitCall, ...]
    calls_per_stage: tuple[int, ...]
    assignment: TraceAssignment
    costs: Sequence[UnitCost] = ()  # empty: not measured


# -------------------------------------------------------------------------------------------------

MAX_INPUT_KINDS = 64  # of micro-batches that are remembered
MAX_TRACES_PER_KIND = 16  # of each kind: how the forward went on, as its questions were answered


@dataclass(frozen=True)
class StageOwnership:
    """Where the units and parameters of a model are at home."""

    num_stages: int
    call_stages: Mapping[UnitCall, int]  # as the example has them
    unit_owners: Mapping[str, tuple[int, ...]]
    parameter_owners: OwnerStages
    buffer_writers: Mapping[str, int] = field(
        default_factory=dict
    )  # buffers that the forward changes

    def find_stage(self, call: UnitCall, previous_stage: int) -> int:
        """The stage of a call, after others on the stage before."""
        found = self.call_stages.get(call)
        if found is not None and (found >= previous_stage or len(self.unit_owners[call.unit]) == 1):
            return found
        homes = [home for home in self.unit_owners[call.unit] if home >= previous_stage]
        if not homes:
            raise CutError(
                f"unit '{call}' is on stage {max(self.unit_owners[call.unit])}, and with these inputs "
                f"the model calls it after a unit of stage {previous_stage}: with the example it was not "
                "so; make the Pipe with an example like these inputs"
            )
        return homes[0]


@dataclass(frozen=True, eq=False)
class ForwardRequest:
    """What a stage is told of a micro-batch, beside the tensors that it takes."""

    programs: Mapping[int, StageProgram]
    plain_leaves: tuple[Any, ...]  # of the inputs, without the tensors
    tensor_positions: tuple[int, ...]  # where those were
    tree_spec: Any
    settings: ModelSettings
    destinations: Mapping[int, tuple[int, ...]]  # by stage: to whom it sends in this call


@dataclass(frozen=True)
class _CompiledTrace:
    guards: InputGuards
    assignment: TraceAssignment
    programs: Mapping[int, StageProgram]
    loss_targets: LossTargets | None
    target_replay: TraceReplay  # leads to those of the loss, if they are counted
    fingerprint: str  # of the division


TraceCache = OrderedDict[Any, list[_CompiledTrace]]  # by the kind of micro-batch


@dataclass
class TracedPartition:
    """A model, its units, and how its forward was divided so far."""

    model: nn.Module
    units: Mapping[str, nn.Module]
    parents: Mapping[str, nn.Module]
    ownership: StageOwnership
    devices: Mapping[int, torch.device]  # of the stages that are here
    summary: CutSummary
    local_model: LocalModel | None = None  # in one of several processes
    _trace_cache: TraceCache = field(default_factory=OrderedDict, repr=False)
    _initial_members: list[Any] = field(default_factory=list, repr=False)  # what the parents had

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trace_cache": OrderedDict(), "_initial_members": []}

    def add_example(
        self,
        example: tuple[tuple[Any, ...], Mapping[str, Any]],
        trace: Trace,
        assignment: TraceAssignment,
        constants: Mapping[int, Tensor],
    ) -> None:
        """What the example was divided into."""
        key, _, _ = self._make_cache_key(*example, self.read_settings())
        if key not in self._trace_cache:
            self._add_to_cache(key, trace, assignment, constants)

    @property
    def children(self) -> dict[str, nn.Module | None]:
        """The model's own."""
        return dict(self.model._modules)

    def read_settings(self) -> ModelSettings:
        """How the model is set now. Stages follow it for each new one: not all of it is told."""
        return read_model_settings(self.parents.values())

    def get_default_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs that the model is given besides, unless the caller gives them."""
        return build_default_kwargs(self.model, inputs)

    def check_unchanged(self) -> None:
        """The units are those that were cut, and the parents have what they had."""
        for name, unit in self.units.items():
            path, _, key = name.rpartition(".")
            if path not in self.parents:  # inside another unit, that has it as a part
                continue
            if self.parents[path]._modules.get(key) is not unit and not is_remote_unit(unit):
                raise RunError(
                    f"unit '{name}' was replaced after the pipe was made, and would not run: make "
                    "the Pipe after the change, or change what is inside the unit"
                )
        now = list(_iter_members(self.parents, self.ownership.buffer_writers))
        before = self._initial_members = self._initial_members or now
        if len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True)):
            return
        names = ", ".join(f"'{name}'" if name else "the model" for name in self.parents)
        raise RunError(
            "a parameter, a buffer or a part of what is around the units was replaced, added or "
            f"taken away after the pipe was made, in one of {names}, and would not be used: make "
            "the Pipe after the change, or change it in place (copy_, load_state_dict)"
        )

    def trace_microbatch(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: ModelSettings
    ) -> TracedMicrobatch:
        """How the forward of these inputs is divided: known, or found by a dry run."""
        key, leaves, spec = self._make_cache_key(args, kwargs, settings)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for known in self._trace_cache.get(key, ()):
            if known.guards.matches(tensors):
                self._trace_cache.move_to_end(key)
                return TracedMicrobatch(known, leaves, spec, tensors)
        try:
            trace, constants = trace_model(self.model, self.units, args, dict(kwargs), self._device)
        except EscapedTensor as leak:
            raise CutError(
                f"at {leak.location}, the forward uses a tensor that left unit '{leak.unit}' "
                "sideways, which it did not with the example: make the Pipe with an example like "
                "these inputs"
            ) from None
        written = {
            name: frozenset({stage}) for name, stage in self.ownership.buffer_writers.items()
        }
        homes = {**self.ownership.parameter_owners, **written}
        division = assign_nodes(trace, self.ownership.find_stage, self.ownership.num_stages, homes)
        self._check_ownership(division)
        known = self._add_to_cache(key, trace, division, constants)
        return TracedMicrobatch(known, leaves, spec, tensors)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.devices.values()))

    def _check_ownership(self, assignment: TraceAssignment) -> None:
        for name, users in assignment.parameter_users.items():
            if users - self.ownership.parameter_owners[name]:
                raise CutError(
                    f"'{name}' would be used on stages {sorted(users)}, and its home is "
                    f"{sorted(self.ownership.parameter_owners[name])}: make the Pipe with an example like "
                    "these inputs"
                )
        for name, home in self.ownership.buffer_writers.items():
            others = sorted(assignment.buffer_readers.get(name, frozenset()) - {home})
            if others:
                raise CutError(
                    f"the forward changes the buffer '{name}' on stage {home}, between units, and "
                    f"with these inputs reads it on others, {', '.join(map(str, others))}: change "
                    "and read it in one unit, or cut elsewhere with stages="
                )
        for name, stage in assignment.buffer_writers.items():
            if self.ownership.buffer_writers.get(name) != stage:
                raise CutError(
                    f"the forward changes the buffer '{name}' between units, and with the example "
                    "it did not: make the Pipe with the model set as now (in training, say), and "
                    "an example like these inputs"
                )

    def _add_to_cache(
        self, key: Any, trace: Trace, assignment: TraceAssignment, constants: Mapping[int, Tensor]
    ) -> _CompiledTrace:
        scores = {
            stage: build_stage_program(assignment, stage, d) for stage, d in self.devices.items()
        }
        counted = find_loss_targets(trace)
        goals = [] if counted is None else [counted.target, counted.class_weights]
        makers = [trace.values[value].producer for value in goals if value is not None]
        known = _CompiledTrace(
            InputGuards(trace, constants, self._get_buffer),
            assignment,
            scores,
            counted,
            TraceReplay(trace, constants, self._get_buffer, [m for m in makers if m is not None]),
            fingerprint_assignment(assignment),
        )
        ways = self._trace_cache.setdefault(key, [])
        ways.insert(0, known)
        del ways[MAX_TRACES_PER_KIND:]
        if len(self._trace_cache) > MAX_INPUT_KINDS:
            self._trace_cache.popitem(last=False)
        return known

    def _get_buffer(self, name: str) -> Tensor:
        path, _, key = name.rpartition(".")
        unit, inner = path, ""
        while unit and unit not in self.units:
            unit, _, last = unit.rpartition(".")
            inner = f"{last}.{inner}".strip(".")
        holder = self.units[unit].get_submodule(inner) if unit else self.parents[path]
        found = holder._buffers[key]
        assert found is not None
        return found

    def apply_cast(self, cast_fn: TensorCast) -> None:
        """The model was cast: what was seen of it holds no longer."""
        if self.local_model is not None:
            self.local_model.apply_cast(cast_fn)
        self._trace_cache, self._initial_members = OrderedDict(), []

    def _make_cache_key(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: ModelSettings
    ) -> tuple[Any, list[Any], Any]:
        leaves, spec = flatten((args, dict(kwargs)))
        signs = tuple([_make_leaf_key(leaf) for leaf in leaves])
        return (str(spec), signs, settings, read_torch_state()), leaves, spec


@dataclass(frozen=True)
class TracedMicrobatch:
    """The division of one micro-batch, and its inputs."""

    compiled: _CompiledTrace
    leaves: list[Any]
    tree_spec: Any
    tensors: Sequence[Tensor]

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Who sends to whom."""
        return self.compiled.assignment.edges

    @property
    def fingerprint(self) -> str:
        """The same in every process that divides in the same way."""
        return self.compiled.fingerprint

    def compute_loss_targets(self) -> tuple[Tensor, TargetCounter] | None:
        """The targets of the model's own loss, and what of them counts; None: not known."""
        counted = self.compiled.loss_targets
        if counted is None:
            return None
        wanted = [counted.target] + (
            [] if counted.class_weights is None else [counted.class_weights]
        )
        target, *classes = self.compiled.target_replay.compute_values(self.tensors, wanted)
        return target, TargetCounter(counted.ignore_index, *classes)

    def make_forward_request(
        self, settings: ModelSettings, destinations: Mapping[int, tuple[int, ...]]
    ) -> ForwardRequest:
        """For every stage."""
        places = tuple(at for at, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor))
        plain = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in self.leaves)
        return ForwardRequest(
            self.compiled.programs, plain, places, self.tree_spec, settings, destinations
        )

    def uses_rng(self, stage: int) -> bool:
        """Does the stage draw random numbers between units?"""
        return self.compiled.programs[stage].uses_rng

    def mutates_inputs(self, stage: int) -> bool:
        """Does the stage change what it takes, in place?"""
        return self.compiled.programs[stage].mutates_inputs

    def select_inputs(self, stage: int) -> list[Tensor]:
        """The tensors that a stage takes of the inputs."""
        return [self.tensors[at] for at in self.compiled.programs[stage].input_indices]


def _iter_members(
    parents: Mapping[str, nn.Module], buffer_writers: Mapping[str, int]
) -> Iterator[Any]:
    """What the parents have, but for buffers that the forward itself assigns anew."""
    for name, module in parents.items():
        yield from module._modules.values()
        yield from module._parameters.values()
        for key, buffer in module._buffers.items():
            if f"{name}.{key}".lstrip(".") not in buffer_writers:
                yield buffer


def _make_leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), IdentityKey(leaf)  # held, so that no other one has its place
    return type(leaf), leaf

"""A traced model that has been cut, with a cache of compiled traces.

`TracedPartition` answers for each micro-batch: which stage does what? It looks for a trace that
holds for the micro-batch, and traces the model again if there is none.

    micro-batch --> cache key --> compiled traces of that key --> the first whose guards match
                                            |
                                            +-- none: trace_model -> assign_nodes -> programs

The cache key has the structure, shapes and dtypes of the inputs, the model's settings and PyTorch's
modes. Guards compare values of inputs that the host reads. The cut itself is fixed by the example:
later traces must find every unit, parameter and written buffer on the stage that owns it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ArgumentError, CutError, PenstockTypeError, RunError
from penstock.fingerprint import Fingerprinter, ObjectIdentity, are_same_objects
from penstock.microbatch import (
    MicrobatchRows,
    check_inputs,
    is_row_dim_ambiguous,
    move_to_device,
    scatter,
    take_rows,
)
from penstock.model.huggingface import build_default_kwargs
from penstock.model.outside_state import preserve_outside_state
from penstock.model.partition import Partition, StageMap, TensorExchange
from penstock.model.stage_inputs import Batch, InputDevices, StageInputs, append_target
from penstock.model.traced.assignment import (
    OwnerStages,
    TraceAssignment,
    assign_nodes,
    fingerprint_assignment,
)
from penstock.model.traced.guards import (
    InputGuards,
    LossCombination,
    LossTargets,
    TraceReplay,
    find_loss_combination,
    find_loss_targets,
    find_output_shapes,
    read_torch_state,
)
from penstock.model.traced.interception import EscapedTensor
from penstock.model.traced.local_model import LocalModel, TensorCast, is_remote_unit
from penstock.model.traced.settings import ModelSettings, SettingsReader, read_state_key
from penstock.model.traced.stage_program import StageProgram, build_stage_programs
from penstock.model.traced.torch_functions import MODE_DEPENDENT
from penstock.model.traced.trace import NodeKind, Trace, UnitCall
from penstock.model.traced.trace_family import (
    TraceFamily,
    differ_in_sizes_only,
    list_input_shapes,
    warn_of_changes,
)
from penstock.model.traced.trace_model import derive_trace, trace_model
from penstock.model.traced.unit_shapes import SizesDiffer, UnitShapes, learn_unit_shapes
from penstock.model.traced.whole_model import UnitLocations, run_model_method
from penstock.nested_values import flatten
from penstock.schedules.ir import StageGraph
from penstock.stage.loss import TargetCounter, build_target_counter
from penstock.tensor_spec import TensorSpec

# ---- the summary of a cut, for reports -----------------------------------------------------------


@dataclass(frozen=True)
class UnitCost:
    """The cost of one call of a unit on one micro-batch.

    Attributes:
        forward: Seconds of F.
        input_grad: Seconds of I.
        weight_grad: Seconds of W.
        activation_bytes: Bytes that the call keeps for its backward.
        resident_bytes: Bytes that are always there: parameters and buffers, and for trained
            parameters a gradient and the state of an optimizer.
    """

    forward: float
    input_grad: float
    weight_grad: float
    activation_bytes: int
    resident_bytes: int

    @property
    def seconds(self) -> float:
        """The seconds of forward and backward together."""
        return self.forward + self.input_grad + self.weight_grad

    def with_loss(self, forward: float, backward: float) -> UnitCost:
        """Return the cost of the last unit, which computes the loss as well, in so many seconds."""
        return UnitCost(
            self.forward + forward,
            self.input_grad + backward,
            self.weight_grad,
            self.activation_bytes,
            self.resident_bytes,
        )


@dataclass(frozen=True)
class CutSummary:
    """The calls of units in order, the number of calls per stage, and the node assignment."""

    calls: tuple[UnitCall, ...]
    calls_per_stage: tuple[int, ...]
    assignment: TraceAssignment
    costs: Sequence[UnitCost] = ()  # empty: not measured


# ---- the partition -------------------------------------------------------------------------------

# Limits of the trace cache. The oldest keys go first; of one key, the oldest traces.
MAX_CACHE_KEYS = 64  # cache keys: shapes of micro-batches, training and eval mode, ...
MAX_TRACES_PER_KEY = 16  # traces of one key: their guards had different results
MAX_FAMILIES = 16  # keys that differ in more than sizes


@dataclass(frozen=True)
class StageOwnership:
    """The stages that own the units, parameters and written buffers of a model.

    Attributes:
        num_stages: The number of stages.
        call_stages: The stage of each call of a unit, as the example has them.
        unit_owners: The stages that call each unit, in order.
        parameter_owners: The stages that have each parameter.
        buffer_writers: The stage that changes a buffer between units.
    """

    num_stages: int
    call_stages: Mapping[UnitCall, int]
    unit_owners: Mapping[str, tuple[int, ...]]
    parameter_owners: OwnerStages
    buffer_writers: Mapping[str, int] = field(default_factory=dict)

    def find_stage(self, call: UnitCall, previous_stage: int) -> int:
        """Return the stage of a call that follows a call on `previous_stage`.

        A call of the example keeps its stage. A call that the example did not have, or that now
        comes later, goes to the next stage that has the unit.
        """
        stage = self.call_stages.get(call)
        if stage is not None and (stage >= previous_stage or len(self.unit_owners[call.unit]) == 1):
            return stage
        later_owners = [owner for owner in self.unit_owners[call.unit] if owner >= previous_stage]
        if not later_owners:
            raise CutError(
                f"unit '{call}' is on stage {max(self.unit_owners[call.unit])}, but with these "
                f"inputs the model calls it after a unit of stage {previous_stage}. With the "
                "example it did not. Make the Pipe with an example like these inputs."
            )
        return later_owners[0]


@dataclass(frozen=True, eq=False)
class ForwardRequest:
    """All that a stage needs to run one micro-batch, except for the tensors.

    Attributes:
        programs: The stage programs, by stage.
        plain_leaves: The leaves of the model's inputs, with None in place of tensors.
        tensor_positions: The positions of the tensors among these leaves.
        tree_spec: The structure of the inputs.
        settings: The model's settings. A new object means that stages have to copy attributes.
        destinations: The stages that each stage sends to in this call.
    """

    programs: Mapping[int, StageProgram]
    plain_leaves: tuple[Any, ...]
    tensor_positions: tuple[int, ...]
    tree_spec: Any
    settings: ModelSettings
    destinations: Mapping[int, tuple[int, ...]]

    def fingerprint_by(self, fingerprint: Fingerprinter) -> Hashable:
        """Return the fingerprint of the request: a graph depends on the programs it was made of."""
        programs, plain_leaves = ObjectIdentity(self.programs), fingerprint(self.plain_leaves)
        positions, structure = self.tensor_positions, str(self.tree_spec)
        return programs, plain_leaves, positions, structure, self.settings


@dataclass(frozen=True)
class _CompiledTrace:
    guards: InputGuards
    assignment: TraceAssignment
    programs: Mapping[int, StageProgram]
    loss_targets: LossTargets | None
    loss_combination: LossCombination
    target_replay: TraceReplay  # computes the loss targets, if there are any
    fingerprint: str  # of the assignment, which all processes must agree on
    kind: str  # the fingerprint of the first trace that differs from this one in sizes only
    # Tensors in attributes and variables, if a guard depends on one. None: they do not matter.
    tensors: tuple[ObjectIdentity, ...] | None
    # `requires_grad` of all parameters, if the forward asks for it. None: it does not matter.
    requires_grad: tuple[bool, ...] | None
    # by index of a leaf of the output, its dim with rows, or None; empty until it is needed
    _output_dims: dict[int, int | None] = field(default_factory=dict)

    def find_output_dims(
        self, count: int, trace_larger: Callable[[], TracedMicrobatch]
    ) -> tuple[tuple[int, int], ...]:
        """Return the dims of outputs that have the rows of a micro-batch with `count` rows.

        If the sizes of an output do not tell, a trace with one row more does. Otherwise nothing is
        returned.
        """
        shapes = find_output_shapes(self.assignment.trace)
        ambiguous = [shape for shape in shapes if is_row_dim_ambiguous(shape, count)]
        if ambiguous and not self._output_dims:
            try:
                larger = find_output_shapes(trace_larger().compiled.assignment.trace)
                columns = [[*zip(*pair, strict=True)] for pair in zip(shapes, larger, strict=True)]
            except Exception as error:
                raise RunError(
                    f"an output of shape {ambiguous[0]} has the {count} rows of its micro-batch on "
                    "dim 0 or on another dim, and the model cannot be traced with one row more to "
                    "see on which one. Use another number of chunks."
                ) from error
            for index, sizes in enumerate(columns):
                dims = [dim for dim, (size, larger_size) in enumerate(sizes) if size != larger_size]
                if len(dims) > 1:
                    raise RunError(
                        f"an output of shape {shapes[index]} has rows on the dims {dims}: it "
                        "relates rows of the batch to each other, and a micro-batch does not have "
                        "the rows of the others. Compute it from the output of the pipe, or use "
                        "chunks=1."
                    )
                self._output_dims[index] = dims[0] if dims else None
        return tuple((index, dim) for index, dim in self._output_dims.items() if dim is not None)


TraceCache = OrderedDict[Any, list[_CompiledTrace]]  # by cache key


@dataclass
class TraceMemory:
    """The part of a traced partition that changes between calls.

    Compiled traces refer to functions and tensors of one model, so a copy of the model starts with
    an empty memory and traces again.
    """

    cache: TraceCache = field(default_factory=OrderedDict)
    # The children of the pipe and of the parents, their parameters and their buffers at the first
    # check; see `check_unchanged`.
    initial_members: list[Any] = field(default_factory=list)
    families: OrderedDict[Any, TraceFamily] = field(default_factory=OrderedDict)
    call_count: int = 0  # batches that were split
    settings_reader: SettingsReader | None = None  # made by the first use

    def __reduce__(self) -> tuple[type[TraceMemory], tuple[()]]:
        return TraceMemory, ()

    def get_family(self, key: Any) -> TraceFamily:
        """Return the family of micro-batches with this key."""
        family = self.families.setdefault(key, TraceFamily())
        self.families.move_to_end(key)
        if len(self.families) > MAX_FAMILIES:
            self.families.popitem(last=False)
        return family


@dataclass(frozen=True, eq=False, repr=False)
class TracedPartition(Partition):
    """A traced model that has been cut into stages.

    Attributes:
        model: The user's model, or the part of it that this process keeps.
        units: The units by name.
        parents: The modules that are not in a unit, by name.
        ownership: Which stage owns what.
        devices: The devices of the stages in this process.
        summary: The cut, for reports.
        local_model: The part of the model that this process keeps, or None for the whole model.
    """

    model: nn.Module
    units: Mapping[str, nn.Module]
    parents: Mapping[str, nn.Module]
    ownership: StageOwnership
    devices: Mapping[int, torch.device]
    summary: CutSummary
    local_model: LocalModel | None = None
    _memory: TraceMemory = field(default_factory=TraceMemory, repr=False)

    needs_whole_batch = True  # the path of the forward may depend on any input

    def add_example(
        self,
        example: tuple[tuple[Any, ...], Mapping[str, Any]],
        trace: Trace,
        assignment: TraceAssignment,
        constants: Mapping[int, Tensor],
    ) -> None:
        """Put the trace of the example into the cache."""
        settings = self.read_settings()
        key, leaves, _ = self._make_cache_key(*example, settings)
        if key not in self._memory.cache:
            compiled = self._compile(trace, assignment, constants, settings)
            self._add_to_cache(key, compiled)
            family = self._memory.get_family(_make_family_key(key, leaves))
            family.add_reference(0, trace, compiled.kind)

    def named_roots(self) -> list[tuple[str, nn.Module]]:
        """Return the model."""
        return [("", self.model)]

    @property
    def wrapper_modules(self) -> list[nn.Module]:
        """The model itself, and the units of other processes."""
        remote_units = () if self.local_model is None else self.local_model.remote_units
        return [self.model, *(module for unit in remote_units for module in unit.modules())]

    def children(self) -> dict[str, nn.Module | None]:
        """Return the direct children of the model, by name."""
        return dict(self.model._modules)

    def root(self, model: nn.Module) -> nn.Module:
        """Return the model, or the part of it that this process keeps."""
        return self.model

    def read_settings(self) -> ModelSettings:
        """Return the current settings of the parents.

        Each call returns a new object. Stages copy all attributes of the parents whenever they see
        a new object, because not every attribute is part of the settings.
        """
        if self._memory.settings_reader is None:
            self._memory.settings_reader = SettingsReader(self.parents.values())
        return self._memory.settings_reader.read()

    def _read_requires_grad(self) -> tuple[bool, ...]:
        """Return `requires_grad` of all parameters, also of those of other processes."""
        modules = (self.model, *self.units.values())
        return tuple([p.requires_grad for module in modules for p in module.parameters()])

    @cached_property
    def _shared_units(self) -> dict[str, nn.Module]:
        """Units of which several stages have copies with the same tensors."""
        owners = self.ownership.unit_owners
        shared = {name for name, stages in owners.items() if len(stages) > 1}
        for parameter, stages in self.ownership.parameter_owners.items():
            unit = next((name for name in owners if parameter.startswith(f"{name}.")), None)
            if unit is not None and not stages.issubset(owners[unit]):
                shared.add(unit)
        return {name: unit for name, unit in self.units.items() if name in shared}

    @cached_property
    def _shared_modules(self) -> list[nn.Module]:
        return [module for unit in self._shared_units.values() for module in unit.modules()]

    def check_unchanged(self, children: Mapping[str, nn.Module | None]) -> None:
        """Raise if a unit, or a member of a parent, was replaced since the model was cut.

        The stages refer to the objects from then, and would silently ignore the new ones.
        """
        for name, unit in self.units.items():
            path, _, key = name.rpartition(".")
            if path not in self.parents:  # the unit is inside another unit
                continue
            if self.parents[path]._modules.get(key) is not unit and not is_remote_unit(unit):
                raise RunError(
                    f"unit '{name}' was replaced after the pipe was made, and would not run. Make "
                    "the Pipe after the change, or change what is inside the unit."
                )
        # The first call, when the pipe is built, takes the members to compare with.
        around_units = _iter_members(self.parents, self._assigned_buffers)
        # `pipe.head = layer` changes only the children of the pipe.
        members = [*children.values(), *around_units, *_iter_unit_members(self._shared_modules)]
        initial = self._memory.initial_members = self._memory.initial_members or members
        if are_same_objects(members, initial):
            return
        names = ", ".join(
            f"'{name}'" if name else "the model" for name in (*self.parents, *self._shared_units)
        )
        raise RunError(
            "a parameter, buffer or submodule was replaced, added or removed after the pipe was "
            f"made, around the units or in a unit that several stages use (one of {names}), and "
            "the change would not be used. Make the Pipe after the change, or change the tensor in "
            "place (copy_, load_state_dict without assign=True)."
        )

    @cached_property
    def _assigned_buffers(self) -> frozenset[str]:
        """The buffers of parents that the forward may assign anew.

        Units assign buffers of a module that is a parent and also inside of them, such as a rotary
        embedding with a cache that the model registers and its blocks hold.
        """
        unit_modules = {id(m) for unit in self.units.values() for m in unit.modules()}
        shared = {
            f"{name}.{key}"
            for name, parent in self.parents.items()
            if id(parent) in unit_modules
            for key in parent._buffers
        }
        return frozenset(
            self.ownership.buffer_writers.keys()
            | (shared - self.summary.assignment.buffer_readers.keys())
        )

    def build_stage_inputs(self, batch: Batch, devices: InputDevices) -> StageInputs:
        """Split a batch: trace each micro-batch, and give each stage the inputs that it uses."""
        check_inputs(batch.inputs, batch.keyword_inputs.values(), devices.get(0))
        self._memory.call_count += 1
        default_inputs = build_default_kwargs(self.model, batch.keyword_inputs)
        inputs, keyword_inputs = batch.inputs, {**default_inputs, **batch.keyword_inputs}
        last_stage = len(self.stages) - 1
        last_device = devices.get(last_stage)
        target = tuple(move_to_device(value, last_device) for value in batch.target)
        names = [*(f"input {index}" for index in range(len(inputs))), *keyword_inputs, "target"]
        values = *inputs, *keyword_inputs.values(), *target
        pieces, rows = scatter(values, batch.chunks, names)
        settings, keywords_start = self.read_settings(), len(inputs)
        keywords_end = keywords_start + len(keyword_inputs)
        plans = [
            self.trace_microbatch(
                piece[:keywords_start],
                dict(zip(keyword_inputs, piece[keywords_start:keywords_end], strict=True)),
                settings,
            )
            for piece in pieces
        ]
        self._check_asked_buffers(plans)

        def trace_larger() -> TracedMicrobatch:
            """Trace a micro-batch with one row more, to see which shapes depend on the rows."""
            larger = take_rows(values, rows, (0, rows.counts[0] + 1))
            keywords = zip(keyword_inputs, larger[keywords_start:keywords_end], strict=True)
            return self.trace_microbatch(larger[:keywords_start], dict(keywords), settings)

        def take_batch() -> list[Any]:
            """Return the leaves of the whole batch."""
            batch_values = take_rows(values, rows, (0, sum(rows.counts)))
            keywords = zip(keyword_inputs, batch_values[keywords_start:keywords_end], strict=True)
            return flatten((batch_values[:keywords_start], dict(keywords)))[0]

        if len(pieces) > 1 and not rows.dim and (batch.return_outputs or not batch.is_step):
            dims = plans[0].compiled.find_output_dims(rows.counts[0], trace_larger)
            rows = rows._replace(output_dims=dims)
        # Micro-batches of one batch may take different paths through the forward. The program is
        # the same for all of them, so an edge that one micro-batch needs is an edge for all.
        edges = sorted({edge for plan in plans for edge in plan.compiled.assignment.edges})
        graph = StageGraph.chain(len(self.stages), edges)
        by_stage = self._assign_inputs(plans, settings, graph, devices)
        targets, target_counter = [piece[-1] for piece in pieces] if target else [], None
        # Without a target, the model may compute the loss itself, from labels among its inputs.
        model_targets = None if target else _find_model_targets(plans)
        loss_shares: Sequence[float | Tensor] = ()
        counted_labels = None
        sums_loss = batch.returns_loss and _is_loss_summed(batch, plans, trace_larger)
        if not batch.uses_model_loss and sums_loss:
            loss_shares = [1.0] * len(pieces)
        elif not batch.uses_model_loss and plans[0].compiled.loss_combination.has_loss:
            loss_shares = _compute_loss_shares(rows, model_targets, last_device)
            counted_labels = model_targets
        elif model_targets is not None:
            targets = [move_to_device(labels, last_device) for labels in model_targets[0]]
            target_counter = model_targets[1]
        has_target = bool(targets) and last_stage in by_stage
        if has_target:
            append_target(by_stage, last_stage, targets)
        return StageInputs(
            by_stage,
            rows,
            len(pieces),
            graph,
            has_target,
            " ".join(plan.compiled.fingerprint for plan in plans),
            target_counter,
            loss_shares,
            counted_labels,
            sums_loss=sums_loss and batch.uses_model_loss,
            outputs_have_loss=batch.uses_model_loss
            and all(plan.compiled.loss_combination.has_loss for plan in plans),
            kind_digest=" ".join(sorted({plan.compiled.kind for plan in plans})),
            other_reads=_find_other_reads(plans, take_batch) if len(pieces) > 1 else frozenset(),
        )

    def _check_asked_buffers(self, plans: Sequence[TracedMicrobatch]) -> None:
        """Raise if the path depends on a buffer that the forward itself changes.

        The paths of all micro-batches are found before the first one runs. A process does not see
        at all what the units of another one write.
        """
        for compiled in (plan.compiled for plan in plans):
            written_here = compiled.assignment.buffer_writers.keys() if len(plans) > 1 else ()
            written_in_units: Collection[str] = compiled.assignment.trace.unit_written_buffers
            if len(plans) == 1 and self.local_model is None:
                written_in_units = ()
            names = compiled.guards.buffer_names & {*written_here, *written_in_units}
            if names:
                raise CutError(
                    f"the path of the forward depends on {', '.join(map(repr, sorted(names)))}, "
                    "and the forward changes this buffer. So each micro-batch would take the path "
                    "of another state than in the unsplit model, which runs the batch at once. "
                    "Compute with the buffer instead of branching on it (torch.where), or change "
                    "it outside of the forward, once per step. In one process, chunks=1 works."
                )

    def _assign_inputs(
        self,
        plans: Sequence[TracedMicrobatch],
        settings: ModelSettings,
        graph: StageGraph,
        devices: InputDevices,
    ) -> dict[int, list[tuple[Any, ...]]]:
        """Return a forward request and the tensors of the batch for each stage and micro-batch."""
        destinations = {
            stage: tuple(dst for src, dst in graph.edges if src == stage)
            for stage in range(len(self.stages))
        }
        requests = [plan.make_forward_request(settings, destinations) for plan in plans]
        by_stage: dict[int, list[tuple[Any, ...]]] = {}
        for index, device in devices.items():
            programs = [plan.compiled.programs[index] for plan in plans]
            self.stages[index].may_draw_random |= any(p.uses_rng for p in programs)
            self.stages[index].may_mutate_inputs |= any(p.mutates_inputs for p in programs)
            by_stage[index] = [
                (request, *(move_to_device(plan.tensors[i], device) for i in program.input_indices))
                for request, plan, program in zip(requests, plans, programs, strict=True)
            ]
        return by_stage

    def trace_microbatch(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: ModelSettings
    ) -> TracedMicrobatch:
        """Return the assignment of a micro-batch: from the cache, or from a new trace.

        Raises:
            CutError: The forward of these inputs does not fit the cut that the example fixed.
        """
        key, leaves, spec = self._make_cache_key(args, kwargs, settings)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for compiled in self._memory.cache.get(key, ()):
            if self._is_current(compiled, settings) and compiled.guards.matches(tensors):
                self._memory.cache.move_to_end(key)
                return TracedMicrobatch(compiled, leaves, spec, tensors)
        family = self._memory.get_family(_make_family_key(key, leaves))
        trace, constants, is_full = self._trace(args, kwargs, family)
        # The new trace is assigned to the stages as the example left them: units and parameters
        # stay where they are, and a buffer is changed by the stage that changed it before.
        written = {
            name: frozenset({stage}) for name, stage in self.ownership.buffer_writers.items()
        }
        owners = {**self.ownership.parameter_owners, **written}
        assignment = assign_nodes(
            trace, self.ownership.find_stage, self.ownership.num_stages, owners
        )
        self._check_ownership(assignment)
        kind = "" if is_full else family.find_kind(trace)
        compiled = self._compile(trace, assignment, constants, settings, kind)
        self._add_to_cache(key, compiled)
        if is_full:
            family.add_reference(self._memory.call_count, trace, compiled.kind)
            family.learn(self._learn_unit_shapes)
            warn_of_changes(family, _name_tensors(args, kwargs))
        return TracedMicrobatch(compiled, leaves, spec, tensors)

    def _trace(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], family: TraceFamily
    ) -> tuple[Trace, Mapping[int, Tensor], bool]:
        """Return a new trace, its constants, and whether the units were run for it."""
        if family.shapes is not None:
            with suppress(SizesDiffer):
                return *self._derive_trace(args, kwargs, family.shapes), False
        try:
            with preserve_outside_state(self.model, *self.units.values()):
                traced = trace_model(self.model, self.units, args, dict(kwargs), self._device)
            return *traced, True
        except EscapedTensor as escaped:
            # While the example is traced, the unit would be opened and its children become units.
            # Now the units are fixed.
            raise CutError(
                f"at {escaped.location}, with these inputs {escaped.problem}. This did not happen "
                "with the example. Make the Pipe with an example like these inputs."
            ) from None

    def _learn_unit_shapes(self, traces: Sequence[Trace]) -> UnitShapes | None:
        with preserve_outside_state(self.model, *self.units.values()):
            return learn_unit_shapes(self.model, self.units, traces, self._device)

    def _derive_trace(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: UnitShapes
    ) -> tuple[Trace, Mapping[int, Tensor]]:
        parents = self.parents.values()
        return derive_trace(
            self.model, self.units, parents, shapes, args, dict(kwargs), self._device
        )

    def _is_current(self, compiled: _CompiledTrace, settings: ModelSettings) -> bool:
        """Return whether what a trace depends on, besides its inputs and its key, is the same."""
        return compiled.tensors in (None, settings.tensors) and (
            compiled.requires_grad is None or compiled.requires_grad == self._read_requires_grad()
        )

    @property
    def _device(self) -> torch.device:
        return next(iter(self.devices.values()))

    def _check_ownership(self, assignment: TraceAssignment) -> None:
        """Raise if an assignment uses a parameter or buffer on a stage that does not have it."""
        for name, users in assignment.parameter_users.items():
            if users - self.ownership.parameter_owners[name]:
                raise CutError(
                    f"'{name}' would be used on stages {sorted(users)}, but it is only on stages "
                    f"{sorted(self.ownership.parameter_owners[name])}. Make the Pipe with an "
                    "example like these inputs."
                )
        for name, writer in self.ownership.buffer_writers.items():
            others = sorted(assignment.buffer_readers.get(name, frozenset()) - {writer})
            if others:
                raise CutError(
                    f"the forward changes the buffer '{name}' on stage {writer}, between units, "
                    f"and with these inputs reads it on other stages: "
                    f"{', '.join(map(str, others))}. Change and read it in one unit with units=, "
                    "or cut elsewhere with stages=."
                )
        for name, stage in assignment.buffer_writers.items():
            if self.ownership.buffer_writers.get(name) != stage:
                raise CutError(
                    f"the forward changes the buffer '{name}' between units, which it did not do "
                    "with the example. Make the Pipe with the model in its present mode (training "
                    "or eval), and with an example like these inputs."
                )

    def _compile(
        self,
        trace: Trace,
        assignment: TraceAssignment,
        constants: Mapping[int, Tensor],
        settings: ModelSettings,
        kind: str = "",
    ) -> _CompiledTrace:
        """Compile a trace into stage programs and guards. It is of a new kind by default."""
        programs = build_stage_programs(assignment, self.devices, constants)
        loss_targets = find_loss_targets(trace)
        goals = [] if loss_targets is None else [loss_targets.target, loss_targets.class_weights]
        producers = [trace.values[value].producer for value in goals if value is not None]
        guards = InputGuards(trace, constants, self._get_buffer)
        asks_requires_grad = any(node.func in MODE_DEPENDENT for node in trace.nodes)
        fingerprint = fingerprint_assignment(assignment)
        return _CompiledTrace(
            guards,
            assignment,
            programs,
            loss_targets,
            find_loss_combination(trace),
            TraceReplay(
                trace, constants, self._get_buffer, [p for p in producers if p is not None]
            ),
            fingerprint,
            # What goes between stages may have the same shapes for inputs of other sizes.
            kind or f"{fingerprint}{list_input_shapes(trace)}",
            settings.tensors if guards.depend_on_constants else None,
            self._read_requires_grad() if asks_requires_grad else None,
        )

    def _add_to_cache(self, key: Any, compiled: _CompiledTrace) -> None:
        # The newest first: the next micro-batches are probably like this one.
        traces = self._memory.cache.setdefault(key, [])
        traces.insert(0, compiled)
        del traces[MAX_TRACES_PER_KEY:]
        if len(self._memory.cache) > MAX_CACHE_KEYS:
            self._memory.cache.popitem(last=False)

    def _get_buffer(self, name: str) -> Tensor:
        """Return a buffer by its name in the model.

        A buffer inside a unit is looked up in the unit, since `model` may be without it.
        """
        # Shorten the path until it is the name of a unit; the rest is the path inside that unit.
        path, _, key = name.rpartition(".")
        unit, inner = path, ""
        while unit and unit not in self.units:
            unit, _, last = unit.rpartition(".")
            inner = f"{last}.{inner}".strip(".")
        holder = self.units[unit].get_submodule(inner) if unit else self.parents[path]
        buffer = holder._buffers[key]
        assert buffer is not None
        return buffer

    def refresh(self, cast: TensorCast) -> None:
        """Drop all traces, and cast the tensors that are not in the pipe's children."""
        if self.local_model is not None:
            self.local_model.apply_cast(cast)
        # A new cache: pipes of copies of the model, which are not cast, may share the old one.
        self._memory.cache, self._memory.initial_members = OrderedDict(), []
        self._memory.families.clear()
        for index, device in self.devices.items():
            stage_forward: Any = self.stages[index].compute  # a `StageForward`
            stage_forward.refresh_buffers(device)

    def check_stage_fn_allowed(self) -> None:
        """Raise an ArgumentError: a stage runs a part of the model's own forward."""
        raise ArgumentError(
            "stage_fn wraps the layers of a Sequential, but here the stages are parts of one "
            "forward. Wrap the model's blocks before you make the Pipe, as in fully_shard(block) "
            "or block.compile()."
        )

    def _make_cache_key(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: ModelSettings
    ) -> tuple[Any, list[Any], Any]:
        """Return the cache key of inputs, their leaves and their structure."""
        leaves, spec = flatten((args, dict(kwargs)))
        leaf_keys = tuple([_make_leaf_key(leaf) for leaf in leaves])
        return (str(spec), leaf_keys, settings, read_torch_state()), leaves, spec

    def describe_skips(self) -> list[str]:
        """Return nothing: values that skip stages are part of the graph."""
        return []

    def describe_cut(self) -> dict[str, str]:
        """Return the units of each stage, and a hash of the values that stages send."""
        units = {
            f"stage {stage.index}": ", ".join(name or "the model" for name in stage.names)
            for stage in self.stages
        }
        sent_values = fingerprint_assignment(self.summary.assignment)
        return {**units, "the values sent between stages": sent_values}

    def find_unit_stages(self) -> dict[str, list[int]]:
        """Return the stages of the calls of each unit, in the order of the calls."""
        stages_by_unit: dict[str, list[int]] = {}
        for call, stage in self.ownership.call_stages.items():
            stages_by_unit.setdefault(call.unit, []).append(stage)
        return stages_by_unit

    def find_function_stages(self) -> dict[Any, list[int | None]]:
        """Return the stages of the operations between units, by function."""
        return self._map_functions(self.summary.assignment)

    def run_unsplit(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def run_method(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        placement: Sequence[int],
        exchange: TensorExchange | None,
    ) -> Any:
        """Run a method of the model with each unit where it is. See `whole_model`."""
        method = getattr(self.model, name, None)
        if not callable(method):
            raise PenstockTypeError(
                f"pipe.{name} runs the {name} of the model, but {type(self.model).__name__} has "
                f"none. Give the model a method {name}, or compute from pipe(x) under "
                "torch.no_grad()."
            )
        if exchange is None and len(set(self.devices.values())) == 1:
            return method(*args, **kwargs)
        locations = self._find_locations(placement, exchange is None)
        return run_model_method(self.model, self.units, locations, exchange, name, args, kwargs)

    def _find_locations(self, placement: Sequence[int], is_whole: bool) -> UnitLocations:
        """Return where the units are: on devices of this process, or on ranks."""
        owners = self.ownership
        if not is_whole:
            ranks = {name: placement[stages[0]] for name, stages in owners.unit_owners.items()}
            parameter_ranks = {
                name: placement[min(stages)]
                for name, stages in owners.parameter_owners.items()
                if {placement[stage] for stage in stages} != set(placement)
            }
            return UnitLocations(self._device, unit_ranks=ranks, parameter_ranks=parameter_ranks)
        unit_devices, mixed_units = {}, set()
        for name, unit in self.units.items():
            devices = [tensor.device for tensor in (*unit.parameters(), *unit.buffers())]
            unit_devices[name] = [*devices, self.devices[owners.unit_owners[name][0]]][0]
            if len(set(devices)) > 1:
                mixed_units.add(name)
        return UnitLocations(self._device, unit_devices, mixed_units)

    def map_stages(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StageMap:
        """Return the stages of the units and operations of this micro-batch's own trace."""
        defaults = build_default_kwargs(self.model, kwargs)
        plan = self.trace_microbatch(args, {**defaults, **kwargs}, self.read_settings())
        assignment = plan.compiled.assignment
        by_unit: dict[str, list[int]] = {}
        for index in assignment.trace.unit_call_indices:
            unit = assignment.trace.nodes[index].func.unit
            by_unit.setdefault(unit, []).append(assignment.node_stages[index])
        units = [(self.units[name], stages) for name, stages in by_unit.items()]
        return units, self._map_functions(assignment)

    def _map_functions(self, assignment: TraceAssignment) -> dict[Any, list[int | None]]:
        """Return the stages of the operations between units, by function in the order of calls.

        On one device, only those of functions that draw random numbers differ between stages.
        """
        nodes = list(enumerate(assignment.trace.nodes))
        has_devices = len(set(self.devices.values())) > 1
        functions = {node.func for _, node in nodes if node.uses_rng or has_devices}
        function_stages: dict[Any, list[int | None]] = {}
        for index, node in nodes:
            if node.kind is not NodeKind.UNIT and node.func in functions:
                stage = assignment.node_stages.get(index)
                function_stages.setdefault(node.func, []).append(stage)
        return function_stages

    def count_loss_targets(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return how many targets count in the model's own loss, or None if that is not known."""
        plan = self.trace_microbatch(args, kwargs, self.read_settings())
        loss_targets = plan.compute_loss_targets()
        return None if loss_targets is None else loss_targets[1](loss_targets[0])


@dataclass(frozen=True)
class TracedMicrobatch:
    """The inputs of one micro-batch, with the compiled trace that holds for them."""

    compiled: _CompiledTrace
    leaves: list[Any]
    tree_spec: Any
    tensors: Sequence[Tensor]

    def compute_loss_targets(self) -> tuple[Tensor, TargetCounter] | None:
        """Return the targets of the model's own loss and a counter of those that count.

        None means that they are not known: the model has no loss, or another one than a mean
        cross-entropy.
        """
        loss_targets = self.compiled.loss_targets
        if loss_targets is None:
            return None
        values = [loss_targets.target] + (
            [] if loss_targets.class_weights is None else [loss_targets.class_weights]
        )
        target, *class_weights = self.compiled.target_replay.compute_values(self.tensors, values)
        return target, build_target_counter(
            loss_targets.ignore_index,
            next(iter(class_weights), None),
            loss_targets.label_smoothing,
        )

    def make_forward_request(
        self, settings: ModelSettings, destinations: Mapping[int, tuple[int, ...]]
    ) -> ForwardRequest:
        """Return the request that all stages get for this micro-batch."""
        positions = tuple(
            index for index, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)
        )
        plain_leaves = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in self.leaves)
        return ForwardRequest(
            self.compiled.programs, plain_leaves, positions, self.tree_spec, settings, destinations
        )


def _is_loss_summed(
    batch: Batch, plans: Sequence[TracedMicrobatch], trace_larger: Callable[[], TracedMicrobatch]
) -> bool:
    """Return whether the model's own losses are summed. Raise if they cannot be combined."""
    if len(plans) == 1 or batch.reduction is not None:
        return batch.reduction == "sum"
    combinations = [plan.compiled.loss_combination for plan in plans]
    for obstacle in (c.obstacle for c in combinations if c.obstacle):
        raise RunError(
            f"the model returns one number, computed by {obstacle}, and that of the batch does not "
            "follow from those of its micro-batches. Return the tensor that it is computed from, "
            "use chunks=1, or set reduction='mean' or 'sum' to combine the numbers so."
        )
    # The Hugging Face Trainer passes the number of targets of the whole batch, and the loss is a
    # sum that is divided by it.
    if batch.keyword_inputs.get("num_items_in_batch") is not None:
        if all(combination.is_sum for combination in combinations):
            return True
        # BERT, T5 and others take the number and return a mean cross-entropy all the same. With a
        # loss of its own, the Trainer passes it to models that then return no loss.
        if all(p.compiled.loss_targets or not p.compiled.loss_combination.has_loss for p in plans):
            return False
        raise RunError(
            "num_items_in_batch was given, but it is not clear that the model's loss is a sum "
            "divided by it. Set reduction='sum' if it is, so that the losses of micro-batches are "
            "added, or leave num_items_in_batch out."
        )
    if not all(combination.is_sum for combination in combinations):
        return False
    # `x.mean(0).sum()` and `x.sum() / len(x)` are means over rows.
    try:
        larger = trace_larger().compiled.loss_combination
    except Exception as error:
        raise RunError(
            "the model returns a sum, and it cannot be traced with one row more to see whether "
            "that is a sum or a mean over the rows. Set reduction='sum' or 'mean'."
        ) from error
    return combinations[0].is_sum_over_rows(larger)


def _compute_loss_shares(
    rows: MicrobatchRows,
    model_targets: tuple[list[Tensor], TargetCounter] | None,
    device: torch.device | None,
) -> Sequence[float | Tensor]:
    """Return the weight of each micro-batch in the model's own loss: by counted targets or rows."""
    if model_targets is None:
        return rows.fractions()
    counts = torch.stack([model_targets[1](target) for target in model_targets[0]])
    return list((counts / counts.sum()).to(device).unbind())


def _find_other_reads(
    plans: Sequence[TracedMicrobatch], take_batch: Callable[[], Sequence[Any]]
) -> frozenset[str]:
    """Return what the host would read differently from the whole batch than from micro-batches.

    The code around the units may go by it, as `x / lengths.max().item()` does. "paths" means that
    forwards of the micro-batches differ in more than sizes: they have read different numbers.
    """
    compiled = list({id(plan.compiled): plan.compiled for plan in plans}.values())
    if all(trace.guards.is_empty for trace in compiled):
        return frozenset()  # as most models
    reads: set[str] = set()
    if any(trace.guards.has_reads for trace in compiled):
        tensors = [leaf for leaf in take_batch() if isinstance(leaf, Tensor)]
        reads = set().union(*(trace.guards.find_other_reads(tensors) for trace in compiled))
    traces = [trace.assignment.trace for trace in compiled]
    if not all(differ_in_sizes_only([traces[0], trace]) for trace in traces[1:]):
        reads.add("paths")
    return frozenset(reads)


def _find_model_targets(
    microbatch_plans: Sequence[TracedMicrobatch],
) -> tuple[list[Tensor], TargetCounter] | None:
    """Return the targets of the model's own loss and their counter.

    Return None unless every micro-batch has such targets and counts them in the same way.
    """
    pairs = [pair for plan in microbatch_plans if (pair := plan.compute_loss_targets()) is not None]
    if (
        len(pairs) < len(microbatch_plans)
        or len({counter.ignore_index for _, counter in pairs}) > 1
    ):
        return None
    return [target for target, _ in pairs], pairs[0][1]


def _iter_members(
    parents: Mapping[str, nn.Module], assigned_buffers: Collection[str]
) -> Iterator[Any]:
    """Yield the children, parameters and buffers of parents.

    Buffers that the forward itself changes are left out: it may assign new tensors.
    """
    for name, module in parents.items():
        yield from module._modules.values()
        yield from module._parameters.values()
        for key, buffer in module._buffers.items():
            if f"{name}.{key}".lstrip(".") not in assigned_buffers:
                yield buffer


def _iter_unit_members(modules: Sequence[nn.Module]) -> Iterator[Any]:
    """Yield the children and parameters of modules inside units."""
    for module in modules:
        yield from module._modules.values()
        yield from module._parameters.values()


def _make_family_key(key: Any, leaves: Sequence[Any]) -> Any:
    """Return the cache key of inputs without the sizes of tensors."""
    structure, leaf_keys, *state = key
    pairs = zip(leaves, leaf_keys, strict=True)
    return (
        structure,
        *state,
        *(
            (leaf.ndim, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf_key
            for leaf, leaf_key in pairs
        ),
    )


def _name_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Return a name for each tensor of the inputs, for messages."""
    named = [*((f"input {index}", value) for index, value in enumerate(args)), *kwargs.items()]
    return [name for name, value in named for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def _make_leaf_key(leaf: Any) -> Any:
    """Return what of an input decides the path of a forward: metadata, or Python values."""
    if isinstance(leaf, Tensor):
        return TensorSpec.from_tensor(leaf)
    return read_state_key(leaf)

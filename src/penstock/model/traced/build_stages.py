"""Build the stages of a traced model: decide what each stage owns, and give it the modules.

    TracedModel --assign_calls--> StageOwnership, TraceAssignment
                --build_partition--> Stage (modules and a `StageForward`), TracedPartition

The layers of a `Stage` are the modules whose parameters and buffers it holds:

    a unit that the stage calls          the user's module, or a copy that shares its tensors if
                                         an earlier stage has the module already
    a unit of another stage              a copy with those tensors alone that operations between
                                         units use on this stage
    a parent's own parameters, buffers   an empty `nn.Module` that holds them
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.traced.assignment import TraceAssignment, assign_nodes
from penstock.model.traced.local_model import LocalModel
from penstock.model.traced.proxies import (
    ProxyModel,
    build_remote_tensor,
    build_unit_proxy,
    copy_sharing_tensors,
)
from penstock.model.traced.shared_state import SharedState, find_shared_state
from penstock.model.traced.stage_forward import StageForward
from penstock.model.traced.trace import Trace, UnitCall
from penstock.model.traced.traced_partition import (
    CutSummary,
    StageOwnership,
    TraceCache,
    TracedPartition,
    TraceMemory,
)
from penstock.model_summary import ModelSummary
from penstock.schedules.ir import StageGraph
from penstock.stage.stage import Stage


@dataclass(frozen=True)
class TracedModel:
    """A model with the trace of its example, before it is cut.

    Attributes:
        model: The user's model.
        units: Its units by name.
        trace: The trace of the example.
        constants: Tensors that the forward took from elsewhere, by value index.
        example: The positional and keyword arguments of the example micro-batch.
        trace_caches: Caches of compiled traces, by cut and devices. Partitions of copies of the
            model share them.
    """

    model: nn.Module
    units: Mapping[str, nn.Module]
    trace: Trace
    constants: Mapping[int, Tensor]
    example: tuple[tuple[Any, ...], dict[str, Any]]
    trace_caches: dict[Any, TraceCache] = field(default_factory=dict, repr=False)

    def rebind_to(self, model: nn.Module) -> TracedModel:
        """Return the same for a copy of the model, which then needs no tracing of its own."""
        units = {name: model.get_submodule(name) for name in self.units}
        return replace(self, model=model, units=units)

    @property
    def calls(self) -> list[UnitCall]:
        """The calls of units in order. The model can be cut between any two of them."""
        return [self.trace.nodes[index].func for index in self.trace.unit_call_indices]

    def find_parents(self) -> dict[str, nn.Module]:
        """Return the modules that `ProxyModel` copies, by name: those that no unit is around.

        A module may be a parent and also inside a unit, such as a rotary embedding that the model
        registers and its blocks hold.
        """
        visited, parents = {id(unit) for unit in self.units.values()}, dict[str, nn.Module]()
        pending: list[tuple[str, nn.Module]] = [("", self.model)]
        while pending:
            name, module = pending.pop()
            if id(module) in visited:  # a unit, or a parent that is registered under two names
                continue
            visited.add(id(module))
            parents[name] = module
            children = [
                (f"{name}.{key}".strip("."), m)
                for key, m in module._modules.items()
                if m is not None
            ]
            pending += reversed(children)
        return parents


def assign_calls(
    traced_model: TracedModel, calls_per_stage: Sequence[int], call_order: Sequence[UnitCall] = ()
) -> tuple[StageOwnership, TraceAssignment]:
    """Cut a traced model.

    Args:
        traced_model: The model.
        calls_per_stage: The number of unit calls of each stage.
        call_order: The order in which the calls are dealt out; by default that of the trace. Under
            torchrun it is the order of the first process, since a model that iterates over a set
            may call its units in another order in each process.

    Returns:
        What each stage owns, and which nodes of the trace it runs.
    """
    call_stages: dict[UnitCall, int] = {}
    order = iter(call_order or traced_model.calls)
    for stage, count in enumerate(calls_per_stage):
        for _ in range(count):
            call_stages[next(order)] = stage
    assignment = assign_nodes(
        traced_model.trace, lambda call, _: call_stages[call], len(calls_per_stage)
    )
    unit_owners = _find_unit_owners(traced_model.units, call_stages)
    parameter_owners = _find_parameter_owners(traced_model, unit_owners, assignment)
    return StageOwnership(
        len(calls_per_stage), call_stages, unit_owners, parameter_owners, assignment.buffer_writers
    ), assignment


def _find_unit_owners(
    units: Mapping[str, nn.Module], call_stages: Mapping[UnitCall, int]
) -> dict[str, tuple[int, ...]]:
    """Return the stages that call each unit.

    A unit that the example did not call goes to the stage of the unit registered before it.
    """
    owners: dict[str, tuple[int, ...]] = {}
    previous: tuple[int, ...] = (0,)
    for name in units:
        stages = sorted({stage for call, stage in call_stages.items() if call.unit == name})
        previous = owners[name] = tuple(stages) or previous[-1:]
    return owners


def _find_parameter_owners(
    traced_model: TracedModel,
    unit_owners: Mapping[str, tuple[int, ...]],
    assignment: TraceAssignment,
) -> dict[str, frozenset[int]]:
    """Return the stages that have each parameter, by all of its names in the unsplit model.

    A tied parameter is on every stage that uses it under any of its names. A parameter that is not
    used at all goes to the stages of the parameter before it.
    """
    unit_names = {id(m): name for name, unit in traced_model.units.items() for m in unit.modules()}
    stages: dict[int, set[int]] = {}  # by the id of the parameter
    named_parameters: list[tuple[str, nn.Parameter]] = []
    for path, module in traced_model.model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            named_parameters.append((f"{path}.{key}" if path else key, parameter))
            unit = unit_names.get(id(module))
            if unit is not None:
                stages.setdefault(id(parameter), set()).update(unit_owners[unit])
    # Then the parameters that operations between units use, also those inside units.
    for name, parameter in named_parameters:
        stages.setdefault(id(parameter), set()).update(assignment.parameter_users.get(name, ()))
    owners: dict[str, frozenset[int]] = {}
    previous = frozenset({0})
    for name, parameter in named_parameters:
        stages[id(parameter)] = stages[id(parameter)] or set(previous)
        previous = owners[name] = frozenset(stages[id(parameter)])
    return owners


def build_partition(
    traced_model: TracedModel,
    ownership: StageOwnership,
    summary: CutSummary,
    outline: ModelSummary,
    devices: Mapping[int, torch.device],
    local_model: LocalModel | None = None,
    remote_stages: Mapping[int, Stage] | None = None,
) -> TracedPartition:
    """Build the stages of this process and the partition that they belong to.

    Args:
        traced_model: The model.
        ownership: What each stage owns, from `assign_calls`.
        summary: The cut.
        outline: The cut, for reports.
        devices: The devices of the stages to build.
        local_model: The part of the model that this process keeps, or None for the whole model.
        remote_stages: The stages of other processes, by index.
    """
    parents = traced_model.find_parents() if local_model is None else local_model.parents
    local_stages = build_draft_stages(traced_model, ownership, summary.assignment, devices, parents)
    stages = {**(remote_stages or {}), **{stage.index: stage for stage in local_stages}}
    # Programs depend on the cut and on the devices, and on nothing else of a partition.
    key = summary.calls_per_stage, tuple(devices.items())
    # A process that keeps only a part of the model cannot share a cache with copies of the model.
    cache = (
        OrderedDict() if local_model else traced_model.trace_caches.setdefault(key, OrderedDict())
    )
    partition = TracedPartition(
        tuple(stages[index] for index in sorted(stages)),
        StageGraph.chain(ownership.num_stages, summary.assignment.edges),
        outline,
        traced_model.model,
        traced_model.units,
        parents,
        ownership,
        devices,
        summary,
        local_model,
        TraceMemory(cache),
    )
    partition.add_example(
        traced_model.example, traced_model.trace, summary.assignment, traced_model.constants
    )
    return partition


def build_draft_stages(
    traced_model: TracedModel,
    ownership: StageOwnership,
    assignment: TraceAssignment,
    devices: Mapping[int, torch.device],
    parents: Mapping[str, nn.Module],
) -> list[Stage]:
    """Build stages without a partition.

    Under torchrun each process drafts all stages first: only then can it see which parameters they
    share. It keeps its own, in a local model.
    """
    shared_proxies = {id(m): build_unit_proxy(name, m) for name, m in traced_model.units.items()}
    modules_by_stage: list[list[nn.Module]] = [[] for _ in range(ownership.num_stages)]
    for name, stages in ownership.unit_owners.items():
        for stage in stages:
            modules_by_stage[stage] += traced_model.units[name].modules()
    shared_state = find_shared_state(modules_by_stage, list(parents.values()))
    return [
        _build_stage(
            index,
            traced_model,
            ownership,
            assignment,
            parents,
            shared_proxies,
            devices,
            shared_state[index],
        )
        for index in devices
    ]


def _build_stage(
    index: int,
    traced_model: TracedModel,
    ownership: StageOwnership,
    assignment: TraceAssignment,
    parents: Mapping[str, nn.Module],
    shared_proxies: Mapping[int, nn.Module],
    devices: Mapping[int, torch.device],
    shared_state: SharedState,
) -> Stage:
    """Build one stage. The stages share unit proxies where they have no tensors of their own."""
    layers: dict[str, nn.Module] = {}
    module_copies: list[tuple[nn.Module, nn.Module]] = []  # original and this stage's module
    proxies, device = dict(shared_proxies), devices[index]
    # Units first: those that the stage calls, and the parts it needs of units on other stages.
    for name, unit in traced_model.units.items():
        owners = [owner for owner in ownership.unit_owners[name] if owner in devices]
        if index in owners:
            # Two stages that call one unit may run at the same time. The first has the user's
            # module; the others have copies, so that attributes set in a forward stay apart.
            layers[name] = unit
            if index != owners[0]:
                layers[name] = copy_sharing_tensors(unit)
                # Operations between units use the parameters of this stage's copy, too.
                proxies[id(unit)] = build_unit_proxy(name, layers[name])
            module_copies += zip(unit.modules(), layers[name].modules(), strict=True)
        elif partial_copy := _copy_with_used_tensors(name, unit, index, assignment, device):
            layers[name] = partial_copy
            proxies[id(unit)] = build_unit_proxy(name, partial_copy)
    unit_modules = {name: layers.get(name, unit) for name, unit in traced_model.units.items()}
    proxy_model = ProxyModel(traced_model.model, proxies)
    for name, holder in _build_tensor_holders(proxy_model, ownership, index, device):
        layers[name] = holder
    return Stage(
        index,
        tuple(layers),
        tuple(layers.values()),
        StageForward(
            index,
            proxy_model,
            unit_modules,
            [(a, b) for a, b in module_copies if a is not b],
            shared_state,
        ),
        tuple(
            type(parents[name]).__name__
            if name in parents
            else type(traced_model.units[name]).__name__
            for name in layers
        ),
    )


def _copy_with_used_tensors(
    name: str, unit: nn.Module, index: int, assignment: TraceAssignment, device: torch.device
) -> nn.Module | None:
    """Return a copy of another stage's unit with the tensors that this stage uses between units.

    An example is a head that computes `F.linear(x, self.embedding.weight)`. All other tensors of
    the copy are remote. Returns None if this stage uses none of them.
    """
    users = [*assignment.parameter_users.items(), *assignment.buffer_readers.items()]
    used = {key for key, stages in users if key.startswith(f"{name}.") and index in stages}
    if not used:
        return None
    unit_copy = copy_sharing_tensors(unit)
    for path, module in unit_copy.named_modules(prefix=name):
        tables: Any = module._parameters, module._buffers
        for tensors in tables:
            others = [key for key in tensors if f"{path}.{key}" not in used]
            _make_remote(module, tensors, others, device)
    return unit_copy


def _make_remote(
    module: nn.Module, tensors: dict[str, Any], keys: Iterable[str], device: torch.device
) -> None:
    """Replace these parameters or buffers by remote tensors, which are plain attributes."""
    for key in keys:
        tensor = tensors.pop(key)
        module.__dict__[key] = None if tensor is None else build_remote_tensor(tensor, device)


def _build_tensor_holders(
    proxy_model: ProxyModel, ownership: StageOwnership, index: int, device: torch.device
) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that hold the parents' own parameters and buffers of a stage, by name.

    The holder shares the `_parameters` and `_buffers` dicts of the stage's parent copy. So a
    `.to(device)` of the stage, or a `load_state_dict`, changes what the parent's forward uses.
    """
    for name, (_, parent_copy) in proxy_model.parent_copies.items():
        prefix = f"{name}." if name else ""
        parameters: dict[str, Any] = parent_copy._parameters
        owners, writers = ownership.parameter_owners, ownership.buffer_writers
        elsewhere = [
            k for k, p in parameters.items() if p is not None and index not in owners[prefix + k]
        ]
        _make_remote(parent_copy, parameters, elsewhere, device)
        # A buffer that no stage writes is on every stage. One that the forward changes is on the
        # stage that changes it, and remote on the others.
        written = [k for k in parent_copy._buffers if writers.get(prefix + k, index) != index]
        _make_remote(parent_copy, parent_copy._buffers, written, device)
        tensors = (*parent_copy._parameters.values(), *parent_copy._buffers.values())
        if any(tensor is not None for tensor in tensors):
            holder = nn.Module()
            holder.__dict__["_parameters"] = parent_copy._parameters
            holder.__dict__["_buffers"] = parent_copy._buffers
            holder.__dict__["_non_persistent_buffers_set"] = parent_copy._non_persistent_buffers_set
            holder.training = parent_copy.training
            yield name, holder

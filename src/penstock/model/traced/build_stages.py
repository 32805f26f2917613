"""A traced model cut into stages: what each has, and what it computes with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
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
from penstock.model.traced.stage_forward import StageForward
from penstock.model.traced.trace import Trace, UnitCall
from penstock.model.traced.traced_partition import (
    CutSummary,
    StageOwnership,
    TraceCache,
    TracedPartition,
)
from penstock.stage.stage import Stage


@dataclass(frozen=True)
class TracedModel:
    """A model that was traced, and is to be cut."""

    model: nn.Module
    units: Mapping[str, nn.Module]
    trace: Trace
    constants: Mapping[int, Tensor]
    example: tuple[tuple[Any, ...], dict[str, Any]]
    trace_caches: dict[Any, TraceCache] = field(
        default_factory=dict, repr=False
    )  # by cut and devices

    def rebind_to(self, model: nn.Module) -> TracedModel:
        """The same for a copy of the model, to be cut alike: no plan has to be made twice."""
        units = {name: model.get_submodule(name) for name in self.units}
        return replace(self, model=model, units=units)

    @property
    def calls(self) -> list[UnitCall]:
        """Of units, in order: between them it can be cut."""
        return [self.trace.nodes[at].func for at in self.trace.unit_call_indices]

    def find_parents(self) -> dict[str, nn.Module]:
        """The modules that are not in a unit."""
        inside = {id(m) for unit in self.units.values() for m in unit.modules()}
        return {name: m for name, m in self.model.named_modules() if id(m) not in inside}


def assign_calls(
    traced_model: TracedModel, calls_per_stage: Sequence[int], call_order: Sequence[UnitCall] = ()
) -> tuple[StageOwnership, TraceAssignment]:
    """So many calls for each stage: where everything is at home, and who does what.

    The order is the model's own, unless another is given: that of the first of several processes.
    """
    calls: dict[UnitCall, int] = {}
    order = iter(call_order or traced_model.calls)
    for stage, count in enumerate(calls_per_stage):
        for _ in range(count):
            calls[next(order)] = stage
    division = assign_nodes(traced_model.trace, lambda call, _: calls[call], len(calls_per_stage))
    units = _find_unit_owners(traced_model.units, calls)
    homes = _find_parameter_owners(traced_model, units, division)
    return StageOwnership(
        len(calls_per_stage), calls, units, homes, division.buffer_writers
    ), division


def _find_unit_owners(
    units: Mapping[str, nn.Module], call_stages: Mapping[UnitCall, int]
) -> dict[str, tuple[int, ...]]:
    """One that was not called stays with the one that was registered before it."""
    found: dict[str, tuple[int, ...]] = {}
    before: tuple[int, ...] = (0,)
    for name in units:
        stages = sorted({stage for call, stage in call_stages.items() if call.unit == name})
        before = found[name] = tuple(stages) or before[-1:]
    return found


def _find_parameter_owners(
    traced_model: TracedModel,
    unit_owners: Mapping[str, tuple[int, ...]],
    assignment: TraceAssignment,
) -> dict[str, frozenset[int]]:
    """By the names of the unsplit model; further names of one that is tied count as well."""
    inside = {id(m): name for name, unit in traced_model.units.items() for m in unit.modules()}
    stages: dict[int, set[int]] = {}
    named: list[tuple[str, nn.Parameter]] = []
    for path, module in traced_model.model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            named.append((f"{path}.{key}" if path else key, parameter))
            unit = inside.get(id(module))
            if unit is not None:
                stages.setdefault(id(parameter), set()).update(unit_owners[unit])
    for name, parameter in named:
        stages.setdefault(id(parameter), set()).update(assignment.parameter_users.get(name, ()))
    found: dict[str, frozenset[int]] = {}
    before = frozenset({0})
    for name, parameter in named:
        stages[id(parameter)] = stages[id(parameter)] or set(before)
        before = found[name] = frozenset(stages[id(parameter)])
    return found


def build_stages(
    traced_model: TracedModel,
    ownership: StageOwnership,
    summary: CutSummary,
    devices: Mapping[int, torch.device],
    local_model: LocalModel | None = None,
) -> tuple[list[Stage], TracedPartition]:
    """The stages on `devices`; the excerpt is of the model, if not all of it is in this process."""
    parents = traced_model.find_parents() if local_model is None else local_model.parents
    stages = build_draft_stages(traced_model, ownership, summary.assignment, devices, parents)
    key = summary.calls_per_stage, tuple(devices.items())
    known = (
        OrderedDict() if local_model else traced_model.trace_caches.setdefault(key, OrderedDict())
    )
    whole = TracedPartition(
        traced_model.model,
        traced_model.units,
        parents,
        ownership,
        devices,
        summary,
        local_model,
        known,
    )
    whole.add_example(
        traced_model.example, traced_model.trace, summary.assignment, traced_model.constants
    )
    return stages, whole


def build_draft_stages(
    traced_model: TracedModel,
    ownership: StageOwnership,
    assignment: TraceAssignment,
    devices: Mapping[int, torch.device],
    parents: Mapping[str, nn.Module],
) -> list[Stage]:
    """The stages alone."""
    shared_fronts = {id(m): build_unit_proxy(name, m) for name, m in traced_model.units.items()}
    return [
        _build_stage(index, traced_model, ownership, assignment, parents, shared_fronts, devices)
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
) -> Stage:
    layers: dict[str, nn.Module] = {}
    twins: list[tuple[nn.Module, nn.Module]] = []
    fronts, device = dict(shared_proxies), devices[index]
    for name, unit in traced_model.units.items():
        homes = [home for home in ownership.unit_owners[name] if home in devices]
        if index in homes:
            layers[name] = unit if index == homes[0] else copy_sharing_tensors(unit)
            twins += zip(unit.modules(), layers[name].modules(), strict=True)
        elif shell := _copy_with_used_tensors(name, unit, index, assignment, device):
            layers[name] = shell
            fronts[id(unit)] = build_unit_proxy(name, shell)
    targets = {name: layers.get(name, unit) for name, unit in traced_model.units.items()}
    skeleton = ProxyModel(traced_model.model, fronts)
    for name, keeper in _build_tensor_holders(skeleton, ownership, index, device):
        layers[name] = keeper
    return Stage(
        index,
        tuple(layers),
        tuple(layers.values()),
        StageForward(index, skeleton, targets, [(a, b) for a, b in twins if a is not b]),
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
    """Of a unit of another stage: those of its parameters and buffers that are used here."""
    users = [*assignment.parameter_users.items(), *assignment.buffer_readers.items()]
    used = {key for key, stages in users if key.startswith(f"{name}.") and index in stages}
    if not used:
        return None
    made = copy_sharing_tensors(unit)
    for path, module in made.named_modules(prefix=name):
        _drop_other_parameters(module, lambda key, path=path: f"{path}.{key}" in used, device)
        for key in [key for key in module._buffers if f"{path}.{key}" not in used]:
            buffer = module._buffers.pop(key)
            module.__dict__[key] = None if buffer is None else build_remote_tensor(buffer, device)
    return made


def _drop_other_parameters(module: nn.Module, is_kept: Any, device: torch.device) -> None:
    """The other parameters can be looked at, and are none of the module's."""
    for key, parameter in list(module._parameters.items()):
        if parameter is not None and not is_kept(key):
            del module._parameters[key]
            module.__dict__[key] = build_remote_tensor(parameter, device)


def _build_tensor_holders(
    proxy_model: ProxyModel, ownership: StageOwnership, index: int, device: torch.device
) -> Iterator[tuple[str, nn.Module]]:
    """What the stage has of the parents' own parameters and buffers, as modules."""
    for name, (_, copy) in proxy_model.parent_copies.items():
        prefix = f"{name}." if name else ""
        _drop_other_parameters(
            copy, lambda key, p=prefix: index in ownership.parameter_owners[p + key], device
        )
        for key in [
            k for k in copy._buffers if ownership.buffer_writers.get(prefix + k, index) != index
        ]:
            buffer = copy._buffers.pop(key)
            copy.__dict__[key] = None if buffer is None else build_remote_tensor(buffer, device)
        if any(t is not None for t in (*copy._parameters.values(), *copy._buffers.values())):
            keeper = nn.Module()
            keeper.__dict__["_parameters"] = copy._parameters
            keeper.__dict__["_buffers"] = copy._buffers
            keeper.__dict__["_non_persistent_buffers_set"] = copy._non_persistent_buffers_set
            keeper.training = copy.training
            yield name, keeper

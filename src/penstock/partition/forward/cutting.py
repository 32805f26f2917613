"""A traced model cut into stages: what each has, and what it computes with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.partition.forward.division import Division, divide
from penstock.partition.forward.excerpt import Excerpt
from penstock.partition.forward.part import Part
from penstock.partition.forward.skeleton import Skeleton, absent_of, front, twin
from penstock.partition.forward.survey import Survey
from penstock.partition.forward.trace import CallOf, Trace
from penstock.partition.forward.whole import Cut, Plans, Whole
from penstock.stage.stage import Stage


@dataclass(frozen=True)
class Prospect:
    """A model that was traced, and is to be cut."""

    model: nn.Module
    units: Mapping[str, nn.Module]
    trace: Trace
    constants: Mapping[int, Tensor]
    example: tuple[tuple[Any, ...], dict[str, Any]]
    plans: dict[Any, Plans] = field(default_factory=dict, repr=False)  # by cut and devices

    def onto(self, model: nn.Module) -> Prospect:
        """The same for a copy of the model, to be cut alike: no plan has to be made twice."""
        units = {name: model.get_submodule(name) for name in self.units}
        return replace(self, model=model, units=units)

    @property
    def calls(self) -> list[CallOf]:
        """Of units, in order: between them it can be cut."""
        return [self.trace.steps[at].func for at in self.trace.calls]

    def parents(self) -> dict[str, nn.Module]:
        """The modules that are not in a unit."""
        inside = {id(m) for unit in self.units.values() for m in unit.modules()}
        return {name: m for name, m in self.model.named_modules() if id(m) not in inside}


def cut_at(
    prospect: Prospect, counts: Sequence[int], calls_in_order: Sequence[CallOf] = ()
) -> tuple[Cut, Division]:
    """So many calls for each stage: where everything is at home, and who does what.

    The order is the model's own, unless another is given: that of the first of several processes.
    """
    calls: dict[CallOf, int] = {}
    order = iter(calls_in_order or prospect.calls)
    for stage, count in enumerate(counts):
        for _ in range(count):
            calls[next(order)] = stage
    division = divide(prospect.trace, lambda call, _: calls[call], len(counts))
    units = _homes_of_units(prospect.units, calls)
    homes = _homes_of_parameters(prospect, units, division)
    return Cut(len(counts), calls, units, homes, division.writes), division


def _homes_of_units(
    units: Mapping[str, nn.Module], calls: Mapping[CallOf, int]
) -> dict[str, tuple[int, ...]]:
    """One that was not called stays with the one that was registered before it."""
    found: dict[str, tuple[int, ...]] = {}
    before: tuple[int, ...] = (0,)
    for name in units:
        stages = sorted({stage for call, stage in calls.items() if call.unit == name})
        before = found[name] = tuple(stages) or before[-1:]
    return found


def _homes_of_parameters(
    prospect: Prospect, units: Mapping[str, tuple[int, ...]], division: Division
) -> dict[str, frozenset[int]]:
    """By the names of the unsplit model; further names of one that is tied count as well."""
    inside = {id(m): name for name, unit in prospect.units.items() for m in unit.modules()}
    stages: dict[int, set[int]] = {}
    named: list[tuple[str, nn.Parameter]] = []
    for path, module in prospect.model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            named.append((f"{path}.{key}" if path else key, parameter))
            unit = inside.get(id(module))
            if unit is not None:
                stages.setdefault(id(parameter), set()).update(units[unit])
    for name, parameter in named:
        stages.setdefault(id(parameter), set()).update(division.uses.get(name, ()))
    found: dict[str, frozenset[int]] = {}
    before = frozenset({0})
    for name, parameter in named:
        stages[id(parameter)] = stages[id(parameter)] or set(before)
        before = found[name] = frozenset(stages[id(parameter)])
    return found


def stages_of(
    prospect: Prospect,
    cut: Cut,
    survey: Survey,
    devices: Mapping[int, torch.device],
    excerpt: Excerpt | None = None,
) -> tuple[list[Stage], Whole]:
    """The stages on `devices`; the excerpt is of the model, if not all of it is in this process."""
    parents = prospect.parents() if excerpt is None else excerpt.parents
    stages = drafts_of(prospect, cut, survey.division, devices, parents)
    key = survey.counts, tuple(devices.items())
    known = OrderedDict() if excerpt else prospect.plans.setdefault(key, OrderedDict())
    whole = Whole(prospect.model, prospect.units, parents, cut, devices, survey, excerpt, known)
    whole.learn(prospect.example, prospect.trace, survey.division, prospect.constants)
    return stages, whole


def drafts_of(
    prospect: Prospect,
    cut: Cut,
    division: Division,
    devices: Mapping[int, torch.device],
    parents: Mapping[str, nn.Module],
) -> list[Stage]:
    """The stages alone."""
    shared_fronts = {id(m): front(name, m) for name, m in prospect.units.items()}
    return [
        _stage(index, prospect, cut, division, parents, shared_fronts, devices) for index in devices
    ]


def _stage(
    index: int,
    prospect: Prospect,
    cut: Cut,
    division: Division,
    parents: Mapping[str, nn.Module],
    shared_fronts: Mapping[int, nn.Module],
    devices: Mapping[int, torch.device],
) -> Stage:
    layers: dict[str, nn.Module] = {}
    twins: list[tuple[nn.Module, nn.Module]] = []
    fronts, device = dict(shared_fronts), devices[index]
    for name, unit in prospect.units.items():
        homes = [home for home in cut.units[name] if home in devices]
        if index in homes:
            layers[name] = unit if index == homes[0] else twin(unit)
            twins += zip(unit.modules(), layers[name].modules(), strict=True)
        elif shell := _shell(name, unit, index, division, device):
            layers[name] = shell
            fronts[id(unit)] = front(name, shell)
    targets = {name: layers.get(name, unit) for name, unit in prospect.units.items()}
    skeleton = Skeleton(prospect.model, fronts)
    for name, keeper in _keepers(skeleton, cut, index, device):
        layers[name] = keeper
    return Stage(
        index,
        tuple(layers),
        tuple(layers.values()),
        Part(index, skeleton, targets, [(a, b) for a, b in twins if a is not b]),
        tuple(
            type(parents[name]).__name__ if name in parents else type(prospect.units[name]).__name__
            for name in layers
        ),
    )


def _shell(
    name: str, unit: nn.Module, index: int, division: Division, device: torch.device
) -> nn.Module | None:
    """Of a unit of another stage: those of its parameters and buffers that are used here."""
    users = [*division.uses.items(), *division.reads.items()]
    used = {key for key, stages in users if key.startswith(f"{name}.") and index in stages}
    if not used:
        return None
    made = twin(unit)
    for path, module in made.named_modules(prefix=name):
        _keep_only(module, lambda key, path=path: f"{path}.{key}" in used, device)
        for key in [key for key in module._buffers if f"{path}.{key}" not in used]:
            buffer = module._buffers.pop(key)
            module.__dict__[key] = None if buffer is None else absent_of(buffer, device)
    return made


def _keep_only(module: nn.Module, kept: Any, device: torch.device) -> None:
    """The other parameters can be looked at, and are none of the module's."""
    for key, parameter in list(module._parameters.items()):
        if parameter is not None and not kept(key):
            del module._parameters[key]
            module.__dict__[key] = absent_of(parameter, device)


def _keepers(
    skeleton: Skeleton, cut: Cut, index: int, device: torch.device
) -> Iterator[tuple[str, nn.Module]]:
    """What the stage has of the parents' own parameters and buffers, as modules."""
    for name, (_, copy) in skeleton.parents.items():
        prefix = f"{name}." if name else ""
        _keep_only(copy, lambda key, p=prefix: index in cut.parameters[p + key], device)
        for key in [k for k in copy._buffers if cut.written.get(prefix + k, index) != index]:
            buffer = copy._buffers.pop(key)
            copy.__dict__[key] = None if buffer is None else absent_of(buffer, device)
        if any(t is not None for t in (*copy._parameters.values(), *copy._buffers.values())):
            keeper = nn.Module()
            keeper.__dict__["_parameters"] = copy._parameters
            keeper.__dict__["_buffers"] = copy._buffers
            keeper.__dict__["_non_persistent_buffers_set"] = copy._non_persistent_buffers_set
            keeper.training = copy.training
            yield name, keeper

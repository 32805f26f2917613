"""Any module cut into stages: traced on an example, and cut between the calls of its units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.batch import scatter
from penstock.errors import ArgumentError, PenstockTypeError
from penstock.ir import StageGraph
from penstock.partition.costing import ResourceLimits, choose_unit_counts
from penstock.partition.forward.cutting import TracedModel, assign_calls, build_stages
from penstock.partition.forward.survey import CutSummary
from penstock.partition.forward.tracing import trace_expanding_units
from penstock.partition.forward.units import (
    UnitSelector,
    has_layer_list,
    is_expandable,
    parameter_bytes,
)
from penstock.partition.hugging_face import (
    build_default_kwargs,
    find_planned_units,
    install_output_hooks,
)
from penstock.partition.outlining import describe_traced_model
from penstock.partition.partition import Partition


@dataclass(frozen=True)
class ExampleMicrobatch:
    """A micro-batch: what a model's forward is called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @staticmethod
    def from_batch(batch: Any, chunks: int) -> ExampleMicrobatch | TracedModel:
        """The first micro-batch of a batch: a tensor, a tuple of inputs, or a dict of them.

        What was traced with one already is as good.
        """
        if isinstance(batch, TracedModel):
            return batch
        if batch is None:
            raise ArgumentError(
                "a model that is no nn.Sequential is cut along its forward, which is run once for "
                "that: give example=, a batch: a tensor, a tuple of inputs, or a dict of inputs "
                "by name"
            )
        args: tuple[Any, ...] = batch if isinstance(batch, tuple) else (batch,)
        if isinstance(batch, Mapping):
            args, named = (), dict(batch)
        else:
            named = {}
        names = [*(f"input {at}" for at in range(len(args))), *named]
        pieces, _ = scatter((*args, *named.values()), chunks, names)
        first = pieces[0]
        return ExampleMicrobatch(
            first[: len(args)], dict(zip(named, first[len(args) :], strict=True))
        )


def trace_with_enough_units(
    model: nn.Module,
    example: ExampleMicrobatch,
    unit_selector: UnitSelector,
    stages: int,
    device: torch.device,
) -> TracedModel:
    """The model traced; units are opened until there are enough of them."""
    _check_traceable(model)
    install_output_hooks(model)
    kwargs = {**build_default_kwargs(model, example.kwargs), **example.kwargs}
    unit_selector = find_planned_units(model) if unit_selector is None else unit_selector
    opened: set[str] = set()
    while True:
        trace, constants, units = trace_expanding_units(
            model, unit_selector, example.args, kwargs, device, opened
        )
        found = TracedModel(model, units, trace, constants, (example.args, kwargs))
        if len(found.calls) >= stages:
            return found
        more = _choose_units_to_open(units)
        if not more:
            raise ArgumentError(
                f"stages={stages}, and the model has {len(found.calls)} calls of units to be "
                f"dealt out, {', '.join(map(str, found.calls)) or 'none'}: take fewer stages, or "
                "say with units= what else is one"
            )
        opened |= more


def _choose_units_to_open(units: Mapping[str, nn.Module]) -> set[str]:
    """Those with lists inside first; the largest otherwise."""
    lists = {name for name, unit in units.items() if has_layer_list(unit)}
    if lists:
        return lists
    sizes = {n: parameter_bytes(u) for n, u in units.items() if is_expandable(u)}
    return {max(sizes, key=lambda name: sizes[name])} if sizes else set()


def cut_model(
    model: nn.Module,
    stages: int | Sequence[int],
    example: ExampleMicrobatch | TracedModel,
    unit_selector: UnitSelector,
    balance: str | None,
    limits: ResourceLimits,
) -> Partition:
    """As many stages as devices."""
    count = len(limits.devices)
    if isinstance(example, TracedModel):
        prospect = example.rebind_to(model)
    else:
        prospect = trace_with_enough_units(model, example, unit_selector, count, limits.devices[0])
    counts, costs = choose_unit_counts(prospect, stages, balance, limits)
    cut, division = assign_calls(prospect, counts)
    survey = CutSummary(tuple(prospect.calls), tuple(counts), division, costs)
    made, whole = build_stages(prospect, cut, survey, dict(enumerate(limits.devices)))
    graph = StageGraph.chain(count, division.edges)
    return Partition(tuple(made), graph, whole, describe_traced_model(prospect, cut, survey))


def _check_traceable(model: nn.Module) -> None:
    if "_orig_mod" in model._modules or isinstance(model, torch.jit.ScriptModule):
        raise PenstockTypeError(
            f"the model is compiled as a whole ({type(model).__name__}), so that its forward "
            "cannot be followed: give the model itself, and compile its blocks"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ArgumentError(
                f"'{name}' has no shape yet, as its module is a lazy one: call the model once on a "
                "batch, and then make the Pipe"
            )

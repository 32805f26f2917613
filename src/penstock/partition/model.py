"""Any module cut into stages: traced on an example, and cut between the calls of its units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.batch import scatter
from penstock.errors import ArgumentError, KindError
from penstock.ir import StageGraph
from penstock.partition.costing import Room, counts_of
from penstock.partition.forward.cutting import Prospect, cut_at, stages_of
from penstock.partition.forward.survey import Survey
from penstock.partition.forward.tracing import traced_open
from penstock.partition.forward.units import Asked, has_list, parameter_bytes, parts_inside
from penstock.partition.hugging_face import defaults_of, planned_units, prepare
from penstock.partition.outlining import outline_of_parts
from penstock.partition.partition import Partition


@dataclass(frozen=True)
class Example:
    """A micro-batch: what a model's forward is called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @staticmethod
    def read(given: Any, chunks: int) -> Example | Prospect:
        """The first micro-batch of a batch: a tensor, a tuple of inputs, or a dict of them.

        What was traced with one already is as good.
        """
        if isinstance(given, Prospect):
            return given
        if given is None:
            raise ArgumentError(
                "a model that is no nn.Sequential is cut along its forward, which is run once for "
                "that: give example=, a batch: a tensor, a tuple of inputs, or a dict of inputs "
                "by name"
            )
        args: tuple[Any, ...] = given if isinstance(given, tuple) else (given,)
        if isinstance(given, Mapping):
            args, named = (), dict(given)
        else:
            named = {}
        names = [*(f"input {at}" for at in range(len(args))), *named]
        pieces, _ = scatter((*args, *named.values()), chunks, names)
        first = pieces[0]
        return Example(first[: len(args)], dict(zip(named, first[len(args) :], strict=True)))


def prospect_of(
    model: nn.Module, example: Example, asked: Asked, stages: int, device: torch.device
) -> Prospect:
    """The model traced; units are opened until there are enough of them."""
    _check(model)
    prepare(model)
    kwargs = {**defaults_of(model, example.kwargs), **example.kwargs}
    asked = planned_units(model) if asked is None else asked
    opened: set[str] = set()
    while True:
        trace, constants, units = traced_open(model, asked, example.args, kwargs, device, opened)
        found = Prospect(model, units, trace, constants, (example.args, kwargs))
        if len(found.calls) >= stages:
            return found
        more = _to_open(units)
        if not more:
            raise ArgumentError(
                f"stages={stages}, and the model has {len(found.calls)} calls of units to be "
                f"dealt out, {', '.join(map(str, found.calls)) or 'none'}: take fewer stages, or "
                "say with units= what else is one"
            )
        opened |= more


def _to_open(units: Mapping[str, nn.Module]) -> set[str]:
    """Those with lists inside first; the largest otherwise."""
    lists = {name for name, unit in units.items() if has_list(unit)}
    if lists:
        return lists
    sizes = {n: parameter_bytes(u) for n, u in units.items() if parts_inside(u)}
    return {max(sizes, key=lambda name: sizes[name])} if sizes else set()


def cut_model(
    model: nn.Module,
    stages: int | Sequence[int],
    example: Example | Prospect,
    asked: Asked,
    balance: str | None,
    room: Room,
) -> Partition:
    """As many stages as devices."""
    count = len(room.devices)
    if isinstance(example, Prospect):
        prospect = example.onto(model)
    else:
        prospect = prospect_of(model, example, asked, count, room.devices[0])
    counts, costs = counts_of(prospect, stages, balance, room)
    cut, division = cut_at(prospect, counts)
    survey = Survey(tuple(prospect.calls), tuple(counts), division, costs)
    made, whole = stages_of(prospect, cut, survey, dict(enumerate(room.devices)))
    graph = StageGraph.chain(count, division.edges)
    return Partition(tuple(made), graph, whole, outline_of_parts(prospect, cut, survey))


def _check(model: nn.Module) -> None:
    if "_orig_mod" in model._modules or isinstance(model, torch.jit.ScriptModule):
        raise KindError(
            f"the model is compiled as a whole ({type(model).__name__}), so that its forward "
            "cannot be followed: give the model itself, and compile its blocks"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ArgumentError(
                f"'{name}' has no shape yet, as its module is a lazy one: call the model once on a "
                "batch, and then make the Pipe"
            )

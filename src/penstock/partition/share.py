"""One process's share of any model: its own stages, and what it must know of the others'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from penstock.errors import CutError
from penstock.ir import StageGraph
from penstock.partition.costing import Room, counts_of
from penstock.partition.forward.cutting import Prospect, cut_at, drafts_of, stages_of
from penstock.partition.forward.division import Division
from penstock.partition.forward.excerpt import Own, excerpt_of
from penstock.partition.forward.survey import Survey, UnitCost
from penstock.partition.forward.whole import Cut
from penstock.partition.outlining import outline_of_parts
from penstock.partition.partition import Partition
from penstock.partition.tied import Tie, tied_names, ties_between
from penstock.stage.stage import Stage


@dataclass(frozen=True)
class Share:
    """Of one process; the ties are with ranks of others."""

    partition: Partition
    ties: tuple[Tie, ...]
    same: Mapping[str, str]  # further names of what is tied, in the whole model


def settled(
    prospect: Prospect, stages: int | Sequence[int], balance: str | None, room: Room
) -> list[Any]:
    """What one process finds for all: the calls of each stage, in which order, and at what cost."""
    counts, costs = counts_of(prospect, stages, balance, room)
    told = [list(astuple(cost)) for cost in costs]
    return [list(counts), [str(call) for call in prospect.calls], told]


def share_of(
    prospect: Prospect,
    found: Sequence[Any],
    placement: Sequence[int],
    rank: int,
    device: torch.device,
    make_ready: Callable[[Sequence[Stage]], None],
) -> Share:
    """`make_ready` gives the process's own stages their memory, on its device.

    All stages are drafted first: what ranks share is seen only where all of it is.
    """
    counts, names, costs = found
    cut, division = _cut(prospect, counts, names)
    devices = dict.fromkeys(range(len(counts)), device)
    drafts = drafts_of(prospect, cut, division, devices, prospect.parents())
    ties, same = ties_between(drafts, placement, rank), tied_names(prospect.model)
    here = {stage: device for stage in devices if placement[stage] == rank}
    make_ready([drafts[stage] for stage in here])
    own = _own(prospect, cut, division, here, same)
    excerpt = excerpt_of(prospect.model, prospect.units, own, device)
    kept = replace(prospect, model=excerpt.model, units=excerpt.units)
    measured = [UnitCost(*cost) for cost in costs]
    survey = Survey(tuple(prospect.calls), tuple(counts), division, measured)
    made, whole = stages_of(kept, cut, survey, here, excerpt)
    stages = [stage.elsewhere() for stage in drafts]
    for stage in made:
        ties = _moved(ties, drafts[stage.index], stage)
        stages[stage.index] = stage
    graph = StageGraph.chain(len(counts), division.edges)
    partition = Partition(tuple(stages), graph, whole, outline_of_parts(prospect, cut, survey))
    return Share(partition, ties, same)


def _cut(prospect: Prospect, counts: Sequence[int], names: Sequence[str]) -> tuple[Cut, Division]:
    calls = {str(call): call for call in prospect.calls}
    if calls.keys() != set(names):
        more = ", ".join(sorted(calls.keys() - set(names))[:4]) or "no others"
        less = ", ".join(sorted(set(names) - calls.keys())[:4]) or "all of those"
        raise CutError(
            f"followed on this rank, the model calls other units than on the first: also {more}, "
            f"and not {less}. Build the same model on every rank, and give the same example"
        )
    return cut_at(prospect, counts, [calls[name] for name in names])


def _own(
    prospect: Prospect,
    cut: Cut,
    division: Division,
    here: Mapping[int, torch.device],
    same: Mapping[str, str],
) -> Own:
    """What is at home on these stages."""
    mine = set(here)
    units = [name for name, homes in cut.units.items() if mine & set(homes)]
    inside = {id(m) for unit in prospect.units.values() for m in unit.modules()}
    parents = {name: m for name, m in prospect.model.named_modules() if id(m) not in inside}
    between = {
        name
        for path, module in parents.items()
        for key in module._parameters
        if mine & cut.parameters.get(name := f"{path}.{key}" if path else key, frozenset())
    }
    used = {name for name, users in division.uses.items() if mine & users}
    written = [name for name, stage in cut.written.items() if stage not in mine]
    return Own(units, between | used, written, division.reads, same)


def _moved(ties: tuple[Tie, ...], draft: Stage, made: Stage) -> tuple[Tie, ...]:
    """Where the stage has what it shares, and not its draft."""
    pairs = {
        id(a): b
        for before, after in zip(draft.layers, made.layers, strict=True)
        for a, b in zip(before.modules(), after.modules(), strict=True)
    }
    return tuple(
        replace(tie, spots=tuple((pairs.get(id(m), m), key) for m, key in tie.spots))
        for tie in ties
    )

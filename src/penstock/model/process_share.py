"""One process's share of any model: its own stages, and what it must know of the others'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from penstock.errors import CutError
from penstock.model.cut import ResourceLimits, choose_unit_counts
from penstock.model.describe import describe_traced_model
from penstock.model.partition import Partition
from penstock.model.tied import TiedTensor, find_tied_names, find_tied_tensors
from penstock.model.traced.assignment import TraceAssignment
from penstock.model.traced.build_stages import (
    TracedModel,
    assign_calls,
    build_draft_stages,
    build_stages,
)
from penstock.model.traced.local_model import LocalMembers, build_local_model
from penstock.model.traced.traced_partition import CutSummary, StageOwnership, UnitCost
from penstock.schedules.ir import StageGraph
from penstock.stage.stage import Stage


@dataclass(frozen=True)
class ProcessShare:
    """Of one process; the ties are with ranks of others."""

    partition: Partition
    tied_tensors: tuple[TiedTensor, ...]
    tied_names: Mapping[str, str]  # further names of what is tied, in the whole model


def decide_cut(
    traced_model: TracedModel,
    stages: int | Sequence[int],
    balance: str | None,
    limits: ResourceLimits,
) -> list[Any]:
    """What one process finds for all: the calls of each stage, in which order, and at what cost."""
    counts, costs = choose_unit_counts(traced_model, stages, balance, limits)
    told = [list(astuple(cost)) for cost in costs]
    return [list(counts), [str(call) for call in traced_model.calls], told]


def build_process_share(
    traced_model: TracedModel,
    decided_cut: Sequence[Any],
    placement: Sequence[int],
    rank: int,
    device: torch.device,
    prepare_stages: Callable[[Sequence[Stage]], None],
) -> ProcessShare:
    """`make_ready` gives the process's own stages their memory, on its device.

    All stages are drafted first: what ranks share is seen only where all of it is.
    """
    counts, names, costs = decided_cut
    cut, division = _apply_decided_cut(traced_model, counts, names)
    devices = dict.fromkeys(range(len(counts)), device)
    drafts = build_draft_stages(traced_model, cut, division, devices, traced_model.find_parents())
    ties, same = find_tied_tensors(drafts, placement, rank), find_tied_names(traced_model.model)
    here = {stage: device for stage in devices if placement[stage] == rank}
    prepare_stages([drafts[stage] for stage in here])
    own = _find_local_state(traced_model, cut, division, here, same)
    excerpt = build_local_model(traced_model.model, traced_model.units, own, device)
    kept = replace(traced_model, model=excerpt.model, units=excerpt.units)
    measured = [UnitCost(*cost) for cost in costs]
    survey = CutSummary(tuple(traced_model.calls), tuple(counts), division, measured)
    made, whole = build_stages(kept, cut, survey, here, excerpt)
    stages = [stage.as_remote() for stage in drafts]
    for stage in made:
        ties = _relocate_tied_tensors(ties, drafts[stage.index], stage)
        stages[stage.index] = stage
    graph = StageGraph.chain(len(counts), division.edges)
    partition = Partition(
        tuple(stages), graph, whole, describe_traced_model(traced_model, cut, survey)
    )
    return ProcessShare(partition, ties, same)


def _apply_decided_cut(
    traced_model: TracedModel, counts: Sequence[int], call_names: Sequence[str]
) -> tuple[StageOwnership, TraceAssignment]:
    calls = {str(call): call for call in traced_model.calls}
    if calls.keys() != set(call_names):
        more = ", ".join(sorted(calls.keys() - set(call_names))[:4]) or "no others"
        less = ", ".join(sorted(set(call_names) - calls.keys())[:4]) or "all of those"
        raise CutError(
            f"followed on this rank, the model calls other units than on the first: also {more}, "
            f"and not {less}. Build the same model on every rank, and give the same example"
        )
    return assign_calls(traced_model, counts, [calls[name] for name in call_names])


def _find_local_state(
    traced_model: TracedModel,
    cut: StageOwnership,
    division: TraceAssignment,
    local_devices: Mapping[int, torch.device],
    tied_names: Mapping[str, str],
) -> LocalMembers:
    """What is at home on these stages."""
    mine = set(local_devices)
    units = [name for name, homes in cut.unit_owners.items() if mine & set(homes)]
    inside = {id(m) for unit in traced_model.units.values() for m in unit.modules()}
    parents = {name: m for name, m in traced_model.model.named_modules() if id(m) not in inside}
    between = {
        name
        for path, module in parents.items()
        for key in module._parameters
        if mine & cut.parameter_owners.get(name := f"{path}.{key}" if path else key, frozenset())
    }
    used = {name for name, users in division.parameter_users.items() if mine & users}
    written = [name for name, stage in cut.buffer_writers.items() if stage not in mine]
    return LocalMembers(units, between | used, written, division.buffer_readers, tied_names)


def _relocate_tied_tensors(
    tied_tensors: tuple[TiedTensor, ...], draft: Stage, built_stage: Stage
) -> tuple[TiedTensor, ...]:
    """Where the stage has what it shares, and not its draft."""
    pairs = {
        id(a): b
        for before, after in zip(draft.layers, built_stage.layers, strict=True)
        for a, b in zip(before.modules(), after.modules(), strict=True)
    }
    return tuple(
        replace(tie, locations=tuple((pairs.get(id(m), m), key) for m, key in tie.locations))
        for tie in tied_tensors
    )

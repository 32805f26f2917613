"""The share of one process in a traced model, under torchrun.

every rank   traces the model on the example
rank 0       `decide_cut`: measures units and chooses the cut, and sends it to all ranks
every rank   `build_process_share`:
               1. draft all stages, to see which ranks share tensors
               2. allocate and move the tensors of its own stages
               3. build a local model: its own units, and remote units without memory
               4. build its own stages from the local model; all others are remote stages
"""

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
    build_partition,
)
from penstock.model.traced.local_model import LocalMembers, build_local_model
from penstock.model.traced.traced_partition import CutSummary, StageOwnership, UnitCost
from penstock.stage.stage import Stage


@dataclass(frozen=True)
class ProcessShare:
    """The partition as one process has it, and the tensors that it shares with others."""

    partition: Partition
    tied_tensors: tuple[TiedTensor, ...]  # shared with ranks in other processes
    tied_names: Mapping[str, str]  # second names of tied tensors, in the whole model


def decide_cut(
    traced_model: TracedModel,
    stages: int | Sequence[int],
    balance: str | None,
    limits: ResourceLimits,
) -> list[Any]:
    """Choose the cut for all processes, as plain values that can be sent.

    Returns the number of calls of units of each stage, the names of the calls in order, and the
    cost of each call.
    """
    counts, costs = choose_unit_counts(traced_model, stages, balance, limits)
    cost_rows = [list(astuple(cost)) for cost in costs]
    return [list(counts), [str(call) for call in traced_model.calls], cost_rows]


def build_process_share(
    traced_model: TracedModel,
    decided_cut: Sequence[Any],
    placement: Sequence[int],
    rank: int,
    device: torch.device,
    prepare_stages: Callable[[Sequence[Stage]], None],
) -> ProcessShare:
    """Build the stages of this process from the cut that rank 0 decided.

    `prepare_stages` allocates the tensors of these stages and moves them to the device.
    """
    counts, names, cost_rows = decided_cut
    ownership, assignment = _apply_decided_cut(traced_model, counts, names)
    # Tied tensors are found by identity, and the local model below has proxies in place of
    # most tensors. So this builds drafts of all stages first, from the complete model.
    devices = dict.fromkeys(range(len(counts)), device)
    parents = traced_model.find_parents()
    drafts = build_draft_stages(traced_model, ownership, assignment, devices, parents)
    ties = find_tied_tensors(drafts, placement, rank)
    tied_names = find_tied_names(traced_model.model)
    local_devices = {stage: device for stage in devices if placement[stage] == rank}
    prepare_stages([drafts[stage] for stage in local_devices])
    members = _find_local_state(traced_model, ownership, assignment, local_devices, tied_names)
    local_model = build_local_model(traced_model.model, traced_model.units, members, device)
    local_trace = replace(traced_model, model=local_model.model, units=local_model.units)
    costs = [UnitCost(*row) for row in cost_rows]
    summary = CutSummary(tuple(traced_model.calls), tuple(counts), assignment, costs)
    outline = describe_traced_model(traced_model, ownership, summary)
    remote_stages = {stage.index: stage.as_remote() for stage in drafts}
    partition = build_partition(
        local_trace, ownership, summary, outline, local_devices, local_model, remote_stages
    )
    # A draft and the stage that is built from it have equal trees of modules.
    built_modules = {
        before: after
        for index in local_devices
        for draft, built in zip(drafts[index].layers, partition.stages[index].layers, strict=True)
        for before, after in zip(draft.modules(), built.modules(), strict=True)
    }
    ties = tuple(tie.relocate(built_modules) for tie in ties)
    return ProcessShare(partition, ties, tied_names)


def _apply_decided_cut(
    traced_model: TracedModel, counts: Sequence[int], call_names: Sequence[str]
) -> tuple[StageOwnership, TraceAssignment]:
    """Assign the calls to stages in the order of rank 0.

    The order may differ here, because some models iterate over sets. The calls must be the same.
    """
    calls = {str(call): call for call in traced_model.calls}
    if calls.keys() != set(call_names):
        additional = ", ".join(sorted(calls.keys() - set(call_names))[:4]) or "none"
        missing = ", ".join(sorted(set(call_names) - calls.keys())[:4]) or "none"
        raise CutError(
            "the model calls different units on this rank than on rank 0. Additional calls: "
            f"{additional}. Missing calls: {missing}. Build the same model on every rank, and "
            "pass the same example."
        )
    return assign_calls(traced_model, counts, [calls[name] for name in call_names])


def _find_local_state(
    traced_model: TracedModel,
    cut: StageOwnership,
    division: TraceAssignment,
    local_devices: Mapping[int, torch.device],
    tied_names: Mapping[str, str],
) -> LocalMembers:
    """Return the names of the units, parameters and buffers that the local stages need."""
    local_stages = set(local_devices)
    units = [name for name, owners in cut.unit_owners.items() if local_stages & set(owners)]
    # Parents are the modules around the units. Their direct parameters have owners of their own.
    inside_units = {id(m) for unit in traced_model.units.values() for m in unit.modules()}
    modules = traced_model.model.named_modules()
    parents = {name: m for name, m in modules if id(m) not in inside_units}
    parent_parameters = {
        name
        for path, module in parents.items()
        for key in module._parameters
        if local_stages
        & cut.parameter_owners.get(name := f"{path}.{key}" if path else key, frozenset())
    }
    used = {name for name, users in division.parameter_users.items() if local_stages & users}
    written_elsewhere = [
        name for name, stage in cut.buffer_writers.items() if stage not in local_stages
    ]
    return LocalMembers(
        units, parent_parameters | used, written_elsewhere, division.buffer_readers, tied_names
    )

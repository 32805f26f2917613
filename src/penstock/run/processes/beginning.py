"""How a call begins: the ranks agree on what is about to be done, and every rank has its data.

With data="first", what stages of a Sequential take is carried to their ranks. Of a whole forward
every rank must know how it is divided, which may depend on all inputs: it gets the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.batch import Chunk, NoChunk
from penstock.errors import RunError
from penstock.partition.forward.whole import TracedPartition
from penstock.partition.split import PlacedPartition
from penstock.run.asking import CallOptions
from penstock.run.feed import Batch, StageInputs, build_stage_inputs
from penstock.run.passage import collect_tensors_by_cell
from penstock.run.processes.agreement import RankFacts, check_ranks_agree, sample_tensors
from penstock.run.processes.opening import (
    BatchAnnouncement,
    collect_batch_facts,
    collect_batch_tensors,
    describe_batch_strides,
    describe_module_flags,
)
from penstock.run.processes.peers import ControlChannel
from penstock.run.processes.sharing import DataPolicy
from penstock.run.processes.team import ProcessGroups
from penstock.run.processes.wire import CallCacheEntry
from penstock.stage.randomness import peek_seed


@dataclass(frozen=True)
class AgreedCall:
    """A call that all ranks have agreed on."""

    stage_inputs: StageInputs
    facts: RankFacts  # that do not depend on the data
    announcement: BatchAnnouncement
    cache_entry: CallCacheEntry
    seed: int
    cache_key: str
    is_first_call: bool  # call of its kind


class CallSetup:
    """Of the calls of one rank."""

    def __init__(
        self, groups: ProcessGroups, placed_partition: PlacedPartition, data_policy: DataPolicy
    ) -> None:
        self._groups, self._placed_partition, self._data_policy = (
            groups,
            placed_partition,
            data_policy,
        )
        self._is_traced = isinstance(placed_partition.partition.how, TracedPartition)
        self._data_rank = placed_partition.placement[0]

    @property
    def scatters_inputs(self) -> bool:
        """Are inputs carried from the first stage's rank to those whose stages take them?"""
        return self._data_policy.data == "first" and not self._is_traced

    def prepare_call(
        self, call_name: str, options: CallOptions, batch: Batch, facts: RankFacts, local_state: str
    ) -> AgreedCall:
        """Agree; then every rank knows the sizes of it all."""
        modules = [m for stage in self._placed_partition.local_stages for m in stage.modules()]
        local_state += describe_module_flags(modules)
        if self.scatters_inputs:
            return self._prepare_scattered_call(call_name, options, batch, facts, local_state)
        general, seed = facts, peek_seed()
        if self._data_policy.data == "first":
            seed = check_ranks_agree(
                self._groups.pipeline_channel, call_name, facts, local_state=local_state, seed=seed
            ).seed
            batch = broadcast_batch(
                self._groups.pipeline_channel, self._data_rank, batch, f"the data of {call_name}"
            )
        fed = build_stage_inputs(
            self._placed_partition.partition, options.chunks, batch, self._input_device
        )
        if self._is_traced and self._data_policy.data == "first":
            self._check_input_gradients(fed)
        facts = {**facts, **collect_batch_facts(batch)}
        if fed.assignment_digest:
            facts["how the forward is divided"] = fed.assignment_digest
        sample = sample_tensors(collect_batch_tensors(batch))
        agreed = check_ranks_agree(
            self._groups.pipeline_channel,
            call_name,
            facts,
            sample,
            local_state + describe_batch_strides(batch),
            seed,
        )
        learned, first = self._find_cache_entry(agreed.cache_key)
        announced = BatchAnnouncement.from_stage_inputs(
            fed, bool(batch.target) or fed.target_count is not None
        )
        return AgreedCall(fed, general, announced, learned, agreed.seed, agreed.cache_key, first)

    def _prepare_scattered_call(
        self, call_name: str, options: CallOptions, batch: Batch, facts: RankFacts, local_state: str
    ) -> AgreedCall:
        """The first stage's rank alone cuts the batch, and tells what others need to know."""
        fed, text = None, None
        local_state += describe_batch_strides(batch)
        if self._data_rank == self._groups.rank:
            fed = build_stage_inputs(
                self._placed_partition.partition, options.chunks, batch, self._input_device
            )
            local_state += str(collect_batch_facts(batch))
            text = BatchAnnouncement.from_stage_inputs(fed, bool(batch.target)).to_json()
        agreed = check_ranks_agree(
            self._groups.pipeline_channel, call_name, facts, None, local_state, peek_seed()
        )
        learned, first = self._find_cache_entry(agreed.cache_key)
        if not learned.batch_announcement:
            told = self._groups.pipeline_channel.broadcast_text(
                self._data_rank, text, f"the data of {call_name}"
            )
            learned.batch_announcement = told
        announced = BatchAnnouncement.from_json(learned.batch_announcement)
        graph = self._placed_partition.partition.graph
        fed = fed or StageInputs({}, announced.rows, announced.chunks, graph)
        return AgreedCall(fed, facts, announced, learned, agreed.seed, agreed.cache_key, first)

    def _find_cache_entry(self, cache_key: str) -> tuple[CallCacheEntry, bool]:
        """What is known of calls of this kind; whether this is the first."""
        remembered = self._groups.get_cache_entry(cache_key)
        sent = self._data_policy.shapes == "sent"
        return CallCacheEntry() if sent else remembered, not remembered.is_complete

    def _input_device(self, stage: int) -> torch.device | None:
        """Where this rank feeds a stage; what it carries to others goes from the host."""
        if self._placed_partition.is_local(stage):
            return self._groups.device.device
        return torch.device("cpu") if self.scatters_inputs else None

    def _check_input_gradients(self, stage_inputs: StageInputs) -> None:
        """Whoever was not given the data cannot give its gradient back."""
        here = self._placed_partition.placement
        for (stage, _), tensors in collect_tensors_by_cell(stage_inputs.by_stage).items():
            if here[stage] != self._data_rank and any(t.requires_grad for t in tensors):
                raise RunError(
                    f"with data='first', an input that wants a gradient is used on stage {stage}, "
                    f"in the process of rank {here[stage]}, from where no gradient comes back: "
                    "detach it, or give the data on all ranks (data='all')"
                )


def broadcast_batch(
    channel: ControlChannel, source_rank: int, batch: Batch, description: str
) -> Batch:
    """One rank's batch, on all."""
    told: Any = None
    if channel.rank == source_rank:
        marks: list[Any] = []
        learns: list[bool] = []

        def unwrap_leaf(leaf: Any) -> Any:
            marks.append(_get_chunk_marker(leaf))
            found = leaf.tensor if isinstance(leaf, NoChunk | Chunk) else leaf
            learns.append(isinstance(found, Tensor) and found.requires_grad)
            return found

        values = pytree.tree_map(
            unwrap_leaf, (batch.inputs, dict(batch.keyword_inputs), batch.target)
        )
        told = [values, marks, learns]
    values, marks, learns = channel.broadcast_value(source_rank, told, description)
    if channel.rank == source_rank:
        return batch
    leaves, spec = pytree.tree_flatten(values)
    marked = [_restore_leaf(*each) for each in zip(leaves, marks, learns, strict=True)]
    inputs, side, target = pytree.tree_unflatten(marked, spec)
    assert isinstance(side, Mapping)
    return Batch(inputs, side, target, batch.uses_model_loss)


def _get_chunk_marker(leaf: Any) -> Any:
    if isinstance(leaf, NoChunk):
        return "whole"
    return leaf.dim if isinstance(leaf, Chunk) else None


def _restore_leaf(leaf: Any, marker: Any, requires_grad: bool) -> Any:
    if requires_grad:
        leaf = leaf.detach().requires_grad_()
    if marker is None:
        return leaf
    return NoChunk(leaf) if marker == "whole" else Chunk(leaf, marker)

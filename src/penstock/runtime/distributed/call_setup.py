"""How a call among processes begins: what the ranks must agree on, and who has which data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.microbatch import Chunk, MicrobatchRows, NoChunk
from penstock.model.placement import PlacedPartition
from penstock.model.traced.traced_partition import TracedPartition
from penstock.runtime.autograd_call import Cell, build_input_payloads, collect_tensors_by_cell
from penstock.runtime.distributed.channels import CallCacheEntry, ProcessTransport
from penstock.runtime.distributed.control_channel import (
    ControlChannel,
    RankFacts,
    check_ranks_agree,
    sample_tensors,
)
from penstock.runtime.distributed.payload_codec import WireTensorSpec
from penstock.runtime.distributed.process_groups import ProcessGroups
from penstock.runtime.stage_inputs import Batch, InputsByStage, StageInputs, build_stage_inputs
from penstock.runtime.step_request import CallOptions
from penstock.schedules.ir import Message
from penstock.stage.payload import Payload
from penstock.stage.rng import peek_seed
from penstock.stage.stage import OUTSIDE
from penstock.torch_compat import pytree

# -------------------------------------------------------------------------------------------------
# What the processes of a pipe give each other, as the user wishes it.
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataPolicy:
    """Who has the data, who gets the outputs, and whether shapes are learned or sent each time."""

    data: str = "all"
    outputs: str = "last"
    shapes: str = "learned"


# -------------------------------------------------------------------------------------------------


def collect_call_facts(options: CallOptions, **extra_facts: object) -> RankFacts:
    """What must be the same on every rank, whatever the data."""
    contexts = [
        f"{kind} {torch.get_autocast_dtype(kind)}"
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]
    return {
        "chunks": str(options.chunks),
        "checkpoint": options.checkpoint,
        "training mode": str(options.training),
        "gradients": str(torch.is_grad_enabled()),
        "autocast": ", ".join(contexts) or "none",
        **{name: str(value) for name, value in extra_facts.items()},
    }


def collect_batch_facts(batch: Batch) -> RankFacts:
    """The kinds and sizes of what was given."""
    return {
        "inputs": _describe_value(batch.inputs),
        **{
            f"input {name!r}": _describe_value(value)
            for name, value in batch.keyword_inputs.items()
        },
        "target": _describe_value(batch.target),
    }


def collect_batch_tensors(batch: Batch) -> list[Tensor]:
    """All of them."""
    leaves = pytree.tree_leaves([batch.inputs, dict(batch.keyword_inputs), batch.target])
    bare = (leaf.tensor if isinstance(leaf, NoChunk | Chunk) else leaf for leaf in leaves)
    return [leaf for leaf in bare if isinstance(leaf, Tensor)]


def describe_batch_strides(batch: Batch) -> str:
    """How tensors lie in memory: messages keep that, and it may differ where sizes do not."""
    return str([tensor.stride() for tensor in collect_batch_tensors(batch)])


def describe_module_flags(modules: Iterable[nn.Module]) -> str:
    """What messages may depend on beside the data: what learns, and what is in training."""
    flags = []
    for module in modules:
        flags.append("t" if module.training else "e")
        flags += ["-" if p is None else "01"[p.requires_grad] for p in module._parameters.values()]
    return "".join(flags)


def _describe_value(value: Any) -> str:
    leaves, spec = pytree.tree_flatten(value)
    said = ", ".join(map(_describe_leaf, leaves)) or "none"
    flat = spec.type is tuple and all(child.is_leaf() for child in spec.children())
    return said if flat else f"{said} in {spec}"


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, NoChunk):
        return f"NoChunk({_describe_leaf(leaf.tensor)})"
    if isinstance(leaf, Chunk):
        return f"Chunk({_describe_leaf(leaf.tensor)}, dim={leaf.dim})"
    if isinstance(leaf, Tensor):
        learns = ", wants a gradient" if leaf.requires_grad else ""
        return f"{WireTensorSpec.from_tensor(leaf)}{learns}"
    return repr(leaf) if isinstance(leaf, int | float | str | bool | None) else type(leaf).__name__


@dataclass(frozen=True)
class BatchAnnouncement:
    """What the first rank tells of data that it alone has."""

    rows: MicrobatchRows
    chunks: int
    input_stages: tuple[int, ...]  # that are given something
    has_target: bool

    @staticmethod
    def from_stage_inputs(stage_inputs: StageInputs, has_target: bool) -> BatchAnnouncement:
        """Of what it has cut."""
        return BatchAnnouncement(
            stage_inputs.rows, stage_inputs.chunks, tuple(stage_inputs.by_stage), has_target
        )

    def to_json(self) -> str:
        """As text."""
        rows = [list(self.rows.counts), self.rows.dim]
        return json.dumps([rows, self.chunks, list(self.input_stages), self.has_target])

    @staticmethod
    def from_json(text: str) -> BatchAnnouncement:
        """From text."""
        (counts, dim), chunks, stages, target = json.loads(text)
        return BatchAnnouncement(MicrobatchRows(tuple(counts), dim), chunks, tuple(stages), target)


# -------------------------------------------------------------------------------------------------
# How a call begins: the ranks agree on what is about to be done, and every rank has its data.
#
# With data="first", what stages of a Sequential take is carried to their ranks. Of a whole forward
# every rank must know how it is divided, which may depend on all inputs: it gets the whole batch.
# -------------------------------------------------------------------------------------------------


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


# -------------------------------------------------------------------------------------------------
# Data that the first stage's rank alone has: it carries to other ranks what their stages take.
#
# It goes through the host, whatever the links between stages are, before anything is computed.
# -------------------------------------------------------------------------------------------------


def send_inputs(
    inputs: InputsByStage,
    cells: list[Cell],
    placed_partition: PlacedPartition,
    transport: ProcessTransport,
) -> None:
    """On the rank that has the data: what cells of others are given."""
    parcels = build_input_payloads(inputs)
    for stage, i in cells:
        parcel = parcels[stage, i]
        if any(parcel.needs_grad):
            raise RunError(
                "with data='first', a side input or target wants a gradient, and it goes to "
                "another process, from where no gradient comes back: detach it, or give it to the "
                "first layer"
            )
        transport.send_to(placed_partition.placement[stage], Message(OUTSIDE, stage, i), parcel)
    transport.flush()


def receive_inputs(
    cells: list[Cell],
    placed_partition: PlacedPartition,
    transport: ProcessTransport,
    device: torch.device,
) -> dict[Cell, Payload]:
    """On another rank: what its own cells are given."""
    mine = [cell for cell in cells if placed_partition.is_local(cell[0])]
    asked: list[Callable[[], Payload]] = [
        transport.recv_from(placed_partition.placement[0], Message(OUTSIDE, *cell)) for cell in mine
    ]
    return {
        cell: wait().map_tensors(lambda tensor: tensor.to(device))
        for cell, wait in zip(mine, asked, strict=True)
    }


def find_remote_input_cells(
    announcement: BatchAnnouncement, placed_partition: PlacedPartition
) -> list[Cell]:
    """Those that are given something, on other ranks than the first stage's."""
    stages = [
        s
        for s in announcement.input_stages
        if placed_partition.placement[s] != placed_partition.placement[0]
    ]
    return [(stage, i) for stage in stages for i in range(announcement.chunks)]

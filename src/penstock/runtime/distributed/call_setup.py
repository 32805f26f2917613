"""The beginning of a call among processes: agree on the call, and give every rank its inputs.

| data=   | model       | what `CallSetup.prepare_call` does                                       |
|---------|-------------|--------------------------------------------------------------------------|
| "all"   | any         | each rank splits its own batch; the ranks compare shapes and samples     |
| "first" | traced      | the data rank broadcasts the whole batch; then as above                  |
| "first" | Sequential  | the data rank splits the batch and announces the sizes; `send_inputs`    |
|         |             | then sends each stage its part                                           |

The data rank is the rank of the first stage. A traced model needs the whole batch on every rank,
because its division into stages may depend on all inputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.device.accelerator import list_autocast_types
from penstock.errors import RunError
from penstock.microbatch import Chunk, MicrobatchRows, NoChunk, list_tensors, unwrap_chunk
from penstock.model.placement import PlacedPartition
from penstock.model.stage_inputs import (
    Cell,
    InputsByStage,
    StageInputs,
    build_input_payloads,
    collect_tensors_by_cell,
)
from penstock.runtime.distributed.channels import CallCacheEntry, ProcessTransport
from penstock.runtime.distributed.control_channel import (
    Agreement,
    ControlChannel,
    RankFacts,
    check_ranks_agree,
    sample_tensors,
)
from penstock.runtime.distributed.process_groups import ProcessGroups
from penstock.runtime.request import Request
from penstock.schedules.ir import Message
from penstock.stage.payload import Payload
from penstock.stage.rng import peek_seed
from penstock.stage.stage import OUTSIDE
from penstock.tensor_spec import TensorSpec
from penstock.torch_compat import pytree


@dataclass(frozen=True)
class DataPolicy:
    """The options of `Pipe` about what the processes exchange."""

    data: str = "all"  # which ranks pass the batch: "all" or "first"
    outputs: str = "last"  # which ranks get the outputs: "last" or "all"
    shapes: str = "learned"  # headers of messages: cached ("learned") or "sent" in every call


# -------------------------------------------------------------------------------------------------
# Facts about a call that `check_ranks_agree` compares
# -------------------------------------------------------------------------------------------------


def collect_call_facts(request: Request, **extra_facts: object) -> RankFacts:
    """Return the facts that must be equal on every rank and do not depend on the request."""
    contexts = [
        f"{kind} {torch.get_autocast_dtype(kind)}"
        for kind in list_autocast_types()
        if torch.is_autocast_enabled(kind)
    ]
    return {
        **{name: str(value) for name, value in request.describe_options().items()},
        "gradients": str(torch.is_grad_enabled()),
        "autocast": ", ".join(contexts) or "none",
        **{name: str(value) for name, value in extra_facts.items()},
    }


def collect_batch_facts(request: Request) -> RankFacts:
    """Return the dtypes, shapes and plain values of a request."""
    return {
        "inputs": _describe_value(request.inputs),
        **{
            f"input {name!r}": _describe_value(value)
            for name, value in request.keyword_inputs.items()
        },
        "target": _describe_value(request.target),
    }


def collect_batch_tensors(request: Request) -> list[Tensor]:
    """Return all tensors of a batch: inputs, keyword inputs and targets."""
    return list_tensors([request.inputs, dict(request.keyword_inputs), request.target])


def describe_batch_strides(request: Request) -> str:
    """Return the strides of all tensors of a request.

    They belong to the cache key: messages keep strides, and equal shapes may have different ones.
    """
    return str([tensor.stride() for tensor in collect_batch_tensors(request)])


def describe_module_flags(modules: Iterable[nn.Module]) -> str:
    """Return `training` of each module and `requires_grad` of each parameter as a short text.

    They belong to the cache key: which tensors of a message need a gradient depends on them.
    """
    flags = []
    for module in modules:
        flags.append("t" if module.training else "e")
        flags += ["-" if p is None else "01"[p.requires_grad] for p in module._parameters.values()]
    return "".join(flags)


def _describe_value(value: Any) -> str:
    leaves, spec = pytree.tree_flatten(value)
    text = ", ".join(map(_describe_leaf, leaves)) or "none"
    is_flat = spec.is_leaf() or (
        spec.type is tuple and all(child.is_leaf() for child in spec.children())
    )
    return text if is_flat else f"{text} in {spec}"


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, NoChunk):
        return f"NoChunk({_describe_leaf(leaf.tensor)})"
    if isinstance(leaf, Chunk):
        return f"Chunk({_describe_leaf(leaf.tensor)}, dim={leaf.dim})"
    if isinstance(leaf, Tensor):
        suffix = ", requires grad" if leaf.requires_grad else ""
        return f"{TensorSpec.from_tensor(leaf)}{suffix}"
    return repr(leaf) if isinstance(leaf, int | float | str | bool | None) else type(leaf).__name__


@dataclass(frozen=True)
class BatchAnnouncement:
    """The sizes of a batch that only the data rank has, as it announces them to the others."""

    rows: MicrobatchRows
    chunks: int
    input_stages: tuple[int, ...]  # the stages that get inputs from outside
    has_target: bool

    @staticmethod
    def from_stage_inputs(stage_inputs: StageInputs, has_target: bool) -> BatchAnnouncement:
        """Return the announcement of a batch that was split into stage inputs."""
        return BatchAnnouncement(
            stage_inputs.rows, stage_inputs.chunks, tuple(stage_inputs.by_stage), has_target
        )

    def to_json(self) -> str:
        """Return the announcement as JSON text."""
        return json.dumps(astuple(self))

    @staticmethod
    def from_json(text: str) -> BatchAnnouncement:
        """Return the announcement that `to_json` has written."""
        (counts, dim, output_dims), chunks, stages, target = json.loads(text)
        rows = MicrobatchRows(tuple(counts), dim, tuple(map(tuple, output_dims)))
        return BatchAnnouncement(rows, chunks, tuple(stages), target)


# -------------------------------------------------------------------------------------------------
# The agreement at the beginning of a call
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AgreedCall:
    """A call that all ranks have agreed on."""

    stage_inputs: StageInputs
    facts: RankFacts  # those that do not depend on the batch
    announcement: BatchAnnouncement
    agreement: Agreement
    cache_entry: CallCacheEntry
    is_first_call: bool  # no call with this cache key has succeeded before


class CallSetup:
    """Prepares the calls of one rank."""

    def __init__(
        self, groups: ProcessGroups, placed_partition: PlacedPartition, data_policy: DataPolicy
    ) -> None:
        self._groups, self._data_policy = groups, data_policy
        self._placed_partition, self._partition = placed_partition, placed_partition.partition
        self._data_rank = placed_partition.placement[0]
        # Inputs of remote stages are sent from host memory.
        self._input_devices = placed_partition.stage_devices
        if self.scatters_inputs:
            host = dict.fromkeys(range(len(placed_partition.placement)), torch.device("cpu"))
            self._input_devices = {**host, **placed_partition.stage_devices}

    @property
    def scatters_inputs(self) -> bool:
        """Whether the data rank sends each stage its part of the request."""
        return self._data_policy.data == "first" and not self._partition.needs_whole_batch

    def prepare_call(
        self, call_name: str, request: Request, facts: RankFacts, local_state: str
    ) -> AgreedCall:
        """Raise RemoteError unless all ranks make the same call. Return the inputs of this rank.

        `local_state` is added to the cache key; it may differ between ranks.
        """
        modules = [m for stage in self._placed_partition.local_stages for m in stage.modules()]
        local_state += describe_module_flags(modules)
        if self.scatters_inputs:
            return self._prepare_scattered_call(call_name, request, facts, local_state)
        general_facts, seed = facts, peek_seed()
        if self._data_policy.data == "first":
            # Compare the general facts first: a rank that makes another call would not take part
            # in the broadcast, and the ranks would wait for each other.
            seed = check_ranks_agree(
                self._groups.pipeline_channel, call_name, facts, local_state=local_state, seed=seed
            ).seed
            request = broadcast_batch(
                self._groups.pipeline_channel, self._data_rank, request, f"the data of {call_name}"
            )
        stage_inputs = self._partition.build_stage_inputs(request, self._input_devices)
        if self._data_policy.data == "first":
            self._check_input_gradients(stage_inputs)
        facts = {**facts, **collect_batch_facts(request)}
        if stage_inputs.assignment_digest:
            facts["the division of the forward"] = stage_inputs.assignment_digest
        samples = sample_tensors(collect_batch_tensors(request))
        agreement = check_ranks_agree(
            self._groups.pipeline_channel,
            call_name,
            facts,
            samples,
            local_state + describe_batch_strides(request),
            seed,
        )
        cache_entry, is_first_call = self._find_cache_entry(agreement.cache_key)
        announcement = BatchAnnouncement.from_stage_inputs(
            stage_inputs, bool(request.target) or stage_inputs.target_count is not None
        )
        return AgreedCall(
            stage_inputs, general_facts, announcement, agreement, cache_entry, is_first_call
        )

    def _prepare_scattered_call(
        self, call_name: str, request: Request, facts: RankFacts, local_state: str
    ) -> AgreedCall:
        """Prepare a call in which only the data rank splits the batch and announces its sizes.

        The announcement is sent in the first call with a cache key and cached after that. The facts
        about the batch are local state of the data rank, so they are part of that key.
        """
        stage_inputs, text = None, None
        local_state += describe_batch_strides(request)
        if self._data_rank == self._groups.rank:
            stage_inputs = self._partition.build_stage_inputs(request, self._input_devices)
            local_state += str(collect_batch_facts(request))
            text = BatchAnnouncement.from_stage_inputs(stage_inputs, bool(request.target)).to_json()
        agreement = check_ranks_agree(
            self._groups.pipeline_channel, call_name, facts, None, local_state, peek_seed()
        )
        cache_entry, is_first_call = self._find_cache_entry(agreement.cache_key)
        if not cache_entry.batch_announcement:
            announced_text: str = self._groups.pipeline_channel.broadcast_value(
                self._data_rank, text, f"the data of {call_name}"
            )
            cache_entry.batch_announcement = announced_text
        announcement = BatchAnnouncement.from_json(cache_entry.batch_announcement)
        stage_inputs = stage_inputs or StageInputs(
            {}, announcement.rows, announcement.chunks, self._partition.graph
        )
        return AgreedCall(stage_inputs, facts, announcement, agreement, cache_entry, is_first_call)

    def _find_cache_entry(self, cache_key: str) -> tuple[CallCacheEntry, bool]:
        """Return the cache entry of a key, and whether no call with this key has succeeded yet.

        With shapes="sent" the entry is always a new one, so that every message sends its header.
        """
        cached = self._groups.get_cache_entry(cache_key)
        always_sent = self._data_policy.shapes == "sent"
        return CallCacheEntry() if always_sent else cached, not cached.is_complete

    def _check_input_gradients(self, stage_inputs: StageInputs) -> None:
        """Raise if an input on another rank than the data rank requires grad.

        The caller has the input on the data rank only, and gradients do not travel back there.
        """
        placement = self._placed_partition.placement
        for (stage, _), tensors in collect_tensors_by_cell(stage_inputs.by_stage).items():
            if placement[stage] != self._data_rank and any(t.requires_grad for t in tensors):
                raise RunError(
                    f"with data='first', an input that requires grad is used on stage {stage}, "
                    f"on rank {placement[stage]}. Its gradient cannot come back from that "
                    "process. Detach the input, or pass the data on all ranks (data='all')."
                )


def broadcast_batch(
    channel: ControlChannel, source_rank: int, request: Request, description: str
) -> Request:
    """Return the request with the batch of one rank, its markers and its requires_grad flags.

    `broadcast_value` sends tensors and plain values only. So the Chunk and NoChunk wrappers are
    taken off and sent as a list of markers.
    """
    message: Any = None
    if channel.rank == source_rank:
        markers: list[Any] = []
        requires_grad: list[bool] = []

        def unwrap_leaf(leaf: Any) -> Any:
            markers.append(_get_chunk_marker(leaf))
            value = unwrap_chunk(leaf)
            requires_grad.append(isinstance(value, Tensor) and value.requires_grad)
            return value

        values = pytree.tree_map(
            unwrap_leaf, (request.inputs, dict(request.keyword_inputs), request.target)
        )
        message = [values, markers, requires_grad]
    values, markers, requires_grad = channel.broadcast_value(source_rank, message, description)
    if channel.rank == source_rank:
        return request
    leaves, spec = pytree.tree_flatten(values)
    restored = [
        _restore_leaf(*fields) for fields in zip(leaves, markers, requires_grad, strict=True)
    ]
    inputs, keyword_inputs, target = pytree.tree_unflatten(restored, spec)
    assert isinstance(keyword_inputs, Mapping)
    return replace(request, inputs=inputs, keyword_inputs=keyword_inputs, target=target)


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
# Inputs of remote stages with data="first"
#
# The data rank sends every other rank the inputs of its stages (side inputs, targets) before
# anything is computed. They go through host memory, even if the stages themselves use NCCL.
# -------------------------------------------------------------------------------------------------


def send_inputs(
    inputs: InputsByStage,
    cells: list[Cell],
    placed_partition: PlacedPartition,
    transport: ProcessTransport,
) -> None:
    """Send the inputs of these cells to their ranks. Only the data rank calls this."""
    payloads = build_input_payloads(inputs)
    for stage, i in cells:
        payload = payloads[stage, i]
        if any(payload.needs_grad):
            raise RunError(
                "with data='first', a side input or target that requires grad goes to another "
                "process, and its gradient cannot come back. Detach it, or pass it to the first "
                "layer."
            )
        transport.send_to(placed_partition.placement[stage], Message(OUTSIDE, stage, i), payload)
    transport.flush()


def receive_inputs(
    cells: list[Cell],
    placed_partition: PlacedPartition,
    transport: ProcessTransport,
    device: torch.device,
) -> dict[Cell, Payload]:
    """Return the inputs of the local cells among these, moved to the device.

    Every rank but the data rank calls this. All receives are posted before the first wait.
    """
    local_cells = [cell for cell in cells if cell[0] in placed_partition.stage_devices]
    waits: list[Callable[[], Payload]] = [
        transport.recv_from(placed_partition.placement[0], Message(OUTSIDE, *cell))
        for cell in local_cells
    ]
    return {
        cell: wait().map_tensors(lambda tensor: tensor.to(device))
        for cell, wait in zip(local_cells, waits, strict=True)
    }


def find_remote_input_cells(
    announcement: BatchAnnouncement, placed_partition: PlacedPartition
) -> list[Cell]:
    """Return the cells that get inputs from outside and are not on the data rank."""
    stages = [
        s
        for s in announcement.input_stages
        if placed_partition.placement[s] != placed_partition.placement[0]
    ]
    return [(stage, i) for stage in stages for i in range(announcement.chunks)]

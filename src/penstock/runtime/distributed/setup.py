"""Joining the processes of a pipe: on which device, and that all mean the same pipe."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from penstock.data_parallel.sync import Replicas
from penstock.device.device import Device, Gpu, resolve_device
from penstock.errors import ArgumentError
from penstock.model.placement import PlacedPartition, ProcessContext
from penstock.model.sequential import is_plain_sequential
from penstock.model.tied import TiedTensor
from penstock.model.traced.assignment import fingerprint_assignment
from penstock.model.traced.traced_partition import TracedPartition
from penstock.runtime.distributed.call_setup import DataPolicy, collect_call_facts
from penstock.runtime.distributed.control_channel import check_ranks_agree
from penstock.runtime.distributed.process_groups import SLOW_CALL_TIMEOUT_FACTOR, ProcessGroups
from penstock.runtime.distributed.tied_weights import broadcast_tied_weights
from penstock.runtime.distributed.topology import Topology
from penstock.runtime.step_request import CallOptions


def choose_device(group: ProcessGroup, devices: Sequence[Any] | None) -> Device:
    """Where this process computes: as it is told, on the GPU that is its own, or on the CPU."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if devices is not None:
        if len(devices) != size:
            raise ArgumentError(
                f"devices has {len(devices)} entries, and the pipe has {size} processes: give one "
                "for each rank, or leave devices out"
            )
        return resolve_device(devices[rank])
    if _uses_nccl(group):
        return resolve_device(f"cuda:{torch.cuda.current_device()}")
    return resolve_device("cpu")


def _uses_nccl(group: ProcessGroup) -> bool:
    return "nccl" in dist.get_backend_config(group)


def open_process_groups(
    topology: Topology, devices: Sequence[Any] | None, heartbeat: float
) -> ProcessGroups:
    """Meet the other processes."""
    if not heartbeat > 0:
        raise ArgumentError(f"heartbeat is a number of seconds above 0, not {heartbeat!r}")
    group = topology.pipeline_group
    place = choose_device(group, devices)
    return ProcessGroups(
        topology, place, heartbeat, uses_nccl=isinstance(place, Gpu) and _uses_nccl(group)
    )


def build_process_context(groups: ProcessGroups) -> ProcessContext:
    """Where this process stands. Where to cut is for one to find, of all copies: times differ."""

    def broadcast_from_first_rank(find_cuts: Callable[[], Sequence[int]]) -> Sequence[int]:
        what, first = "where to cut", groups.rank == 0
        groups.watchdog.mark_computing(what, SLOW_CALL_TIMEOUT_FACTOR)
        mine = list(find_cuts()) if first and groups.topology.replica_index == 0 else None
        if first and groups.replica_channel is not None:
            mine = groups.replica_channel.broadcast_value(0, mine, what)
        found: Sequence[int] = groups.pipeline_channel.broadcast_value(0, mine, what)
        groups.watchdog.mark_computing("its stages", SLOW_CALL_TIMEOUT_FACTOR)
        return found

    return ProcessContext(groups.rank, groups.size, groups.device, broadcast_from_first_rank)


def describe_layers(module: nn.Module) -> dict[str, str]:
    """Each layer: its class, and a digest of the names, shapes and dtypes of all it has."""
    layers = {f"layer {name}": layer for name, layer in module.named_children()}
    if not is_plain_sequential(module):
        layers["the model"] = module
    return {name: f"{type(layer).__name__} {_hash_layer(layer)}" for name, layer in layers.items()}


def _describe_stages(placed_partition: PlacedPartition) -> dict[str, str]:
    """How a whole forward is divided: all ranks must do so in the same way."""
    how = placed_partition.partition.how
    if not isinstance(how, TracedPartition):
        return {}
    told = {
        f"stage {stage.index}": ", ".join(name or "the model" for name in stage.names)
        for stage in placed_partition.partition.stages
    }
    return {**told, "what goes between the stages": fingerprint_assignment(how.summary.assignment)}


def check_same_pipe(
    groups: ProcessGroups,
    call_name: str,
    options: CallOptions,
    data_policy: DataPolicy,
    placed_partition: PlacedPartition,
    extra_facts: Mapping[str, str],
) -> None:
    """All ranks are making the same pipe, and all copies."""
    facts = {
        "penstock": sys.modules["penstock"].__version__,
        "torch": torch.__version__.split("+")[0],
        **collect_call_facts(options, **asdict(data_policy)),
        **_describe_stages(placed_partition),
        **extra_facts,
    }
    check_ranks_agree(groups.pipeline_channel, call_name, facts)
    if groups.replica_channel is not None:
        check_ranks_agree(
            groups.replica_channel, "the pipe", {**facts, "the rank in it": str(groups.rank)}
        )


def sync_initial_state(
    groups: ProcessGroups, tied_tensors: Sequence[TiedTensor], replicas: Replicas
) -> None:
    """Give every copy what the first has, and every holder of a tied tensor what its owner has.

    Processes may have been initialised differently.
    """
    if groups.averaging_group is not None:
        replicas.broadcast_initial_state(groups.averaging_group)
    broadcast_tied_weights(tied_tensors, groups.pipeline_channel)


def _hash_layer(layer: nn.Module) -> str:
    parts = [f"{n} {type(m).__name__}" for n, m in layer.named_modules()]
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        lazy = nn.parameter.is_lazy(tensor)
        parts.append(f"{name} lazy" if lazy else f"{name} {tuple(tensor.shape)} {tensor.dtype}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]

"""Creation of a pipe over several processes.

`Pipe.__init__` calls these functions in this order:

1. `open_process_groups`     choose the device, connect the processes
2. `build_process_context`   let rank 0 choose the cut points for all ranks
3. `check_same_pipe`         raise if the ranks or replicas were given different models or options
   `check_same_weights`      raise if the ranks have initialised the model differently
4. `sync_initial_state`      copy parameters from the first replica, and tied weights from the owner
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from penstock.data_parallel.sync import Replicas
from penstock.device.device import Device, resolve_device
from penstock.errors import ArgumentError, RemoteError
from penstock.model.placement import PlacedPartition, ProcessContext
from penstock.model.sequential import is_plain_sequential, refuse_forward
from penstock.model.tied import TiedTensor
from penstock.runtime.distributed.call_setup import DataPolicy, collect_call_facts
from penstock.runtime.distributed.control_channel import (
    check_ranks_agree,
    hash_facts,
    sample_values,
)
from penstock.runtime.distributed.links import GLOO, find_link_backend
from penstock.runtime.distributed.process_groups import SLOW_CALL_TIMEOUT_FACTOR, ProcessGroups
from penstock.runtime.distributed.topology import Topology
from penstock.runtime.request import Request
from penstock.runtime.tied_gradients import broadcast_tied_weights
from penstock.torch_compat import TORCH_VERSION

DEFAULT_HEARTBEAT = 10.0  # seconds


def choose_device(group: ProcessGroup, devices: Sequence[Any] | None) -> Device:
    """Return the device of this process.

    This is its entry of `devices`. Without `devices` it is the current GPU if the group has a
    backend for GPUs, else the CPU.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if devices is not None:
        if len(devices) != size:
            raise ArgumentError(
                f"devices has {len(devices)} entries, but the pipe has {size} processes. Pass one "
                "device per rank, or leave devices out."
            )
        return resolve_device(devices[rank])
    return resolve_device(find_link_backend(dist.get_backend_config(group)).device_type)


def open_process_groups(
    topology: Topology, devices: Sequence[Any] | None, heartbeat: float
) -> ProcessGroups:
    """Choose the device of this process and connect it to the other processes of the pipe.

    An error in the arguments of one rank is raised on all of them, so that rank connects, too.
    """
    group = topology.pipeline_group
    try:
        check_heartbeat(heartbeat)
        device = choose_device(group, devices)
        backend = find_link_backend(dist.get_backend_config(group), device.device.type)
    except Exception:
        groups = ProcessGroups(topology, resolve_device("cpu"), DEFAULT_HEARTBEAT, GLOO)
        with groups.guarded_call("making the pipe"):
            raise
    return ProcessGroups(topology, device, heartbeat, backend)


def check_heartbeat(heartbeat: Any) -> None:
    """Raise ArgumentError unless the heartbeat is a finite number of seconds."""
    if not (isinstance(heartbeat, int | float) and 0 < heartbeat < math.inf):
        raise ArgumentError(
            f"heartbeat must be a number of seconds above 0, not {heartbeat!r}. With a debugger, "
            f"pass a day: heartbeat=86400."
        )


def build_process_context(groups: ProcessGroups) -> ProcessContext:
    """Return the rank, size and device of this process, and a way to agree on cut points.

    Cut points may come from measured times, which differ between processes. So rank 0 of the first
    replica finds them and tells all ranks of all replicas. Along the dims of the mesh that the pipe
    does not average over, layers may communicate (tensor parallelism): the first ranks of all
    replicas run them then, or those of the first replica would wait for them.
    """
    topology = groups.topology
    measures_together = len(topology.replicas) > max(len(topology.averaged_replicas), 1)

    def broadcast_from_first_rank(find_cuts: Callable[[], Sequence[int]]) -> Sequence[int]:
        description, is_first_rank = "the cut points", groups.rank == 0
        groups.watchdog.mark_computing(description, SLOW_CALL_TIMEOUT_FACTOR)
        measures = measures_together or topology.replica_index == 0
        cuts = list(find_cuts()) if is_first_rank and measures else None
        # First across replicas to their first ranks, then along each pipeline.
        if is_first_rank and groups.replica_channel is not None:
            cuts = groups.replica_channel.broadcast_value(0, cuts, description)
        agreed_cuts: Sequence[int] = groups.pipeline_channel.broadcast_value(0, cuts, description)
        groups.watchdog.mark_computing("its stages", SLOW_CALL_TIMEOUT_FACTOR)
        return agreed_cuts

    return ProcessContext(
        groups.rank, groups.size, groups.device, broadcast_from_first_rank, measures_together
    )


def describe_layers(module: nn.Module) -> dict[str, str]:
    """Return the class of each layer with a hash of the names, shapes and dtypes of its tensors."""
    layers = {f"layer {name}": layer for name, layer in module.named_children()}
    if not is_plain_sequential(module):
        layers["the model"] = module
    return {name: f"{type(layer).__name__} {_hash_layer(layer)}" for name, layer in layers.items()}


def check_same_pipe(
    groups: ProcessGroups,
    call_name: str,
    request: Request,
    data_policy: DataPolicy,
    placed_partition: PlacedPartition,
    extra_facts: Mapping[str, str],
) -> None:
    """Raise RemoteError unless all ranks and all replicas create the same pipe."""
    facts = {
        "penstock": sys.modules["penstock"].__version__,
        "torch": TORCH_VERSION.split("+")[0],
        **collect_call_facts(request, **asdict(data_policy)),
        **placed_partition.partition.describe_cut(),
        **extra_facts,
    }
    check_ranks_agree(groups.pipeline_channel, call_name, facts)
    if groups.replica_channel is not None:
        check_ranks_agree(
            groups.replica_channel, "the pipe", {**facts, "the rank in it": str(groups.rank)}
        )


def sample_weights(module: nn.Module) -> dict[str, str]:
    """Return a hash of some values of each parameter that this rank has, by name.

    Parameters on the meta device have none, and shards (DTensor) are not those of other ranks. Of a
    model that was trained by another pipe, each rank has only its own stages.
    """
    if vars(module).get("forward") is refuse_forward:
        return {}
    return {
        name: f"{hash_facts(str(sample_values(parameter.detach()))):x}"
        for name, parameter in module.named_parameters()
        if type(parameter.data) is Tensor
        and not isinstance(parameter, nn.UninitializedParameter)
        and not parameter.is_meta
        and parameter.layout is torch.strided
        and parameter.numel()
    }


def check_same_weights(groups: ProcessGroups, weights: Mapping[str, str]) -> None:
    """Raise RemoteError unless the ranks of a pipeline have built the model with equal weights.

    Each rank keeps its own stages. With another seed on one rank the pipe would train a model that
    no rank has built. Replicas may differ: `sync_initial_state` copies the first one to all.
    """
    channel = groups.pipeline_channel
    gathered = channel.all_gather_value(dict(weights), "the first weights")
    for rank, other_weights in enumerate(gathered):
        common = [name for name in gathered[0] if name in other_weights]
        different = [name for name in common if other_weights[name] != gathered[0][name]]
        if different:
            raise RemoteError(
                f"the weights of the model on rank {rank} are not those on rank 0: "
                f"{len(different)} of {len(common)} parameters differ, the first one is "
                f"'{different[0]}'. A pipe is one model, and each rank keeps its stages of it. "
                f"Call torch.manual_seed with the same number on every rank before you build the "
                f"model, or build the layers of other ranks on the meta device.",
                "disagreed",
            )


def sync_initial_state(
    groups: ProcessGroups, tied_tensors: Sequence[TiedTensor], replicas: Replicas
) -> None:
    """Copy the state of the first replica to all replicas, and tied tensors to all their holders.

    Replicas may have initialised their models with different random numbers.
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

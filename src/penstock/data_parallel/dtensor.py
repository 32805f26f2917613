"""Helpers for `DTensor`: the local shard, and the process groups that hold the others.

A DTensor is recognised by its attributes. Importing its class takes long, and a process that has
not imported it has no DTensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

# A ProcessGroup. A build of PyTorch without torch.distributed does not have that class.
AnyProcessGroup = Any


class PeerRanks(Protocol):
    """The interface to the other ranks of a pipe."""

    def all_gather(self, tensor: Tensor, description: str) -> list[Tensor]:
        """Return the tensors of all ranks. They are on the CPU and have equal shapes.

        `description` says in an error what a rank was waiting for.
        """


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "device_mesh")


def to_local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, detached, with its memory. Return others unchanged."""
    if not is_dtensor(tensor):
        return tensor
    shard: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return shard


def find_mesh_groups(tensor: Tensor, sharded_only: bool = False) -> list[AnyProcessGroup]:
    """Return the process groups of a DTensor's mesh, one for each dim with several processes.

    With `sharded_only`, dims along which the tensor is replicated are left out.
    """
    if not is_dtensor(tensor):
        return []
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    placements: Any = tensor.placements  # type: ignore[attr-defined]
    return [
        mesh.get_group(dim)
        for dim, placement in enumerate(placements)
        if mesh.size(dim) > 1 and not (sharded_only and placement.is_replicate())
    ]


def find_all_mesh_groups(tensors: Iterable[Tensor]) -> list[AnyProcessGroup]:
    """Return the process groups of all tensors, without duplicates."""
    return list(dict.fromkeys(group for tensor in tensors for group in find_mesh_groups(tensor)))


def all_reduce(
    tensor: Tensor, op: dist.ReduceOp.RedOpType, groups: Iterable[AnyProcessGroup]
) -> Tensor:
    """Return a tensor reduced over several process groups, one after the other.

    gloo groups reduce on the CPU, others on the device of the tensor.
    """
    result = tensor
    for group in groups:
        is_gloo = dist.get_backend(group) == "gloo"
        result = result.to("cpu" if is_gloo else tensor.device, copy=True)
        dist.all_reduce(result, op, group=group)
    return result.to(tensor.device)

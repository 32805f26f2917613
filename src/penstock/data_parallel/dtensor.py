"""Helpers for `DTensor`: the local shard, and the process groups that hold the others.

A DTensor is recognised by its attributes. Importing its class takes long, and a process that has
not imported it has no DTensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.tensor_spec import TensorSpec

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


@dataclass(frozen=True)
class Sharding:
    """The layout of a DTensor: its local shard, its mesh and its placements on it."""

    shard_spec: TensorSpec
    device_mesh: Any
    placements: Any

    @staticmethod
    def from_tensor(tensor: Tensor) -> Sharding | None:
        """Return the layout of a DTensor, or None for another tensor."""
        if not is_dtensor(tensor):
            return None
        shard_spec = TensorSpec.from_tensor(to_local(tensor))
        return Sharding(shard_spec, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]

    def allocate(self, spec: TensorSpec, device: torch.device) -> Tensor:
        """Return an uninitialised DTensor with this layout, and the shape and dtype of a spec."""
        from torch.distributed.tensor import DTensor

        shard = self.shard_spec._replace(dtype=spec.dtype).allocate(device)
        return DTensor.from_local(
            shard,
            self.device_mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(spec.shape),
            stride=tuple(spec.strides),
        )


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


def take_maximum(
    rows: Sequence[Sequence[float]], groups: Sequence[AnyProcessGroup], device: torch.device
) -> list[list[float]]:
    """Return the largest of each number over the process groups, so that all members agree."""
    if not groups or not rows:
        return [list(row) for row in rows]
    numbers = torch.tensor([list(row) for row in rows], dtype=torch.float64, device=device)
    maxima: list[list[float]] = all_reduce(numbers, dist.ReduceOp.MAX, groups).tolist()
    return maxima


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

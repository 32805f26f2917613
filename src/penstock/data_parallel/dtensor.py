"""Tensors in parts over a mesh of processes (`DTensor`): this process's part, and who has others.

They are told by what they can do, and not by their class: to load it takes long.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

AnyProcessGroup = (
    Any  # a ProcessGroup; a build of PyTorch without torch.distributed has no such class
)


class PeerRanks(Protocol):
    """The other ranks of a pipe."""

    def all_gather(self, tensor: Tensor, description: str) -> list[Tensor]:
        """The numbers of all, those of the host: as many from each."""


def is_dtensor(tensor: Tensor) -> bool:
    """Is it a DTensor?"""
    return hasattr(tensor, "device_mesh")


def to_local(tensor: Tensor) -> Tensor:
    """This process's part: of the same memory, and in no graph."""
    if not is_dtensor(tensor):
        return tensor
    part: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


def find_mesh_groups(tensor: Tensor, sharded_only: bool = False) -> list[AnyProcessGroup]:
    """The groups of the dims of its mesh; those along which it is `sharded`, or all."""
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
    """Those of all of them, each once, in their order."""
    return list(dict.fromkeys(group for tensor in tensors for group in find_mesh_groups(tensor)))


def all_reduce(
    tensor: Tensor, op: dist.ReduceOp.RedOpType, groups: Iterable[AnyProcessGroup]
) -> Tensor:
    """The numbers of all ranks of the groups put together, where these are."""
    found = tensor
    for group in groups:
        gloo = dist.get_backend(group) == "gloo"
        found = found.to("cpu" if gloo else tensor.device, copy=True)
        dist.all_reduce(found, op, group=group)
    return found.to(tensor.device)

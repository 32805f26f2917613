"""Tensors in parts over a mesh of processes (`DTensor`): this process's part, and who has others.

They are told by what they can do, and not by their class: to load it takes long.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

Group = Any  # a ProcessGroup; a build of PyTorch without torch.distributed has no such class


class Ranks(Protocol):
    """The other ranks of a pipe."""

    def exchange(self, mine: Tensor, what: str) -> list[Tensor]:
        """The numbers of all, those of the host: as many from each."""


def is_in_parts(tensor: Tensor) -> bool:
    """Is it a DTensor?"""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """This process's part: of the same memory, and in no graph."""
    if not is_in_parts(tensor):
        return tensor
    part: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


def groups_of(tensor: Tensor, sharded: bool = False) -> list[Group]:
    """The groups of the dims of its mesh; those along which it is `sharded`, or all."""
    if not is_in_parts(tensor):
        return []
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    placements: Any = tensor.placements  # type: ignore[attr-defined]
    return [
        mesh.get_group(dim)
        for dim, placement in enumerate(placements)
        if mesh.size(dim) > 1 and not (sharded and placement.is_replicate())
    ]


def all_groups(tensors: Iterable[Tensor]) -> list[Group]:
    """Those of all of them, each once, in their order."""
    return list(dict.fromkeys(group for tensor in tensors for group in groups_of(tensor)))


def reduce(numbers: Tensor, op: dist.ReduceOp.RedOpType, groups: Iterable[Group]) -> Tensor:
    """The numbers of all ranks of the groups put together, where these are."""
    found = numbers
    for group in groups:
        gloo = dist.get_backend(group) == "gloo"
        found = found.to("cpu" if gloo else numbers.device, copy=True)
        dist.all_reduce(found, op, group=group)
    return found.to(numbers.device)

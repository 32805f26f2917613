"""Where a process stands: which processes are the ranks of its pipe, and which are copies of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ArgumentError

PIPE, COPIES = "pp", "dp"  # the names of a mesh's dims


@dataclass(frozen=True)
class Standing:
    """One process among those of a pipe, and among those of all of its copies.

    `everyone` are the processes of all copies, by their ranks in the world; `copy` says to which
    of them this one belongs. Over `averaging` the pipe itself averages gradients.
    """

    group: ProcessGroup
    everyone: tuple[int, ...]
    copy: int = 0
    averaging: ProcessGroup | None = None


def standing_in(mesh: DeviceMesh | None, group: ProcessGroup | None) -> Standing | None:
    """What a user means by a mesh or a group; None if all ranks are in one process.

    A mesh has one dim, that of the pipe, or two, 'pp' and 'dp'. Of one that was cut out of a
    larger one, the other dims are copies, and what they do is the user's affair.
    """
    if mesh is None and group is None:
        return None
    if mesh is not None and group is not None:
        raise ArgumentError("mesh and group both say which processes a pipe has: give one of them")
    if not dist.is_initialized():
        raise ArgumentError(
            "a pipe over several processes needs torch.distributed: call penstock.init() first, "
            "under torchrun"
        )
    if mesh is not None:
        return _in_mesh(mesh)
    if not isinstance(group, ProcessGroup):
        raise ArgumentError("this process is not in the group: make the pipe in those that are")
    return Standing(group, tuple(dist.get_process_group_ranks(group)))


def _in_mesh(mesh: DeviceMesh) -> Standing:
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        whole = mesh._get_root_mesh()
        pipe = mesh
    elif sorted(names) == sorted((PIPE, COPIES)):
        whole, pipe = mesh, mesh[PIPE]
    else:
        raise ArgumentError(
            f"the mesh has the dims {names or mesh.ndim}, and the ranks of a pipe are on one: give "
            f"that one, as in mesh=mesh['pp'], or a mesh with the dims '{PIPE}' and '{COPIES}'"
        )
    group = pipe.get_group()
    members = dist.get_process_group_ranks(group)
    ranks = whole.mesh.flatten().tolist()
    copies = sorted({min(others) for others in _copies(whole, members)})
    averaging = mesh[COPIES].get_group() if mesh.ndim == 2 else None
    return Standing(group, tuple(sorted(ranks)), copies.index(min(members)), averaging)


def _copies(whole: DeviceMesh, members: list[int]) -> list[list[int]]:
    """The ranks of each copy: those along the dim on which the members are."""
    mesh = whole.mesh
    for dim in range(mesh.ndim):
        lines: list[list[int]] = mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
        if sorted(members) in map(sorted, lines):
            return lines
    return [members]

"""Where a process stands: which processes are the ranks of its pipe, and which are copies of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ArgumentError

PIPELINE_DIM, DATA_PARALLEL_DIM = "pp", "dp"  # the names of a mesh's dims


@dataclass(frozen=True)
class Topology:
    """One process among those of a pipe, and among those of all of its copies.

    Processes are named by their ranks in the world. `copies` has those of each copy, in the order
    of the pipe's ranks, and `copy` says which of them this one is in. Over the copies that are
    `averaged` the pipe itself averages gradients.

       copies   (0, 1)   everyone  0 1 2 3
                (2, 3)   twins of rank 1, and of rank 3:  1 3
    """

    pipeline_group: ProcessGroup
    replicas: tuple[tuple[int, ...], ...]
    replica_index: int = 0
    averaged_replicas: tuple[int, ...] = ()

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """The processes of all copies. Their ranks in what all copies do are by this order."""
        if len(self.replicas) == 1:
            return self.replicas[0]
        return tuple(sorted(rank for members in self.replicas for rank in members))

    @property
    def replica_peers(self) -> tuple[int, ...]:
        """Those that have the same stages, of every copy."""
        return tuple(members[dist.get_rank(self.pipeline_group)] for members in self.replicas)

    @property
    def averaging_ranks(self) -> tuple[int, ...]:
        """Those of them over which the pipe averages; none at all, if it does not."""
        return tuple(self.replica_peers[copy] for copy in self.averaged_replicas)


def resolve_topology(mesh: DeviceMesh | None, group: ProcessGroup | None) -> Topology | None:
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
        return _topology_from_mesh(mesh)
    if not isinstance(group, ProcessGroup):
        raise ArgumentError("this process is not in the group: make the pipe in those that are")
    return Topology(group, (tuple(dist.get_process_group_ranks(group)),))


def _topology_from_mesh(mesh: DeviceMesh) -> Topology:
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        pipe = mesh
    elif sorted(names) == sorted((PIPELINE_DIM, DATA_PARALLEL_DIM)):
        pipe = mesh[PIPELINE_DIM]
    else:
        raise ArgumentError(
            f"the mesh has the dims {names or mesh.ndim}, and the ranks of a pipe are on one: give "
            f"that one, as in mesh=mesh['pp'], or a mesh with the dims '{PIPELINE_DIM}' and '{DATA_PARALLEL_DIM}'"
        )
    group = pipe.get_group()
    members = tuple(dist.get_process_group_ranks(group))
    copies = _find_replicas(mesh._get_root_mesh(), members)
    inside = set(mesh.mesh.flatten().tolist()) if mesh.ndim == 2 else set()
    averaged = [copy for copy, those in enumerate(copies) if inside.issuperset(those)]
    if len(averaged) < 2:
        averaged = []
    return Topology(group, copies, copies.index(members), tuple(averaged))


def _find_replicas(root_mesh: DeviceMesh, members: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each copy: those along the dim on which the members are, and in their order."""
    mesh = root_mesh.mesh
    for dim in range(mesh.ndim):
        lines: list[list[int]] = mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
        if sorted(members) in map(sorted, lines):
            in_order = list(members) == sorted(members)
            return tuple(
                tuple(sorted(line) if in_order else line) for line in sorted(lines, key=min)
            )
    return (tuple(members),)

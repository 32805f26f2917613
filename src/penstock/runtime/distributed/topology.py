"""The processes of a pipe: which ones are its ranks, and which ones are replicas of it.

`resolve_topology` reads the `mesh=` or `group=` argument of `Pipe`. All ranks in this module are
ranks in the default process group (global ranks), as `dist.get_rank()` returns them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ArgumentError
from penstock.torch_compat import get_root_mesh

PIPELINE_DIM, DATA_PARALLEL_DIM = "pp", "dp"  # names of mesh dimensions


@dataclass(frozen=True)
class Topology:
    """The position of this process in its pipeline and among the replicas of that pipeline.

    `replicas` has one tuple per replica: its global ranks in the order of the pipeline. This
    process belongs to `replicas[replica_index]`. The pipe itself averages gradients over the
    replicas in `averaged_replicas`.

       replicas   (0, 1)   all_ranks  0 1 2 3
                  (2, 3)   replica_peers of rank 1, and of rank 3:  1 3
    """

    pipeline_group: ProcessGroup
    replicas: tuple[tuple[int, ...], ...]
    replica_index: int = 0
    averaged_replicas: tuple[int, ...] = ()

    def __deepcopy__(self, memo: Any) -> Topology:
        return self  # a copy of a pipe is one of the same processes

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """The global ranks of all replicas.

        A group over all replicas (the watchdog, saving) numbers its members in this order.
        """
        if len(self.replicas) == 1:
            return self.replicas[0]
        return tuple(sorted(rank for members in self.replicas for rank in members))

    @property
    def replica_peers(self) -> tuple[int, ...]:
        """The global ranks that hold the same stages as this process, one per replica."""
        return tuple(members[dist.get_rank(self.pipeline_group)] for members in self.replicas)

    @property
    def averaging_ranks(self) -> tuple[int, ...]:
        """The replica peers over which the pipe averages gradients. Empty if it does not."""
        return tuple(self.replica_peers[index] for index in self.averaged_replicas)


def _warn_if_alone() -> None:
    """Warn if torchrun has started several processes, and nothing connects them."""
    size = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and size != "1" and not dist.is_initialized():
        warnings.warn(
            f"torchrun has started {size} processes, but this pipe has neither mesh= nor group=, "
            "so each process trains a whole pipeline of its own. Pass mesh=penstock.init().",
            stacklevel=5,  # the caller of Pipe
        )


def resolve_topology(mesh: DeviceMesh | None, group: ProcessGroup | None) -> Topology | None:
    """Return the topology that `mesh=` or `group=` describes. None: all ranks in one process.

    A mesh has one dimension, the pipeline, or the two dimensions 'pp' and 'dp'. If it was sliced
    from a larger mesh, the other dimensions of that mesh are replicas too, but the pipe does not
    average over them: the user does.
    """
    if mesh is None and group is None:
        _warn_if_alone()
        return None
    if mesh is not None and group is not None:
        raise ArgumentError(
            "mesh and group were both given, and each selects the processes of the pipe. Pass "
            "only one of them."
        )
    if not dist.is_initialized():
        raise ArgumentError(
            "a pipe over several processes needs torch.distributed: call penstock.init() first, "
            "under torchrun"
        )
    if mesh is not None:
        return _topology_from_mesh(mesh)
    # PyTorch passes GroupMember.NON_GROUP_MEMBER, which is not a ProcessGroup, to outsiders.
    if not isinstance(group, ProcessGroup):
        raise ArgumentError(
            "this process is not a member of the group: create the pipe only in its members"
        )
    return Topology(group, (tuple(dist.get_process_group_ranks(group)),))


def _topology_from_mesh(mesh: DeviceMesh) -> Topology:
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        pipe = mesh
    elif sorted(names) == sorted((PIPELINE_DIM, DATA_PARALLEL_DIM)):
        pipe = mesh[PIPELINE_DIM]
    else:
        raise ArgumentError(
            f"the mesh has the dimensions {names or mesh.ndim}, but the ranks of a pipe lie along "
            f"one dimension. Pass that one, as in mesh=mesh['pp'], or pass a mesh with the "
            f"dimensions '{PIPELINE_DIM}' and '{DATA_PARALLEL_DIM}'."
        )
    group = pipe.get_group()
    members = tuple(dist.get_process_group_ranks(group))
    # `mesh=mesh["pp"]` drops the other dimensions. The root mesh still has them, and they tell
    # which processes hold the same stages.
    replicas = _find_replicas(get_root_mesh(mesh), members)
    # The pipe averages only over the dimension 'dp' of the mesh that it was given.
    mesh_ranks = set(mesh.mesh.flatten().tolist()) if mesh.ndim == 2 else set()
    averaged = [
        index
        for index, replica_members in enumerate(replicas)
        if mesh_ranks.issuperset(replica_members)
    ]
    if len(averaged) < 2:
        averaged = []
    return Topology(group, replicas, replicas.index(members), tuple(averaged))


def _find_replicas(root_mesh: DeviceMesh, members: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each replica: the lines of the mesh that are parallel to `members`.

    Every line is in the same order as `members`, so that equal positions hold equal stages.
    """
    mesh = root_mesh.mesh
    for dim in range(mesh.ndim):
        lines: list[list[int]] = mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
        if sorted(members) in map(sorted, lines):
            in_order = list(members) == sorted(members)
            return tuple(
                tuple(sorted(line) if in_order else line) for line in sorted(lines, key=min)
            )
    return (tuple(members),)

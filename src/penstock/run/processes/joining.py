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

from penstock.errors import ArgumentError
from penstock.partition.split import Site
from penstock.run.asking import Settings
from penstock.run.processes.agreement import agree
from penstock.run.processes.opening import facts_of
from penstock.run.processes.sharing import Sharing
from penstock.run.processes.standing import Standing
from penstock.run.processes.team import Team
from penstock.stage.places import Gpu, Place, place_at


def place_in(group: ProcessGroup, devices: Sequence[Any] | None) -> Place:
    """Where this process computes: as it is told, on the GPU that is its own, or on the CPU."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if devices is not None:
        if len(devices) != size:
            raise ArgumentError(
                f"devices has {len(devices)} entries, and the pipe has {size} processes: give one "
                "for each rank, or leave devices out"
            )
        return place_at(devices[rank])
    if _uses_nccl(group):
        return place_at(f"cuda:{torch.cuda.current_device()}")
    return place_at("cpu")


def _uses_nccl(group: ProcessGroup) -> bool:
    return "nccl" in dist.get_backend_config(group)


def join(standing: Standing, devices: Sequence[Any] | None, heartbeat: float) -> Team:
    """Meet the other processes."""
    if not heartbeat > 0:
        raise ArgumentError(f"heartbeat is a number of seconds above 0, not {heartbeat!r}")
    group = standing.group
    place = place_in(group, devices)
    return Team(standing, place, heartbeat, nccl=isinstance(place, Gpu) and _uses_nccl(group))


def site_in(team: Team) -> Site:
    """Where this process stands. Where to cut is the first rank's to find: times differ."""

    def settled(find: Callable[[], Sequence[int]]) -> Sequence[int]:
        mine = list(find()) if team.rank == 0 else None
        found: Sequence[int] = team.peers.value(0, mine, "where to cut")
        return found

    return Site(team.rank, team.size, team.place, settled)


def check_same(
    team: Team,
    name: str,
    module: nn.Sequential,
    settings: Settings,
    sharing: Sharing,
    more: Mapping[str, object],
) -> None:
    """All ranks are making the same pipe."""
    facts = {
        "penstock": sys.modules["penstock"].__version__,
        "torch": torch.__version__.split("+")[0],
        **facts_of(settings),
        **{key: str(value) for key, value in {**asdict(sharing), **more}.items()},
        **{f"layer {n}": f"{type(l).__name__} {_digest(l)}" for n, l in module.named_children()},
    }
    agree(team.peers, name, facts)


def _digest(layer: nn.Module) -> str:
    """Of the names, shapes and dtypes of all it has."""
    parts = [f"{n} {type(m).__name__}" for n, m in layer.named_modules()]
    parts += [f"{n} {tuple(t.shape)} {t.dtype}" for n, t in layer.named_parameters()]
    parts += [f"{n} {tuple(t.shape)} {t.dtype}" for n, t in layer.named_buffers()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]

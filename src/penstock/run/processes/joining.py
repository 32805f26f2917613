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
from penstock.gradients.replicas import Replicas
from penstock.partition.forward.division import digest_of
from penstock.partition.forward.whole import Whole
from penstock.partition.sequential import is_layered
from penstock.partition.split import Site, Split
from penstock.partition.tied import Tie
from penstock.run.asking import Settings
from penstock.run.processes.agreement import agree
from penstock.run.processes.opening import facts_of
from penstock.run.processes.sharing import Sharing
from penstock.run.processes.standing import Standing
from penstock.run.processes.team import SLOW, Team
from penstock.run.processes.ties import tie
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
    """Where this process stands. Where to cut is for one to find, of all copies: times differ."""

    def settled(find: Callable[[], Sequence[int]]) -> Sequence[int]:
        what, first = "where to cut", team.rank == 0
        team.watch.at(what, SLOW)
        mine = list(find()) if first and team.standing.copy == 0 else None
        if first and team.twins is not None:
            mine = team.twins.value(0, mine, what)
        found: Sequence[int] = team.peers.value(0, mine, what)
        team.watch.at("its stages", SLOW)
        return found

    return Site(team.rank, team.size, team.place, settled)


def described(module: nn.Module) -> dict[str, str]:
    """Each layer: its class, and a digest of the names, shapes and dtypes of all it has."""
    layers = {f"layer {name}": layer for name, layer in module.named_children()}
    if not is_layered(module):
        layers["the model"] = module
    return {name: f"{type(layer).__name__} {_digest(layer)}" for name, layer in layers.items()}


def _division_of(split: Split) -> dict[str, str]:
    """How a whole forward is divided: all ranks must do so in the same way."""
    how = split.partition.how
    if not isinstance(how, Whole):
        return {}
    told = {
        f"stage {stage.index}": ", ".join(name or "the model" for name in stage.names)
        for stage in split.partition.stages
    }
    return {**told, "what goes between the stages": digest_of(how.survey.division)}


def check_same(
    team: Team,
    name: str,
    settings: Settings,
    sharing: Sharing,
    split: Split,
    more: Mapping[str, str],
) -> None:
    """All ranks are making the same pipe, and all copies."""
    facts = {
        "penstock": sys.modules["penstock"].__version__,
        "torch": torch.__version__.split("+")[0],
        **facts_of(settings, **asdict(sharing)),
        **_division_of(split),
        **more,
    }
    agree(team.peers, name, facts)
    if team.twins is not None:
        agree(team.twins, "the pipe", {**facts, "the rank in it": str(team.rank)})


def begin_alike(team: Team, ties: Sequence[Tie], replicas: Replicas) -> None:
    """Give every copy what the first has, and every holder of a tied tensor what its owner has.

    Processes may have been initialised differently.
    """
    if team.averaging is not None:
        replicas.begin_alike(team.averaging)
    tie(ties, team.peers)


def _digest(layer: nn.Module) -> str:
    parts = [f"{n} {type(m).__name__}" for n, m in layer.named_modules()]
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        lazy = nn.parameter.is_lazy(tensor)
        parts.append(f"{name} lazy" if lazy else f"{name} {tuple(tensor.shape)} {tensor.dtype}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]

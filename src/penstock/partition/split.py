"""A Sequential on devices: where to cut it, which rank gets which stage, and moving it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock import balance as balancing
from penstock.errors import ArgumentError
from penstock.ir import Schedule
from penstock.partition.materialise import Blanks, is_on_meta, materialise
from penstock.partition.profile import layer_bytes, layer_times
from penstock.partition.sequential import (
    Partition,
    PipeSequential,
    cut,
    placed_by_user,
    tensors_of,
)
from penstock.schedules.choice import placement_of, stages_per_rank
from penstock.stage.places import Place, place_at

BALANCES = ("time", "memory", "parameters")


@dataclass(frozen=True)
class Split:
    """A partition whose stages stand on ranks, each at a place."""

    partition: Partition
    places: tuple[Place, ...]
    placement: tuple[int, ...]
    blanks: Blanks = field(default_factory=Blanks)

    def place_of(self, stage: int) -> Place:
        """Where the stage computes."""
        return self.places[self.placement[stage]]


@dataclass(frozen=True)
class Wish:
    """What the user says about the split; None where nothing is said."""

    stages: int | Sequence[int] | None
    devices: Sequence[Any] | None
    balance: str | None
    example: Any
    chunks: int


def split(module: nn.Sequential, wish: Wish, schedule: str | Schedule | None) -> Split:
    """Cut and place as wished; without a wish, as the layers stand."""
    _check_wish(wish)
    if wish.stages is None and wish.devices is None:
        if wish.balance is not None or wish.example is not None:
            raise ArgumentError(
                "balance and example say how to cut, but the layers stay as they were placed: "
                "give stages= or devices=, too"
            )
        return _as_placed(module)
    return _as_wished(module, wish, schedule)


def _check_wish(wish: Wish) -> None:
    stages, devices = wish.stages, wish.devices
    if isinstance(stages, bool | float | str):
        raise ArgumentError(
            f"stages is a number of stages or a list with the layers of each, not {stages!r}"
        )
    if isinstance(devices, str | torch.device):
        raise ArgumentError(
            f"devices is a list with one for each rank, such as ['{devices}', '{devices}'], not "
            f"'{devices}'"
        )
    if isinstance(devices, int):
        raise ArgumentError(
            f"devices is a list with one for each rank, not their number, {devices}"
        )
    if devices is not None and not len(devices):
        raise ArgumentError("devices is empty: give at least one, or leave it out")


def _as_placed(module: nn.Sequential) -> Split:
    counts, devices = placed_by_user(list(module))
    ranks = list(dict.fromkeys(devices))
    places = tuple(place_at(device) for device in ranks)
    placement = tuple(ranks.index(device) for device in devices)
    return Split(cut(module, counts), places, placement)


def _as_wished(module: nn.Sequential, wish: Wish, schedule: str | Schedule | None) -> Split:
    per_rank = stages_per_rank(schedule)
    stages = wish.stages
    if stages is None:
        assert wish.devices is not None
        stages = len(wish.devices) * per_rank
    number = stages if isinstance(stages, int) else len(stages)
    if number < 1:
        raise ArgumentError(f"stages={stages}: a pipe has at least one stage")
    ranks = -(-number // per_rank)
    places = tuple(map(place_at, wish.devices or _devices_at_hand(ranks)))
    placement = placement_of(schedule, len(places), number)
    partition = cut(module, _counts(module, stages, wish, places[placement[0]]))
    devices = [places[rank].device for rank in placement]
    where = {
        n: at for stage, at in zip(partition.stages, devices, strict=True) for n in stage.names
    }
    blanks = materialise(module, where)
    _move(partition, devices)
    return Split(partition, places, placement, blanks)


def _move(partition: Partition, devices: Sequence[torch.device]) -> None:
    """Each layer to its stage's device; what several share, to that of the first."""
    settled: set[Tensor] = set()
    for stage, device in zip(partition.stages, devices, strict=True):
        for layer in stage.layers:
            held = {*tensors_of(layer)}
            if any(t.device != device for t in held - settled):
                if held & settled:
                    layer._apply(lambda t, to=device: t if t in settled else t.to(to))
                else:
                    layer.to(device)
            settled.update(tensors_of(layer))
            settled.update(p.grad for p in layer.parameters() if p.grad is not None)


def _devices_at_hand(ranks: int) -> list[str]:
    """GPUs where there are enough, else the CPU several times over."""
    if torch.cuda.is_available():
        if torch.cuda.device_count() < ranks:
            raise ArgumentError(
                f"{ranks} ranks need {ranks} GPUs, and {torch.cuda.device_count()} are here: give "
                f"devices=, such as penstock.virtual_devices('cuda:0', {ranks})"
            )
        return [f"cuda:{rank}" for rank in range(ranks)]
    return ["cpu"] * ranks


def _counts(
    module: nn.Sequential, stages: int | Sequence[int], wish: Wish, first: Place
) -> Sequence[int]:
    if not isinstance(stages, int):
        if wish.balance is not None:
            raise ArgumentError(
                f"stages={list(stages)} already says where to cut: leave balance out, or give "
                f"stages={len(stages)}"
            )
        balancing.check_cut(stages, len(module))
        return stages
    wanted = wish.balance or ("parameters" if wish.example is None else "time")
    if wanted not in BALANCES:
        raise ArgumentError(f"balance is one of {', '.join(BALANCES)}, not '{wanted}'")
    if stages == 1:
        return (len(module),)
    if wanted == "parameters":
        return balancing.cut([_parameter_bytes(layer) for layer in module], stages)
    if wish.example is None:
        raise ArgumentError(f"balance='{wanted}' measures the layers: give example=, a batch")
    if is_on_meta(module):
        raise ArgumentError(
            f"balance='{wanted}' runs the layers, and the model was built on meta: balance by "
            "parameters, or give the layers of each stage, as in stages=[2, 3]"
        )
    example = wish.example if isinstance(wish.example, tuple) else (wish.example,)
    unpack = isinstance(module, PipeSequential)
    layers, device = list(module), first.device
    with first.entered():
        if wanted == "time":
            costs = layer_times(layers, example, unpack=unpack, device=device)
        else:
            costs = layer_bytes(layers, example, unpack=unpack, chunks=wish.chunks, device=device)
    return balancing.cut(costs, stages)


def _parameter_bytes(layer: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in layer.parameters())


def ties(split: Split) -> list[str]:
    """Every parameter that stages of several ranks share, and whose it is, in words."""
    owners: dict[nn.Parameter, tuple[str, int]] = {}
    found = []
    for stage in split.partition.stages:
        rank = split.placement[stage.index]
        for name, layer in zip(stage.names, stage.layers, strict=True):
            for inner, parameter in layer.named_parameters():
                first, owner = owners.setdefault(parameter, (f"{name}.{inner}", rank))
                if owner != rank:
                    found.append(f"{name}.{inner} on rank {rank} is {first} of rank {owner}")
    return found

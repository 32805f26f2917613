"""A model on devices: where to cut it, which rank gets which stage, and moving it there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock import balance as balancing
from penstock.errors import ArgumentError
from penstock.ir import Schedule, StageGraph
from penstock.partition.costing import BALANCES, Room
from penstock.partition.forward.cutting import Prospect
from penstock.partition.forward.units import Asked, parameter_bytes
from penstock.partition.materialise import Blanks, materialise
from penstock.partition.model import Example, cut_model, prospect_of
from penstock.partition.outlining import sizes_on
from penstock.partition.partition import Layers, Partition
from penstock.partition.profile import layer_bytes, layer_times
from penstock.partition.sequential import (
    PipeSequential,
    cut,
    is_layered,
    placed_by_user,
    tensors_of,
)
from penstock.partition.setting import is_on_meta
from penstock.partition.share import settled, share_of
from penstock.partition.tied import Tie, tied_names, ties_between, ties_in_words
from penstock.schedules.choice import placement_of, stages_per_rank
from penstock.stage.places import Place, place_at
from penstock.stage.stage import Stage


@dataclass(frozen=True)
class Split:
    """A partition whose stages stand on ranks. `places` are those of this process's ranks."""

    partition: Partition
    places: Mapping[int, Place]
    placement: tuple[int, ...]
    ties: tuple[Tie, ...] = ()  # with ranks of other processes
    same: Mapping[str, str] = field(default_factory=dict)  # further names of what is tied
    blanks: Blanks = field(default_factory=Blanks)

    def is_here(self, stage: int) -> bool:
        """Does this process compute the stage?"""
        return self.placement[stage] in self.places

    def place_of(self, stage: int) -> Place:
        """Where the stage computes: one of this process's."""
        return self.places[self.placement[stage]]

    @property
    def talking(self) -> frozenset[tuple[int, int]]:
        """The pairs of ranks of which the one sends messages to the other."""
        return self.talking_over(self.partition.graph)

    def talking_over(self, graph: StageGraph) -> frozenset[tuple[int, int]]:
        """The same, if other stages feed each other."""
        ranks = [(self.placement[src], self.placement[dst]) for src, dst in graph.edges]
        return frozenset(p for a, b in ranks if a != b for p in ((a, b), (b, a)))

    @property
    def stages_here(self) -> list[Stage]:
        """Those that this process computes."""
        return [stage for stage in self.partition.stages if self.is_here(stage.index)]


@dataclass(frozen=True)
class Site:
    """Where this process stands among those of a pipe.

    `settled` gives what the first rank finds, on every rank.
    """

    rank: int
    ranks: int
    place: Place
    settled: Callable[[Callable[[], Sequence[Any]]], Any]


@dataclass(frozen=True)
class Wish:
    """What the user says about the split; None where nothing is said."""

    stages: int | Sequence[int] | None
    devices: Sequence[Any] | None
    balance: str | None
    example: Any
    chunks: int
    units: Asked = None
    memory: float | Sequence[float] | None = None


def split(
    module: nn.Module, wish: Wish, schedule: str | Schedule | None, site: Site | None = None
) -> Split:
    """Cut and place as wished; without a wish, as the layers stand, or a share for each process."""
    check_wish(wish)
    if site is not None:
        return _among_processes(module, wish, schedule, site)
    if wish.stages is None and wish.devices is None:
        if wish.balance is not None or wish.example is not None:
            raise ArgumentError(
                "balance and example say how to cut, but the layers stay as they were placed: "
                "give stages= or devices=, too"
            )
        if not is_layered(module):
            raise ArgumentError(
                f"{type(module).__name__} is no nn.Sequential: say into how many stages it is to "
                "be cut, and give a batch to follow its forward with, as in Pipe(model, stages=4, "
                "example=batch)"
            )
        return _as_placed(module)
    return _as_wished(module, wish, schedule)


def check_wish(wish: Wish) -> None:
    """Each thing is of its kind."""
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
    places = dict(enumerate(map(place_at, ranks)))
    placement = tuple(ranks.index(device) for device in devices)
    return Split(cut(module, counts), places, placement)


def _as_wished(module: nn.Module, wish: Wish, schedule: str | Schedule | None) -> Split:
    per_rank = stages_per_rank(schedule)
    stages = wish.stages
    if stages is None:
        assert wish.devices is not None
        stages = len(wish.devices) * per_rank
    number = number_of(stages)
    ranks = -(-number // per_rank)
    places = tuple(map(place_at, wish.devices or _devices_at_hand(ranks)))
    placement = placement_of(schedule, len(places), number)
    devices = [places[rank].device for rank in placement]
    partition = parted(module, wish, stages, [places[rank] for rank in placement], placement)
    blanks = _give_memory(module, partition.stages, devices)
    _move(partition.stages, devices)
    return Split(partition, dict(enumerate(places)), placement, blanks=blanks)


def parted(
    module: nn.Module,
    wish: Wish,
    stages: int | Sequence[int],
    places: Sequence[Place],
    placement: tuple[int, ...],
) -> Partition:
    """The model cut as wished, a place for each stage; nothing is moved."""
    if not is_layered(module):
        room, example = _room(wish, places, placement), Example.read(wish.example, wish.chunks)
        return cut_model(module, stages, example, wish.units, wish.balance, room)
    partition = cut(module, _counts(module, stages, wish, places[0]))
    if wish.example is None:
        return partition
    sizes = sizes_on(module, partition.stages, wish.example, wish.chunks)
    return replace(partition, outline=partition.outline.with_sizes(sizes))


def _room(wish: Wish, places: Sequence[Place], placement: tuple[int, ...]) -> Room:
    devices = tuple(place.device for place in places)
    flying = tuple(min(wish.chunks, len(devices) - stage) for stage in range(len(devices)))
    return Room(devices, flying, placement, wish.memory)


def _among_processes(
    module: nn.Module, wish: Wish, schedule: str | Schedule | None, site: Site
) -> Split:
    """This process's share: it keeps no layer of another's."""
    stages = site.ranks * stages_per_rank(schedule) if wish.stages is None else wish.stages
    placement = placement_of(schedule, site.ranks, number_of(stages))
    if not is_layered(module):
        return _part_among_processes(module, wish, stages, placement, site)
    counts = site.settled(lambda: _counts(module, stages, wish, site.place))
    whole = cut(module, counts)
    ties = ties_between(whole.stages, placement, site.rank)
    mine = [stage for stage in whole.stages if placement[stage.index] == site.rank]
    same = tied_names(module)
    blanks = _give_memory(module, mine, [site.place.device for _ in mine])
    _move(mine, [site.place.device for _ in mine])
    seen = [stage if stage in mine else stage.elsewhere() for stage in whole.stages]
    partition = replace(whole, stages=tuple(seen))
    return Split(partition, {site.rank: site.place}, placement, ties, same, blanks)


def _part_among_processes(
    module: nn.Module,
    wish: Wish,
    stages: int | Sequence[int],
    placement: tuple[int, ...],
    site: Site,
) -> Split:
    """The same of a whole forward: every process follows it, and keeps its own units."""
    example, device = Example.read(wish.example, wish.chunks), site.place.device
    if not isinstance(example, Prospect):
        example = prospect_of(module, example, wish.units, len(placement), device)
    prospect, room = example.onto(module), _room(wish, [site.place for _ in placement], placement)
    found = site.settled(lambda: settled(prospect, stages, wish.balance, room))
    blanks = []

    def make_ready(mine: Sequence[Stage]) -> None:
        blanks.append(_give_memory(module, mine, [device for _ in mine]))
        _move(mine, [device for _ in mine])

    share = share_of(prospect, found, placement, site.rank, device, make_ready)
    here = [s for s in share.partition.stages if placement[s.index] == site.rank]
    _move(here, [device for _ in here])  # a copy that a stage had for a draft was moved for it
    places = {site.rank: site.place}
    return Split(share.partition, places, placement, share.ties, share.same, *blanks)


def number_of(stages: int | Sequence[int]) -> int:
    """How many stages are asked for."""
    number = stages if isinstance(stages, int) else len(stages)
    if number < 1:
        raise ArgumentError(f"stages={stages}: a pipe has at least one stage")
    return number


def _give_memory(
    module: nn.Module, stages: Sequence[Stage], devices: Sequence[torch.device]
) -> Blanks:
    """To what was built on meta of these stages."""
    named = zip(stages, devices, strict=True)
    layers = [
        (name, layer, device)
        for stage, device in named
        for name, layer in zip(stage.names, stage.layers, strict=True)
    ]
    return materialise(module, layers)


def _move(stages: Sequence[Stage], devices: Sequence[torch.device]) -> None:
    """Each layer to its stage's device; what several share, to that of the first."""
    settled: set[Tensor] = set()
    for stage, device in zip(stages, devices, strict=True):
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
        return balancing.cut([parameter_bytes(layer) for layer in module], stages)
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


def in_words(split: Split) -> list[str]:
    """Where each stage is, what jumps over stages, and what ranks share."""
    lines = []
    for stage in split.partition.stages:
        if split.is_here(stage.index):
            numbers = sum(p.numel() for layer in stage.layers for p in layer.parameters())
            lines.append(f"{stage} on {split.place_of(stage.index)!r}, {numbers:,} parameters")
        else:
            lines.append(f"{stage} in the process of rank {split.placement[stage.index]}")
    how = split.partition.how
    routes = how.routes if isinstance(how, Layers) else ()
    skips = Counter((key.name, src, dst) for key, src, dst in routes)
    for (name, src, dst), times in skips.items():
        lines.append(f"skip {name!r}: stage {src} to {dst}" + f", {times} times" * (times > 1))
    tied = ties_in_words(split.stages_here, split.placement)
    tied += [f"{tie.name}: on ranks {', '.join(map(str, tie.holders))}" for tie in split.ties]
    return lines + [f"tied {tie}" for tie in tied]

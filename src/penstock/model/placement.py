"""A model on devices: where to cut it, which rank gets which stage, and moving it there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config import check_chunks
from penstock.device.device import Device, resolve_device
from penstock.errors import ArgumentError, PenstockTypeError
from penstock.model.cut import (
    BALANCE_MODES,
    ExampleMicrobatch,
    ResourceLimits,
    cut_model,
    trace_with_enough_units,
)
from penstock.model.describe import measure_transfer_bytes
from penstock.model.meta_init import UninitializedTensors, has_meta_tensors, materialize
from penstock.model.partition import Partition, SequentialLayout
from penstock.model.process_share import build_process_share, decide_cut
from penstock.model.sequential import (
    PipeSequential,
    check_model,
    cut_sequential,
    group_by_device,
    is_plain_sequential,
    list_module_tensors,
)
from penstock.model.sequential_profiler import measure_layer_bytes, measure_layer_times
from penstock.model.tied import (
    TiedTensor,
    describe_tied_parameters,
    find_tied_names,
    find_tied_tensors,
)
from penstock.model.traced.build_stages import TracedModel
from penstock.model.traced.units import UnitSelector, parameter_bytes
from penstock.schedules.balance import balance_costs
from penstock.schedules.balance_problem import check_cut
from penstock.schedules.ir import Schedule, StageGraph
from penstock.schedules.registry import choose_placement, default_stages_per_rank
from penstock.stage.stage import Stage

# -------------------------------------------------------------------------------------------------
# The stages of a pipe stay on their devices: what would move them is refused.
# -------------------------------------------------------------------------------------------------


def check_no_device_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What `Module.to` was given names no device."""
    try:
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
    except RuntimeError:  # a device that is not there
        raise build_move_error() from None
    if device is not None:
        raise build_move_error()


def check_keeps_device(tensor_function: Any, devices: Iterable[Device]) -> None:
    """What is done to each tensor leaves it on its device."""
    for place in devices:
        try:
            moved = tensor_function(torch.empty(0, device=place.device)).device != place.device
        except (RuntimeError, AssertionError):  # to a device that is not there
            moved = True
        if moved:
            raise build_move_error()


def build_move_error() -> PenstockTypeError:
    """Says what would work."""
    return PenstockTypeError(
        "the stages of a pipe stay on the devices they were given, so moving it is denied: "
        "make another Pipe, with other devices; casting, as in pipe.to(torch.float16), is allowed"
    )


# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacedPartition:
    """A partition whose stages stand on ranks. `places` are those of this process's ranks."""

    partition: Partition
    devices: Mapping[int, Device]
    placement: tuple[int, ...]
    tied_tensors: tuple[TiedTensor, ...] = ()  # with ranks of other processes
    tied_names: Mapping[str, str] = field(default_factory=dict)  # further names of what is tied
    uninitialized_tensors: UninitializedTensors = field(default_factory=UninitializedTensors)

    def is_local(self, stage: int) -> bool:
        """Does this process compute the stage?"""
        return self.placement[stage] in self.devices

    def stage_device(self, stage: int) -> Device:
        """Where the stage computes: one of this process's."""
        return self.devices[self.placement[stage]]

    @property
    def communicating_ranks(self) -> frozenset[tuple[int, int]]:
        """The pairs of ranks of which the one sends messages to the other."""
        return self.find_communicating_ranks(self.partition.graph)

    def find_communicating_ranks(self, graph: StageGraph) -> frozenset[tuple[int, int]]:
        """The same, if other stages feed each other."""
        ranks = [(self.placement[src], self.placement[dst]) for src, dst in graph.edges]
        return frozenset(p for a, b in ranks if a != b for p in ((a, b), (b, a)))

    @property
    def local_stages(self) -> list[Stage]:
        """Those that this process computes."""
        return [stage for stage in self.partition.stages if self.is_local(stage.index)]


@dataclass(frozen=True)
class ProcessContext:
    """Where this process stands among those of a pipe.

    `settled` gives what the first rank finds, on every rank.
    """

    rank: int
    ranks: int
    device: Device
    broadcast_from_first_rank: Callable[[Callable[[], Sequence[Any]]], Any]


@dataclass(frozen=True)
class SplitRequest:
    """What the user says about the split; None where nothing is said."""

    stages: int | Sequence[int] | None
    devices: Sequence[Any] | None
    balance: str | None
    example: Any
    chunks: int
    units: UnitSelector = None
    memory: float | Sequence[float] | None = None


def place_model(
    module: nn.Module,
    request: SplitRequest,
    schedule: str | Schedule | None,
    process: ProcessContext | None = None,
) -> PlacedPartition:
    """Cut and place as wished; without a wish, as the layers stand, or a share for each process."""
    check_split_request(request)
    if process is not None:
        return _place_across_processes(module, request, schedule, process)
    if request.stages is None and request.devices is None:
        if request.balance is not None or request.example is not None:
            raise ArgumentError(
                "balance and example say how to cut, but the layers stay as they were placed: "
                "give stages= or devices=, too"
            )
        if not is_plain_sequential(module):
            raise ArgumentError(
                f"{type(module).__name__} is no nn.Sequential: say into how many stages it is to "
                "be cut, and give a batch to follow its forward with, as in Pipe(model, stages=4, "
                "example=batch)"
            )
        return _keep_user_placement(module)
    return _place_as_requested(module, request, schedule)


def check_split_request(request: SplitRequest) -> None:
    """Each thing is of its kind."""
    stages, devices = request.stages, request.devices
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


def _keep_user_placement(module: nn.Sequential) -> PlacedPartition:
    counts, devices = group_by_device(list(module))
    ranks = list(dict.fromkeys(devices))
    places = dict(enumerate(map(resolve_device, ranks)))
    placement = tuple(ranks.index(device) for device in devices)
    return PlacedPartition(cut_sequential(module, counts), places, placement)


def _place_as_requested(
    module: nn.Module, request: SplitRequest, schedule: str | Schedule | None
) -> PlacedPartition:
    per_rank = default_stages_per_rank(schedule)
    stages = request.stages
    if stages is None:
        assert request.devices is not None
        stages = len(request.devices) * per_rank
    number = count_stages(stages)
    ranks = -(-number // per_rank)
    places = tuple(map(resolve_device, request.devices or _list_default_devices(ranks)))
    placement = choose_placement(schedule, len(places), number)
    devices = [places[rank].device for rank in placement]
    partition = partition_model(
        module, request, stages, [places[rank] for rank in placement], placement
    )
    blanks = _materialize_stages(module, partition.stages, devices)
    _move_stages(partition.stages, devices)
    return PlacedPartition(
        partition, dict(enumerate(places)), placement, uninitialized_tensors=blanks
    )


def partition_model(
    module: nn.Module,
    request: SplitRequest,
    stages: int | Sequence[int],
    stage_devices: Sequence[Device],
    placement: tuple[int, ...],
) -> Partition:
    """The model cut as wished, a place for each stage; nothing is moved."""
    if not is_plain_sequential(module):
        room, example = (
            _build_resource_limits(request, stage_devices, placement),
            ExampleMicrobatch.from_batch(request.example, request.chunks),
        )
        return cut_model(module, stages, example, request.units, request.balance, room)
    partition = cut_sequential(
        module, _choose_layer_counts(module, stages, request, stage_devices[0])
    )
    if request.example is None:
        return partition
    sizes = measure_transfer_bytes(module, partition.stages, request.example, request.chunks)
    return replace(partition, outline=partition.outline.with_transfer_bytes(sizes))


def _build_resource_limits(
    request: SplitRequest, stage_devices: Sequence[Device], placement: tuple[int, ...]
) -> ResourceLimits:
    devices = tuple(place.device for place in stage_devices)
    flying = tuple(min(request.chunks, len(devices) - stage) for stage in range(len(devices)))
    return ResourceLimits(devices, flying, placement, request.memory)


def _place_across_processes(
    module: nn.Module,
    request: SplitRequest,
    schedule: str | Schedule | None,
    process: ProcessContext,
) -> PlacedPartition:
    """This process's share: it keeps no layer of another's."""
    stages = (
        process.ranks * default_stages_per_rank(schedule)
        if request.stages is None
        else request.stages
    )
    placement = choose_placement(schedule, process.ranks, count_stages(stages))
    if not is_plain_sequential(module):
        return _place_traced_across_processes(module, request, stages, placement, process)
    counts = process.broadcast_from_first_rank(
        lambda: _choose_layer_counts(module, stages, request, process.device)
    )
    whole = cut_sequential(module, counts)
    ties = find_tied_tensors(whole.stages, placement, process.rank)
    mine = [stage for stage in whole.stages if placement[stage.index] == process.rank]
    same = find_tied_names(module)
    blanks = _materialize_stages(module, mine, [process.device.device for _ in mine])
    _move_stages(mine, [process.device.device for _ in mine])
    seen = [stage if stage in mine else stage.as_remote() for stage in whole.stages]
    partition = replace(whole, stages=tuple(seen))
    return PlacedPartition(partition, {process.rank: process.device}, placement, ties, same, blanks)


def _place_traced_across_processes(
    module: nn.Module,
    request: SplitRequest,
    stages: int | Sequence[int],
    placement: tuple[int, ...],
    process: ProcessContext,
) -> PlacedPartition:
    """The same of a whole forward: every process follows it, and keeps its own units."""
    example, device = (
        ExampleMicrobatch.from_batch(request.example, request.chunks),
        process.device.device,
    )
    if not isinstance(example, TracedModel):
        example = trace_with_enough_units(module, example, request.units, len(placement), device)
    prospect, room = (
        example.rebind_to(module),
        _build_resource_limits(request, [process.device for _ in placement], placement),
    )
    found = process.broadcast_from_first_rank(
        lambda: decide_cut(prospect, stages, request.balance, room)
    )
    blanks = []

    def prepare_stages(local_stages: Sequence[Stage]) -> None:
        blanks.append(_materialize_stages(module, local_stages, [device for _ in local_stages]))
        _move_stages(local_stages, [device for _ in local_stages])

    share = build_process_share(prospect, found, placement, process.rank, device, prepare_stages)
    here = [s for s in share.partition.stages if placement[s.index] == process.rank]
    _move_stages(
        here, [device for _ in here]
    )  # a copy that a stage had for a draft was moved for it
    places = {process.rank: process.device}
    return PlacedPartition(
        share.partition, places, placement, share.tied_tensors, share.tied_names, *blanks
    )


def count_stages(stages: int | Sequence[int]) -> int:
    """How many stages are asked for."""
    number = stages if isinstance(stages, int) else len(stages)
    if number < 1:
        raise ArgumentError(f"stages={stages}: a pipe has at least one stage")
    return number


def _materialize_stages(
    module: nn.Module, stages: Sequence[Stage], devices: Sequence[torch.device]
) -> UninitializedTensors:
    """To what was built on meta of these stages."""
    named = zip(stages, devices, strict=True)
    layers = [
        (name, layer, device)
        for stage, device in named
        for name, layer in zip(stage.names, stage.layers, strict=True)
    ]
    return materialize(module, layers)


def _move_stages(stages: Sequence[Stage], devices: Sequence[torch.device]) -> None:
    """Each layer to its stage's device; what several share, to that of the first."""
    settled: set[Tensor] = set()
    for stage, device in zip(stages, devices, strict=True):
        for layer in stage.layers:
            held = {*list_module_tensors(layer)}
            if any(t.device != device for t in held - settled):
                if held & settled:
                    layer._apply(lambda t, to=device: t if t in settled else t.to(to))
                else:
                    layer.to(device)
            settled.update(list_module_tensors(layer))
            settled.update(p.grad for p in layer.parameters() if p.grad is not None)


def _list_default_devices(ranks: int) -> list[str]:
    """GPUs where there are enough, else the CPU several times over."""
    if torch.cuda.is_available():
        if torch.cuda.device_count() < ranks:
            raise ArgumentError(
                f"{ranks} ranks need {ranks} GPUs, and {torch.cuda.device_count()} are here: give "
                f"devices=, such as penstock.virtual_devices('cuda:0', {ranks})"
            )
        return [f"cuda:{rank}" for rank in range(ranks)]
    return ["cpu"] * ranks


def _choose_layer_counts(
    module: nn.Sequential,
    stages: int | Sequence[int],
    request: SplitRequest,
    profiling_device: Device,
) -> Sequence[int]:
    if not isinstance(stages, int):
        if request.balance is not None:
            raise ArgumentError(
                f"stages={list(stages)} already says where to cut: leave balance out, or give "
                f"stages={len(stages)}"
            )
        check_cut(stages, len(module))
        return stages
    wanted = request.balance or ("parameters" if request.example is None else "time")
    if wanted not in BALANCE_MODES:
        raise ArgumentError(f"balance is one of {', '.join(BALANCE_MODES)}, not '{wanted}'")
    if stages == 1:
        return (len(module),)
    if wanted == "parameters":
        return balance_costs([parameter_bytes(layer) for layer in module], stages)
    if request.example is None:
        raise ArgumentError(f"balance='{wanted}' measures the layers: give example=, a batch")
    if has_meta_tensors(module):
        raise ArgumentError(
            f"balance='{wanted}' runs the layers, and the model was built on meta: balance by "
            "parameters, or give the layers of each stage, as in stages=[2, 3]"
        )
    example = request.example if isinstance(request.example, tuple) else (request.example,)
    unpack = isinstance(module, PipeSequential)
    layers, device = list(module), profiling_device.device
    with profiling_device.activate():
        if wanted == "time":
            costs = measure_layer_times(layers, example, unpack=unpack, device=device)
        else:
            costs = measure_layer_bytes(
                layers, example, unpack=unpack, chunks=request.chunks, device=device
            )
    return balance_costs(costs, stages)


def describe_placement(placed_partition: PlacedPartition) -> list[str]:
    """Where each stage is, what jumps over stages, and what ranks share."""
    lines = []
    for stage in placed_partition.partition.stages:
        if placed_partition.is_local(stage.index):
            numbers = sum(p.numel() for layer in stage.layers for p in layer.parameters())
            lines.append(
                f"{stage} on {placed_partition.stage_device(stage.index)!r}, {numbers:,} parameters"
            )
        else:
            lines.append(
                f"{stage} in the process of rank {placed_partition.placement[stage.index]}"
            )
    how = placed_partition.partition.how
    routes = how.skip_routes if isinstance(how, SequentialLayout) else ()
    skips = Counter((key.name, src, dst) for key, src, dst in routes)
    for (name, src, dst), times in skips.items():
        lines.append(f"skip {name!r}: stage {src} to {dst}" + f", {times} times" * (times > 1))
    tied = describe_tied_parameters(placed_partition.local_stages, placed_partition.placement)
    tied += [
        f"{tie.name}: on ranks {', '.join(map(str, tie.ranks))}"
        for tie in placed_partition.tied_tensors
    ]
    return lines + [f"tied {tie}" for tie in tied]


# -------------------------------------------------------------------------------------------------
# `penstock.split`: a model cut, to be looked at before anything is made of it.
# -------------------------------------------------------------------------------------------------


def split(
    model: nn.Module,
    stages: int | Sequence[int],
    example: Any = None,
    *,
    chunks: int = 1,
    units: UnitSelector = None,
    balance: str | None = None,
    memory: float | Sequence[float] | None = None,
) -> Partition:
    """Cut a model as `Pipe` would with the same arguments. The model stays as and where it is.

    `example` is a batch: a tensor, a tuple of inputs, or a dict of inputs by name. What is said of
    values and activations is for one of its `chunks` micro-batches. `memory` are the bytes that a
    stage's device may have, or a list with those of each.

    >>> layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    >>> partition = split(layers, 2, torch.zeros(6, 4), balance="parameters")
    >>> partition.counts
    (2, 2)
    >>> print(partition)
    Sequential in 2 stages of 2 + 2 units, 130 parameters
    <BLANKLINE>
    stage  parameters  bytes  receives  sends  units
        0          40  160 B         -  192 B  0 to 1
        1          90  360 B     192 B      -  2 to 3
    <BLANKLINE>
    sends    stage 0 to 1: 1, 192 B
    largest  stage 1: 360 B of parameters, 1.38 times the mean
    advice   nothing was measured: parameters say little about time; cut by balance='time', with an
             example
    """
    check_model(model)
    check_chunks(chunks)
    wish = SplitRequest(stages, None, balance, example, chunks, units, memory)
    check_split_request(wish)
    tensor = next((t for t in (*model.parameters(), *model.buffers())), torch.empty(0))
    here = resolve_device("cpu" if tensor.is_meta else tensor.device)
    number = count_stages(stages)
    return partition_model(model, wish, stages, [here] * number, tuple(range(number)))

"""Cut a model and place its stages on devices: `place_model`, and `penstock.split`.

Four cases, by what the user gives:

| model | given | cut | stages go to |
|---|---|---|---|
| Sequential | neither `stages=` nor `devices=` | where the device changes | they stay |
| Sequential | `stages=` or `devices=` | by layers, balanced | one process, one device a rank |
| any other | `stages=` or `devices=`, `example=` | by units of the trace, balanced | the same |
| any | under torchrun | as above, decided by rank 0 | each process keeps its own stages |

`split` does the cutting alone and moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.config import check_chunks
from penstock.data_parallel.dtensor import find_all_mesh_groups, take_maximum
from penstock.device.accelerator import get_model_name, get_total_memory, list_accelerators
from penstock.device.device import Device, resolve_device
from penstock.errors import ArgumentError, PenstockTypeError
from penstock.model.cut import (
    BALANCE_MODES,
    ExampleMicrobatch,
    ResourceLimits,
    build_process_share,
    check_not_lazy,
    cut_model,
    decide_cut,
    find_cut_within,
    trace_with_enough_units,
)
from penstock.model.describe import measure_transfer_bytes
from penstock.model.example_hints import check_example, explained_example
from penstock.model.meta_init import UninitializedTensors, has_meta_tensors, materialize
from penstock.model.outside_state import preserve_outside_state
from penstock.model.partition import Partition
from penstock.model.profiler import ExampleLoss, OutputLoss, measure_layer_bytes, profile_layers
from penstock.model.sequential import (
    PipeSequential,
    check_model,
    cut_sequential,
    group_by_device,
    is_plain_sequential,
    list_module_tensors,
)
from penstock.model.tied import (
    TiedTensor,
    describe_tied_parameters,
    find_tied_names,
    find_tied_tensors,
)
from penstock.model.traced.build_stages import TracedModel
from penstock.model.traced.traced_partition import UnitCost
from penstock.model.traced.units import UnitSelector, parameter_bytes
from penstock.planning.profile import DeviceProfile, resolve_memory
from penstock.schedules.balance import (
    DeviceCapacity,
    balance_costs,
    check_cut,
    count_in_flight,
)
from penstock.schedules.ir import Schedule, StageGraph
from penstock.schedules.lowering import (
    Recomputation,
    recompute,
    recompute_mode,
    resolve_recomputation,
)
from penstock.schedules.registry import (
    ScheduleFactory,
    ScheduleLike,
    choose_placement,
    default_stages_per_rank,
    resolve_schedule,
)
from penstock.stage.stage import Stage
from penstock.tracebacks import entry_point

# The bytes that ranks may use: a number, a text such as "24GB" or "90%", a fraction of the device
# from 0 to 1, or one of these for each rank.
MemoryCap = float | str | Sequence[float | str] | None

# ---- conversions of a pipe -----------------------------------------------------------------------
#
# The stages of a pipe stay on the devices that they were placed on. `pipe.to(dtype)` and other
# casts are allowed, and so is a move to where all stages are already. Everything that would move a
# tensor to another device is refused.


def check_keeps_device(tensor_function: Any, devices: Iterable[Device]) -> None:
    """Raise if a function for `Module._apply` moves tensors to another device.

    If a module that contains the pipe is moved, PyTorch calls `pipe._apply` with a function that
    cannot be inspected. So this check calls the function with an empty tensor on each device.
    """
    for device in devices:
        try:
            moved = tensor_function(torch.empty(0, device=device.device)).device != device.device
        except (RuntimeError, AssertionError):  # a move to a device that this machine does not have
            moved = True
        if moved:
            raise build_move_error()


def build_move_error() -> PenstockTypeError:
    """Return the error for an attempt to move a pipe."""
    return PenstockTypeError(
        "the stages of a pipe stay on their devices, so it cannot be moved. Make another Pipe "
        "with other devices. (Casting is allowed, as in pipe.to(torch.float16).)"
    )


# ---- cutting and placing -------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacedPartition:
    """A partition whose stages have ranks and devices.

    In one process `devices` has an entry for every rank. Under torchrun it has one, for the rank of
    this process.
    """

    partition: Partition
    devices: Mapping[int, Device]  # by rank
    placement: tuple[int, ...]  # the rank of each stage
    tied_tensors: tuple[TiedTensor, ...] = ()  # shared with ranks in other processes
    tied_names: Mapping[str, str] = field(default_factory=dict)  # second names of tied tensors
    uninitialized_tensors: UninitializedTensors = field(default_factory=UninitializedTensors)
    memory: tuple[float, ...] = ()  # the bytes that each rank may use; empty if nothing was said

    @cached_property
    def stage_devices(self) -> dict[int, torch.device]:
        """The devices of the stages that this process computes, by stage."""
        ranks = enumerate(self.placement)
        return {s: self.devices[rank].device for s, rank in ranks if rank in self.devices}

    @cached_property
    def local_stages(self) -> tuple[Stage, ...]:
        """The stages that this process computes."""
        return tuple(self.partition.stages[stage] for stage in self.stage_devices)

    @property
    def communicating_ranks(self) -> frozenset[tuple[int, int]]:
        """The pairs of ranks that send messages to each other, in both orders."""
        return self.find_communicating_ranks(self.partition.graph)

    def find_communicating_ranks(self, graph: StageGraph) -> frozenset[tuple[int, int]]:
        """Return the pairs of ranks that send messages to each other under another stage graph."""
        ranks = [(self.placement[src], self.placement[dst]) for src, dst in graph.edges]
        return frozenset(p for a, b in ranks if a != b for p in ((a, b), (b, a)))


@dataclass(frozen=True)
class ProcessContext:
    """The rank of this process among the processes of a pipe.

    `broadcast_from_first_rank(function)` calls the function on rank 0 (of the first replica) and
    returns its result on every rank. A decision that depends on measurements must be made once, or
    ranks would cut the model in different places. With `measures_together`, the function runs on
    rank 0 of every replica, because the layers may communicate between replicas.
    """

    rank: int
    ranks: int
    device: Device
    broadcast_from_first_rank: Callable[[Callable[[], Sequence[Any]]], Any]
    measures_together: bool = False


@dataclass(frozen=True)
class SplitRequest:
    """The arguments of `Pipe` that say how to split the model; None if left out.

    `reserved` are bytes of each rank that the cut must leave free. `build_loss` returns the loss of
    the first micro-batch of the example, by the number of micro-batches.
    """

    stages: int | Sequence[int] | None
    devices: Sequence[Any] | None
    balance: str | None
    example: Any
    chunks: int
    units: UnitSelector = None
    memory: MemoryCap = None
    checkpoint: Recomputation = "except_last"
    schedule: str | Schedule | None = None
    reserved: tuple[float, ...] = ()
    build_loss: ExampleLoss | None = None

    @property
    def loss(self) -> OutputLoss | None:
        """The loss of an output of the example's first micro-batch, if there is one."""
        return None if self.build_loss is None else self.build_loss(self.chunks)


def place_model(
    module: nn.Module, request: SplitRequest, process: ProcessContext | None = None
) -> PlacedPartition:
    """Cut a model into stages and place them on devices, as the table at the top says."""
    check_split_request(module, request)
    # Under torchrun the rank of a process gives its device, wherever the layers are now.
    if process is not None:
        return _place_across_processes(module, request, process)
    if request.stages is None and request.devices is None:
        if request.balance is not None or request.example is not None:
            raise ArgumentError(
                "balance and example say how to cut, but without stages= or devices= the layers "
                "stay where they are. Pass one of these, too."
            )
        if not is_plain_sequential(module):
            raise ArgumentError(
                f"{type(module).__name__} is not an nn.Sequential, so example= is needed, a batch "
                "to trace its forward with, as in Pipe(model, example=batch). stages= sets the "
                "number of stages, which is planned otherwise"
            )
        return _keep_user_placement(module, request)
    return _place_as_requested(module, request)


def check_split_request(module: nn.Module, request: SplitRequest) -> None:
    """Raise if `stages` or `devices` has the wrong type, or an option does not apply."""
    stages, devices = request.stages, request.devices
    if is_plain_sequential(module) and request.units is not None:
        raise ArgumentError(
            "units= does not apply to an nn.Sequential, whose layers are its units and which is "
            "cut by stages= and balance=. Leave it out, or pass balance='memory'."
        )
    if request.memory is not None and request.example is None:
        raise ArgumentError(
            "memory= is a cap on what a step needs, which is measured on a batch. Pass one as "
            "example=."
        )
    if isinstance(stages, bool | float | str):
        raise ArgumentError(
            f"stages must be a number of stages, or a list with the number of layers of each "
            f"stage, not {stages!r}"
        )
    if isinstance(request.balance, list | tuple):
        raise ArgumentError(
            f"balance is what the cut balances: 'time', 'memory' or 'parameters'. The number of "
            f"layers of each stage is called stages={list(request.balance)}."
        )
    if isinstance(devices, str | torch.device):
        raise ArgumentError(
            f"devices must be a list with one device for each rank, such as ['{devices}', "
            f"'{devices}'], not '{devices}'. Without devices, the ranks use the GPUs of this "
            "machine, or the CPU."
        )
    if isinstance(devices, int):
        raise ArgumentError(
            f"devices must be a list with one device for each rank, not their number, {devices}. "
            f"Write stages={devices} and leave devices out to use the GPUs of this machine, or the "
            "CPU."
        )
    if devices is not None and not len(devices):
        raise ArgumentError("devices is empty. Pass at least one device, or leave it out.")


def _keep_user_placement(module: nn.Sequential, request: SplitRequest) -> PlacedPartition:
    """Cut a Sequential where the device of its layers changes; each device is a rank."""
    counts, stage_devices = group_by_device(list(module))
    rank_devices = list(dict.fromkeys(stage_devices))
    devices = dict(enumerate(map(resolve_device, rank_devices)))
    placement = tuple(rank_devices.index(device) for device in stage_devices)
    resolve_recomputation(request.checkpoint, len(placement), request.chunks)
    caps = resolve_memory_caps(request.memory, list(devices.values()))
    return PlacedPartition(cut_sequential(module, counts), devices, placement, memory=caps)


def resolve_memory_caps(memory: MemoryCap, rank_devices: Sequence[Device]) -> tuple[float, ...]:
    """Return the bytes that each rank may use, or an empty tuple if the user did not say."""
    if memory is None:
        return ()
    return resolve_memory(memory, [describe_device(device) for device in rank_devices])


def describe_device(device: Device) -> DeviceProfile:
    """Return the kind and the memory of a device. Virtual GPUs of one size are of one kind."""
    kind = get_model_name(device.device)
    multiprocessors = getattr(device, "sms", None)
    if multiprocessors is not None:
        kind = f"{kind}, {multiprocessors} multiprocessors"
    return DeviceProfile(kind, get_total_memory(device.device))


def _place_as_requested(module: nn.Module, request: SplitRequest) -> PlacedPartition:
    """Cut and place a model in one process, by `stages=` and `devices=`."""
    schedule = request.schedule
    # An interleaved or V schedule has several stages a rank, and so several stages a device.
    per_rank = default_stages_per_rank(schedule)
    stages = request.stages
    if stages is None:
        assert request.devices is not None
        stages = len(request.devices) * per_rank
    num_stages = count_stages(stages)
    ranks = -(-num_stages // per_rank)  # rounded up
    rank_devices = tuple(map(resolve_device, request.devices or list_default_devices(ranks)))
    placement = choose_placement(schedule, len(rank_devices), num_stages)
    resolve_recomputation(request.checkpoint, num_stages, request.chunks)
    devices = [rank_devices[rank].device for rank in placement]
    partition = partition_model(
        module, request, stages, [rank_devices[rank] for rank in placement], placement
    )
    # Memory first: `Module.to` cannot copy a tensor out of `meta`.
    uninitialized = _materialize_stages(module, partition.stages, devices)
    _move_stages(partition.stages, devices)
    return PlacedPartition(
        partition,
        dict(enumerate(rank_devices)),
        placement,
        memory=resolve_memory_caps(request.memory, rank_devices),
        uninitialized_tensors=uninitialized,
    )


def partition_model(
    module: nn.Module,
    request: SplitRequest,
    stages: int | Sequence[int],
    stage_devices: Sequence[Device],
    placement: tuple[int, ...],
) -> Partition:
    """Cut a model into stages for these devices, without moving anything."""
    if not is_plain_sequential(module):
        limits = _build_resource_limits(
            request, stage_devices, placement, nearest=request.memory is not None
        )
        on_one_device = len({device.device for device in stage_devices}) == 1
        limits = replace(limits, on_one_device=on_one_device)
        example = ExampleMicrobatch.from_batch(request.example, request.chunks)
        # Units are measured on the compute stream of the device, as those of a Sequential are.
        with stage_devices[0].activate():
            return cut_model(
                module, stages, example, request.units, request.balance, limits, request.loss
            )
    cut = _choose_layer_counts(module, stages, request, stage_devices, placement)
    partition = cut_sequential(module, cut.counts, cut.costs)
    if request.example is None:
        return partition
    # For the report only. Without an example the sizes stay unknown.
    sizes = measure_transfer_bytes(module, partition.stages, request.example, request.chunks)
    return replace(partition, outline=partition.outline.with_transfer_bytes(sizes))


def _build_resource_limits(
    request: SplitRequest,
    stage_devices: Sequence[Device],
    placement: tuple[int, ...],
    measured_together: bool = False,
    nearest: bool = False,
) -> ResourceLimits:
    """Return the limits of a cut, with the micro-batches that the schedule keeps in flight."""
    schedule = ScheduleFactory(request.schedule, placement)(request.chunks)
    wanted = resolve_recomputation(request.checkpoint, len(placement), request.chunks)
    schedule = recompute(schedule, recompute_mode(wanted, request.chunks))
    devices = [stage_devices[placement.index(rank)] for rank in range(max(placement) + 1)]
    caps = resolve_memory_caps(request.memory, devices)
    # Without a cap, the cut fits the memory of the devices; that of the CPU is not counted.
    caps = caps or tuple(describe_device(device).memory for device in devices)
    if request.reserved:
        pairs = zip(caps, request.reserved, strict=True)
        caps = tuple(max(cap - reserved, 1.0) for cap, reserved in pairs)
    return ResourceLimits(
        tuple(device.device for device in stage_devices),
        count_in_flight(schedule),
        placement,
        caps,
        measured_together,
        nearest,
        schedule=schedule,
    )


def _place_across_processes(
    module: nn.Module,
    request: SplitRequest,
    process: ProcessContext,
) -> PlacedPartition:
    """Cut a model on all processes alike, and keep the stages of this process.

    The stages of other ranks become remote stages, which have names and no layers.
    """
    schedule = request.schedule
    stages = (
        process.ranks * default_stages_per_rank(schedule)
        if request.stages is None
        else request.stages
    )
    placement = choose_placement(schedule, process.ranks, count_stages(stages))
    resolve_recomputation(request.checkpoint, len(placement), request.chunks)
    if not is_plain_sequential(module):
        return _place_traced_across_processes(module, request, stages, placement, process)

    def choose() -> tuple[Sequence[int], list[tuple[Any, ...]] | None]:
        cut = _choose_layer_counts(
            module,
            stages,
            request,
            [process.device for _ in placement],
            placement,
            process.measures_together,
            nearest=False,
        )
        return cut.counts, None if cut.costs is None else list(map(astuple, cut.costs))

    counts, rows = process.broadcast_from_first_rank(choose)
    costs = None if rows is None else [UnitCost(*row) for row in rows]
    whole = cut_sequential(module, counts, costs)
    # Tied tensors are found by identity, so they are looked up while all stages are still here and
    # before materialization and moving, which replace tensors.
    ties = find_tied_tensors(whole.stages, placement, process.rank)
    names = find_tied_names(module)
    local_stages = [stage for stage in whole.stages if placement[stage.index] == process.rank]
    devices = [process.device.device for _ in local_stages]
    uninitialized = _materialize_stages(module, local_stages, devices)
    _move_stages(local_stages, devices)
    stages_here = [stage if stage in local_stages else stage.as_remote() for stage in whole.stages]
    partition = replace(whole, stages=tuple(stages_here))
    return PlacedPartition(
        partition, {process.rank: process.device}, placement, ties, names, uninitialized
    )


def _place_traced_across_processes(
    module: nn.Module,
    request: SplitRequest,
    stages: int | Sequence[int],
    placement: tuple[int, ...],
    process: ProcessContext,
) -> PlacedPartition:
    """Trace a model on all processes, and keep the units of this process.

    Every process traces the forward itself. Rank 0 measures and chooses the cut for all.
    """
    example, device = (
        ExampleMicrobatch.from_batch(request.example, request.chunks),
        process.device.device,
    )
    if not isinstance(example, TracedModel):
        example = trace_with_enough_units(module, example, request.units, len(placement), device)
    traced_model, limits = (
        example.rebind_to(module),
        _build_resource_limits(
            request,
            [process.device for _ in placement],
            placement,
            process.measures_together,
        ),
    )
    decided_cut = process.broadcast_from_first_rank(
        lambda: decide_cut(traced_model, stages, request.balance, limits, request.loss)
    )
    uninitialized = []

    def prepare_stages(local_stages: Sequence[Stage]) -> None:
        uninitialized.append(
            _materialize_stages(module, local_stages, [device for _ in local_stages])
        )
        _move_stages(local_stages, [device for _ in local_stages])

    partition, ties, tied_names = build_process_share(
        traced_model, decided_cut, placement, process.rank, device, prepare_stages
    )
    # `prepare_stages` moved the layers of the draft stages. The final stages have new copies of
    # some modules, which are moved now.
    local_stages = [s for s in partition.stages if placement[s.index] == process.rank]
    _move_stages(local_stages, [device for _ in local_stages])
    devices = {process.rank: process.device}
    return PlacedPartition(partition, devices, placement, ties, tied_names, uninitialized[0])


def count_stages(stages: int | Sequence[int]) -> int:
    """Return the number of stages that `stages=` asks for."""
    count = stages if isinstance(stages, int) else len(stages)
    if count < 1:
        raise ArgumentError(f"stages={stages}: a pipe has at least one stage")
    return count


def _materialize_stages(
    module: nn.Module, stages: Sequence[Stage], devices: Sequence[torch.device]
) -> UninitializedTensors:
    """Give memory to the layers of these stages that were built on `meta`."""
    layers = [
        (name, layer, device)
        for stage, device in zip(stages, devices, strict=True)
        for name, layer in zip(stage.names, stage.layers, strict=True)
    ]
    return materialize(module, layers)


def _move_stages(stages: Sequence[Stage], devices: Sequence[torch.device]) -> None:
    """Move each layer to its stage's device; a shared tensor goes to the first one's device.

    `layer.to` would move a tensor that an earlier stage shares a second time, and replace it in
    this layer alone, which ends the tie. So tensors that were placed before are left out.
    """
    placed: set[Tensor] = set()
    for stage, device in zip(stages, devices, strict=True):
        for layer in stage.layers:
            tensors = {*list_module_tensors(layer)}
            if any(t.device != device for t in tensors - placed):
                if tensors & placed:
                    layer._apply(lambda t, to=device: t if t in placed else t.to(to))
                else:
                    layer.to(device)
            placed.update(list_module_tensors(layer))
            # `Module._apply` converts gradients, too. Those of placed parameters must stay.
            placed.update(p.grad for p in layer.parameters() if p.grad is not None)


def list_default_devices(ranks: int) -> list[torch.device]:
    """Return a GPU for each rank, or the CPU for all ranks on a machine without GPUs."""
    gpus = list_accelerators()
    if not gpus:
        return [torch.device("cpu")] * ranks
    if len(gpus) < ranks:
        raise ArgumentError(
            f"{ranks} ranks need {ranks} GPUs, but this machine has {len(gpus)}. Pass devices=, "
            f"such as penstock.virtual_devices('cuda:0', {ranks})."
        )
    return gpus[:ranks]


class _LayerCut(NamedTuple):
    """The number of layers of each stage of a Sequential, and what each layer costs, if known."""

    counts: Sequence[int]
    costs: Sequence[UnitCost] | None = None


def _choose_layer_counts(
    module: nn.Sequential,
    stages: int | Sequence[int],
    request: SplitRequest,
    stage_devices: Sequence[Device],
    placement: tuple[int, ...],
    measured_together: bool = False,
    nearest: bool = True,
) -> _LayerCut:
    """Choose the number of layers of each stage of a Sequential."""
    if not isinstance(stages, int):
        if request.balance is not None:
            raise ArgumentError(
                f"stages={list(stages)} already says where to cut, so balance does not apply. "
                f"Leave balance out, or give stages={len(stages)}."
            )
        check_cut(stages, len(module))
        return _LayerCut(stages)
    # An example is given to be measured with. Without one, only parameters can be compared.
    balance = request.balance or ("parameters" if request.example is None else "time")
    if balance not in BALANCE_MODES:
        raise ArgumentError(f"balance must be one of {', '.join(BALANCE_MODES)}, not '{balance}'")
    if stages == 1:
        return _LayerCut((len(module),))
    if balance == "parameters":
        check_not_lazy(module)
        return _LayerCut(balance_costs([parameter_bytes(layer) for layer in module], stages))
    if request.example is None:
        raise ArgumentError(
            f"balance='{balance}' measures the layers on a batch. Pass one as example=."
        )
    if has_meta_tensors(module):
        raise ArgumentError(
            f"balance='{balance}' runs the layers, but the model was built on meta. Use "
            "balance='parameters', or give the layers of each stage, as in stages=[2, 3]."
        )
    example = request.example if isinstance(request.example, tuple) else (request.example,)
    unpack = isinstance(module, PipeSequential)
    layers, device = list(module), stage_devices[0].device
    # Layers that communicate with other processes run equally often on all of them: see `cut.py`.
    peers = find_all_mesh_groups(module.parameters())
    is_joint = bool(peers) or measured_together
    limit = {"runs": 5, "timeout": inf} if is_joint else {}
    # On the compute stream of the device: a virtual GPU has only some of the multiprocessors.
    with stage_devices[0].activate():
        if balance == "memory":
            costs = measure_layer_bytes(
                layers, example, unpack=unpack, chunks=request.chunks, device=device
            )
            return _LayerCut(balance_costs(take_maximum([costs], peers, device)[0], stages))
        profiles = profile_layers(
            layers,
            example,
            unpack=unpack,
            chunks=request.chunks,
            device=device,
            loss=request.loss,
            **limit,
        )
    rows = take_maximum(list(map(astuple, profiles)), peers, device)
    profiles = [UnitCost(f, i, w, int(activation), int(size)) for f, i, w, activation, size in rows]
    if request.memory is None and len(set(placement)) == stages:
        counts = balance_costs([profile.seconds for profile in profiles], stages)
        return _LayerCut(counts, profiles)
    limits = _build_resource_limits(request, stage_devices, placement, measured_together, nearest)
    capacities = tuple(DeviceCapacity(memory=memory) for memory in limits.memory)
    return _LayerCut(find_cut_within(limits, profiles, capacities), profiles)


def describe_placement(placed_partition: PlacedPartition) -> list[str]:
    """Return lines of text on the device of each stage, the skips, and the tied parameters."""
    lines = []
    devices, placement = placed_partition.devices, placed_partition.placement
    for stage in placed_partition.partition.stages:
        rank = placement[stage.index]
        if rank in devices:
            count = sum(p.numel() for layer in stage.layers for p in layer.parameters())
            lines.append(f"{stage} on {devices[rank]!r}, {count:,} parameters")
        else:
            lines.append(f"{stage} in the process of rank {rank}")
    lines += placed_partition.partition.describe_skips()
    tied = describe_tied_parameters(placed_partition.local_stages, placement)
    tied += [
        f"{tie.name}: on ranks {', '.join(map(str, tie.ranks))}"
        for tie in placed_partition.tied_tensors
    ]
    return lines + [f"tied {tie}" for tie in tied]


# ---- penstock.split ------------------------------------------------------------------------------


@entry_point
def split(
    model: nn.Module,
    stages: int | Sequence[int],
    example: Any = None,
    *,
    chunks: int = 1,
    units: UnitSelector = None,
    balance: str | None = None,
    memory: MemoryCap = None,
    schedule: ScheduleLike = None,
    checkpoint: Recomputation = "except_last",
) -> Partition:
    """Cut a model as `Pipe` would with the same arguments, without changing or moving it.

    Use it to look at a cut before you make a pipe: `print` the result, or `draw` it.

    Args:
        model: Any module. An `nn.Sequential` is cut between its layers.
        stages: The number of stages, or a list with the number of units of each.
        example: A batch: a tensor, a tuple of inputs, or a dict of inputs by name. Needed for a
            model that is not an `nn.Sequential`, and to balance by time or memory.
        chunks: The number of micro-batches. Sizes of transfers and activations are those of one
            micro-batch.
        units: The submodules that are never cut: a path, a class, a function of name and module,
            or a list of these. Left out, Penstock chooses.
        balance: "time", "memory" or "parameters".
        memory: The bytes that the device of each stage may use, such as 16e9 or "16GB", or a list
            with one entry a stage. The cut keeps to it as far as the profile of the units can tell.
        schedule: With `memory`, the schedule, which says how many micro-batches a stage keeps.
        checkpoint: With `memory`, which micro-batches are recomputed.

    Returns:
        The partition.

    Raises:
        ArgumentError: If the arguments contradict each other, or no such cut exists.
        PenstockTypeError: If the model cannot be cut because of its type.
        CutError: If the model's forward cannot be cut.

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
    advice   nothing was measured, and parameters say little about time: use balance='time' and an
             example
    """
    check_model(model)
    check_chunks(chunks)
    check_example(example)
    request = SplitRequest(
        stages,
        None,
        balance,
        example,
        chunks,
        units,
        memory,
        checkpoint,
        resolve_schedule(schedule),
    )
    check_split_request(model, request)
    # Nothing is moved, so the units are measured where the model is.
    tensor = next((t for t in (*model.parameters(), *model.buffers())), torch.empty(0))
    device = resolve_device("cpu" if tensor.is_meta else tensor.device)
    count = count_stages(stages)
    ranks = -(-count // default_stages_per_rank(request.schedule))  # rounded up
    placement = choose_placement(request.schedule, ranks, count)
    with explained_example(model, example), preserve_outside_state(model):
        return partition_model(model, request, stages, [device] * count, placement)

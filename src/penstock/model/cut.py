"""Cut a model that is not an `nn.Sequential`: trace it, choose the cut, build the stages.

    example batch
        | ExampleMicrobatch.from_batch     the first micro-batch of the batch
    micro-batch
        | trace_with_enough_units          run the forward once; units are the smallest parts
    TracedModel
        | choose_unit_counts               measure the units, search for the best cut
    units of each stage
        | cut_model                        assign every operation to a stage, build the stages
    Partition

A cut is always between two calls of units, in the order in which the forward calls them. Under
torchrun each process builds its own stages only (`build_process_share`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.data_parallel.dtensor import find_all_mesh_groups, take_maximum
from penstock.device.accelerator import get_model_name, is_accelerator
from penstock.errors import ArgumentError, CutError, PenstockError, PenstockTypeError
from penstock.microbatch import scatter
from penstock.model.describe import describe_traced_model
from penstock.model.huggingface import (
    build_default_kwargs,
    find_planned_units,
    install_output_hooks,
)
from penstock.model.isolation import preserve_rng
from penstock.model.partition import Partition
from penstock.model.profiler import ModuleCall, OutputLoss, profile_call, profile_calls
from penstock.model.tied import TiedTensor, find_tied_names, find_tied_tensors
from penstock.model.traced.assignment import TraceAssignment
from penstock.model.traced.build_stages import (
    TracedModel,
    assign_calls,
    build_draft_stages,
    build_partition,
)
from penstock.model.traced.dry_run import make_dummy_tensor
from penstock.model.traced.local_model import LocalMembers, build_local_model
from penstock.model.traced.trace import NodeKind, Trace, ValueRef
from penstock.model.traced.trace_model import trace_expanding_units
from penstock.model.traced.trace_tail import TraceTail
from penstock.model.traced.traced_partition import CutSummary, StageOwnership, UnitCost
from penstock.model.traced.units import UnitSelector, has_layer_list, is_expandable, parameter_bytes
from penstock.nested_values import unflatten
from penstock.schedules.balance import (
    CutProblem,
    DeviceCapacity,
    UnitLoad,
    UnitOutput,
    balance_costs,
    check_cut,
    even_out_ranks,
    find_best_cut,
    find_nearest_cut,
)
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Schedule
from penstock.schedules.lowering import lower
from penstock.schedules.timeline import simulate
from penstock.stage.stage import Stage
from penstock.torch_compat import is_compiled_wrapper

# ---- choosing the cut ----------------------------------------------------------------------------
#
# balance="time"        measure every unit, then search for the cut whose slowest stage takes the
#                       least time, transfers included, and that fits the memory of the devices; if
#                       ranks have several stages, also for one with even ranks, and simulate both
# balance="memory"      measure every unit, and even out the bytes of the stages
# balance="parameters"  measure nothing, and even out the bytes of the parameters
#
# Units of a tensor-parallel model communicate with other processes in every run. These processes
# measure together: each of them the same number of runs, and then they agree on the costs, so that
# they cut their parts of the model alike.

BALANCE_MODES = ("time", "memory", "parameters")

MeasurementT = TypeVar("MeasurementT")

# A GPU sends about 20 GB/s over PCIe. Ranks on the CPU, or on one GPU, share memory, so there a
# transfer is free.
_SECONDS_PER_BYTE = 1 / 20e9


@dataclass(frozen=True)
class ResourceLimits:
    """The devices and the memory that a cut has to fit.

    `devices` and `in_flight` (micro-batches whose activations are kept at once) have one entry for
    each stage, and `placement` is the rank of each stage. `memory` is the number of bytes that each
    rank may use. `measured_together` says that other processes may measure the same units at the
    same time. With `nearest`, a cut that needs a little too much is better than an error: the
    caller measures what it really needs. With `on_one_device`, the ranks share its memory. If ranks
    have several stages, two cuts are simulated under the `schedule`.
    """

    devices: tuple[torch.device, ...]
    in_flight: tuple[int, ...]
    placement: tuple[int, ...]
    memory: tuple[float, ...]
    measured_together: bool = False
    nearest: bool = False
    on_one_device: bool = False
    schedule: Schedule | None = None

    @property
    def rank_devices(self) -> list[torch.device]:
        """The device of each rank."""
        ranks = range(max(self.placement) + 1)
        return [self.devices[self.placement.index(rank)] for rank in ranks]


def choose_unit_counts(
    traced_model: TracedModel,
    stages: int | Sequence[int],
    balance: str | None,
    limits: ResourceLimits,
    loss: OutputLoss | None = None,
) -> tuple[Sequence[int], list[UnitCost]]:
    """Return how many calls of units each stage takes, and the costs if they were measured."""
    calls = traced_model.calls
    if not isinstance(stages, int):
        if balance is not None:
            raise ArgumentError(
                f"stages={list(stages)} already says where to cut, so balance does not apply. "
                f"Leave balance out, or give stages={len(stages)}."
            )
        check_cut(stages, len(calls))
        return stages, []
    balance = balance or "time"
    if balance not in BALANCE_MODES:
        raise ArgumentError(f"balance must be one of {', '.join(BALANCE_MODES)}, not '{balance}'")
    units = [traced_model.units[call.unit] for call in calls]
    # With one stage there is nothing to choose, so nothing is measured.
    if balance == "parameters" or stages == 1:
        return balance_costs(list(map(parameter_bytes, units)), stages), []
    with preserve_rng():
        unit_calls = list(build_unit_calls(traced_model))
    # Every unit is measured on the first device. `measure_devices` finds out how much faster or
    # slower devices of another model are.
    peers = find_all_mesh_groups(traced_model.model.parameters())
    timeout = inf if peers or limits.measured_together else 0.5
    costs = profile_calls(unit_calls, limits.devices[0], timeout)
    tail = measure_tail(
        traced_model.trace, loss, lambda calls: profile_calls(calls, limits.devices[0], timeout)
    )
    for cost in tail:
        costs[-1] = costs[-1].with_loss(cost.forward, cost.input_grad)
    cost_rows = take_maximum(list(map(astuple, costs)), peers, limits.devices[0])
    costs = [
        UnitCost(f, i, w, int(activation), int(size)) for f, i, w, activation, size in cost_rows
    ]
    # The first stage keeps the most micro-batches in flight. Which stage a unit goes to is not
    # known yet, so every unit counts as if it were there.
    if balance == "memory":
        return balance_costs(
            [c.resident_bytes + c.activation_bytes * limits.in_flight[0] for c in costs], stages
        ), costs
    devices = tuple(measure_devices(limits, unit_calls, costs, timeout))
    values = tuple(find_unit_transfers(traced_model.trace))
    return find_cut_within(limits, costs, devices, values), costs


def measure_tail(
    trace: Trace,
    loss: OutputLoss | None,
    measure: Callable[[list[ModuleCall]], list[MeasurementT]],
) -> list[MeasurementT]:
    """Measure the operations after the last unit, which are mostly the loss.

    Returns:
        What `measure` returns for one call of them. Nothing if there is no loss, or if it cannot be
        measured.
    """
    call = build_tail_call(trace, loss)
    if call is None:
        return []
    try:
        return measure([call])
    # Some operations do not accept the values that they are measured with. Then only the units
    # count: a cut that is a little less even is better than none.
    except Exception:
        return []


def build_tail_call(trace: Trace, loss: OutputLoss | None) -> ModuleCall | None:
    """Return a call of the operations after the last unit, to measure it. None without a loss."""
    tail = TraceTail(trace, loss)
    if not tail.can_run:
        return None
    with preserve_rng():
        return tail, tail.make_arguments(), {}


def find_cut_within(
    limits: ResourceLimits,
    costs: Sequence[UnitCost],
    devices: tuple[DeviceCapacity, ...],
    values: tuple[UnitOutput, ...] = (),
) -> tuple[int, ...]:
    """Return the number of units of each stage, within the memory of the devices."""
    sends_copies = is_accelerator(limits.devices[0]) and not limits.on_one_device
    problem = CutProblem(
        tuple(UnitLoad(c.seconds, c.resident_bytes, c.activation_bytes) for c in costs),
        devices,
        values,
        placement=limits.placement,
        in_flight=limits.in_flight,
        seconds_per_byte=_SECONDS_PER_BYTE if sends_copies else 0.0,
    )
    try:
        return _choose_faster_cut(problem, find_best_cut(problem), costs, limits.schedule)
    except ArgumentError:
        if not limits.nearest:
            raise
        # If not even the parameters fit, this raises: there is nothing to measure.
        static = tuple(replace(unit, activation_bytes=0) for unit in problem.units)
        find_best_cut(replace(problem, units=static))
        return find_nearest_cut(problem)


def _choose_faster_cut(
    problem: CutProblem,
    counts: tuple[int, ...],
    costs: Sequence[UnitCost],
    schedule: Schedule | None,
) -> tuple[int, ...]:
    """Return the cut, or the one with even ranks if the schedule is simulated to be faster with it.

    With several stages a rank, the slowest stage does not decide alone, nor does the slowest rank.
    """
    if schedule is None or len(set(problem.placement)) == problem.stages:
        return counts
    even = even_out_ranks(problem, counts)
    if even == counts:
        return counts
    program = lower(schedule)

    def simulate_cut(counts: tuple[int, ...]) -> float:
        ends = list(accumulate(counts))
        stages = [costs[end - count : end] for count, end in zip(counts, ends, strict=True)]
        F, I, W = (
            tuple(sum(getattr(cost, part) for cost in stage) for stage in stages)
            for part in ("forward", "input_grad", "weight_grad")
        )
        return simulate(program, Cost(F, I, W, activation=(0.0,) * len(counts))).makespan

    return min((counts, even), key=simulate_cut)


def build_unit_calls(traced_model: TracedModel) -> Iterator[ModuleCall]:
    """Yield each call of a unit with arguments to measure it.

    Tensors have the shape and dtype that they have in the trace, and synthetic values, because
    units are traced on fake tensors. Integer tensors that come from the inputs (lengths, indices)
    have the values of the example: many units fail with others.
    """
    trace = traced_model.trace
    for node_index in trace.unit_call_indices:
        node = trace.nodes[node_index]
        refs, spec = node.arg_template
        leaves = [
            _build_argument(trace, ref.value) if isinstance(ref, ValueRef) else ref for ref in refs
        ]
        args, kwargs = unflatten(leaves, spec)
        yield traced_model.units[node.func.unit], args, kwargs


def _build_argument(trace: Trace, value: int) -> Tensor:
    integers = trace.unit_integer_inputs.get(value)
    return make_dummy_tensor(trace.values[value].tensor_spec) if integers is None else integers


def find_unit_transfers(trace: Trace) -> Iterator[UnitOutput]:
    """Yield the values that one unit computes and later units use, with their bytes.

    The search for a cut knows units only, so every operation between units counts as part of one:
    the last unit among those that computed its inputs. An operation that depends on the inputs of
    the model alone is computed wherever it is needed and belongs to no unit.
    """
    call_numbers = {node: number for number, node in enumerate(trace.unit_call_indices)}
    unit_of_node: dict[int, int] = {}  # by index of the node: the number of a call of a unit
    users: dict[int, set[int]] = {}  # by index of the value: the calls that use it
    for node_index, node in enumerate(trace.nodes):
        producers = [trace.values[value].producer for value in node.inputs]
        earlier_units = [unit_of_node[index] for index in producers if index in unit_of_node]
        if node.kind is NodeKind.UNIT:
            unit_of_node[node_index] = call_numbers[node_index]
        elif earlier_units and not node.input_only:
            unit_of_node[node_index] = max(earlier_units)
        for value in node.inputs if node_index in unit_of_node else ():
            users.setdefault(value, set()).add(unit_of_node[node_index])
    for value in trace.output.value_indices:  # the outputs are needed on the last stage
        users.setdefault(value, set()).add(len(call_numbers) - 1)
    for value, using_units in users.items():
        producer = trace.values[value].producer
        src = unit_of_node.get(-1 if producer is None else producer)
        dsts = tuple(sorted(dst for dst in using_units if src is not None and dst > src))
        if src is not None and dsts:
            spec = trace.values[value].tensor_spec
            # A value that requires grad crosses the cut twice: its gradient comes back.
            yield UnitOutput(src, dsts, spec.nbytes * (2 if spec.requires_grad else 1))


def measure_devices(
    limits: ResourceLimits, calls: Sequence[ModuleCall], costs: Sequence[UnitCost], timeout: float
) -> Iterator[DeviceCapacity]:
    """Yield the speed and the memory of each rank's device.

    Speeds are relative to the first device. A device of another model runs the costliest unit once
    more to compare; devices of one model count as equally fast.
    """
    slowest = max(range(len(costs)), key=lambda number: costs[number].seconds)
    speeds: dict[str, float] = {get_model_name(limits.devices[0]): 1.0}
    for device, memory in zip(limits.rank_devices, limits.memory, strict=True):
        if get_model_name(device) not in speeds:
            seconds = profile_call(*calls[slowest], device, timeout=timeout).seconds
            speeds[get_model_name(device)] = costs[slowest].seconds / seconds
        yield DeviceCapacity(speeds[get_model_name(device)], memory)


# ---- tracing and cutting -------------------------------------------------------------------------


@dataclass(frozen=True)
class ExampleMicrobatch:
    """The arguments of one call of the model's forward."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @staticmethod
    def from_batch(batch: Any, chunks: int) -> ExampleMicrobatch | TracedModel:
        """Return the first micro-batch of a batch: a tensor, a tuple of inputs or a dict of them.

        A `TracedModel` in place of the batch is returned as it is, so that a model that was
        traced before need not be traced again.
        """
        if isinstance(batch, TracedModel):
            return batch
        if batch is None:
            raise ArgumentError(
                "a model that is not an nn.Sequential is cut along its forward, which has to be "
                "traced once. Pass a batch as example=: a tensor, a tuple of inputs, or a dict of "
                "inputs by name."
            )
        is_mapping = isinstance(batch, Mapping)
        kwargs: dict[str, Any] = dict(batch) if is_mapping else {}
        args = () if is_mapping else batch if isinstance(batch, tuple) else (batch,)
        names = [*(f"input {index}" for index in range(len(args))), *kwargs]
        # Split as a call of the pipe splits its inputs, so that the trace has the same shapes.
        microbatches, _ = scatter((*args, *kwargs.values()), chunks, names)
        values = microbatches[0]
        return ExampleMicrobatch(
            values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True))
        )


def trace_with_enough_units(
    model: nn.Module,
    example: ExampleMicrobatch,
    unit_selector: UnitSelector,
    stages: int,
    device: torch.device,
) -> TracedModel:
    """Trace the model, with at least as many calls of units as stages.

    A model of three large blocks has three units, which are too few for four stages. Units are then
    expanded into their children, and the model is traced again, until there are enough.
    """
    _check_traceable(model)
    # Before tracing, because the hooks are part of what is traced.
    install_output_hooks(model)
    kwargs = {**build_default_kwargs(model, example.kwargs), **example.kwargs}
    unit_selector = find_planned_units(model) if unit_selector is None else unit_selector
    expanded: set[str] = set()
    while True:
        try:
            trace, constants, units = trace_expanding_units(
                model, unit_selector, example.args, kwargs, device, expanded
            )
        except Exception as error:
            if not isinstance(error, PenstockError):
                error.add_note("This happened while Penstock traced the model on the example.")
            raise
        traced_model = TracedModel(model, units, trace, constants, (example.args, kwargs))
        calls = traced_model.calls
        if len(calls) >= stages:
            return traced_model
        more = _choose_units_to_open(units)
        if not more:
            if not calls and units:
                raise ArgumentError(
                    f"the forward does not call any of its units ({', '.join(list(units)[:4])}, "
                    "...) through the model. It may reach them through a global variable, or "
                    "through a function that was compiled or made before. Call them as attributes "
                    "(self.blocks), or remove torch.compile from the forward."
                )
            raise ArgumentError(
                f"stages={stages} needs at least {stages} calls of units, but the model has "
                f"{len(calls)}: {', '.join(map(str, calls)) or 'none'}. Use fewer stages, or name "
                "more submodules as units with units=."
            )
        expanded |= more


def _choose_units_to_open(units: Mapping[str, nn.Module]) -> set[str]:
    """Return the units to expand next: all that contain lists of layers, else the largest one."""
    # The elements of a list are usually equal blocks, which make an even cut possible. A unit
    # without lists may have to be cut within a block, so only one of them is expanded at a time.
    lists = {name for name, unit in units.items() if has_layer_list(unit)}
    if lists:
        return lists
    sizes = {n: parameter_bytes(u) for n, u in units.items() if is_expandable(u)}
    return {max(sizes, key=lambda name: sizes[name])} if sizes else set()


def cut_model(
    model: nn.Module,
    stages: int | Sequence[int],
    example: ExampleMicrobatch | TracedModel,
    unit_selector: UnitSelector,
    balance: str | None,
    limits: ResourceLimits,
    loss: OutputLoss | None = None,
) -> Partition:
    """Trace a model and cut it into one stage for each entry of `limits.devices`.

    `stages` is the number of stages, or a list with the calls of units of each. `loss` is the loss
    of the output, unless the model computes it.
    """
    count = len(limits.devices)
    if isinstance(example, TracedModel):
        traced_model = example.rebind_to(model)
    else:
        traced_model = trace_with_enough_units(
            model, example, unit_selector, count, limits.devices[0]
        )
    counts, costs = choose_unit_counts(traced_model, stages, balance, limits, loss)
    ownership, assignment = assign_calls(traced_model, counts)
    summary = CutSummary(tuple(traced_model.calls), tuple(counts), assignment, costs)
    outline = describe_traced_model(traced_model, ownership, summary)
    return build_partition(
        traced_model, ownership, summary, outline, dict(enumerate(limits.devices))
    )


def _check_traceable(model: nn.Module) -> None:
    # The tracer sees calls of Python functions, and compiled code makes none.
    if is_compiled_wrapper(model) or isinstance(model, torch.jit.ScriptModule):
        raise PenstockTypeError(
            f"the model is compiled as a whole ({type(model).__name__}), so its forward cannot be "
            "traced. Pass the model itself, and compile its blocks."
        )
    check_not_lazy(model)


def check_not_lazy(model: nn.Module) -> None:
    """Raise if a parameter or buffer has no shape yet."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ArgumentError(
                f"'{name}' has no shape yet, because its module is lazy. Call the model once on a "
                "batch before you make the Pipe."
            )


# ---- one process of several ----------------------------------------------------------------------
#
# every rank   traces the model on the example
# rank 0       `decide_cut`: measures units and chooses the cut, and sends it to all ranks. Rank 0
#              of every replica measures if the units may communicate between replicas.
# every rank   `build_process_share`:
#                1. draft all stages, to see which ranks share tensors
#                2. allocate and move the tensors of its own stages
#                3. build a local model: its own units, and remote units without memory
#                4. build its own stages from the local model; all others are remote stages


def decide_cut(
    traced_model: TracedModel,
    stages: int | Sequence[int],
    balance: str | None,
    limits: ResourceLimits,
    loss: OutputLoss | None = None,
) -> list[Any]:
    """Choose the cut for all processes, as plain values that can be sent.

    Returns the number of calls of units of each stage, the names of the calls in order, and the
    cost of each call.
    """
    counts, costs = choose_unit_counts(traced_model, stages, balance, limits, loss)
    cost_rows = [list(astuple(cost)) for cost in costs]
    return [list(counts), [str(call) for call in traced_model.calls], cost_rows]


def build_process_share(
    traced_model: TracedModel,
    decided_cut: Sequence[Any],
    placement: Sequence[int],
    rank: int,
    device: torch.device,
    prepare_stages: Callable[[Sequence[Stage]], None],
) -> tuple[Partition, tuple[TiedTensor, ...], dict[str, str]]:
    """Build the stages of this process from the cut that rank 0 decided.

    `prepare_stages` allocates the tensors of these stages and moves them to the device. Returns the
    partition, the tensors that ranks in other processes share, and the second names of tied
    tensors in the whole model.
    """
    counts, names, cost_rows = decided_cut
    ownership, assignment = _apply_decided_cut(traced_model, counts, names)
    # Tied tensors are found by identity, and the local model below has proxies in place of
    # most tensors. So this builds drafts of all stages first, from the complete model.
    devices = dict.fromkeys(range(len(counts)), device)
    parents = traced_model.find_parents()
    drafts = build_draft_stages(traced_model, ownership, assignment, devices, parents)
    ties = find_tied_tensors(drafts, placement, rank)
    tied_names = find_tied_names(traced_model.model)
    local_devices = {stage: device for stage in devices if placement[stage] == rank}
    prepare_stages([drafts[stage] for stage in local_devices])
    members = _find_local_state(traced_model, ownership, assignment, local_devices, tied_names)
    local_model = build_local_model(traced_model.model, traced_model.units, members, device)
    local_trace = replace(traced_model, model=local_model.model, units=local_model.units)
    costs = [UnitCost(*row) for row in cost_rows]
    summary = CutSummary(tuple(traced_model.calls), tuple(counts), assignment, costs)
    outline = describe_traced_model(traced_model, ownership, summary)
    remote_stages = {stage.index: stage.as_remote() for stage in drafts}
    partition = build_partition(
        local_trace, ownership, summary, outline, local_devices, local_model, remote_stages
    )
    # A draft and the stage that is built from it have equal trees of modules.
    built_modules = {
        before: after
        for index in local_devices
        for draft, built in zip(drafts[index].layers, partition.stages[index].layers, strict=True)
        for before, after in zip(draft.modules(), built.modules(), strict=True)
    }
    return partition, tuple(tie.relocate(built_modules) for tie in ties), tied_names


def _apply_decided_cut(
    traced_model: TracedModel, counts: Sequence[int], call_names: Sequence[str]
) -> tuple[StageOwnership, TraceAssignment]:
    """Assign the calls to stages in the order of rank 0.

    The order may differ here, because some models iterate over sets. The calls must be the same.
    """
    calls = {str(call): call for call in traced_model.calls}
    if calls.keys() != set(call_names):
        additional = ", ".join(sorted(calls.keys() - set(call_names))[:4]) or "none"
        missing = ", ".join(sorted(set(call_names) - calls.keys())[:4]) or "none"
        raise CutError(
            "the model calls different units on this rank than on rank 0. Additional calls: "
            f"{additional}. Missing calls: {missing}. Build the same model on every rank, and "
            "pass the same example."
        )
    return assign_calls(traced_model, counts, [calls[name] for name in call_names])


def _find_local_state(
    traced_model: TracedModel,
    cut: StageOwnership,
    division: TraceAssignment,
    local_devices: Mapping[int, torch.device],
    tied_names: Mapping[str, str],
) -> LocalMembers:
    """Return the names of the units, parameters and buffers that the local stages need."""
    local_stages = set(local_devices)
    units = [name for name, owners in cut.unit_owners.items() if local_stages & set(owners)]
    # Parents are the modules around the units. Their direct parameters have owners of their own.
    parent_parameters = {
        name
        for path, module in traced_model.find_parents().items()
        for key in module._parameters
        if local_stages
        & cut.parameter_owners.get(name := f"{path}.{key}" if path else key, frozenset())
    }
    used = {name for name, users in division.parameter_users.items() if local_stages & users}
    written_elsewhere = [
        name for name, stage in cut.buffer_writers.items() if stage not in local_stages
    ]
    return LocalMembers(
        units, parent_parameters | used, written_elsewhere, division.buffer_readers, tied_names
    )

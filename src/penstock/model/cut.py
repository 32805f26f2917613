"""Any module cut into stages: traced on an example, and cut between the calls of its units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.errors import ArgumentError, PenstockTypeError
from penstock.microbatch import scatter
from penstock.model.describe import describe_traced_model
from penstock.model.huggingface import (
    build_default_kwargs,
    find_planned_units,
    install_output_hooks,
)
from penstock.model.partition import Partition
from penstock.model.profiler import ModuleCall, profile_call, profile_calls
from penstock.model.traced.build_stages import TracedModel, assign_calls, build_stages
from penstock.model.traced.pytrees import unflatten
from penstock.model.traced.remote_tensor import TensorSpec
from penstock.model.traced.trace import NodeKind, Trace, ValueRef
from penstock.model.traced.trace_model import trace_expanding_units
from penstock.model.traced.traced_partition import CutSummary, UnitCost
from penstock.model.traced.units import UnitSelector, has_layer_list, is_expandable, parameter_bytes
from penstock.schedules.balance import balance_costs, find_best_cut
from penstock.schedules.balance_problem import (
    CutProblem,
    DeviceCapacity,
    UnitLoad,
    UnitOutput,
    check_cut,
)
from penstock.schedules.ir import StageGraph

# -------------------------------------------------------------------------------------------------
# Where to cut a traced model: its units are measured, and the best of all cuts is taken.
# -------------------------------------------------------------------------------------------------

BALANCE_MODES = ("time", "memory", "parameters")
_SECONDS_PER_BYTE = 1 / 20e9  # between GPUs, about what PCIe does; on one host's memory, nothing


@dataclass(frozen=True)
class ResourceLimits:
    """What there is to compute with: a device and the micro-batches in flight for each stage.

    `placement` is the rank of each stage. `memory` are the bytes that each rank may have; left out,
    what a GPU has, or no bound.
    """

    devices: tuple[torch.device, ...]
    in_flight: tuple[int, ...]
    placement: tuple[int, ...]
    memory: float | Sequence[float] | None = None

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
) -> tuple[Sequence[int], list[UnitCost]]:
    """How many calls of units each stage takes, and what was measured for that."""
    calls = traced_model.calls
    if not isinstance(stages, int):
        if balance is not None:
            raise ArgumentError(
                f"stages={list(stages)} already says where to cut: leave balance out, or give "
                f"stages={len(stages)}"
            )
        check_cut(stages, len(calls))
        return stages, []
    balance = balance or "time"
    if balance not in BALANCE_MODES:
        raise ArgumentError(f"balance is one of {', '.join(BALANCE_MODES)}, not '{balance}'")
    units = [traced_model.units[call.unit] for call in calls]
    if balance == "parameters" or stages == 1:
        return balance_costs(list(map(parameter_bytes, units)), stages), []
    made = list(build_unit_calls(traced_model))
    costs = profile_calls(made, limits.devices[0])
    if balance == "memory":
        return balance_costs(
            [c.resident_bytes + c.activation_bytes * limits.in_flight[0] for c in costs], stages
        ), costs
    task = CutProblem(
        tuple(UnitLoad(c.seconds, c.resident_bytes, c.activation_bytes) for c in costs),
        tuple(measure_devices(limits, made, costs)),
        tuple(find_unit_transfers(traced_model.trace)),
        placement=limits.placement,
        in_flight=limits.in_flight,
        seconds_per_byte=_SECONDS_PER_BYTE if limits.devices[0].type == "cuda" else 0.0,
    )
    return find_best_cut(task).counts, costs


def build_unit_calls(traced_model: TracedModel) -> Iterator[ModuleCall]:
    """Each call of a unit with arguments that look like its own; most of their numbers are any.

    Lengths and indices are those of the example: with others a unit may not run.
    """
    trace = traced_model.trace
    for at in trace.unit_call_indices:
        step = trace.nodes[at]
        refs, spec = step.arg_template
        leaves = [
            _build_argument(trace, ref.value) if isinstance(ref, ValueRef) else ref for ref in refs
        ]
        args, kwargs = unflatten(leaves, spec)
        yield traced_model.units[step.func.unit], args, kwargs


def _build_argument(trace: Trace, value: int) -> Tensor:
    told = trace.unit_integer_inputs.get(value)
    return _synthesize_argument(trace.values[value].tensor_spec) if told is None else told


def find_unit_transfers(trace: Trace) -> Iterator[UnitOutput]:
    """What goes from unit to unit. An operation between units is at the last that it follows."""
    order = {at: number for number, at in enumerate(trace.unit_call_indices)}
    home: dict[int, int] = {}  # of steps: the number of a call
    users: dict[int, set[int]] = {}
    for at, step in enumerate(trace.nodes):
        makers = [trace.values[value].producer for value in step.inputs]
        follows = [home[maker] for maker in makers if maker in home]
        if step.kind is NodeKind.UNIT:
            home[at] = order[at]
        elif follows and not step.input_only:
            home[at] = max(follows)
        for value in step.inputs if at in home else ():
            users.setdefault(value, set()).add(home[at])
    for value in trace.output.value_indices:
        users.setdefault(value, set()).add(len(order) - 1)
    for value, found in users.items():
        src = home.get(-1 if (maker := trace.values[value].producer) is None else maker)
        dsts = tuple(sorted(dst for dst in found if src is not None and dst > src))
        if src is not None and dsts:
            look = trace.values[value].tensor_spec
            yield UnitOutput(src, dsts, look.nbytes * (2 if look.requires_grad else 1))


def measure_devices(
    limits: ResourceLimits, calls: Sequence[ModuleCall], costs: Sequence[UnitCost]
) -> Iterator[DeviceCapacity]:
    """How fast each is, measured by the costliest unit, if they are of several kinds."""
    memory = limits.memory
    _check_memory(memory)
    devices = limits.rank_devices
    count = len(devices)
    bounds = list(memory) if isinstance(memory, Sequence) else [memory] * count
    if len(bounds) != count:
        raise ArgumentError(
            f"memory has {len(bounds)} entries, and there are {count} ranks: give the bytes of "
            "each rank's device, or one number for all"
        )
    at = max(range(len(costs)), key=lambda number: costs[number].seconds)
    speeds: dict[str, float] = {_device_model(limits.devices[0]): 1.0}
    for device, bound in zip(devices, bounds, strict=True):
        if _device_model(device) not in speeds:
            seconds = profile_call(*calls[at], device).seconds
            speeds[_device_model(device)] = costs[at].seconds / seconds
        yield DeviceCapacity(
            speeds[_device_model(device)],
            _default_memory_limit(device) if bound is None else float(bound),
        )


def _check_memory(memory: Any) -> None:
    given = (
        list(memory) if isinstance(memory, Sequence) and not isinstance(memory, str) else [memory]
    )
    for one in given:
        number = isinstance(one, int | float) and not isinstance(one, bool)
        if one is not None and not (number and one > 0):
            raise ArgumentError(
                f"memory is a number of bytes above 0, such as 16e9, or a list with one for each "
                f"rank, not {memory!r}"
            )


def _device_model(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _default_memory_limit(device: torch.device) -> float:
    if device.type != "cuda":
        return inf
    return float(torch.cuda.get_device_properties(device).total_memory)


def _synthesize_argument(spec: TensorSpec) -> Tensor:
    """Numbers that every unit can take: small ones, no. 0, true."""
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        return (torch.randn(spec.shape).to(spec.dtype) * 0.1).requires_grad_(spec.requires_grad)
    made = torch.ones if spec.dtype is torch.bool else torch.zeros
    return made(spec.shape, dtype=spec.dtype)


# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExampleMicrobatch:
    """A micro-batch: what a model's forward is called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @staticmethod
    def from_batch(batch: Any, chunks: int) -> ExampleMicrobatch | TracedModel:
        """The first micro-batch of a batch: a tensor, a tuple of inputs, or a dict of them.

        What was traced with one already is as good.
        """
        if isinstance(batch, TracedModel):
            return batch
        if batch is None:
            raise ArgumentError(
                "a model that is no nn.Sequential is cut along its forward, which is run once for "
                "that: give example=, a batch: a tensor, a tuple of inputs, or a dict of inputs "
                "by name"
            )
        args: tuple[Any, ...] = batch if isinstance(batch, tuple) else (batch,)
        if isinstance(batch, Mapping):
            args, named = (), dict(batch)
        else:
            named = {}
        names = [*(f"input {at}" for at in range(len(args))), *named]
        pieces, _ = scatter((*args, *named.values()), chunks, names)
        first = pieces[0]
        return ExampleMicrobatch(
            first[: len(args)], dict(zip(named, first[len(args) :], strict=True))
        )


def trace_with_enough_units(
    model: nn.Module,
    example: ExampleMicrobatch,
    unit_selector: UnitSelector,
    stages: int,
    device: torch.device,
) -> TracedModel:
    """The model traced; units are opened until there are enough of them."""
    _check_traceable(model)
    install_output_hooks(model)
    kwargs = {**build_default_kwargs(model, example.kwargs), **example.kwargs}
    unit_selector = find_planned_units(model) if unit_selector is None else unit_selector
    opened: set[str] = set()
    while True:
        trace, constants, units = trace_expanding_units(
            model, unit_selector, example.args, kwargs, device, opened
        )
        found = TracedModel(model, units, trace, constants, (example.args, kwargs))
        if len(found.calls) >= stages:
            return found
        more = _choose_units_to_open(units)
        if not more:
            raise ArgumentError(
                f"stages={stages}, and the model has {len(found.calls)} calls of units to be "
                f"dealt out, {', '.join(map(str, found.calls)) or 'none'}: take fewer stages, or "
                "say with units= what else is one"
            )
        opened |= more


def _choose_units_to_open(units: Mapping[str, nn.Module]) -> set[str]:
    """Those with lists inside first; the largest otherwise."""
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
) -> Partition:
    """As many stages as devices."""
    count = len(limits.devices)
    if isinstance(example, TracedModel):
        prospect = example.rebind_to(model)
    else:
        prospect = trace_with_enough_units(model, example, unit_selector, count, limits.devices[0])
    counts, costs = choose_unit_counts(prospect, stages, balance, limits)
    cut, division = assign_calls(prospect, counts)
    survey = CutSummary(tuple(prospect.calls), tuple(counts), division, costs)
    made, whole = build_stages(prospect, cut, survey, dict(enumerate(limits.devices)))
    graph = StageGraph.chain(count, division.edges)
    return Partition(tuple(made), graph, whole, describe_traced_model(prospect, cut, survey))


def _check_traceable(model: nn.Module) -> None:
    if "_orig_mod" in model._modules or isinstance(model, torch.jit.ScriptModule):
        raise PenstockTypeError(
            f"the model is compiled as a whole ({type(model).__name__}), so that its forward "
            "cannot be followed: give the model itself, and compile its blocks"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ArgumentError(
                f"'{name}' has no shape yet, as its module is a lazy one: call the model once on a "
                "batch, and then make the Pipe"
            )

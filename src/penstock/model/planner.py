"""`penstock.plan`: profile a model, search for the fastest plan, and apply one to a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import accumulate, pairwise
from math import isinf
from os import PathLike
from typing import Any

import torch
from torch import nn

from penstock.device.accelerator import list_accelerators
from penstock.device.device import Device, resolve_device
from penstock.display import Progress, shown_progress
from penstock.errors import ArgumentError, PenstockError, PenstockTypeError
from penstock.model.example_hints import check_example, explained_example
from penstock.model.model_profile import profile_model, resolve_optimizer, trace_for_plan
from penstock.model.outside_state import preserve_outside_state
from penstock.model.placement import (
    MemoryCap,
    SplitRequest,
    describe_device,
    list_default_devices,
)
from penstock.model.profiler import bind_target
from penstock.model.sequential import check_model, is_plain_sequential
from penstock.model.traced.units import UnitSelector
from penstock.planning.plan import Plan
from penstock.planning.profile import PerRows, UnitProfile, UnitSeconds, resolve_memory
from penstock.planning.search import search_plan
from penstock.planning.search_space import check_schedule_names
from penstock.schedules.bound import Objective
from penstock.schedules.cost import Cost
from penstock.schedules.families import FAMILIES, make
from penstock.schedules.ir import Schedule
from penstock.tracebacks import entry_point

_ACCELERATOR_SHARE = 0.9  # of its memory: libraries and the audit of the first step need some, too
# Stages keep a little more than the profile of their units tells: gradients between I and W,
# losses, messages. The search leaves this much of a cap free if it can. The pipe measures the rest.
_SEARCH_SHARE = 0.95


@dataclass(frozen=True, repr=False)
class ModelPlan(Plan):
    """A plan with what is needed to run it in this process: the example and the devices."""

    example: Any = field(default=None, compare=False)
    target: Any = field(default=None, compare=False)
    model_devices: tuple[Device, ...] = field(default=(), compare=False)
    units: UnitSelector = field(default=None, compare=False)


@entry_point
def plan(
    model: nn.Module,
    example: Any,
    *,
    devices: int | Sequence[Any] | None = None,
    memory: MemoryCap = None,
    optimizer: str | float | torch.optim.Optimizer | type[torch.optim.Optimizer] = "adamw",
    target: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    units: UnitSelector = None,
    objective: Objective = "makespan",
    chunks: int | Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
    solver_seconds: float = 10.0,
    progress: Progress | bool | None = None,
) -> ModelPlan:
    """Choose cut, placement, schedule, micro-batches, recomputation and runtime for a model.

    The units of the model are measured on the devices, without moving or changing the model. The
    search then finds the fastest plan under the memory cap, and says how far it is from the best.

    Args:
        model: An `nn.Sequential`, or any other module.
        example: A batch of the size to train with: a tensor, a tuple of inputs, or a dict of inputs
            by name.
        devices: The devices, or their number. By default all GPUs, or without any, one rank for
            each thread that PyTorch uses.
        memory: The cap of each rank, as for `Pipe`. By default 90% of the memory of a GPU.
        optimizer: The optimizer, its class or its name, such as "adamw" or "sgd"; or the bytes of
            its state per byte of gradients.
        target: The target of the example, with which a pipe checks the memory exactly.
        loss_fn: The loss of the output and the target, or of the output alone. The last unit is
            measured with it: with a large vocabulary, the loss takes as long as several layers.
        units: For a traced model, the submodules that are never cut.
        objective: "makespan" for the seconds of one step by itself, "period" for steps that follow
            each other.
        chunks: The number of micro-batches, or those to try.
        schedules: The names of the schedules to try.
        solver_seconds: How long the exact solver may run, if `ortools` is installed.
        progress: True to show a bar, in a notebook or a terminal; or a function that is called with
            what is being done and the fraction that is done.

    Returns:
        The plan, for `Pipe(model, plan=plan)`. Print it to see why.

    Raises:
        ArgumentError: If an argument is invalid, or nothing fits the memory.
        CutError: If the model's forward cannot be cut.

    >>> layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> found = plan(layers, torch.zeros(8, 4), devices=2, chunks=4, schedules=["1f1b"])
    >>> found.schedule_name, found.chunks, len(found.cut)
    ('1f1b', 4, 2)
    """
    check_model(model)
    if example is None:
        raise ArgumentError("a plan needs measurements. Pass a batch as example=.")
    check_example(example)
    rank_devices = list_planned_devices(devices)
    if memory is None and list_accelerators():
        memory = _ACCELERATOR_SHARE
    # Mistakes are found before the measurements, which take seconds or minutes.
    optimizer_factor = resolve_optimizer(optimizer)
    caps = resolve_memory(memory, list(map(describe_device, rank_devices)))
    if schedules is not None:
        check_schedule_names(schedules)

    with shown_progress(progress) as shown:

        def report(what: str, fraction: float, start: float, share: float) -> None:
            if shown is not None:
                shown(what, start + share * fraction)

        with explained_example(model, example), preserve_outside_state(model, loss_fn):
            profile = profile_model(
                model,
                example,
                rank_devices,
                units=units,
                optimizer_factor=optimizer_factor,
                loss=None if loss_fn is None else partial(bind_target, loss_fn, target),
                progress=lambda what, fraction: report(what, fraction, 0.0, 0.5),
            )
        search = partial(
            search_plan,
            profile,
            objective=objective,
            chunks=[chunks] if isinstance(chunks, int) else chunks,
            schedules=schedules,
            solver_seconds=solver_seconds,
            progress=lambda what, fraction: report(what, fraction, 0.5, 0.5),
        )
        try:
            chosen_plan = search(memory=[cap * _SEARCH_SHARE for cap in caps])
        except ArgumentError:
            chosen_plan = search(memory=caps)
    chosen_plan = replace(chosen_plan, memory=caps)
    return attach_model(chosen_plan, example, target, tuple(rank_devices), units)


def replan(
    current: Plan,
    measured: Cost,
    chunks: int | Sequence[int] | None,
    solver_seconds: float,
    progress: Progress | bool | None,
) -> tuple[Plan, Plan]:
    """Search again with measured seconds of the stages in place of the profile's.

    Returns the current plan with these seconds, and the new one. The units of a stage keep their
    proportions. A step may not show I and W apart, so both are corrected by one factor.
    """
    planned = current.costs.cost
    overhead = current.profile.runtimes[current.runtime]
    units = list(current.profile.units)
    ends = accumulate(current.cut, initial=0)
    for stage, (start, end) in enumerate(pairwise(ends)):
        forward = _get_ratio(measured.F[stage], planned.F[stage], overhead)
        backward = _get_ratio(
            measured.I[stage] + measured.W[stage],
            planned.I[stage] + planned.W[stage],
            2 * overhead,
        )
        for index in range(start, end):
            units[index] = _scale_unit(units[index], forward, backward)
    profile = replace(current.profile, units=tuple(units))
    before = current.with_profile(profile)
    with shown_progress(progress) as shown:
        after = search_plan(
            profile,
            memory=current.memory,
            objective=current.objective,
            chunks=[chunks] if isinstance(chunks, int) else chunks,
            solver_seconds=solver_seconds,
            progress=shown,
        )
    if before.seconds <= after.seconds:
        after = before
    if isinstance(current, ModelPlan):
        attached = current.example, current.target, current.model_devices, current.units
        after = attach_model(after, *attached)
    return before, after


def _get_ratio(measured: float, planned: float, overhead: float) -> float:
    """Return by how much the seconds of a stage are wrong, without what the runtime adds."""
    return max(measured - overhead, measured / 2) / max(planned - overhead, 1e-9)


def _scale_unit(unit: UnitProfile, forward: float, backward: float) -> UnitProfile:
    def scale(line: PerRows, factor: float) -> PerRows:
        return PerRows(line.fixed * factor, line.per_row * factor)

    return replace(
        unit,
        seconds={
            kind: UnitSeconds(
                scale(seconds.F, forward), scale(seconds.I, backward), scale(seconds.W, backward)
            )
            for kind, seconds in unit.seconds.items()
        },
    )


def attach_model(
    found: Plan, example: Any, target: Any, devices: tuple[Device, ...], units: UnitSelector
) -> ModelPlan:
    """Return a plan with what a pipe in this process needs."""
    values = {f.name: getattr(found, f.name) for f in fields(Plan)}
    return ModelPlan(**values, example=example, target=target, model_devices=devices, units=units)


def list_planned_devices(devices: int | Sequence[Any] | None) -> list[Device]:
    """Return the device of each rank: as given, all GPUs, or the CPU for each thread of PyTorch."""
    if isinstance(devices, bool | float | str | torch.device):
        raise ArgumentError(f"devices must be a number, or a list of devices, not {devices!r}")
    if devices is None:
        devices = list_accelerators() or torch.get_num_threads()
    if isinstance(devices, int):
        if devices < 1:
            raise ArgumentError(f"devices={devices}: a plan needs at least one device")
        devices = list_default_devices(devices)
    if not len(devices):
        raise ArgumentError("devices is empty. Pass at least one device, or leave it out.")
    return list(map(resolve_device, devices))


def resolve_plan(plan: Any) -> Plan | None:
    """Return a plan, loaded if it is the path of a file."""
    if plan is None or isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | PathLike):
        return Plan.load(plan)
    raise PenstockTypeError(
        f"plan must be a plan of penstock.plan, or the path of a saved one, not {plan!r}"
    )


def wants_plan(request: SplitRequest) -> bool:
    """Return whether the user gave a batch and did not say where to cut: then a plan does."""
    return (
        request.example is not None
        and request.stages is None
        and request.devices is None
        and request.balance is None
        and not isinstance(request.schedule, Schedule)
    )


def plan_for_request(module: nn.Module, request: SplitRequest, target: Any) -> ModelPlan:
    """Plan with the devices and the memory that are there, and with what the user said."""
    if request.checkpoint != "except_last":
        raise ArgumentError(
            "checkpoint= was given, but neither stages= nor devices=, so a plan decides what to "
            "recompute. Leave checkpoint out, or pass stages=."
        )
    return plan(
        module,
        request.example,
        memory=request.memory,
        target=target,
        units=request.units,
        chunks=None if request.chunks == 1 else request.chunks,
        schedules=None if request.schedule is None else [str(request.schedule)],
    )


def check_planned_options(request: SplitRequest) -> None:
    """Raise if the user gave an option that a plan decides."""
    decided = {"stages": None, "schedule": None, "balance": None, "memory": None}
    for name, default in {**decided, "chunks": 1, "checkpoint": "except_last"}.items():
        if getattr(request, name) != default:
            raise ArgumentError(
                f"{name}= does not apply with plan=, which has decided it. Leave it out, or make "
                "another plan."
            )


def build_planned_request(module: nn.Module, found: Plan, request: SplitRequest) -> SplitRequest:
    """Return the request that cuts and places a model in one process as the plan says.

    Raises an ArgumentError if the plan is for another model. `request` is what the user said beside
    the plan.
    """
    devices, example, units = request.devices, request.example, request.units
    if isinstance(found, ModelPlan):
        devices = devices or found.model_devices
        example = found.example if example is None else example
        units = found.units if units is None else units
    devices = list_default_devices(found.ranks) if devices is None else devices
    if len(devices) != found.ranks:
        raise ArgumentError(
            f"the plan is for {found.ranks} devices, but there are {len(devices)}. Plan again with "
            "these devices."
        )
    rank_devices = list(map(resolve_device, devices))
    cut_example = example
    if is_plain_sequential(module):
        found.check_model([name for name, _ in module.named_children()])
    elif example is None:
        raise ArgumentError(
            "the forward of this model has to be traced once, and a plan that was loaded has no "
            "batch. Pass one as example=, as in Pipe(model, plan=plan, example=batch)."
        )
    else:
        try:
            cut_example = trace_for_plan(module, example, found.chunks, units, rank_devices)
        except Exception as error:
            is_of_model = not isinstance(error, PenstockError | torch.OutOfMemoryError)
            if request.example is not None or not is_of_model:
                raise
            raise ArgumentError(
                f"this plan is for another model ({found.profile.model}), or its batch is for "
                f"another forward: {type(module).__name__} raises {type(error).__name__} with it "
                f"({error}). Make a plan for this model with penstock.plan, or pass a batch as "
                "example=."
            ) from error
        found.check_model(list(map(str, cut_example.calls)))
    return SplitRequest(
        list(found.cut),
        rank_devices,
        None,
        cut_example,
        found.chunks,
        units,
        None if all(map(isinf, found.memory)) or example is None else list(found.memory),
        list(found.recompute),
        get_planned_schedule(found),
    )


def build_process_request(
    module: nn.Module, found: Plan, request: SplitRequest, ranks: int
) -> SplitRequest:
    """Return the request that cuts a model over processes as the plan says."""
    check_planned_options(request)
    if ranks != found.ranks:
        raise ArgumentError(
            f"the plan is for {found.ranks} devices, but there are {ranks} ranks. Plan again for "
            "so many devices."
        )
    example = request.example
    if is_plain_sequential(module):
        found.check_model([name for name, _ in module.named_children()])
    elif example is None and isinstance(found, ModelPlan):
        example = found.example
    return replace(
        request,
        stages=list(found.cut),
        example=example,
        chunks=found.chunks,
        checkpoint=list(found.recompute),
        schedule=get_planned_schedule(found),
    )


def get_planned_schedule(found: Plan) -> str | Schedule:
    """Return the schedule of a plan: its name, with which it works for any number of micro-batches.

    A schedule that was searched has no name.
    """
    family = FAMILIES.get(found.schedule_name)
    if family is None or len(found.cut) % found.ranks:
        return found.schedule
    named = make(found.schedule_name, found.ranks, found.chunks, len(found.cut) // found.ranks)
    return found.schedule_name if named == found.schedule else found.schedule

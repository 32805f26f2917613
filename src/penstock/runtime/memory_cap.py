"""`memory=`: a placement in which no rank needs more bytes than its cap.

The profile of the units tells nearly what a cut needs: stages keep inputs, messages and gradients
beside the activations of their units. So each cut is measured, and while one needs too much, the
next one has to leave that many bytes free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil
from typing import Any

from torch import nn

from penstock.errors import ArgumentError
from penstock.model.placement import PlacedPartition, SplitRequest
from penstock.model.planner import (
    ModelPlan,
    attach_model,
    build_planned_request,
    check_planned_options,
    plan_for_request,
)
from penstock.planning.plan import Plan
from penstock.planning.search import search_plan
from penstock.runtime.memory_forecast import MemoryForecast
from penstock.schedules.ir import Schedule
from penstock.text_format import format_bytes

ADAM_STATE_FACTOR = 2.0  # two tensors of the size of each gradient
_MAX_CUTS = 8

Place = Callable[[SplitRequest], PlacedPartition]
ForecastMemory = Callable[[PlacedPartition, SplitRequest], MemoryForecast]


def place_within_memory(
    request: SplitRequest, place: Place, forecast_memory: ForecastMemory
) -> tuple[PlacedPartition, MemoryForecast]:
    """Return a placement that keeps to `request.memory`, and what it needs.

    Raises:
        ArgumentError: No cut was found that fits. The message says what is missing, and what would
            fit.
    """
    nearest: tuple[float, tuple[float, ...], MemoryForecast] | None = None
    measured: dict[tuple[int, ...], MemoryForecast] = {}
    attempt = request
    while len(measured) < _MAX_CUTS:
        try:
            placed = place(attempt)
        except ArgumentError:
            if nearest is None:  # not even the parameters fit
                raise
            break
        if placed.partition.counts in measured:
            break
        forecast = forecast_memory(placed, attempt)
        measured[placed.partition.counts] = forecast
        excess = forecast.find_excess(placed.memory)
        if not any(excess):
            return placed, forecast
        if nearest is None or max(excess) < nearest[0]:
            nearest = max(excess), placed.memory, forecast
        reserved = attempt.reserved or (0.0,) * len(excess)
        attempt = replace(
            attempt, reserved=tuple(a + b for a, b in zip(reserved, excess, strict=True))
        )
    assert nearest is not None
    _, caps, forecast = nearest
    raise ArgumentError(
        f"no cut fits the memory. In the nearest: {_describe_excess(forecast, caps)}. "
        f"{_describe_choices(request, place, forecast_memory, forecast, caps)}"
    )


def place_plan(
    module: nn.Module,
    request: SplitRequest,
    plan: Plan | None,
    place: Place,
    forecast_memory: Callable[..., MemoryForecast],
    target: Any,
) -> tuple[Plan, SplitRequest, PlacedPartition, MemoryForecast | None]:
    """Place a model as a plan says, or as a plan that is made here.

    A plan forecasts memory from the profile of its units. If the stages need more than that, a plan
    that is made here is searched again with so much less memory, and the user's plan is refused.

    Returns:
        The plan, the request that follows from it, the placement, and what it needs of a cap.
    """
    has_plan = plan is not None
    if plan is None:
        plan = plan_for_request(module, request, target)
    else:
        check_planned_options(request)
    caps = plan.memory
    for _ in range(_MAX_CUTS):
        planned = build_planned_request(module, plan, request)
        placed = place(planned)
        if planned.memory is None:
            return plan, planned, placed, None
        example = request.example
        if isinstance(plan, ModelPlan):
            example = plan.example if example is None else example
            target = plan.target if target is None else target
        forecast = forecast_memory(
            placed, planned, (example, target), plan.profile.optimizer_factor
        )
        excess = forecast.find_excess(caps)
        if not any(excess):
            return plan, planned, replace(placed, memory=caps), forecast
        if has_plan:
            raise ArgumentError(
                f"the plan needs more memory than its profile has told: "
                f"{_describe_excess(forecast, caps)}. Plan again with less memory."
            )
        tighter = [cap - size for cap, size in zip(plan.memory, excess, strict=True)]
        if min(tighter) <= 0:
            break
        searched = search_plan(plan.profile, memory=tighter, solver_seconds=0)
        assert isinstance(plan, ModelPlan)
        plan = attach_model(searched, plan.example, target, plan.model_devices, plan.units)
    raise ArgumentError(
        f"no plan fits the memory. In the nearest: {_describe_excess(forecast, caps)}."
    )


def _describe_excess(forecast: MemoryForecast, caps: tuple[float, ...]) -> str:
    """Return a sentence on the rank that lacks most."""
    excess = forecast.find_excess(caps)
    rank = max(range(len(caps)), key=excess.__getitem__)
    state = forecast.held[rank] + forecast.optimizer[rank]
    others = sum(map(bool, excess)) - 1
    return (
        f"rank {rank} would need {format_bytes(forecast.total[rank])} and may use "
        f"{format_bytes(caps[rank])}, which is {format_bytes(excess[rank])} too little: "
        f"{format_bytes(state)} are for parameters, gradients and the optimizer, and "
        f"{format_bytes(forecast.peak[rank])} for a step"
        + f" ({others} other ranks lack memory, too)"
        * bool(others)
    )


def _describe_choices(
    request: SplitRequest,
    place: Place,
    forecast_memory: ForecastMemory,
    forecast: MemoryForecast,
    caps: tuple[float, ...],
) -> str:
    """Return a sentence on what would fit. All but the last two choices are measured."""
    fitting = []
    for name, alternative in _list_alternatives(request):
        try:
            placed = place(alternative)
            needs = forecast_memory(placed, alternative)
        # The model may not accept what is tried: BatchNorm needs two rows. Then it is not advised,
        # and the user sees the error about the cap.
        except Exception:
            continue
        if not any(needs.find_excess(placed.memory)):
            fitting.append(f"{name} ({format_bytes(max(needs.total))})")
    half = replace(forecast, peak=tuple(ceil(size / 2) for size in forecast.peak))
    if not any(half.find_excess(caps)):
        fitting.append("half the batch")
    shares = [size / cap for size, cap in zip(forecast.total, caps, strict=True)]
    fitting.append(f"about {max(ceil(sum(shares)), len(caps) + 1)} devices")
    return f"What would fit: {', '.join(fitting)}."


def _list_alternatives(request: SplitRequest) -> Iterator[tuple[str, SplitRequest]]:
    frugal = replace(request, checkpoint="always")
    yield "checkpoint='always'", frugal
    if not isinstance(request.schedule, Schedule):
        if request.schedule != "1f1b":
            yield "schedule='1f1b'", replace(request, schedule="1f1b")
            yield "both", replace(frugal, schedule="1f1b")
        chunks = 2 * request.chunks
        yield f"chunks={chunks}", replace(request, chunks=chunks)
        yield f"chunks={chunks} and checkpoint='always'", replace(frugal, chunks=chunks)

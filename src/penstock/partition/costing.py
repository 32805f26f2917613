"""Where to cut a traced model: its units are measured, and the best of all cuts is taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from penstock import balance as balancing
from penstock.errors import ArgumentError
from penstock.partition.forward.absent import Look
from penstock.partition.forward.cutting import Prospect
from penstock.partition.forward.survey import UnitCost
from penstock.partition.forward.trace import Kind, Ref, Trace
from penstock.partition.forward.trees import unflatten
from penstock.partition.forward.units import parameter_bytes
from penstock.partition.measure import Call, measure, measure_each

BALANCES = ("time", "memory", "parameters")
_SECOND_A_BYTE = 1 / 20e9  # between GPUs, about what PCIe does; on one host's memory, nothing


@dataclass(frozen=True)
class Room:
    """What there is to compute with: a device and the micro-batches in flight for each stage.

    `placement` is the rank of each stage. `memory` are the bytes that each rank may have; left out,
    what a GPU has, or no bound.
    """

    devices: tuple[torch.device, ...]
    in_flight: tuple[int, ...]
    placement: tuple[int, ...]
    memory: float | Sequence[float] | None = None

    @property
    def by_rank(self) -> list[torch.device]:
        """The device of each rank."""
        ranks = range(max(self.placement) + 1)
        return [self.devices[self.placement.index(rank)] for rank in ranks]


def counts_of(
    prospect: Prospect, stages: int | Sequence[int], balance: str | None, room: Room
) -> tuple[Sequence[int], list[UnitCost]]:
    """How many calls of units each stage takes, and what was measured for that."""
    calls = prospect.calls
    if not isinstance(stages, int):
        if balance is not None:
            raise ArgumentError(
                f"stages={list(stages)} already says where to cut: leave balance out, or give "
                f"stages={len(stages)}"
            )
        balancing.check_cut(stages, len(calls))
        return stages, []
    balance = balance or "time"
    if balance not in BALANCES:
        raise ArgumentError(f"balance is one of {', '.join(BALANCES)}, not '{balance}'")
    units = [prospect.units[call.unit] for call in calls]
    if balance == "parameters" or stages == 1:
        return balancing.cut(list(map(parameter_bytes, units)), stages), []
    made = list(calls_of(prospect))
    costs = measure_each(made, room.devices[0])
    if balance == "memory":
        return balancing.cut([c.holds + c.keeps * room.in_flight[0] for c in costs], stages), costs
    task = balancing.Task(
        tuple(balancing.Unit(c.seconds, c.holds, c.keeps) for c in costs),
        tuple(devices_of(room, made, costs)),
        tuple(values_of(prospect.trace)),
        placement=room.placement,
        in_flight=room.in_flight,
        second_a_byte=_SECOND_A_BYTE if room.devices[0].type == "cuda" else 0.0,
    )
    return balancing.best_cut(task).counts, costs


def calls_of(prospect: Prospect) -> Iterator[Call]:
    """Each call of a unit with arguments that look like its own; most of their numbers are any.

    Lengths and indices are those of the example: with others a unit may not run.
    """
    trace = prospect.trace
    for at in trace.calls:
        step = trace.steps[at]
        refs, spec = step.arguments
        leaves = [_like(trace, ref.value) if isinstance(ref, Ref) else ref for ref in refs]
        args, kwargs = unflatten(leaves, spec)
        yield prospect.units[step.func.unit], args, kwargs


def _like(trace: Trace, value: int) -> Tensor:
    told = trace.told.get(value)
    return _any(trace.values[value].look) if told is None else told


def values_of(trace: Trace) -> Iterator[balancing.Value]:
    """What goes from unit to unit. An operation between units is at the last that it follows."""
    order = {at: number for number, at in enumerate(trace.calls)}
    home: dict[int, int] = {}  # of steps: the number of a call
    users: dict[int, set[int]] = {}
    for at, step in enumerate(trace.steps):
        makers = [trace.values[value].maker for value in step.takes]
        follows = [home[maker] for maker in makers if maker in home]
        if step.kind is Kind.UNIT:
            home[at] = order[at]
        elif follows and not step.free:
            home[at] = max(follows)
        for value in step.takes if at in home else ():
            users.setdefault(value, set()).add(home[at])
    for value in trace.output.made:
        users.setdefault(value, set()).add(len(order) - 1)
    for value, found in users.items():
        src = home.get(-1 if (maker := trace.values[value].maker) is None else maker)
        dsts = tuple(sorted(dst for dst in found if src is not None and dst > src))
        if src is not None and dsts:
            look = trace.values[value].look
            yield balancing.Value(src, dsts, look.size * (2 if look.learns else 1))


def devices_of(
    room: Room, calls: Sequence[Call], costs: Sequence[UnitCost]
) -> Iterator[balancing.Device]:
    """How fast each is, measured by the costliest unit, if they are of several kinds."""
    memory = room.memory
    _check_memory(memory)
    devices = room.by_rank
    count = len(devices)
    bounds = list(memory) if isinstance(memory, Sequence) else [memory] * count
    if len(bounds) != count:
        raise ArgumentError(
            f"memory has {len(bounds)} entries, and there are {count} ranks: give the bytes of "
            "each rank's device, or one number for all"
        )
    at = max(range(len(costs)), key=lambda number: costs[number].seconds)
    speeds: dict[str, float] = {_kind(room.devices[0]): 1.0}
    for device, bound in zip(devices, bounds, strict=True):
        if _kind(device) not in speeds:
            seconds = measure(*calls[at], device).seconds
            speeds[_kind(device)] = costs[at].seconds / seconds
        yield balancing.Device(
            speeds[_kind(device)], _bound(device) if bound is None else float(bound)
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


def _kind(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _bound(device: torch.device) -> float:
    if device.type != "cuda":
        return inf
    return float(torch.cuda.get_device_properties(device).total_memory)


def _any(look: Look) -> Tensor:
    """Numbers that every unit can take: small ones, no. 0, true."""
    if look.dtype.is_floating_point or look.dtype.is_complex:
        return (torch.randn(look.shape).to(look.dtype) * 0.1).requires_grad_(look.learns)
    made = torch.ones if look.dtype is torch.bool else torch.zeros
    return made(look.shape, dtype=look.dtype)

"""The seconds of plans, and their bounds, at the speed that idle ranks leave to the others.

The search compares plans as if all devices were busy. Virtual GPUs of one GPU are faster while
others are idle: see `DeviceProfile.idle_gain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from penstock.planning.bound import bound_with_idle_gain, least_work, space_bound
from penstock.planning.schedule_timer import ScheduleTimer
from penstock.planning.search_space import Group, Point

_COMPARED_POINTS = 8  # at the speed that devices have while ranks are idle


def pick_fastest_step(ranking: Sequence[Point], started: Sequence[Point]) -> Point:
    """Return the point whose step is fastest, of those that are fastest while all ranks are busy.

    Two plans may be equal while all ranks are busy, and in one of them ranks are idle more often.

    Args:
        ranking: The points that were found, the fastest first.
        started: The points with which the search began: none of them may be faster.
    """
    gain = ranking[0].group.space.idle_gain
    if not gain:
        return ranking[0]
    by_group: dict[Group, Point] = {}
    for point in ranking:
        if point.seconds <= ranking[0].seconds * (1 + gain):
            by_group.setdefault(point.group, point)
    # The first ones are also the alternatives that are shown.
    candidates = [*ranking[:_COMPARED_POINTS], *list(by_group.values())[:_COMPARED_POINTS]]
    different = {id(point): point for point in (*candidates, *started)}
    return min(different.values(), key=seconds_with_idle_gain)


def seconds_with_idle_gain(point: Point) -> float:
    """Return the seconds of a point at the speed that devices have while ranks are idle in it."""
    group, space = point.group, point.group.space
    if not space.idle_gain:
        return point.seconds
    if point not in space.step_seconds:
        costs = group.table.stage_costs(point.cut, group.placement)
        timer = ScheduleTimer(point.name, point.schedule, costs.graph)
        faster = timer.speed_up(costs, point.recomputed, space.profile.devices)
        seconds = timer.seconds(faster, point.recomputed, space.objective)
        space.step_seconds[point] = seconds
    return space.step_seconds[point]


def bound_step(group: Group, fastest: float) -> float:
    """Return seconds that no step of a group can beat, at the speed that its idle ranks leave.

    Every plan of it takes these seconds while all ranks are busy: its bound, or `fastest`, the
    seconds of the fastest plan, if it was searched.
    """
    space = group.space
    limit = min(fastest, inf if group.is_exhausted else group.bound)
    if space.objective == "period":
        work = space_bound(group.table, group.placement, space.memory, "period")
    else:
        work = least_work(group.table) / len(space.memory)
    return bound_with_idle_gain(limit, work, space.idle_gain, space.objective)


def bound_schedule(point: Point, limit: float) -> float:
    """Return seconds that no schedule of the cut of a point can beat, as `bound_step` does."""
    group, space = point.group, point.group.space
    cost = group.table.stage_costs(point.cut, group.placement).cost
    busy = [0.0] * len(space.memory)
    for stage, rank in enumerate(group.placement):
        again = (cost.R or cost.F)[stage] if point.recomputed[stage] else 0.0
        busy[rank] += group.chunks * (cost.F[stage] + cost.I[stage] + cost.W[stage] + again)
    work = max(busy) if space.objective == "period" else sum(busy) / len(busy)
    return bound_with_idle_gain(limit, work, space.idle_gain, space.objective)

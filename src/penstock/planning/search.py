"""The search for the fastest plan.

The space is every cut of the units, with one or more stages per rank (in a loop, or two in a V),
every schedule that has this placement, every number of micro-batches and every set of recomputed
stages. A group is a placement with a number of micro-batches.

    1. In each group, time the even cut with every schedule. Improve the best of these by moving
       units between stages as long as that helps.
    2. Go through every cut of each group, except those that a bound shows to be no faster than the
       best plan so far. A group with too many is left alone: it is not exhausted.
    3. Let `fit` search for schedules: in an exhausted group for every cut and set of recomputed
       stages whose bound allows it, in others for the best cut and for cuts with a low bound.
    4. Up to here, plans are compared at the speed of devices that are all busy. Time the best of
       them at the speed that idle ranks leave (`DeviceProfile.idle_gain`), and take the fastest.

If every group is exhausted or its bound is above the best plan, that plan is the best of the space.
Otherwise the lowest bound of the other groups says how much faster a plan could be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

from penstock.display import Progress
from penstock.errors import ArgumentError
from penstock.planning.bound import schedule_bound
from penstock.planning.cut_moves import find_low_bound_cut, find_possible_flags, move_units
from penstock.planning.idle_speed import (
    bound_schedule,
    bound_step,
    pick_fastest_step,
    seconds_with_idle_gain,
)
from penstock.planning.plan import Alternative, Certificate, Plan, describe_choice
from penstock.planning.profile import Profile, resolve_memory
from penstock.planning.schedule_timer import ScheduleTimer
from penstock.planning.search_space import (
    Group,
    Point,
    Space,
    build_groups,
    check_names,
    check_schedule_names,
    explain_no_fit,
)
from penstock.planning.solver import has_solver, solve_schedule, solve_space_bound
from penstock.schedules.bound import Objective
from penstock.schedules.cost import exceeds

# The work of the search, counted in actions, so that equal problems have equal plans: how many
# may be timed to try every cut, and how many `fit` may place in the groups that were exhausted.
_TIMED_ACTIONS = 3_000_000
_FITTED_ACTIONS = 600_000
_FITTED_GROUP = 400  # actions of a schedule up to which `fit` is tried for every cut
_ACTIONS_PER_CUT = 3_000  # what it costs to look at a cut at all
# How many schedules `fit` may try for one cut of an exhausted group; how many actions it may place
# for the best cuts of the other groups together, for those with low bounds, and for the winner.
_FIT_ATTEMPTS = 40
_FIT_EFFORT = 60_000
_POLISH_EFFORT = 80_000
# It takes about ten microseconds per action to build and compile a schedule. The most promising
# groups are timed first, until their schedules have so many actions in all.
_BUILT_ACTIONS = 2_100_000
_CLIMBED = 2  # how many of the best even cuts of a placement are improved by moving units
_BOUNDED_GROUPS = 8  # how many are searched for a cut with a low bound
_SOLVED_STAGES = 64  # above, the solver takes too long to raise a bound
_SHOWN_ALTERNATIVES = 4


def search_plan(
    profile: Profile,
    *,
    memory: Any = None,
    objective: Objective = "makespan",
    chunks: Sequence[int] | None = None,
    stages_per_rank: Sequence[int] = (1, 2),
    schedules: Sequence[str] | None = None,
    cut: Sequence[int] | None = None,
    placement: Sequence[int] | None = None,
    recompute: Sequence[bool] | None = None,
    runtimes: Sequence[str] | None = None,
    start: Sequence[Plan] = (),
    solver_seconds: float = 10.0,
    progress: Progress | None = None,
) -> Plan:
    """Search for the fastest plan for a profile, under a memory cap in bytes.

    What is given is kept; everything else is searched. Large problems are not searched completely:
    the certificate says how much faster a plan may be. If devices have an `idle_gain`, plans are
    found at the speed of ranks that are all busy, and only the best of these are compared at the
    speed that idle ranks leave. The plan is never slower than one of `start` that fits in memory.

    Args:
        profile: The model and its devices. The plan uses all of them, in their order.
        memory: The cap of each rank, as in `resolve_memory`; by default the memory of the devices.
        objective: "makespan" for the seconds of one step by itself, "period" for steps that follow
            each other without a barrier.
        chunks: The numbers of micro-batches to try.
        stages_per_rank: The numbers of stages per rank to try.
        schedules: The names of the schedules to try; "fit" is one of them.
        cut: The units of each stage.
        placement: The rank of each stage.
        recompute: Whether each stage recomputes its activations.
        runtimes: The runtimes to choose from; by default those of the profile.
        start: Plans to begin with, such as those for smaller caps, which fit under a larger one
            too. Those that do not fit, or are not in the space that is searched, are left out.
        solver_seconds: How long the solver may try to improve the schedule of the best plan, or to
            prove that it is the best. Without ortools, or with 0, there is no solver.
        progress: Called with what the search is doing and the fraction that is done.

    Returns:
        The plan, with the next best choices and a certificate.

    Raises:
        ArgumentError: An argument is invalid, or no plan fits in memory. The message then says what
            is missing, and what would fit.

    Example:
        >>> from penstock.planning import DeviceProfile, PerRows, UnitProfile, UnitSeconds
        >>> seconds = {"gpu": UnitSeconds(PerRows(1), PerRows(1), PerRows(1))}
        >>> layers = [UnitProfile(f"layer {i}", seconds) for i in range(4)]
        >>> profile = Profile("tiny", 8, layers, devices=[DeviceProfile("gpu")] * 2)
        >>> plan = search_plan(profile, chunks=[8], solver_seconds=0)
        >>> plan.schedule_name, plan.cut, plan.seconds
        ('interleaved-zb', (1, 1, 1, 1), 49.0)
    """
    report = progress or (lambda what, fraction: None)
    names = check_names("runtime", runtimes, profile.runtimes)
    space = Space(
        profile,
        resolve_memory(memory, profile.devices),
        objective,
        # Every action takes longer under a runtime with more overhead, so only one can be best.
        min(names, key=lambda name: profile.runtimes[name]),
        None if schedules is None else frozenset(check_schedule_names(schedules)),
        tuple(cut or ()),
        tuple(recompute or ()),
    )
    groups = build_groups(space, chunks, stages_per_rank, placement)
    if not space.uses_fit and not any(group.names for group in groups):
        raise ArgumentError(
            f"{' and '.join(sorted(space.names or ()))} cannot run with these stages and ranks. "
            "Allow other schedules, such as 'fit', or another number of stages per rank."
        )
    started = list(_points_of_plans(start, groups))
    results = _search_groups(space, groups, started, report)
    if not results.points:
        raise ArgumentError(explain_no_fit(space, groups))
    ranking = sorted(results.points.values(), key=lambda point: point.seconds)
    best = pick_fastest_step(ranking, started)
    if space.uses_fit and not best.group.is_huge:
        report("improving the best schedule", 0.9)
        polished = best.group.fit(best.cut, best.recomputed, _POLISH_EFFORT)
        if polished and polished.seconds < best.seconds * (1 - 1e-9):
            best = min(best, polished, key=seconds_with_idle_gain)
    solved, schedule_limit, method = _solve_exactly(best, solver_seconds, report)
    best = min(best, solved, key=seconds_with_idle_gain)
    _raise_bounds(best, groups, solver_seconds, report)
    seconds = seconds_with_idle_gain(best)
    fastest = min(best.seconds, solved.seconds, ranking[0].seconds)
    certificate = Certificate(
        bound=min(seconds, *(bound_step(group, fastest) for group in groups)),
        schedule_bound=min(seconds, bound_schedule(best, schedule_limit)),
        space=_describe_space(groups),
        method=method,
    )
    report("done", 1.0)
    return Plan(
        profile=profile,
        cut=best.cut,
        placement=best.group.placement,
        chunks=best.group.chunks,
        recompute=best.recomputed,
        schedule_name=best.name,
        schedule=best.schedule,
        runtime=space.runtime,
        memory=space.memory,
        objective=objective,
        alternatives=_next_best(space, best, ranking),
        certificate=certificate,
    )


def _describe_space(groups: Sequence[Group]) -> str:
    cuts = sum(group.cuts for group in groups)
    number = f"{cuts:,}" if cuts < 10**15 else f"10^{len(str(cuts)) - 1}"
    chunks = sorted({group.chunks for group in groups})
    stages = sorted({group.stages for group in groups})
    names = {name for group in groups for name in group.names}
    return (
        f"{number} cuts into {' or '.join(map(str, stages))} stages, "
        f"{len(names)} named schedules and fit, {len(chunks)} numbers of micro-batches from "
        f"{chunks[0]} to {chunks[-1]}, any stages recomputed where the memory needs it"
    )


def _next_best(space: Space, best: Point, ranking: Sequence[Point]) -> tuple[Alternative, ...]:
    rows: list[Alternative] = []
    for point in ranking:
        if len(rows) == _SHOWN_ALTERNATIVES:
            break
        group = point.group
        if (point.name, group) == (best.name, best.group):
            continue
        costs = group.table.stage_costs(point.cut, group.placement)
        timer = ScheduleTimer(point.name, point.schedule, costs.graph)
        peaks = [
            timer.peak(rank, costs, point.recomputed) + resident
            for rank, resident in enumerate(costs.resident)
        ]
        choice = describe_choice(
            point.name, group.placement, group.chunks, point.recomputed, space.runtime
        )
        rows.append(Alternative(choice, seconds_with_idle_gain(point), max(peaks)))
    return tuple(sorted(rows, key=lambda row: row.seconds))


class _Best:
    """The best point of each schedule and group, and the fastest of all."""

    def __init__(self) -> None:
        self.seconds = inf
        self.points: dict[tuple[str, Group], Point] = {}

    def consider(self, points: Iterable[Point]) -> None:
        for point in points:
            key = point.name, point.group
            if key not in self.points or point.seconds < self.points[key].seconds:
                self.points[key] = point
            self.seconds = min(self.seconds, point.seconds)

    def of_group(self, group: Group) -> list[Point]:
        """Return the points of a group, the fastest first."""
        points = (point for point in self.points.values() if point.group is group)
        return sorted(points, key=lambda point: point.seconds)


def _points_of_plans(plans: Sequence[Plan], groups: Sequence[Group]) -> Iterator[Point]:
    """Yield the plans that are in the space and fit in memory, as points of it."""
    by_choice = {(group.placement, group.chunks): group for group in groups}
    units = len(groups[0].space.profile.units)
    for plan in plans:
        group = by_choice.get((plan.placement, plan.chunks))
        if group is None or sum(plan.cut) != units:
            continue
        space = group.space
        allowed = plan.schedule_name in group.names or space.uses_fit
        if not allowed or plan.cut != (space.cut or plan.cut):
            continue
        if plan.recompute != (space.recomputed or plan.recompute):
            continue
        costs = group.table.stage_costs(plan.cut, plan.placement)
        timer = ScheduleTimer(plan.schedule_name, plan.schedule, costs.graph)
        peaks = (timer.peak(rank, costs, plan.recompute) for rank in range(len(space.memory)))
        if not any(map(exceeds, peaks, costs.free_bytes(space.memory))):
            seconds = timer.seconds(costs, plan.recompute, space.objective)
            yield Point(seconds, plan.schedule_name, group, plan.cut, plan.recompute, plan.schedule)


def _search_groups(
    space: Space, groups: Sequence[Group], start: Iterable[Point], report: Progress
) -> _Best:
    best = _Best()
    best.consider(start)
    ordered = sorted(groups, key=lambda group: group.bound)
    budget = _BUILT_ACTIONS
    # The most promising group first. An estimate takes longer than a bound and is seldom below it:
    # a group is estimated only when no estimate is below its bound.
    queue = [(group.bound, False, index, group) for index, group in enumerate(groups)]
    heapify(queue)
    timed = 0
    while queue:
        _, is_estimated, index, group = heappop(queue)
        work = group.actions * len(group.names)
        if group.bound >= best.seconds or work > budget:
            continue
        if not is_estimated:
            heappush(queue, (max(group.bound, group.estimate()), True, index, group))
            continue
        report("timing even cuts", 0.2 * timed / len(ordered))
        timed += 1
        budget -= work
        for cut in {group.even_cut(with_memory) for with_memory in (False, True)}:
            best.consider(group.time(cut))
    for index, placement in enumerate({group.placement: None for group in ordered}):
        report("moving units", 0.2 + 0.05 * index)
        even = [p for p in best.points.values() if p.group.placement == placement]
        for point in sorted(even, key=lambda point: point.seconds)[:_CLIMBED]:
            best.consider(move_units(point))
    budget = _TIMED_ACTIONS
    for index, group in enumerate(ordered):
        report("trying every cut", 0.4 + 0.2 * index / len(ordered))
        if group.bound < best.seconds and not group.is_huge:
            budget -= _try_every_cut(group, best, budget)
    if space.uses_fit:
        _fit_promising(space, ordered, best, report)
    return best


def _try_every_cut(group: Group, best: _Best, budget: int) -> int:
    """Time every cut of a group that may be faster, unless there are too many.

    Returns:
        The work that it took, in actions. There are too many if it would exceed the budget.
    """
    per_cut = _ACTIONS_PER_CUT + group.actions
    cuts = group.find_cuts(best.seconds, max(0, budget // per_cut))
    if cuts is None:
        return 0
    for cut in cuts:
        best.consider(group.time(cut, best.seconds))
    group.is_exhausted = not group.skips_flags
    return per_cut * len(cuts)


def _fit_promising(space: Space, groups: Sequence[Group], best: _Best, report: Progress) -> None:
    """Let `fit` make schedules: for every cut of exhausted groups, for a few of others.

    One of these is the best with a named schedule. The others, in the most promising groups, have a
    low bound: what is good for a named schedule is often not good for one made for the cut.
    """
    candidates: list[tuple[float, int, Group, tuple[int, ...], tuple[bool, ...]]] = []
    low_cuts: set[tuple[Group, tuple[int, ...]]] = set()
    fastest = sorted(best.points.values(), key=lambda point: point.seconds)
    promising = list(dict.fromkeys(point.group for point in fastest) or groups)[:_BOUNDED_GROUPS]
    for group in groups:
        if group.bound >= best.seconds:
            break
        if group.is_huge:
            continue
        points = best.of_group(group)[:1]
        cuts = [point.cut for point in points]
        if not group.names:  # no named schedule was timed
            cuts = list({group.even_cut(with_memory) for with_memory in (False, True)})
        if group.is_exhausted:
            # There were not too many before, and now there are fewer.
            cuts = group.find_cuts(best.seconds, _TIMED_ACTIONS) or []
        elif not space.cut and group in promising:
            flags = points[0].recomputed if points else (False,) * group.stages
            starts = dict.fromkeys([*cuts, group.even_cut(with_memory=False)])
            lower = dict.fromkeys(find_low_bound_cut(group, cut, flags) for cut in starts)
            low_cuts.update((group, cut) for cut in lower if cut not in cuts)
            cuts = list(dict.fromkeys([*cuts, *lower]))
        for cut in cuts:
            costs = group.table.stage_costs(cut, group.placement)
            free = costs.free_bytes(space.memory)
            for flags in find_possible_flags(group, costs, best.seconds):
                bound = schedule_bound(
                    costs, group.placement, group.chunks, flags, free, space.objective
                )
                if bound < best.seconds:
                    candidates.append((bound, len(candidates), group, cut, flags))
    candidates.sort(key=lambda candidate: candidate[:2])
    all_budget = _FITTED_ACTIONS
    budgets = dict.fromkeys((False, True), _FIT_EFFORT)
    for index, (bound, _, group, cut, flags) in enumerate(candidates):
        if bound >= best.seconds:
            break
        report("searching for schedules", 0.6 + 0.3 * index / len(candidates))
        effort = _FIT_ATTEMPTS * group.actions
        if group.is_exhausted and all_budget >= effort and group.actions <= _FITTED_GROUP:
            all_budget -= effort
        else:
            # The candidates are in the order of their bounds: those left have none below this one.
            group.bound = max(group.bound, bound) if group.is_exhausted else group.bound
            group.is_exhausted = False
            effort, is_low = min(effort, _FIT_EFFORT // 3), (group, cut) in low_cuts
            if budgets[is_low] < effort:
                continue
            budgets[is_low] -= effort
        point = group.fit(cut, flags, effort)
        if point:
            best.consider([point])


def _solve_exactly(
    best: Point, solver_seconds: float, report: Progress
) -> tuple[Point, float, str]:
    """Return the best schedule known for the winner's cut, a bound for that cut, and its source."""
    group, space = best.group, best.group.space
    costs = group.table.stage_costs(best.cut, group.placement)
    free = costs.free_bytes(space.memory)
    bound = schedule_bound(
        costs, group.placement, group.chunks, best.recomputed, free, space.objective
    )
    method = "bounds of work, fill, drain and memory"
    proved = best.seconds <= bound * (1 + 1e-9)
    if proved or not space.uses_fit or solver_seconds <= 0 or not has_solver():
        return best, bound, method
    report("solving exactly", 0.95)
    solution = solve_schedule(
        costs, best.schedule, best.recomputed, free, space.objective, solver_seconds
    )
    if solution.bound > bound:
        bound, method = solution.bound, "CP-SAT"
    if solution.schedule is not None:
        timer = ScheduleTimer("solver", solution.schedule, costs.graph)
        peaks = [timer.peak(rank, costs, best.recomputed) for rank in range(len(free))]
        seconds = timer.seconds(costs, best.recomputed, space.objective)
        if seconds < best.seconds * (1 - 1e-9) and not any(map(exceeds, peaks, free)):
            best = best._replace(seconds=seconds, name="solver", schedule=solution.schedule)
    return best, bound, method


def _raise_bounds(
    best: Point, groups: Sequence[Group], solver_seconds: float, report: Progress
) -> None:
    """Let the solver raise the bounds of the groups that could still have a faster plan."""
    if solver_seconds <= 0 or not has_solver():
        return
    # The lowest bound is the one that counts, so each round raises that of the lowest group.
    unproved = [
        group
        for group in groups
        if not group.is_exhausted
        and group.bound < best.seconds * (1 - 1e-9)
        and group.stages <= _SOLVED_STAGES
    ]
    for index, group in enumerate(sorted(unproved, key=lambda group: group.bound)):
        report("proving a bound", 0.96 + 0.03 * index / len(unproved))
        limit = solve_space_bound(
            group.table,
            group.placement,
            group.space.memory,
            group.space.objective,
            best.seconds,
            solver_seconds / len(unproved),
        )
        group.bound = max(group.bound, limit)

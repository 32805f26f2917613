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

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import combinations, pairwise, product
from math import comb, inf, prod
from typing import Any, NamedTuple

from penstock.display import Progress
from penstock.errors import ArgumentError
from penstock.planning.bound import bound_with_idle_gain, least_work, schedule_bound, space_bound
from penstock.planning.plan import Alternative, Certificate, Plan, describe_choice
from penstock.planning.profile import Profile, resolve_memory
from penstock.planning.recomputed_fit import fit_with_recomputation
from penstock.planning.schedule_timer import ScheduleTimer
from penstock.planning.solver import has_solver, solve_schedule, solve_space_bound
from penstock.planning.stage_costs import CostTable, StageCosts, count_chunks
from penstock.schedules.balance import check_cut
from penstock.schedules.bound import Objective
from penstock.schedules.cost import exceeds
from penstock.schedules.families import family_of, loop, training_families, vee
from penstock.schedules.families.common import group_stages
from penstock.schedules.fit import named_schedules
from penstock.schedules.ir import Schedule
from penstock.schedules.simulator import paused_garbage_collection
from penstock.text_format import format_bytes

# The work of the search, counted in actions, so that equal problems have equal plans: how many
# may be timed to try every cut, and how many `fit` may place in the groups that were exhausted.
_TIMED_ACTIONS = 3_000_000
_FITTED_ACTIONS = 600_000
_FITTED_GROUP = 400  # actions of a schedule up to which `fit` is tried for every cut
_ACTIONS_PER_CUT = 3_000  # what it costs to look at a cut at all
_STEPS_PER_CUT = 100  # how many dead ends per cut are searched
# How many schedules `fit` may try for one cut of an exhausted group; how many actions it may place
# for the best cuts of the other groups together, for those with low bounds, and for the winner.
_FIT_ATTEMPTS = 40
_FIT_EFFORT = 60_000
_POLISH_EFFORT = 80_000
# It takes about ten microseconds per action to build and compile a schedule. The most promising
# groups are timed first, until their schedules have so many actions in all. In a huge group, only
# these schedules are tried.
_BUILT_ACTIONS = 2_100_000
_HUGE_ACTIONS = 100_000
_HUGE_SCHEDULES = frozenset({"zb-h1", "dualpipe-v", "interleaved"})
_MAX_CELLS = 250_000  # ranks x micro-batches that are tried by default
_CLIMBED = 2  # how many of the best even cuts of a placement are improved by moving units
# How many groups are searched for a cut with a low bound, and how many stages are looked at there.
_BOUNDED_GROUPS, _BOUNDED_STAGES = 8, 10_000
_MOVED_ACTIONS = 20_000_000  # how many may be timed, a fifth of a microsecond each, to do that
_FLAG_SETS = 256  # how many sets of recomputed stages of one schedule and cut are timed
_SOLVED_STAGES = 64  # above, the solver takes too long to raise a bound
_SHOWN_ALTERNATIVES = 4
_COMPARED_POINTS = 8  # at the speed that devices have while ranks are idle


class Point(NamedTuple):
    """One plan of the space, timed. Points are compared by their seconds first."""

    seconds: float
    name: str
    group: Group
    cut: tuple[int, ...]
    recomputed: tuple[bool, ...]
    schedule: Schedule


class Group:
    """The plans with one placement and one number of micro-batches."""

    def __init__(self, space: Space, placement: tuple[int, ...], chunks: int) -> None:
        self.space, self.placement, self.chunks = space, placement, chunks
        self.table = space.table(chunks)
        self.stages = len(placement)
        self.stages_by_rank = group_stages(placement)
        self.bound = space_bound(self.table, placement, space.memory, space.objective)
        self.actions = 4 * self.stages * chunks  # of one schedule
        units = len(space.profile.units)
        self.cuts = 1 if space.cut else comb(units - 1, self.stages - 1)
        self.is_exhausted = False  # whether all of its plans have been considered
        self.skips_flags = False  # whether some sets of recomputed stages were left out
        self.is_huge = self.actions > _HUGE_ACTIONS
        self.names = space.names_of(placement)
        if self.is_huge and space.names is None:
            self.names &= _HUGE_SCHEDULES
        self._timers: dict[tuple[tuple[int, int], ...], list[ScheduleTimer]] = {}

    @cached_property
    @paused_garbage_collection()
    def schedules(self) -> dict[str, Schedule]:
        """The named schedules of the placement that are tried, without those that are equal."""
        schedules: dict[str, Schedule] = {}
        for name, schedule in named_schedules(self.placement, self.chunks, self.names).items():
            if schedule not in schedules.values():
                schedules[name] = schedule
        return schedules

    def timers(self, costs: StageCosts) -> list[ScheduleTimer]:
        """Return the compiled schedules. Skip connections make other messages for other cuts."""
        edges = costs.graph.edges
        if edges not in self._timers:
            self._timers[edges] = [
                ScheduleTimer(name, schedule, costs.graph)
                for name, schedule in self.schedules.items()
            ]
        return self._timers[edges]

    def find_cuts(self, best: float, most: int) -> list[tuple[int, ...]] | None:
        """Return every cut in which each rank can do its work in less than the best time.

        Returns:
            The cuts, or None if there are more than `most`, or if they take too long to find.
        """
        if self.space.cut:
            return [self.space.cut]
        if self.stages > _STEPS_PER_CUT:
            return None  # `extend` calls itself once per stage
        units, last = len(self.space.profile.units), self.stages - 1
        work = [sums["FIW"] for sums in self.table.seconds]
        loads = [0.0] * len(work)
        # The least work that is left at each unit, and the ranks that can take it after each stage.
        distinct = [sums["FIW"] for sums in self.table.distinct_seconds]
        least = [min(sums[-1] - sums[u] for sums in distinct) for u in range(units + 1)]
        takers = [set(self.placement[stage + 1 :]) for stage in range(self.stages)]
        cuts: list[tuple[int, ...]] = []
        limit, steps = best / self.chunks, _STEPS_PER_CUT * most

        def extend(cut: tuple[int, ...], start: int) -> bool:
            """Add all cuts that begin with these stages. Return False to give up."""
            nonlocal steps
            stage = len(cut)
            rank, before = self.placement[stage], loads[self.placement[stage]]
            first_end = units if stage == last else start + 1
            for end in range(first_end, units - last + stage + 1):
                steps -= 1
                loads[rank] = before + work[rank][end] - work[rank][start] + 3 * self.table.overhead
                if loads[rank] >= limit:
                    break  # with more units it takes even longer
                if least[end] > sum(limit - loads[taker] for taker in takers[stage]):
                    continue
                if stage == last:
                    cuts.append((*cut, end - start))
                elif not extend((*cut, end - start), end):
                    return False
                if steps < 0 or len(cuts) > most:
                    return False
            loads[rank] = before
            return True

        return cuts if extend((), 0) else None

    def estimate(self) -> float:
        """Return a guess of the seconds of the best plan: the bound of an even cut."""
        cut = _even_cut(self, with_memory=False)
        costs = self.table.stage_costs(cut, self.placement)
        nothing = (False,) * self.stages
        free = (inf,) * len(self.space.memory)
        return schedule_bound(
            costs, self.placement, self.chunks, nothing, free, self.space.objective
        )

    def time(
        self, cut: tuple[int, ...], best: float = inf, name: str | None = None
    ) -> Iterator[Point]:
        """Yield the named schedules of a cut that fit, with the fewest recomputed stages.

        Schedules that the bound shows to be slower than `best` are left out. With a name, only that
        schedule is timed, and its seconds are infinite if it is not faster than `best`.
        """
        space = self.space
        costs = self.table.stage_costs(cut, self.placement)
        free = costs.free_bytes(space.memory)
        for timer in self.timers(costs):
            if name not in (None, timer.name):
                continue
            for flags in self._fitting_flags(timer, costs, free):
                bound = schedule_bound(
                    costs, self.placement, self.chunks, flags, free, space.objective
                )
                if bound < best:
                    # To find out that a schedule is not faster takes less time than its seconds.
                    limit = best if name else inf
                    seconds = timer.seconds(costs, flags, space.objective, limit)
                    best = min(best, seconds)
                    yield Point(seconds, timer.name, self, cut, flags, timer.schedule)

    def _fitting_flags(
        self, timer: ScheduleTimer, costs: StageCosts, free: Sequence[float]
    ) -> Iterator[tuple[bool, ...]]:
        """Yield the smallest sets of recomputed stages with which a schedule fits, as flags."""
        if fixed := self.space.recomputed:
            peaks = (timer.peak(rank, costs, fixed) for rank in range(timer.schedule.ranks))
            if not any(map(exceeds, peaks, free)):
                yield fixed
            return
        by_rank = [timer.fitting_recomputations(rank, costs, cap) for rank, cap in enumerate(free)]
        if prod(map(len, by_rank)) > _FLAG_SETS:
            # On each rank, only the stages that take least to compute again.
            self.skips_flags = True
            again = costs.cost.R or costs.cost.F
            by_rank = [[min(sets, key=lambda set: sum(again[s] for s in set))] for sets in by_rank]
        for sets in product(*by_rank):
            chosen = {stage for subset in sets for stage in subset}
            yield tuple(stage in chosen for stage in range(self.stages))

    def fit(self, cut: tuple[int, ...], flags: tuple[bool, ...], effort: int) -> Point | None:
        """Return the schedule that `fit` finds for a cut and recomputed stages, if one fits."""
        space = self.space
        costs = self.table.stage_costs(cut, self.placement)
        free = costs.free_bytes(space.memory)
        schedule = fit_with_recomputation(
            costs, self.placement, self.chunks, flags, free, space.objective, effort
        )
        if schedule is None:
            return None
        timer = ScheduleTimer("fit", schedule, costs.graph)
        # The schedule that was found may fit with fewer recomputed stages, too.
        return min(
            Point(timer.seconds(costs, f, space.objective), "fit", self, cut, f, schedule)
            for f in (flags, *self._fitting_flags(timer, costs, free))
        )


@dataclass(frozen=True)
class Space:
    """The problem: the profile, the caps, the objective, and what the caller has fixed."""

    profile: Profile
    memory: tuple[float, ...]
    objective: Objective
    runtime: str
    names: frozenset[str] | None  # None: every schedule
    cut: tuple[int, ...]  # empty: every cut
    recomputed: tuple[bool, ...]  # empty: every set of stages

    @cached_property
    def _tables(self) -> dict[int, CostTable]:
        return {}

    def table(self, chunks: int) -> CostTable:
        """Return the costs of the units for a number of micro-batches."""
        if chunks not in self._tables:
            self._tables[chunks] = CostTable(self.profile, chunks, self.runtime)
        return self._tables[chunks]

    @cached_property
    def idle_gain(self) -> float:
        """The largest gain of a device: see `DeviceProfile.idle_gain`."""
        return max(device.idle_gain for device in self.profile.devices)

    @cached_property
    def step_seconds(self) -> dict[Point, float]:
        """The seconds of points at the speed that idle ranks leave, once they are known."""
        return {}

    @cached_property
    def _names_by_placement(self) -> dict[tuple[int, ...], frozenset[str]]:
        return {}

    def names_of(self, placement: tuple[int, ...]) -> frozenset[str]:
        """Return the names of the schedules that a placement has, and that may be tried."""
        if placement not in self._names_by_placement:
            self._names_by_placement[placement] = frozenset(
                name
                for name in training_families(placement)
                if self.names is None or name in self.names
            )
        return self._names_by_placement[placement]

    @property
    def uses_fit(self) -> bool:
        """Whether `fit` may make the schedule."""
        return self.names is None or "fit" in self.names


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
    names = _check_names("runtime", runtimes, profile.runtimes)
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
    groups = _build_groups(space, chunks, stages_per_rank, placement)
    if not space.uses_fit and not any(group.names for group in groups):
        raise ArgumentError(
            f"{' and '.join(sorted(space.names or ()))} cannot run with these stages and ranks. "
            "Allow other schedules, such as 'fit', or another number of stages per rank."
        )
    started = list(_points_of_plans(start, groups))
    results = _search_groups(space, groups, started, report)
    if not results.points:
        raise ArgumentError(_explain_no_fit(space, groups))
    ranking = sorted(results.points.values(), key=lambda point: point.seconds)
    best = _pick_fastest_step(ranking, started)
    if space.uses_fit and not best.group.is_huge:
        report("improving the best schedule", 0.9)
        polished = best.group.fit(best.cut, best.recomputed, _POLISH_EFFORT)
        if polished and polished.seconds < best.seconds * (1 - 1e-9):
            best = min(best, polished, key=_seconds_with_idle_gain)
    solved, schedule_limit, method = _solve_exactly(best, solver_seconds, report)
    best = min(best, solved, key=_seconds_with_idle_gain)
    _raise_bounds(best, groups, solver_seconds, report)
    seconds = _seconds_with_idle_gain(best)
    fastest = min(best.seconds, solved.seconds, ranking[0].seconds)
    certificate = Certificate(
        bound=min(seconds, *(_bound_step(group, fastest) for group in groups)),
        schedule_bound=min(seconds, _bound_schedule(best, schedule_limit)),
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


# ---- the groups -----------------------------------------------------------------------------


def _check_names(what: str, chosen: Iterable[str] | None, valid_names: Iterable[str]) -> list[str]:
    valid_names = list(valid_names)
    names = valid_names if chosen is None else list(chosen)
    unknown = [name for name in names if name not in valid_names]
    if unknown or not names:
        raise ArgumentError(
            f"there is no {what} {', '.join(map(repr, unknown)) or '(none was given)'}: the "
            f"profile has {', '.join(valid_names)}"
        )
    return names


def check_schedule_names(names: Sequence[str]) -> Sequence[str]:
    """Return the names of schedules. Raise an ArgumentError if one is unknown, or cannot train."""
    for name in names:
        if name != "fit" and not family_of(name).trains:
            raise ArgumentError(f"{name} has no backwards, so no training step can be planned")
    return names


def _build_groups(
    space: Space,
    chunks: Sequence[int] | None,
    stages_per_rank: Sequence[int],
    placement: Sequence[int] | None,
) -> list[Group]:
    rows, ranks = space.profile.rows, len(space.profile.devices)
    units = len(space.profile.units)
    if placement is not None:
        placements = [tuple(placement)]
        if set(placement) != set(range(ranks)):
            raise ArgumentError(
                f"placement {list(placement)} must name each of the {ranks} ranks, from 0 on"
            )
    else:
        placements = [loop(ranks, count) for count in sorted(set(stages_per_rank))]
        if 2 in stages_per_rank and ranks > 1:
            placements.append(vee(ranks))
    if space.cut:
        check_cut(space.cut, units)
        placements = [p for p in placements if len(p) == len(space.cut)]
    if space.recomputed:
        placements = [p for p in placements if len(p) == len(space.recomputed)]
    fitting = [p for p in placements if len(p) <= units]
    if not fitting:
        raise ArgumentError(
            f"{units} units cannot be planned on {ranks} devices with these stages: each stage "
            f"takes at least one unit. Use fewer devices, or a cut of as many stages as the "
            "placement has."
        )
    options = choose_chunks(rows, ranks) if chunks is None else sorted(set(chunks))
    for number in options:
        if number < 1 or count_chunks(rows, number) != number:
            raise ArgumentError(
                f"chunks is {number}, but a batch of {rows} rows cannot be split into so many "
                "micro-batches of equal rows (the last may have fewer)"
            )
    return [Group(space, p, number) for p in fitting for number in options]


def choose_chunks(rows: int, ranks: int) -> list[int]:
    """Return the numbers of micro-batches to try: all small ones, then multiples of the ranks.

    With many ranks, those between are thinned out: each is at least a fifth more than the last.

    >>> choose_chunks(rows=12, ranks=2)
    [1, 2, 3, 4, 6, 12]
    """
    most = min(rows, 8 * ranks, max(1, _MAX_CELLS // ranks))
    counts = sorted({count_chunks(rows, number) for number in range(1, most + 1)})
    small = max(8, min(ranks, 32))
    chosen: list[int] = []
    for number in reversed(counts):
        between = number <= ranks and (not chosen or number <= chosen[-1] / 1.2)
        if number <= small or number % ranks == 0 or between:
            chosen.append(number)
    return sorted(chosen)


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
        for cut in {_even_cut(group, with_memory) for with_memory in (False, True)}:
            best.consider(group.time(cut))
    for index, placement in enumerate({group.placement: None for group in ordered}):
        report("moving units", 0.2 + 0.05 * index)
        even = [p for p in best.points.values() if p.group.placement == placement]
        for point in sorted(even, key=lambda point: point.seconds)[:_CLIMBED]:
            best.consider(_move_units(point))
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
            cuts = list({_even_cut(group, with_memory) for with_memory in (False, True)})
        if group.is_exhausted:
            # There were not too many before, and now there are fewer.
            cuts = group.find_cuts(best.seconds, _TIMED_ACTIONS) or []
        elif not space.cut and group in promising:
            flags = points[0].recomputed if points else (False,) * group.stages
            starts = dict.fromkeys([*cuts, _even_cut(group, with_memory=False)])
            lower = dict.fromkeys(_lower_bound(group, cut, flags) for cut in starts)
            low_cuts.update((group, cut) for cut in lower if cut not in cuts)
            cuts = list(dict.fromkeys([*cuts, *lower]))
        for cut in cuts:
            costs = group.table.stage_costs(cut, group.placement)
            free = costs.free_bytes(space.memory)
            for flags in _possible_flags(group, costs, best.seconds):
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


# ---- cuts and recomputation -----------------------------------------------------------------


def _possible_flags(group: Group, costs: StageCosts, best: float) -> list[tuple[bool, ...]]:
    """Return the sets of recomputed stages with which a schedule might be faster than `best`.

    On each rank one micro-batch has to fit, and its work has to end in time. If the group is not
    exhausted, only two are tried: as little and as much as possible on each rank.
    """
    if group.space.recomputed:
        return [group.space.recomputed]
    cost, chunks, stages = costs.cost, group.chunks, range(group.stages)
    by_rank: list[list[frozenset[int]]] = []
    for mine, cap in zip(group.stages_by_rank, costs.free_bytes(group.space.memory), strict=True):
        sets = []
        # If all micro-batches fit at once, a schedule without recomputation is faster than the same
        # one with it. (`fit` may happen to find a better one with it. That is not searched.)
        fits_all = not exceeds(chunks * sum(cost.activation[s] for s in mine), cap)
        for size in range(1 if fits_all else len(mine) + 1):
            for subset in combinations(mine, size):
                again = sum((cost.R or cost.F)[stage] for stage in subset)
                work = again + sum(cost.F[s] + cost.I[s] + cost.W[s] for s in mine)
                # Some moment holds one micro-batch: one stage active, the others at their least.
                least = max(
                    cost.activation[s]
                    + sum(
                        cost.stage_input[o] if o in subset else cost.activation[o]
                        for o in mine
                        if o < s
                    )
                    for s in mine
                )
                if chunks * work < best and not exceeds(least, cap):
                    sets.append(frozenset(subset))
        by_rank.append(sets)
    if prod(map(len, by_rank)) > _FLAG_SETS:
        group.is_exhausted = False
    if group.is_exhausted:
        choices = [frozenset[int]().union(*sets) for sets in product(*by_rank)]
    elif not all(by_rank):
        choices = []
    else:
        choices = [
            frozenset[int]().union(*(pick(sets, key=len) for sets in by_rank))
            for pick in (min, max)
        ]
    return list(dict.fromkeys(tuple(s in chosen for s in stages) for chosen in choices))


def _even_cut(group: Group, with_memory: bool) -> tuple[int, ...]:
    """Return the cut whose slowest stage is fastest, or whose fullest stage is emptiest."""
    if group.space.cut:
        return group.space.cut
    table, units = group.table, len(group.space.profile.units)
    stages = group.stages
    memory_sums = {
        cap: [
            (a + stages * b) / (cap if cap < inf else 1.0)
            for a, b in zip(table.resident, table.activation, strict=True)
        ]
        for cap in set(group.space.memory)
    }
    columns = [
        memory_sums[group.space.memory[rank]] if with_memory else table.seconds[rank]["FIW"]
        for rank in group.placement
    ]

    def take(limit: float) -> list[int]:
        ends = [0]
        for stage, sums in enumerate(columns):
            start, stages_left = ends[-1], stages - stage - 1
            end = bisect_right(sums, (sums[start] + limit) * (1 + 1e-12)) - 1
            ends.append(max(start + 1, min(end, units - stages_left)))
        return ends

    low, high = 0.0, max(sums[-1] for sums in columns)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if take(middle)[-1] >= units else (middle, high)
    return tuple(b - a for a, b in pairwise(take(high)))


def _move_units(point: Point) -> Iterator[Point]:
    """Yield ever faster points: units move between stages as long as that helps.

    A unit may move over several stages: each of them passes one on.
    """
    group, improving = point.group, not point.group.space.cut
    budget = _MOVED_ACTIONS // group.actions
    pairs = _list_moves(group.stages)
    while improving:
        improving = False
        for src, dst in pairs:
            if point.cut[src] == 1:
                continue
            budget -= 1
            if budget < 0:
                return
            counts = list(point.cut)
            counts[src] -= 1
            counts[dst] += 1
            timed = min(
                group.time(tuple(counts), point.seconds, point.name),
                key=lambda p: p.seconds,
                default=None,
            )
            if timed and timed.seconds < point.seconds * (1 - 1e-9):
                point, improving = timed, True
                yield timed


def _lower_bound(
    group: Group, cut: tuple[int, ...], recomputed: tuple[bool, ...]
) -> tuple[int, ...]:
    """Return a cut with a lower bound: units move as long as that lowers it."""

    def bound_of(cut: tuple[int, ...]) -> float:
        costs = group.table.stage_costs(cut, group.placement)
        free = costs.free_bytes(group.space.memory)
        return schedule_bound(
            costs, group.placement, group.chunks, recomputed, free, group.space.objective
        )

    budget, lowest, improving = _BOUNDED_STAGES // group.stages, bound_of(cut), True
    while improving:
        improving = False
        for src, dst in _list_moves(group.stages):
            if cut[src] == 1:
                continue
            budget -= 1
            if budget < 0:
                return cut
            counts = list(cut)
            counts[src] -= 1
            counts[dst] += 1
            bound = bound_of(tuple(counts))
            if bound < lowest * (1 - 1e-9):
                lowest, cut, improving = bound, tuple(counts), True
    return cut


def _list_moves(stages: int) -> list[tuple[int, int]]:
    """Return the pairs of stages between which a unit may move, near ones first."""
    furthest = stages if stages <= 16 else 3
    return [
        (src, dst)
        for distance in range(1, furthest + 1)
        for src in range(stages)
        for dst in (src - distance, src + distance)
        if 0 <= dst < stages
    ]


# ---- words ----------------------------------------------------------------------------------


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
        rows.append(Alternative(choice, _seconds_with_idle_gain(point), max(peaks)))
    return tuple(sorted(rows, key=lambda row: row.seconds))


def _pick_fastest_step(ranking: Sequence[Point], started: Sequence[Point]) -> Point:
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
    return min(different.values(), key=_seconds_with_idle_gain)


def _seconds_with_idle_gain(point: Point) -> float:
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


def _bound_step(group: Group, fastest: float) -> float:
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


def _bound_schedule(point: Point, limit: float) -> float:
    """Return seconds that no schedule of the cut of a point can beat, as `_bound_step` does."""
    group, space = point.group, point.group.space
    cost = group.table.stage_costs(point.cut, group.placement).cost
    busy = [0.0] * len(space.memory)
    for stage, rank in enumerate(group.placement):
        again = (cost.R or cost.F)[stage] if point.recomputed[stage] else 0.0
        busy[rank] += group.chunks * (cost.F[stage] + cost.I[stage] + cost.W[stage] + again)
    work = max(busy) if space.objective == "period" else sum(busy) / len(busy)
    return bound_with_idle_gain(limit, work, space.idle_gain, space.objective)


def _explain_no_fit(space: Space, groups: Sequence[Group]) -> str:
    """Return the message for a problem without a plan: what is missing, and what would fit."""
    rank, need, resident = _least_memory(space, groups)
    cap = space.memory[rank]
    ranks, rows = len(space.memory), space.profile.rows
    message = (
        f"no plan fits: the plan that needs least takes {format_bytes(need)} on rank {rank}, "
        f"{format_bytes(need - cap)} more than its cap of {format_bytes(cap)}. "
        f"{format_bytes(resident)} of it are parameters, gradients, optimizer state and workspace."
    )
    cures = []
    units = len(space.profile.units)
    for more in range(ranks + 1, min(units, 8 * ranks) + 1):
        wider = replace(
            space,
            profile=space.profile.with_devices(more),
            memory=(*space.memory, *(space.memory[-1],) * (more - ranks)),
            cut=(),
            recomputed=(),
        )
        if _fits(wider, rows):
            cures.append(f"at least {more} devices")
            break
    fewer = rows // 2
    while fewer and not _fits(replace(space, cut=(), recomputed=()), fewer):
        fewer //= 2
    if fewer:
        cures.append(f"a batch of {fewer} rows")
    if space.recomputed and not all(space.recomputed):
        cures.append("more recomputation")
    cures.append(f"a cap of {format_bytes(need)}")
    return f"{message} What would fit: {', or '.join(cures)}."


def _least_memory(space: Space, groups: Sequence[Group]) -> tuple[int, float, float]:
    """Return where the least excess is: (rank, bytes that it needs, resident bytes).

    The excess is that of one micro-batch alone, with everything recomputed.
    """
    rows = []
    for group in groups:
        cut = _even_cut(group, with_memory=True)
        costs = group.table.stage_costs(cut, group.placement)
        needs = []
        for rank, (mine, resident) in enumerate(
            zip(group.stages_by_rank, costs.resident, strict=True)
        ):
            inputs = sum(costs.cost.stage_input[s] for s in mine)
            active = max(costs.cost.activation[s] - costs.cost.stage_input[s] for s in mine)
            need = resident + inputs + active
            needs.append((need - space.memory[rank], rank, need, resident))
        rows.append(max(needs))
    return min(rows)[1:]


def _fits(space: Space, rows: int) -> bool:
    """Return whether one micro-batch of a batch of so many rows fits with some cut."""
    smaller = replace(space, profile=replace(space.profile, rows=rows))
    ranks = len(space.memory)
    group = Group(smaller, loop(ranks, 1), count_chunks(rows, min(rows, 8 * ranks)))
    rank, need, _ = _least_memory(smaller, [group])
    return not exceeds(need, space.memory[rank])

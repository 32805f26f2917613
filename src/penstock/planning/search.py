"""The search for the fastest plan.

The space is every cut of the units, with one or more stages per rank (in a loop, or two in a V),
every schedule that has this placement, every number of micro-batches and every set of recomputed
stages. A group is a placement with a number of micro-batches. The search goes through the groups,
the one with the lowest bound first, and leaves out those whose bound is no better than the best
plan so far.

    small group    every cut; with each, every schedule with the fewest recomputed stages that fit
    large group    the even cut, improved by moving units between neighbours as long as that helps

Then `fit` searches for better schedules for the most promising cuts (in a small space: for all
whose bound allows it), and the solver improves the winner if it is installed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from math import comb, inf
from typing import Any, NamedTuple

from penstock.errors import ArgumentError
from penstock.planning.bound import schedule_bound, space_bound
from penstock.planning.plan import Alternative, Certificate, Plan, describe_choice
from penstock.planning.profile import Profile, resolve_memory
from penstock.planning.schedule_timer import ScheduleTimer
from penstock.planning.stage_costs import CostTable, StageCosts, count_chunks
from penstock.schedules.balance import check_cut
from penstock.schedules.cost import exceeds
from penstock.schedules.families import family_of, loop, vee
from penstock.schedules.fit import Objective, fit, named_schedules
from penstock.schedules.ir import Schedule
from penstock.text_format import format_bytes

# Called with what the search is doing and the fraction that is done.
Progress = Callable[[str, float], None]

# A group is small if timing all its cuts takes no more than so many actions.
_EXHAUSTIVE_ACTIONS = 3_000_000
# How many schedules `fit` may try for one cut of a small group; how many actions it may place for
# the cuts of large groups together, and for the winner.
_FIT_ATTEMPTS = 40
_FIT_EFFORT = 60_000
_POLISH_EFFORT = 80_000
_CLIMBED = 6  # how many large groups are improved by moving units
_SHOWN_ALTERNATIVES = 4


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
        self.table = CostTable(space.profile, chunks, space.runtime)
        self.stages = len(placement)
        self.bound = space_bound(self.table, placement, space.memory, space.objective)
        self.schedules: dict[str, Schedule] = {}
        for name, schedule in named_schedules(placement, chunks).items():
            wanted = space.names is None or name in space.names
            if wanted and schedule not in self.schedules.values():
                self.schedules[name] = schedule
        self.actions = 4 * self.stages * chunks  # of one schedule
        units = len(space.profile.units)
        self.cuts = 1 if space.cut else comb(units - 1, self.stages - 1)
        work = self.cuts * self.actions * max(1, len(self.schedules))
        self.is_small = work <= _EXHAUSTIVE_ACTIONS
        self._timers: dict[tuple[tuple[int, int], ...], list[ScheduleTimer]] = {}

    def timers(self, costs: StageCosts) -> list[ScheduleTimer]:
        """Return the compiled schedules. Skip connections make other messages for other cuts."""
        edges = costs.graph.edges
        if edges not in self._timers:
            self._timers[edges] = [
                ScheduleTimer(name, schedule, costs.graph)
                for name, schedule in self.schedules.items()
            ]
        return self._timers[edges]

    def all_cuts(self) -> Iterator[tuple[int, ...]]:
        """Yield every cut."""
        if self.space.cut:
            yield self.space.cut
            return
        units = len(self.space.profile.units)
        for ends in combinations(range(1, units), self.stages - 1):
            yield tuple(b - a for a, b in pairwise((0, *ends, units)))

    def time(self, cut: tuple[int, ...], best: float = inf) -> Iterator[Point]:
        """Yield the named schedules of a cut that fit, with the fewest recomputed stages.

        Schedules that the bound shows to be slower than `best` are left out.
        """
        space = self.space
        costs = self.table.stage_costs(cut, self.placement)
        free = costs.free_bytes(space.memory)
        for timer in self.timers(costs):
            for flags in _fitting_flags(timer, costs, free, space.recomputed):
                bound = schedule_bound(
                    costs, self.placement, self.chunks, flags, free, space.objective
                )
                if bound < best:
                    seconds = timer.seconds(costs, flags, space.objective)
                    best = min(best, seconds)
                    yield Point(seconds, timer.name, self, cut, flags, timer.schedule)

    def fit(self, cut: tuple[int, ...], flags: tuple[bool, ...], effort: int) -> Point | None:
        """Return the schedule that `fit` finds for a cut and recomputed stages, if one fits."""
        space = self.space
        costs = self.table.stage_costs(cut, self.placement)
        schedule = fit_with_recomputation(
            costs,
            self.placement,
            self.chunks,
            flags,
            costs.free_bytes(space.memory),
            space.objective,
            effort,
        )
        if schedule is None:
            return None
        seconds = ScheduleTimer("fit", schedule, costs.graph).seconds(costs, flags, space.objective)
        return Point(seconds, "fit", self, cut, flags, schedule)


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
    solver_seconds: float = 10.0,
    progress: Progress | None = None,
) -> Plan:
    """Return the fastest plan for a profile, under a memory cap in bytes.

    What is given is kept; everything else is searched.

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
        None if schedules is None else frozenset(_check_schedules(schedules)),
        tuple(cut or ()),
        tuple(recompute or ()),
    )
    groups = _build_groups(space, chunks, stages_per_rank, placement)
    found = _search_groups(space, groups, report)
    if not found:
        raise ArgumentError(_explain_no_fit(space, groups))
    ranking = sorted(found, key=lambda point: point.seconds)
    best = ranking[0]
    if space.uses_fit:
        report("improving the best schedule", 0.9)
        polished = best.group.fit(best.cut, best.recomputed, _POLISH_EFFORT)
        if polished and polished.seconds < best.seconds * (1 - 1e-9):
            best = polished
    costs = best.group.table.stage_costs(best.cut, best.group.placement)
    schedule_limit = schedule_bound(
        costs,
        best.group.placement,
        best.group.chunks,
        best.recomputed,
        costs.free_bytes(space.memory),
        objective,
    )
    method = "bounds of work, fill, drain and memory"
    certificate = Certificate(
        bound=min(best.seconds, *(group.bound for group in groups if not group.is_small), inf),
        schedule_bound=min(best.seconds, schedule_limit),
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


def _check_names(what: str, chosen: Iterable[str] | None, known: Iterable[str]) -> list[str]:
    known = list(known)
    names = known if chosen is None else list(chosen)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ArgumentError(
            f"there is no {what} {', '.join(map(repr, unknown)) or '(none was given)'}: the "
            f"profile has {', '.join(known)}"
        )
    return names


def _check_schedules(names: Sequence[str]) -> Sequence[str]:
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

    >>> choose_chunks(rows=12, ranks=2)
    [1, 2, 3, 4, 6, 12]
    """
    counts = {count_chunks(rows, number) for number in range(1, min(rows, 8 * ranks) + 1)}
    return sorted(n for n in counts if n <= max(8, ranks) or n % ranks == 0)


def _search_groups(space: Space, groups: Sequence[Group], report: Progress) -> list[Point]:
    """Return the best point of each schedule and group that is worth comparing."""
    best: dict[tuple[str, tuple[int, ...], int], Point] = {}
    fastest = inf

    def consider(points: Iterable[Point]) -> None:
        nonlocal fastest
        for point in points:
            key = point.name, point.group.placement, point.group.chunks
            if key not in best or point.seconds < best[key].seconds:
                best[key] = point
            fastest = min(fastest, point.seconds)

    ordered = sorted(groups, key=lambda group: group.bound)
    for index, group in enumerate(ordered):
        report(f"{group.stages} stages, {group.chunks} micro-batches", 0.6 * index / len(ordered))
        if group.bound >= fastest:
            break  # no plan of this group, or of those after it, is faster
        cuts: Iterable[tuple[int, ...]] = group.all_cuts()
        if not group.is_small:
            cuts = {_even_cut(group, with_memory) for with_memory in (False, True)}
        for cut in cuts:
            consider(group.time(cut, fastest if group.is_small else inf))
    large = [point for point in best.values() if not point.group.is_small]
    for point in sorted(large, key=lambda point: point.seconds)[:_CLIMBED]:
        consider(_move_units(point))
    if space.uses_fit:
        _fit_promising(space, ordered, best, consider, lambda: fastest, report)
    return list(best.values())


def _fit_promising(
    space: Space,
    groups: Sequence[Group],
    best: dict[tuple[str, tuple[int, ...], int], Point],
    consider: Callable[[Iterable[Point]], None],
    fastest: Callable[[], float],
    report: Progress,
) -> None:
    """Let `fit` make schedules: for every cut of small groups, for the best cuts of large ones."""
    candidates: list[tuple[float, int, Group, tuple[int, ...], tuple[bool, ...]]] = []
    for group in groups:
        if group.bound >= fastest():
            break
        if group.is_small:
            cuts = list(group.all_cuts())
        else:
            points = [p for p in best.values() if p.group is group]
            cuts = list(dict.fromkeys(p.cut for p in sorted(points, key=lambda p: p.seconds)))[:1]
        for cut in cuts:
            costs = group.table.stage_costs(cut, group.placement)
            for flags in _possible_flags(group, costs, fastest()):
                bound = schedule_bound(
                    costs,
                    group.placement,
                    group.chunks,
                    flags,
                    costs.free_bytes(space.memory),
                    space.objective,
                )
                candidates.append((bound, len(candidates), group, cut, flags))
    candidates.sort(key=lambda candidate: candidate[:2])
    budget = _FIT_EFFORT
    for index, (bound, _, group, cut, flags) in enumerate(candidates):
        if bound >= fastest():
            break
        report("searching for schedules", 0.6 + 0.3 * index / len(candidates))
        effort = _FIT_ATTEMPTS * group.actions
        if not group.is_small:
            if budget < group.actions:
                continue
            effort = min(effort, _FIT_EFFORT // 3)
            budget -= effort
        point = group.fit(cut, flags, effort)
        if point:
            consider([point])


# ---- cuts and recomputation -----------------------------------------------------------------


def _fitting_flags(
    timer: ScheduleTimer,
    costs: StageCosts,
    free: Sequence[float],
    fixed: tuple[bool, ...],
) -> Iterator[tuple[bool, ...]]:
    """Yield the smallest sets of recomputed stages with which a schedule fits, as flags."""
    stages = range(timer.schedule.stages)
    if fixed:
        peaks = (timer.peak(rank, costs, fixed) for rank in range(timer.schedule.ranks))
        if not any(map(exceeds, peaks, free)):
            yield fixed
        return
    by_rank = [timer.fitting_recomputations(rank, costs, cap) for rank, cap in enumerate(free)]
    for sets in product(*by_rank):
        chosen = {stage for subset in sets for stage in subset}
        yield tuple(stage in chosen for stage in stages)


def _possible_flags(group: Group, costs: StageCosts, best: float) -> list[tuple[bool, ...]]:
    """Return the sets of recomputed stages with which a schedule might be faster than `best`.

    On each rank one micro-batch has to fit, and its work has to end in time. In a large group only
    the sets with nothing or everything of a rank are tried, the same on all ranks that can choose.
    """
    if group.space.recomputed:
        return [group.space.recomputed]
    cost, chunks, stages = costs.cost, group.chunks, range(group.stages)
    by_rank: list[list[frozenset[int]]] = []
    for rank, cap in enumerate(costs.free_bytes(group.space.memory)):
        mine = [stage for stage in stages if group.placement[stage] == rank]
        sets = []
        for size in range(len(mine) + 1):
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
    if group.is_small:
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
    columns = []
    for rank in group.placement:
        if with_memory:
            cap = group.space.memory[rank] if group.space.memory[rank] < inf else 1.0
            sums = [
                (a + group.stages * b) / cap
                for a, b in zip(table.resident, table.activation, strict=True)
            ]
        else:
            seconds = table.seconds[rank]
            sums = [sum(seconds[op][u] for op in "FIW") for u in range(units + 1)]
        columns.append(sums)

    def take(limit: float) -> list[int]:
        ends = [0]
        for stage, sums in enumerate(columns):
            start, rest = ends[-1], stages - stage - 1
            end = bisect_right(sums, (sums[start] + limit) * (1 + 1e-12)) - 1
            ends.append(max(start + 1, min(end, units - rest)))
        return ends

    low, high = 0.0, max(sums[-1] for sums in columns)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if take(middle)[-1] >= units else (middle, high)
    return tuple(b - a for a, b in pairwise(take(high)))


def _move_units(point: Point) -> Iterator[Point]:
    """Yield ever faster points: units move between neighbouring stages as long as that helps.

    A unit may move over several stages: each of them passes one on.
    """
    group, improving = point.group, not point.group.space.cut
    while improving:
        improving = False
        for src, dst in product(range(group.stages), repeat=2):
            if src == dst or abs(src - dst) > 2 or point.cut[src] == 1:
                continue
            counts = list(point.cut)
            counts[src] -= 1
            counts[dst] += 1
            timed = min(
                (p for p in group.time(tuple(counts), point.seconds) if p.name == point.name),
                key=lambda p: p.seconds,
                default=None,
            )
            if timed and timed.seconds < point.seconds * (1 - 1e-9):
                point, improving = timed, True
                yield timed


def fit_with_recomputation(
    costs: StageCosts,
    placement: tuple[int, ...],
    chunks: int,
    recomputed: Sequence[bool],
    free: Sequence[float],
    objective: Objective,
    effort: int,
) -> Schedule | None:
    """Return the schedule that `fit` finds, if these stages are recomputed.

    `fit` knows no R. A recomputed stage therefore looks to it like one with a longer I and a
    smaller activation, and its rank keeps some memory back for the moment of the recomputation.
    """
    cost = costs.cost
    kept = cost.kept_sizes
    sizes = [
        max(cost.stage_input[s], kept[s]) if recomputed[s] else cost.activation[s]
        for s in range(len(placement))
    ]
    caps = list(free)
    for rank in range(len(caps)):
        caps[rank] -= max(
            cost.activation[s] - sizes[s] for s, owner in enumerate(placement) if owner == rank
        )
    again = [
        seconds if flag else 0.0 for seconds, flag in zip(cost.R or cost.F, recomputed, strict=True)
    ]
    disguised = replace(
        cost,
        I=tuple(map(sum, zip(cost.I, again, strict=True))),
        activation=tuple(sizes),
        weight_activation=kept,
    )
    shares = [0.0] * len(caps)
    for stage, rank in enumerate(placement):
        shares[rank] += sizes[stage]
    if any(map(exceeds, shares, caps)):
        return None
    return fit(placement, chunks, disguised, caps, costs.graph, effort, objective)


# ---- words ----------------------------------------------------------------------------------


def _describe_space(groups: Sequence[Group]) -> str:
    cuts = sum(group.cuts for group in groups)
    chunks = sorted({group.chunks for group in groups})
    stages = sorted({group.stages for group in groups})
    names = sorted({name for group in groups for name in group.schedules})
    return (
        f"{cuts:,} cuts into {' or '.join(map(str, stages))} stages, "
        f"{len(names)} named schedules and fit, {len(chunks)} numbers of micro-batches from "
        f"{chunks[0]} to {chunks[-1]}, any stages recomputed"
    )


def _next_best(space: Space, best: Point, ranking: Sequence[Point]) -> tuple[Alternative, ...]:
    rows = []
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
        rows.append(Alternative(choice, point.seconds, max(peaks)))
    return tuple(rows)


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
            cures.append(f"{more} devices")
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
        for rank, resident in enumerate(costs.resident):
            mine = [s for s in range(group.stages) if group.placement[s] == rank]
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

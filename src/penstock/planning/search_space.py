"""The plans that are searched: the problem, and the groups that its plans fall into.

A group is a placement with a number of micro-batches. It times its plans, and has a bound for them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from math import comb, inf, prod
from typing import NamedTuple

from penstock.errors import ArgumentError
from penstock.planning.bound import schedule_bound, space_bound
from penstock.planning.profile import Profile
from penstock.planning.recomputed_fit import fit_with_recomputation
from penstock.planning.schedule_timer import ScheduleTimer
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

_STEPS_PER_CUT = 100  # how many dead ends per cut are searched
# In a group with so many actions in a schedule, only these schedules are tried: it takes about ten
# microseconds per action to build and compile one.
_HUGE_ACTIONS = 100_000
_HUGE_SCHEDULES = frozenset({"zb-h1", "dualpipe-v", "interleaved"})
_MAX_CELLS = 250_000  # ranks x micro-batches that are tried by default
MAX_FLAG_SETS = 256  # how many sets of recomputed stages of one schedule and cut are timed


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

    def even_cut(self, with_memory: bool) -> tuple[int, ...]:
        """Return the cut whose slowest stage is fastest, or whose fullest stage is emptiest."""
        if self.space.cut:
            return self.space.cut
        units, stages = len(self.space.profile.units), self.stages
        memory_sums = {
            cap: [
                (a + stages * b) / (cap if cap < inf else 1.0)
                for a, b in zip(self.table.resident, self.table.activation, strict=True)
            ]
            for cap in set(self.space.memory)
        }
        columns = [
            memory_sums[self.space.memory[rank]] if with_memory else self.table.seconds[rank]["FIW"]
            for rank in self.placement
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

    def estimate(self) -> float:
        """Return a guess of the seconds of the best plan: the bound of an even cut."""
        cut = self.even_cut(with_memory=False)
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
        if prod(map(len, by_rank)) > MAX_FLAG_SETS:
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


def check_names(what: str, chosen: Iterable[str] | None, valid_names: Iterable[str]) -> list[str]:
    """Return the chosen names, by default all valid ones. Raise if one is not valid."""
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


def build_groups(
    space: Space,
    chunks: Sequence[int] | None,
    stages_per_rank: Sequence[int],
    placement: Sequence[int] | None,
) -> list[Group]:
    """Return the groups of a space, for the placements and numbers of micro-batches to try."""
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


# ---- what would fit -----------------------------------------------------------------------------


def explain_no_fit(space: Space, groups: Sequence[Group]) -> str:
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
        cut = group.even_cut(with_memory=True)
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

"""The best cut under the memory of each rank, and what to say if none fits.

Stages that share a rank share its memory, so what one may keep depends on the others. The search
is first let loose as if each had all of it. If the best cut is too much for a rank, then in every
cut that fits one of its stages keeps no more than in proportion to what is there: each such case
is searched, and the best of all is gone on with, until one fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, pairwise

from penstock.errors import ArgumentError
from penstock.schedules.balance_problem import (
    CutProblem,
    DeviceCapacity,
    EvaluatedCut,
    IntegerCutProblem,
    UnitLoad,
    check_stage_count,
)

# -------------------------------------------------------------------------------------------------
# The search for the best cut: exact, under what each stage may keep in memory.
#
# First the least cost of the slowest stage, then, among the cuts of which that is true, the most
# even one. Both go stage by stage: what is best for the units before `end`, if the last of so many
# stages ends there. A cap on what a stage may cost keeps the search to starts that are not far off.
# -------------------------------------------------------------------------------------------------

_BLOCK_SIZE = 16  # starts that are passed over together
_FRACTION_SCALE = 1 << 128


@dataclass(frozen=True, order=True)
class CutCandidate:
    """The less, the better."""

    max_cost: int
    unevenness: int  # the sum of the stages' costs squared, then of their numbers of units
    reversed_counts: tuple[
        int, ...
    ]  # numbers of units from the last stage: large stages come first

    @property
    def counts(self) -> tuple[int, ...]:
        """How many units each stage takes."""
        return self.reversed_counts[::-1]


def search_under_stage_memory(
    problem: IntegerCutProblem, stage_memory: Sequence[int]
) -> CutCandidate | None:
    """The best cut of which each stage keeps to its room; None if there is none."""
    if not problem.is_feasible(stage_memory):
        return None
    low = _cost_lower_bound(problem)
    top = problem.prefix_costs[-1] * max(problem.slowness) + 2 * sum(
        cost for values in problem.message_costs.produced_at for _, _, cost in values
    )
    step = max(1, low // 16, top // 4096)
    cap = low
    while (slowest := _minimize_max_cost(_CappedProblem(problem, stage_memory, cap), low)) is None:
        assert cap < top, "everything fits, and nothing is found"
        cap, step = min(cap + step, top), 2 * step
    unevenness, ends = _minimize_unevenness(_CappedProblem(problem, stage_memory, slowest))
    counts = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    return CutCandidate(slowest, unevenness, tuple(reversed(counts)))


def _cost_lower_bound(problem: IntegerCutProblem) -> int:
    """No cut can do better: the work is divided by speed, and no unit is divided."""
    shared = Fraction(problem.prefix_costs[-1]) / sum(
        Fraction(1, slow) for slow in problem.slowness
    )
    units = (b - a for a, b in zip(problem.prefix_costs, problem.prefix_costs[1:], strict=False))
    return max(-(-shared.numerator // shared.denominator), max(units) * min(problem.slowness))


@dataclass
class _CappedProblem:
    """The stages that cost no more than the cap."""

    problem: IntegerCutProblem
    stage_memory: Sequence[int]
    cap: int
    _message_cost_cache: dict[int, list[int]] = field(default_factory=dict)

    def possible_ends(self, stage: int) -> Iterator[int]:
        """Where it may end, so that those after it can take what is left."""
        whole = self.problem
        after = whole.slowness[stage + 1 :]
        most = sum(self.cap // slow for slow in after)
        first = bisect_left(whole.prefix_costs, whole.prefix_costs[-1] - most)
        last = whole.unit_count - len(after)
        if not after:
            first = last
        return (end for end in range(max(stage + 1, first), last + 1) if whole.can_cut_before[end])

    def first_start(self, stage: int, end: int) -> int:
        """Of those from which it may reach that end, messages aside."""
        sums, kept = self.problem.prefix_costs, self.problem.prefix_memory[stage]
        by_cost = bisect_left(sums, sums[end] - self.cap // self.problem.slowness[stage])
        by_room = bisect_left(kept, kept[end] - self.stage_memory[stage])
        return max(stage, by_cost, by_room)

    def message_costs(self, end: int) -> list[int]:
        """What they cost a stage that ends there, from each start: end - 1, end - 2 and so on."""
        if end not in self._message_cost_cache:
            sums = self.problem.prefix_costs
            low = bisect_left(sums, sums[end] - self.cap // min(self.problem.slowness))
            self._message_cost_cache[end] = self.problem.message_costs.stage_costs(end, low)
        return self._message_cost_cache[end]


def _minimize_max_cost(capped: _CappedProblem, low: int) -> int | None:
    """The least cost of the most expensive stage, or None if it is above the cap.

    It is `low` at least, which lets the search for a start end early.
    """
    sums, never = capped.problem.prefix_costs, capped.cap + 1
    before = [low] + [never] * capped.problem.unit_count
    highest = 0  # of the starts that can be reached
    for stage, slow in enumerate(capped.problem.slowness):
        after = [never] * len(sums)
        reached = -1
        for end in capped.possible_ends(stage):
            first, top = capped.first_start(stage, end), min(highest, end - 1)
            if first > top:
                continue
            least = min(before[first : top + 1])
            if least == never:
                continue
            best, messages, here = never, capped.message_costs(end), sums[end]
            for start in range(top, first - 1, -1):
                cost = slow * (here - sums[start])
                if cost >= best:
                    break  # and it grows with each earlier start
                cost = max(cost + messages[end - 1 - start], before[start])
                if cost < best:
                    best = cost
                    if best == least:
                        break
            if best < never:
                after[end], reached = best, end
        if reached < 0:
            return None
        before, highest = after, reached
    return before[-1]


def _minimize_unevenness(capped: _CappedProblem) -> tuple[int, list[int]]:
    """The least unevenness, and where each stage ends; of equals, the latest ends.

    First only cuts are looked for that come near to what no cut can beat.
    """
    rest = _UnevennessBound.from_problem(capped.problem)
    low = rest.min_after(-1, 0)
    more = low // 64 + 1
    while (found := _minimize_unevenness_within(capped, rest, low + more)) is None:
        more *= 4
    return found


@dataclass(frozen=True)
class _UnevennessBound:
    """What the stages after one can not do better than, whatever they take of the units left.

    They are at their most even if each takes in proportion to its speed. If the largest unit left
    is more than that, it alone costs what it does.
    """

    problem: IntegerCutProblem
    weight: int  # no numbers of units outweigh a difference of costs
    suffix_speeds: list[int]  # by stage: those after it, squared and added, in parts of _PART
    suffix_max_cost: list[int]  # by unit: of those from there on

    @staticmethod
    def from_problem(problem: IntegerCutProblem) -> _UnevennessBound:
        squares = [-(-_FRACTION_SCALE // slow**2) for slow in problem.slowness]
        units = [b - a for a, b in pairwise(problem.prefix_costs)]
        return _UnevennessBound(
            problem,
            problem.unit_count**2 + 1,
            list(accumulate(reversed(squares), initial=0))[::-1],
            list(accumulate(reversed(units), max, initial=0))[::-1],
        )

    def min_after(self, stage: int, end: int) -> int:
        """Of the stages after that one, which ends there."""
        whole = self.problem
        after = whole.stages - 1 - stage
        if not after:
            return 0
        left, largest = whole.prefix_costs[-1] - whole.prefix_costs[end], self.suffix_max_cost[end]
        speeds = self.suffix_speeds[stage + 1]
        even = left**2 * _FRACTION_SCALE // speeds
        alone = (largest * self.min_slowness) ** 2 + (
            left - largest
        ) ** 2 * _FRACTION_SCALE // speeds
        return max(even, alone) * self.weight + (whole.unit_count - end) ** 2 // after

    @cached_property
    def min_slowness(self) -> int:
        """What it takes least."""
        return min(self.problem.slowness)


def _minimize_unevenness_within(
    capped: _CappedProblem, bound: _UnevennessBound, max_unevenness: int
) -> tuple[int, list[int]] | None:
    """The same, or None if the least is more than that."""
    whole, never = capped.problem, max_unevenness + 1
    before = [0] + [never] * whole.unit_count
    starts = []
    for stage in range(whole.stages):
        after, start = [never] * len(before), [0] * len(before)
        lows = [min(before[at : at + _BLOCK_SIZE]) for at in range(0, len(before), _BLOCK_SIZE)]
        for end in capped.possible_ends(stage):
            limit = max_unevenness - bound.min_after(stage, end)
            best, at = _find_best_start(capped, stage, end, before, lows, bound.weight, limit + 1)
            if best <= limit:
                after[end], start[end] = best, at
        before = after
        starts.append(start)
    if before[-1] == never:
        return None
    ends = [whole.unit_count]
    for start in reversed(starts[1:]):
        ends.append(start[ends[-1]])
    return before[-1], ends[::-1]


def _find_best_start(
    capped: _CappedProblem,
    stage: int,
    end: int,
    prefix_unevenness: Sequence[int],
    block_minima: Sequence[int],
    weight: int,
    best: int,
) -> tuple[int, int]:
    """The least unevenness of what comes before that end, if it is less than `best`, and the start.

    A block of starts is passed over if even the least of what comes before them, with the cheapest
    stage from there, would be too much; and so are all earlier ones if that is so for the least
    of all blocks.
    """
    sums, slow, cap = capped.problem.prefix_costs, capped.problem.slowness[stage], capped.cap
    first, at = capped.first_start(stage, end), 0
    low, high = first // _BLOCK_SIZE, (end - 1) // _BLOCK_SIZE
    least = min(block_minima[low : high + 1])
    if least >= best:
        return best, at
    messages, here = capped.message_costs(end), sums[end]
    for block in range(high, low - 1, -1):
        top = min(end - 1, block * _BLOCK_SIZE + _BLOCK_SIZE - 1)
        cost = slow * (here - sums[top])
        price = cost * cost * weight + (end - top) ** 2
        if least + price >= best:
            break
        if block_minima[block] + price >= best:
            continue
        for start in range(top, max(first, block * _BLOCK_SIZE) - 1, -1):
            cost = slow * (here - sums[start]) + messages[end - 1 - start]
            if cost <= cap:
                total = prefix_unevenness[start] + cost * cost * weight + (end - start) ** 2
                if total < best:
                    best, at = total, start
    return best, at


# -------------------------------------------------------------------------------------------------

_MAX_CASES = 256  # after so many, the stages of a rank get equal shares of its memory


def find_best_cut(problem: CutProblem) -> EvaluatedCut:
    """The cut whose slowest stage, its messages included, is as fast as it can be.

    Every rank has memory enough for its stages. Among equals the stages' seconds are as even as
    they can be (the least sum of squares), then their numbers of units, and then the larger stages
    come first. It is exact; only where ranks with several stages are so short of memory that
    hundreds of searches find no cut does each of their stages get an equal share of it.

    >>> units = (UnitLoad(seconds=1.0, static_bytes=10),) * 6
    >>> find_best_cut(CutProblem(units, (DeviceCapacity(speed=2.0), DeviceCapacity()))).counts
    (4, 2)
    >>> find_best_cut(CutProblem(units, (DeviceCapacity(speed=2.0, memory=30), DeviceCapacity()))).counts
    (3, 3)
    """
    whole = IntegerCutProblem.from_problem(problem)
    found = _search_under_rank_memory(whole)
    if found is None:
        raise ArgumentError(_explain_infeasible(problem, whole))
    return problem.evaluate(found.counts)


def _search_under_rank_memory(problem: IntegerCutProblem) -> CutCandidate | None:
    rooms = tuple(problem.rank_memory[rank] for rank in problem.placement)
    seen = {rooms}
    cases: list[tuple[CutCandidate, tuple[int, ...]]] = []
    _push_candidate(cases, problem, rooms)
    while cases:
        found, rooms = heappop(cases)
        tight = list(_find_tighter_limits(problem, found.counts))
        if not tight:
            return found
        if len(seen) > _MAX_CASES:
            return search_under_stage_memory(
                problem, _equal_memory_shares(problem, problem.rank_memory)
            )
        for stage, most in tight:
            case = (*rooms[:stage], most, *rooms[stage + 1 :])
            if case not in seen:
                seen.add(case)
                _push_candidate(cases, problem, case)
    return None


def _push_candidate(
    cases: list[tuple[CutCandidate, tuple[int, ...]]],
    problem: IntegerCutProblem,
    stage_memory: tuple[int, ...],
) -> None:
    found = search_under_stage_memory(problem, stage_memory)
    if found is not None:
        heappush(cases, (found, stage_memory))


def _find_tighter_limits(
    problem: IntegerCutProblem, counts: Sequence[int]
) -> list[tuple[int, int]]:
    """For the first rank that is given too much: its stages, and what one of them may keep."""
    kept = _memory_by_stage(problem, counts)
    for rank, room in enumerate(problem.rank_memory):
        own = [stage for stage, at in enumerate(problem.placement) if at == rank]
        wanted = sum(kept[stage] for stage in own)
        if wanted > room:
            return [(stage, kept[stage] * room // wanted) for stage in own if kept[stage]]
    return []


def _memory_by_stage(problem: IntegerCutProblem, counts: Sequence[int]) -> list[int]:
    found, start = [], 0
    for sums, count in zip(problem.prefix_memory, counts, strict=True):
        found.append(sums[start + count] - sums[start])
        start += count
    return found


def _equal_memory_shares(problem: IntegerCutProblem, rank_memory: Sequence[int]) -> list[int]:
    return [rank_memory[rank] // problem.placement.count(rank) for rank in problem.placement]


def _explain_infeasible(problem: CutProblem, integer_problem: IntegerCutProblem) -> str:
    """What every rank would need more, if all got as much more, and who needs it."""
    low, high = 0, sum(sums[-1] for sums in integer_problem.prefix_memory) * integer_problem.stages
    while low < high:
        more = (low + high) // 2
        if integer_problem.is_feasible(
            _equal_memory_shares(
                integer_problem, [room + more for room in integer_problem.rank_memory]
            )
        ):
            high = more
        else:
            low = more + 1
    found = search_under_stage_memory(
        integer_problem,
        _equal_memory_shares(integer_problem, [room + low for room in integer_problem.rank_memory]),
    )
    assert found is not None
    cut = problem.evaluate(found.counts)
    lacks = []
    for rank, device in enumerate(problem.devices):
        own = [stage for stage, at in enumerate(problem.placement) if at == rank]
        wanted = sum(cut.loads[stage].memory for stage in own)
        if wanted > device.memory:
            stages = f"stage{'s' * (len(own) > 1)} {' and '.join(map(str, own))}"
            lacks.append(
                f"{stages} would need {_format_bytes(wanted)} on rank {rank}, which has "
                f"{_format_bytes(device.memory)}: {_format_bytes(wanted - device.memory)} too much"
            )
    return (
        f"no cut of {len(problem.units)} units into {problem.stages} stages fits the memory. The nearest "
        f"is {list(cut.counts)}, and there {'; '.join(lacks)}. Take more stages or devices with "
        "more memory, cut the batch into more chunks, recompute (checkpoint='always'), or take a "
        "schedule with fewer micro-batches in flight"
    )


def _format_bytes(number: float) -> str:
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            return f"{number / 1024**power:.2f} {name}"
    return f"{number:g} bytes"


def balance_costs(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return how many neighbouring units each of `stages` equal devices takes, by cost alone.

    >>> balance_costs([1] * 10, 4)
    (3, 3, 2, 2)
    >>> balance_costs([1, 1, 1, 6, 1, 1], 3)
    (3, 1, 2)
    """
    units = tuple(map(UnitLoad, costs))
    check_stage_count(units, stages)
    return find_best_cut(CutProblem(units, (DeviceCapacity(),) * stages)).counts

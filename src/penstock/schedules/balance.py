"""The exact search for the best cut of a model into stages, under the memory of each rank.

    find_best_cut                the best cut under the memory of each rank
    search_under_stage_memory    the best cut under a memory limit for each stage
    balance_costs                the best cut by cost alone, for equal devices

Stages that share a rank share its memory, so the limit of one depends on the others. The first
search gives each stage the whole memory of its rank. If its best cut needs too much on a rank, then
in every cut that fits, at least one stage of that rank needs no more than its proportional share.
Each of these cases is searched with that tighter limit, always continuing with the best cut so far,
until a cut fits (best-first branch and bound).
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
from penstock.text_format import format_binary_bytes

# -------------------------------------------------------------------------------------------------
# The search under a memory limit for each stage. It is exact, and has two passes:
#
#     1. _minimize_max_cost      the least possible cost of the slowest stage
#     2. _minimize_unevenness    among the cuts with that cost, the most even one
#
# Both are dynamic programs over the stages. `before[end]` is the best value for the units before
# `end`, if the stages so far end there. A cap on the cost of a stage limits the search to starts
# that are not far from the end. The cap starts at a lower bound and is raised until a cut is found.
# -------------------------------------------------------------------------------------------------

_BLOCK_SIZE = 16  # the number of starts that are skipped together
_FRACTION_SCALE = 1 << 128  # for fractions in whole numbers


@dataclass(frozen=True, order=True)
class CutCandidate:
    """A cut with its quality. The smaller of two candidates is the better one.

    max_cost         the cost of the slowest stage
    unevenness       the sum of the squared costs, and with far less weight that of squared counts
    reversed_counts  the number of units of each stage, from the last; comparing from the last stage
                     prefers cuts with larger stages first
    """

    max_cost: int
    unevenness: int
    reversed_counts: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of units of each stage."""
        return self.reversed_counts[::-1]


def search_under_stage_memory(
    problem: IntegerCutProblem, stage_memory: Sequence[int]
) -> CutCandidate | None:
    """Return the best cut in which no stage needs more than its memory, or None."""
    if not problem.is_feasible(stage_memory):
        return None
    low = _cost_lower_bound(problem)
    top = problem.prefix_costs[-1] * max(problem.slowness) + 2 * sum(
        cost for values in problem.message_costs.produced_at for _, _, cost in values
    )
    # A low cap makes a pass quick, but it may find nothing. The steps double, so that few passes
    # are needed even if the best cost is far above the lower bound.
    step = max(1, low // 16, top // 4096)
    cap = low
    while (slowest := _minimize_max_cost(_CappedProblem(problem, stage_memory, cap), low)) is None:
        assert cap < top, "everything fits, and nothing is found"
        cap, step = min(cap + step, top), 2 * step
    unevenness, ends = _minimize_unevenness(_CappedProblem(problem, stage_memory, slowest))
    counts = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    return CutCandidate(slowest, unevenness, tuple(reversed(counts)))


def _cost_lower_bound(problem: IntegerCutProblem) -> int:
    """Return a cost that the slowest stage of every cut reaches.

    It is the larger of two bounds: all work shared in proportion to speed, and the largest unit on
    the fastest device.
    """
    shared = Fraction(problem.prefix_costs[-1]) / sum(
        Fraction(1, slow) for slow in problem.slowness
    )
    units = (b - a for a, b in zip(problem.prefix_costs, problem.prefix_costs[1:], strict=False))
    return max(-(-shared.numerator // shared.denominator), max(units) * min(problem.slowness))


@dataclass
class _CappedProblem:
    """The problem with a cap on the cost of a stage, which limits its possible starts and ends."""

    problem: IntegerCutProblem
    stage_memory: Sequence[int]
    cap: int
    _message_cost_cache: dict[int, list[int]] = field(default_factory=dict)

    def possible_ends(self, stage: int) -> Iterator[int]:
        """Return the ends of a stage that leave no more units than the later stages can take."""
        whole = self.problem
        after = whole.slowness[stage + 1 :]
        most = sum(self.cap // slow for slow in after)
        first_end = bisect_left(whole.prefix_costs, whole.prefix_costs[-1] - most)
        last_end = whole.unit_count - len(after)
        if not after:
            first_end = last_end
        return (
            end
            for end in range(max(stage + 1, first_end), last_end + 1)
            if whole.can_cut_before[end]
        )

    def first_start(self, stage: int, end: int) -> int:
        """Return the first start from which a stage may reach that end, without its messages."""
        costs, memory = self.problem.prefix_costs, self.problem.prefix_memory[stage]
        by_cost = bisect_left(costs, costs[end] - self.cap // self.problem.slowness[stage])
        by_memory = bisect_left(memory, memory[end] - self.stage_memory[stage])
        return max(stage, by_cost, by_memory)

    def message_costs(self, end: int) -> list[int]:
        """Return the message costs of a stage that ends there, for each start from end - 1 down.

        They do not depend on the stage, so all stages share the cache.
        """
        if end not in self._message_cost_cache:
            sums = self.problem.prefix_costs
            low = bisect_left(sums, sums[end] - self.cap // min(self.problem.slowness))
            self._message_cost_cache[end] = self.problem.message_costs.stage_costs(end, low)
        return self._message_cost_cache[end]


def _minimize_max_cost(capped: _CappedProblem, low: int) -> int | None:
    """Return the least possible cost of the slowest stage, or None if it is above the cap.

    `low` is a lower bound. It lets the search for a start end early.
    """
    sums, never = capped.problem.prefix_costs, capped.cap + 1
    before = [low] + [never] * capped.problem.unit_count
    highest = 0  # the last start that can be reached
    for stage, slow in enumerate(capped.problem.slowness):
        after = [never] * len(sums)
        reached = -1
        for end in capped.possible_ends(stage):
            low_start, top = capped.first_start(stage, end), min(highest, end - 1)
            if low_start > top:
                continue
            least = min(before[low_start : top + 1])
            if least == never:
                continue
            best, messages, end_sum = never, capped.message_costs(end), sums[end]
            for start in range(top, low_start - 1, -1):
                cost = slow * (end_sum - sums[start])
                if cost >= best:
                    break  # earlier starts cost even more
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
    """Return the least unevenness and where each stage ends. Of equal cuts, the latest ends win.

    The first pass looks only for cuts close to the lower bound, which is quick. The limit grows
    until a cut is found.
    """
    bound = _UnevennessBound.from_problem(capped.problem)
    low = bound.min_after(-1, 0)
    more = low // 64 + 1
    while (result := _minimize_unevenness_within(capped, bound, low + more)) is None:
        more *= 4
    return result


@dataclass(frozen=True)
class _UnevennessBound:
    """A lower bound on the unevenness of the stages after a given one.

    They are most even if each takes units in proportion to its speed. If the largest unit that is
    left is more than such a share, the stage with that unit costs at least as much as the unit.

    weight           the factor of the squared costs; it is so large that no difference in the
                     numbers of units can outweigh a difference in costs
    suffix_speeds    by stage: the sum of the squared speeds from that stage on, in parts of
                     _FRACTION_SCALE
    suffix_max_cost  by unit: the cost of the largest unit from there on
    """

    problem: IntegerCutProblem
    weight: int
    suffix_speeds: list[int]
    suffix_max_cost: list[int]

    @staticmethod
    def from_problem(problem: IntegerCutProblem) -> _UnevennessBound:
        # Rounding up makes the speeds a little too large, and the bound a little too small: it
        # stays a lower bound.
        squares = [-(-_FRACTION_SCALE // slow**2) for slow in problem.slowness]
        units = [b - a for a, b in pairwise(problem.prefix_costs)]
        return _UnevennessBound(
            problem,
            problem.unit_count**2 + 1,
            list(accumulate(reversed(squares), initial=0))[::-1],
            list(accumulate(reversed(units), max, initial=0))[::-1],
        )

    def min_after(self, stage: int, end: int) -> int:
        """Return the bound for the stages after `stage`, if that one ends before unit `end`."""
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
        """The slowness of the fastest device."""
        return min(self.problem.slowness)


def _minimize_unevenness_within(
    capped: _CappedProblem, bound: _UnevennessBound, max_unevenness: int
) -> tuple[int, list[int]] | None:
    """Return the least unevenness and where each stage ends, or None if it is above the maximum.

    `starts[stage][end]` is the best start of a stage that ends there. Following these from the last
    unit back gives the cut.
    """
    whole, never = capped.problem, max_unevenness + 1
    before = [0] + [never] * whole.unit_count
    starts = []
    for stage in range(whole.stages):
        after, start = [never] * len(before), [0] * len(before)
        lows = [min(before[i : i + _BLOCK_SIZE]) for i in range(0, len(before), _BLOCK_SIZE)]
        for end in capped.possible_ends(stage):
            limit = max_unevenness - bound.min_after(stage, end)
            best, best_start = _find_best_start(
                capped, stage, end, before, lows, bound.weight, limit + 1
            )
            if best <= limit:
                after[end], start[end] = best, best_start
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
    """Return the least unevenness of the units before `end`, if below `best`, and its start.

    Starts are searched in blocks. A block is skipped if its smallest prefix, together with the
    cheapest stage that starts in the block, is already too much. If that holds for the smallest
    prefix of all blocks, all earlier blocks are skipped too, because their stages cost more.
    """
    sums, slow, cap = capped.problem.prefix_costs, capped.problem.slowness[stage], capped.cap
    first_start, best_start = capped.first_start(stage, end), 0
    low, high = first_start // _BLOCK_SIZE, (end - 1) // _BLOCK_SIZE
    least = min(block_minima[low : high + 1])
    if least >= best:
        return best, best_start
    messages, end_sum = capped.message_costs(end), sums[end]
    for block in range(high, low - 1, -1):
        top = min(end - 1, block * _BLOCK_SIZE + _BLOCK_SIZE - 1)
        cost = slow * (end_sum - sums[top])
        price = cost * cost * weight + (end - top) ** 2
        if least + price >= best:
            break
        if block_minima[block] + price >= best:
            continue
        for start in range(top, max(first_start, block * _BLOCK_SIZE) - 1, -1):
            cost = slow * (end_sum - sums[start]) + messages[end - 1 - start]
            if cost <= cap:
                total = prefix_unevenness[start] + cost * cost * weight + (end - start) ** 2
                if total < best:
                    best, best_start = total, start
    return best, best_start


# -------------------------------------------------------------------------------------------------
# The search under the memory of each rank, which its stages share.
# -------------------------------------------------------------------------------------------------

# After this many cases, each stage of a rank gets an equal share of its memory.
_MAX_CASES = 256


def find_best_cut(problem: CutProblem) -> EvaluatedCut:
    """Return the cut whose slowest stage, with its messages, is as fast as possible.

    The stages of each rank fit in its memory. Among equal cuts the seconds of the stages are as
    even as possible (the least sum of squares), then their numbers of units, and then the larger
    stages come first. The result is exact, with one exception: if ranks with several stages are so
    short of memory that hundreds of searches find no cut, each of their stages gets an equal share
    of the memory.

    >>> units = (UnitLoad(seconds=1.0, static_bytes=10),) * 6
    >>> slow, fast = DeviceCapacity(), DeviceCapacity(speed=2.0)
    >>> find_best_cut(CutProblem(units, (fast, slow))).counts
    (4, 2)
    >>> small = DeviceCapacity(speed=2.0, memory=30)
    >>> find_best_cut(CutProblem(units, (small, slow))).counts
    (3, 3)
    """
    whole = IntegerCutProblem.from_problem(problem)
    candidate = _search_under_rank_memory(whole)
    if candidate is None:
        raise ArgumentError(_explain_infeasible(problem, whole))
    return problem.evaluate(candidate.counts)


def _search_under_rank_memory(problem: IntegerCutProblem) -> CutCandidate | None:
    """Return the best cut under the memory of each rank, or None, by branch and bound.

    A case is one memory limit per stage. The heap yields the case with the best cut first. A cut
    that fits is therefore the best of all: tighter limits never lead to better cuts.
    """
    limits = tuple(problem.rank_memory[rank] for rank in problem.placement)
    visited = {limits}
    cases: list[tuple[CutCandidate, tuple[int, ...]]] = []
    _push_candidate(cases, problem, limits)
    while cases:
        candidate, limits = heappop(cases)
        tighter = list(_find_tighter_limits(problem, candidate.counts))
        if not tighter:
            return candidate
        if len(visited) > _MAX_CASES:
            return search_under_stage_memory(
                problem, _equal_memory_shares(problem, problem.rank_memory)
            )
        for stage, limit in tighter:
            case = (*limits[:stage], limit, *limits[stage + 1 :])
            if case not in visited:
                visited.add(case)
                _push_candidate(cases, problem, case)
    return None


def _push_candidate(
    cases: list[tuple[CutCandidate, tuple[int, ...]]],
    problem: IntegerCutProblem,
    stage_memory: tuple[int, ...],
) -> None:
    """Search one case and push its best cut, if there is one."""
    candidate = search_under_stage_memory(problem, stage_memory)
    if candidate is not None:
        heappush(cases, (candidate, stage_memory))


def _find_tighter_limits(
    problem: IntegerCutProblem, counts: Sequence[int]
) -> list[tuple[int, int]]:
    """Return (stage, tighter limit) for each stage of the first rank whose memory is exceeded.

    If all stages of the rank needed more than their proportional shares, the rank would be over its
    memory. So in a cut that fits, at least one of them stays within its share. Return an empty list
    if the cut fits.
    """
    needs = _memory_by_stage(problem, counts)
    for rank, room in enumerate(problem.rank_memory):
        stages = [stage for stage, owner in enumerate(problem.placement) if owner == rank]
        total = sum(needs[stage] for stage in stages)
        if total > room:
            return [(stage, needs[stage] * room // total) for stage in stages if needs[stage]]
    return []


def _memory_by_stage(problem: IntegerCutProblem, counts: Sequence[int]) -> list[int]:
    needs, start = [], 0
    for sums, count in zip(problem.prefix_memory, counts, strict=True):
        needs.append(sums[start + count] - sums[start])
        start += count
    return needs


def _equal_memory_shares(problem: IntegerCutProblem, rank_memory: Sequence[int]) -> list[int]:
    return [rank_memory[rank] // problem.placement.count(rank) for rank in problem.placement]


def _explain_infeasible(problem: CutProblem, integer_problem: IntegerCutProblem) -> str:
    """Return the message for a problem without a cut: the nearest cut, and what each rank lacks.

    The nearest cut is the one that needs the least additional memory, if every rank got the same.
    A binary search finds that amount.
    """
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
    candidate = search_under_stage_memory(
        integer_problem,
        _equal_memory_shares(integer_problem, [room + low for room in integer_problem.rank_memory]),
    )
    assert candidate is not None
    cut = problem.evaluate(candidate.counts)
    lacks = []
    for rank, device in enumerate(problem.devices):
        stages = [stage for stage, owner in enumerate(problem.placement) if owner == rank]
        need = sum(cut.loads[stage].memory for stage in stages)
        if need > device.memory:
            names = f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))}"
            lacks.append(
                f"{names} would need {format_binary_bytes(need)} on rank {rank}, which has "
                f"{format_binary_bytes(device.memory)}: "
                f"{format_binary_bytes(need - device.memory)} too much"
            )
    return (
        f"no cut of {len(problem.units)} units into {problem.stages} stages fits the memory. The "
        f"nearest is {list(cut.counts)}, and there {'; '.join(lacks)}. Use more stages or devices "
        "with more memory, cut the batch into more chunks, recompute (checkpoint='always'), or use "
        "a schedule with fewer micro-batches in flight."
    )


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

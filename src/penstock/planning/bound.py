"""Lower bounds: seconds that no schedule, and no plan, can beat.

`schedule_bound` is for one cut with its micro-batches, recomputation and memory, and any order of
its actions (see `schedules.bound`). `space_bound` is for all cuts of a placement. Both are for the
speed of ranks that are all busy; `bound_with_idle_gain` is for that which idle ranks leave.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import fsum, inf

from penstock.planning.stage_costs import CostTable, StageCosts
from penstock.schedules import bound
from penstock.schedules.bound import Objective
from penstock.schedules.families.common import group_stages

_PACKING_STEPS, _PACKING_PARTS = 100, 20  # how finely `_least_full_rank` looks


def schedule_bound(
    costs: StageCosts,
    placement: Sequence[int],
    chunks: int,
    recomputed: Sequence[bool],
    free: Sequence[float],
    objective: Objective = "makespan",
) -> float:
    """Return seconds that no schedule of these stages can beat, as in `schedules.bound`."""
    return bound.schedule_bound(
        costs.cost, costs.graph, placement, chunks, recomputed, free, objective
    )


def space_bound(
    table: CostTable,
    placement: Sequence[int],
    memory: Sequence[float],
    objective: Objective = "makespan",
) -> float:
    """Return seconds that no plan with this placement and number of micro-batches can beat.

    Whatever the cut is, a micro-batch passes through all units and back, the ranks together have
    the whole work to do, and stage s starts after at least s units. With stage r on rank r, for all
    ranks, there is also a best cut: a stage that takes as many units as it can leaves the fewest to
    the others. The result is infinite if the parameters alone exceed the memory.
    """
    ranks, units, chunks = len(memory), len(table.profile.units), table.chunks
    stages_by_rank = group_stages(placement)
    work = [sums["FIW"] for sums in table.seconds]
    distinct = [sums["FIW"] for sums in table.distinct_seconds]
    fastest = [min(sums[u + 1] - sums[u] for sums in distinct) for u in range(units)]
    # The least seconds from the start of the step until unit u can start, and from the end of its I
    # to the end of the step: the units before it, on the fastest device for each. Messages between
    # the stages before a stage come on top.
    fills, drains = (
        list(
            accumulate(
                (
                    min(s[op][u + 1] - s[op][u] for s in table.distinct_seconds)
                    for u in range(units)
                ),
                initial=0.0,
            )
        )
        for op in "FI"
    )
    hops, hops_back = _least_hops(table, placement)
    if objective == "period":
        fills = drains = [0.0] * (units + 1)
        hops = hops_back = [0.0] * len(placement)
    # What the runtime adds to all Fs of a stage, to all of its Is, and to all of its Ws.
    overhead = chunks * table.overhead
    lost_seconds = [
        fills[mine[0]] + hops[mine[0]] + 3 * len(mine) * overhead for mine in stages_by_rank
    ]
    # The share of rank r in the work is at most its time from its start on, without overhead. Units
    # are weighed by the seconds on the fastest rank, and each rank by how close it can come to
    # these.
    paces = {
        id(sums): max(
            (fastest[u] / (sums[u + 1] - sums[u]) for u in range(units) if sums[u + 1] > sums[u]),
            default=1.0,
        )
        for sums in distinct
    }
    pace = [paces[id(sums)] for sums in work]
    lost = sum(seconds * p for seconds, p in zip(lost_seconds, pace, strict=True))
    even = (chunks * sum(fastest) + lost) / sum(pace)
    even = max(even, fills[-1] + drains[-1] + hops[-1] + hops_back[-1])
    if len(distinct) == 1:
        least_overhead = 3 * overhead * min(map(len, stages_by_rank))
        even = max(even, chunks * _least_full_rank(fastest, ranks) + least_overhead)
    if sum(memory) < table.resident[-1]:
        return inf
    if list(placement) != list(range(ranks)):
        return even
    # Without weight gradients, which may wait: these are the actions on a rank before its last I.
    ordered = {
        id(sums["FIW"]): [f + i for f, i in zip(sums["F"], sums["I"], strict=True)]
        for sums in table.distinct_seconds
    }

    def reach(sums: Sequence[float], start: int, seconds: float) -> int:
        """Return the first unit that a rank cannot do for all micro-batches in these seconds."""
        return bisect_right(sums, (sums[start] + seconds / chunks) * (1 + 1e-12)) - 1

    def fits(seconds: float) -> bool:
        end = 0
        for rank in range(ranks):
            start, sums = end, work[rank]
            left = seconds - fills[start] - hops[rank]
            back = drains[start] + hops_back[rank]
            end = min(
                reach(sums, start, left - 3 * overhead),
                reach(ordered[id(sums)], start, left - 2 * overhead - back),
                bisect_right(table.resident, (table.resident[start] + memory[rank]) * (1 + 1e-12))
                - 1,
            )
            if end >= units:
                return True
            if end < start:
                return False
        return False

    low, high = even, hops[-1] + fills[-1] + drains[-1] + hops_back[-1]
    high += chunks * max(sums[-1] for sums in work) + 3 * overhead
    if not fits(high):
        return inf
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low


def least_work(table: CostTable) -> float:
    """Return the seconds that all ranks together work at least, in a step without overhead."""
    sums = [sums["FIW"] for sums in table.distinct_seconds]
    units = range(len(table.profile.units))
    return table.chunks * fsum(min(s[u + 1] - s[u] for s in sums) for u in units)


def bound_with_idle_gain(
    limit: float, work: float, gain: float, objective: Objective = "makespan"
) -> float:
    """Return how long a step takes at least that takes `limit` seconds while all ranks are busy.

    In a step of T seconds in which a rank works for w seconds in the mean, ranks are idle for
    1 - w / T of the time. So it takes T / (1 + gain (1 - w / T)) seconds. This grows with T because
    T is at least w and the gain is at most 1, so the bound for the least T holds for every T.

    Steps that follow each other without a barrier may be idle for any part of the time. For their
    period, only the work of the busiest rank counts.

    Args:
        limit: The seconds that a step, or its period, takes at least while all ranks are busy.
        work: The seconds that a rank works at least: in the mean, or for a period the busiest one.
        gain: The largest `DeviceProfile.idle_gain`, from 0 to 1.
        objective: What is bounded: a step, or its period.
    """
    if not gain or not limit:
        return limit
    if objective == "period":
        return min(limit, work) / (1 + gain)
    limit = max(limit, work)
    return limit / (1 + gain * (1 - work / limit))


def _least_hops(table: CostTable, placement: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return the least seconds of the messages from stage 0 to each stage, and back.

    Whatever the cut is, the last unit of a stage passes something to the next unit, and so to the
    next stage. At the best cut, the fewest bytes are passed. A skip connection is sent directly to
    the stage that uses it, so its bytes do not travel from stage to stage.
    """
    profile = table.profile
    units = len(profile.units)
    forth, back = [0.0] * units, [0.0] * units  # bytes between each unit and the one before it
    for value, size, _ in table.values:
        if value.src + 1 in value.dsts:
            forth[value.src + 1] += size
            back[value.src + 1] += size if value.has_grad else 0.0

    def accumulate_hops(sizes: Sequence[float]) -> list[float]:
        least = min(sizes[1:], default=0.0)
        seconds = (
            profile.link_between(rank, other).seconds(least) if rank != other else 0.0
            for rank, other in pairwise(placement)
        )
        return list(accumulate(seconds, initial=0.0))

    return accumulate_hops(forth), accumulate_hops(back)


def _least_full_rank(seconds: Sequence[float], ranks: int) -> float:
    """Return the seconds that the fullest of some equal ranks has at least, wherever units go.

    Units are not cut, so 48 equal units and a longer one do not fill 8 ranks evenly. This is bin
    packing. A limit is too low for all units if their shares of it, rounded to n-ths, add up to
    more than the ranks: `floor((n + 1) x share) / n` is a dual feasible function, which never adds
    up to more than 1 for the units of one rank.

    >>> round(_least_full_rank([1.0] * 48 + [1.5], ranks=8), 2)
    6.99
    """
    mean = sum(seconds) / ranks or 1.0
    best = max([sum(seconds) / ranks, *seconds]) / mean
    # Shares of the mean, rounded down: units that are equal but for float errors count as equal.
    shares = sorted(max(0.0, round(second / mean, 7) - 1e-7) for second in seconds)

    def sum_of_parts(n: int, limit: float) -> float:
        # floor(x) is the number of ks in 1, 2, ... that are at most x.
        thresholds = ((k + 1e-9) * limit / (n + 1) for k in range(1, n + 2))
        return sum(len(shares) - bisect_left(shares, threshold) for threshold in thresholds) / n

    for step in range(_PACKING_STEPS):
        limit = 1 + step / _PACKING_STEPS
        if limit > best and any(
            sum_of_parts(n, limit) > ranks * (1 + 1e-9) for n in range(1, _PACKING_PARTS)
        ):
            best = limit
    return best * mean

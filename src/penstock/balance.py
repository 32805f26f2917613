"""Where to cut a chain of units into stages, so that the most expensive stage is cheap.

`cut` is exact. Costs are first written as whole numbers of one common fraction, since sums of
floats would decide by their rounding between cuts that are equally good.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate
from math import lcm

from penstock.errors import ArgumentError


def cut(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """How many neighbouring units each stage takes.

    The most expensive stage is as cheap as it can be. Among the cuts of which that is true, the
    stages' costs are as even as they can be (the least sum of squares), then their numbers of
    units, and then the larger stages come first.

    >>> cut([1] * 10, 4)
    (3, 3, 2, 2)
    >>> cut([1, 1, 1, 6, 1, 1], 3)
    (3, 1, 2)
    """
    _check_costs(costs)
    if not 1 <= stages <= len(costs):
        raise ArgumentError(
            f"{len(costs)} units cannot be cut into {stages} stages: each stage takes at least "
            "one unit, and there is at least one stage"
        )
    sums = _whole_sums(costs)
    ends = _least_total(_price(sums, _least_cap(sums, stages)), len(costs), stages)
    return tuple(end - start for start, end in zip((0, *ends), ends, strict=False))


def check_cut(counts: Sequence[int], units: int) -> None:
    """Refuse counts that are no cut of so many units.

    >>> check_cut([3, 1, 2], units=6)
    >>> check_cut([3, 2], units=6)
    Traceback (most recent call last):
    penstock.errors.ArgumentError: [3, 2] is no cut of 6 units: they take 5 together
    """
    problems = [
        f"stage {stage} takes {count}, and each takes at least one"
        for stage, count in enumerate(counts)
        if count < 1
    ]
    if sum(counts) != units:
        problems.append(f"they take {sum(counts)} together")
    if problems:
        raise ArgumentError(f"{list(counts)} is no cut of {units} units: {'; '.join(problems)}")


def _check_costs(costs: Sequence[float]) -> None:
    wrong = [
        f"unit {unit} costs {cost}"
        for unit, cost in enumerate(costs)
        if not 0 <= cost < float("inf")
    ]
    if wrong:
        raise ArgumentError(f"{', '.join(wrong)}: a cost is a number from 0 up")


def _whole_sums(costs: Sequence[float]) -> list[int]:
    """`sums[b] - sums[a]` is what units a to b cost, times a factor that makes all costs whole."""
    exact = [Fraction(cost) for cost in costs]
    scale = lcm(*(cost.denominator for cost in exact))
    return list(accumulate((int(cost * scale) for cost in exact), initial=0))


def _least_cap(sums: Sequence[int], stages: int) -> int:
    """The least cost of the most expensive stage.

    A cap will do if stages that each take as much as it allows come to the end. (If fewer of them
    do, some can be cut further, which makes none more expensive.)
    """
    low, high = 0, sums[-1]
    while low < high:
        cap = (low + high) // 2
        end = 0
        for _ in range(stages):
            end = bisect_right(sums, sums[end] + cap) - 1
        low, high = (low, cap) if end == len(sums) - 1 else (cap + 1, high)
    return low


def _price(sums: Sequence[int], cap: int) -> Callable[[int, int], int]:
    """What a stage of the units from a to b adds to the total that the best cut makes least.

    Excess over the cap, then cost squared, then number squared: the weights let no amount of a
    later one outweigh the least of an earlier. Each is a convex function of a sum over the units.
    """
    cost_weight = len(sums) ** 2
    excess_weight = (sums[-1] ** 2 + 1) * cost_weight

    def price(a: int, b: int) -> int:
        cost = sums[b] - sums[a]
        total = cost * cost * cost_weight + (b - a) ** 2
        return total if cost <= cap else total + (cost - cap) * excess_weight

    return price


def _least_total(price: Callable[[int, int], int], units: int, stages: int) -> list[int]:
    """Where each stage ends in the cut of the least total price; of equals, the latest ends.

    `total[b]` is the least for units 0 to b in so many stages, and `start[b]` where the last of
    them starts. As the prices are convex, that start moves only forwards, with more units and
    with more stages (Yao 1980). So the search for it is short: in all about units squared steps,
    whatever the number of stages.
    """
    total = [price(0, end) for end in range(units + 1)]
    start = [0] * (units + 1)
    starts = []
    for stage in range(1, stages):
        before, total, start = total, total.copy(), start.copy()
        latest = units
        for end in range(units - (stages - 1 - stage), stage, -1):
            among = range(max(start[end], stage), min(latest, end - 1) + 1)
            total[end], negative = min((before[at] + price(at, end), -at) for at in among)
            start[end] = latest = -negative
        starts.append(start)
    ends = [units]
    for start in reversed(starts):
        ends.append(start[ends[-1]])
    return ends[::-1]

"""The search for the best cut: exact, under what each stage may keep in memory.

First the least cost of the slowest stage, then, among the cuts of which that is true, the most
even one. Both go stage by stage: what is best for the units before `end`, if the last of so many
stages ends there. A cap on what a stage may cost keeps the search to starts that are not far off.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise

from penstock.balance.whole import Whole

_BLOCK = 16  # starts that are passed over together
_PART = 1 << 128


@dataclass(frozen=True, order=True)
class Found:
    """The less, the better."""

    slowest: int
    unevenness: int  # the sum of the stages' costs squared, then of their numbers of units
    backwards: tuple[int, ...]  # numbers of units from the last stage: large stages come first

    @property
    def counts(self) -> tuple[int, ...]:
        """How many units each stage takes."""
        return self.backwards[::-1]


def search(whole: Whole, room: Sequence[int]) -> Found | None:
    """The best cut of which each stage keeps to its room; None if there is none."""
    if not whole.fits(room):
        return None
    low = _at_least(whole)
    top = whole.sums[-1] * max(whole.slow) + 2 * sum(
        cost for values in whole.messages.made for _, _, cost in values
    )
    step = max(1, low // 16, top // 4096)
    cap = low
    while (slowest := _slowest(_Bounded(whole, room, cap), low)) is None:
        assert cap < top, "everything fits, and nothing is found"
        cap, step = min(cap + step, top), 2 * step
    unevenness, ends = _evenest(_Bounded(whole, room, slowest))
    counts = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    return Found(slowest, unevenness, tuple(reversed(counts)))


def _at_least(whole: Whole) -> int:
    """No cut can do better: the work is divided by speed, and no unit is divided."""
    shared = Fraction(whole.sums[-1]) / sum(Fraction(1, slow) for slow in whole.slow)
    units = (b - a for a, b in zip(whole.sums, whole.sums[1:], strict=False))
    return max(-(-shared.numerator // shared.denominator), max(units) * min(whole.slow))


@dataclass
class _Bounded:
    """The stages that cost no more than the cap."""

    whole: Whole
    room: Sequence[int]
    cap: int
    _messages: dict[int, list[int]] = field(default_factory=dict)

    def ends(self, stage: int) -> Iterator[int]:
        """Where it may end, so that those after it can take what is left."""
        whole = self.whole
        after = whole.slow[stage + 1 :]
        most = sum(self.cap // slow for slow in after)
        first = bisect_left(whole.sums, whole.sums[-1] - most)
        last = whole.units - len(after)
        if not after:
            first = last
        return (end for end in range(max(stage + 1, first), last + 1) if whole.may_end[end])

    def first_start(self, stage: int, end: int) -> int:
        """Of those from which it may reach that end, messages aside."""
        sums, kept = self.whole.sums, self.whole.kept[stage]
        by_cost = bisect_left(sums, sums[end] - self.cap // self.whole.slow[stage])
        by_room = bisect_left(kept, kept[end] - self.room[stage])
        return max(stage, by_cost, by_room)

    def messages(self, end: int) -> list[int]:
        """What they cost a stage that ends there, from each start: end - 1, end - 2 and so on."""
        if end not in self._messages:
            sums = self.whole.sums
            low = bisect_left(sums, sums[end] - self.cap // min(self.whole.slow))
            self._messages[end] = self.whole.messages.before(end, low)
        return self._messages[end]


def _slowest(bounded: _Bounded, low: int) -> int | None:
    """The least cost of the most expensive stage, or None if it is above the cap.

    It is `low` at least, which lets the search for a start end early.
    """
    sums, never = bounded.whole.sums, bounded.cap + 1
    before = [low] + [never] * bounded.whole.units
    highest = 0  # of the starts that can be reached
    for stage, slow in enumerate(bounded.whole.slow):
        after = [never] * len(sums)
        reached = -1
        for end in bounded.ends(stage):
            first, top = bounded.first_start(stage, end), min(highest, end - 1)
            if first > top:
                continue
            least = min(before[first : top + 1])
            if least == never:
                continue
            best, messages, here = never, bounded.messages(end), sums[end]
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


def _evenest(bounded: _Bounded) -> tuple[int, list[int]]:
    """The least unevenness, and where each stage ends; of equals, the latest ends.

    First only cuts are looked for that come near to what no cut can beat.
    """
    rest = _Rest.of(bounded.whole)
    low = rest.least(-1, 0)
    more = low // 64 + 1
    while (found := _evenest_within(bounded, rest, low + more)) is None:
        more *= 4
    return found


@dataclass(frozen=True)
class _Rest:
    """What the stages after one can not do better than, whatever they take of the units left.

    They are at their most even if each takes in proportion to its speed. If the largest unit left
    is more than that, it alone costs what it does.
    """

    whole: Whole
    weight: int  # no numbers of units outweigh a difference of costs
    speeds: list[int]  # by stage: those after it, squared and added, in parts of _PART
    largest: list[int]  # by unit: of those from there on

    @staticmethod
    def of(whole: Whole) -> _Rest:
        squares = [-(-_PART // slow**2) for slow in whole.slow]
        units = [b - a for a, b in pairwise(whole.sums)]
        return _Rest(
            whole,
            whole.units**2 + 1,
            list(accumulate(reversed(squares), initial=0))[::-1],
            list(accumulate(reversed(units), max, initial=0))[::-1],
        )

    def least(self, stage: int, end: int) -> int:
        """Of the stages after that one, which ends there."""
        whole = self.whole
        after = whole.stages - 1 - stage
        if not after:
            return 0
        left, largest = whole.sums[-1] - whole.sums[end], self.largest[end]
        speeds = self.speeds[stage + 1]
        even = left**2 * _PART // speeds
        alone = (largest * self.fastest) ** 2 + (left - largest) ** 2 * _PART // speeds
        return max(even, alone) * self.weight + (whole.units - end) ** 2 // after

    @cached_property
    def fastest(self) -> int:
        """What it takes least."""
        return min(self.whole.slow)


def _evenest_within(bounded: _Bounded, rest: _Rest, most: int) -> tuple[int, list[int]] | None:
    """The same, or None if the least is more than that."""
    whole, never = bounded.whole, most + 1
    before = [0] + [never] * whole.units
    starts = []
    for stage in range(whole.stages):
        after, start = [never] * len(before), [0] * len(before)
        lows = [min(before[at : at + _BLOCK]) for at in range(0, len(before), _BLOCK)]
        for end in bounded.ends(stage):
            limit = most - rest.least(stage, end)
            best, at = _best_start(bounded, stage, end, before, lows, rest.weight, limit + 1)
            if best <= limit:
                after[end], start[end] = best, at
        before = after
        starts.append(start)
    if before[-1] == never:
        return None
    ends = [whole.units]
    for start in reversed(starts[1:]):
        ends.append(start[ends[-1]])
    return before[-1], ends[::-1]


def _best_start(
    bounded: _Bounded,
    stage: int,
    end: int,
    before: Sequence[int],
    lows: Sequence[int],
    weight: int,
    best: int,
) -> tuple[int, int]:
    """The least unevenness of what comes before that end, if it is less than `best`, and the start.

    A block of starts is passed over if even the least of what comes before them, with the cheapest
    stage from there, would be too much; and so are all earlier ones if that is so for the least
    of all blocks.
    """
    sums, slow, cap = bounded.whole.sums, bounded.whole.slow[stage], bounded.cap
    first, at = bounded.first_start(stage, end), 0
    low, high = first // _BLOCK, (end - 1) // _BLOCK
    least = min(lows[low : high + 1])
    if least >= best:
        return best, at
    messages, here = bounded.messages(end), sums[end]
    for block in range(high, low - 1, -1):
        top = min(end - 1, block * _BLOCK + _BLOCK - 1)
        cost = slow * (here - sums[top])
        price = cost * cost * weight + (end - top) ** 2
        if least + price >= best:
            break
        if lows[block] + price >= best:
            continue
        for start in range(top, max(first, block * _BLOCK) - 1, -1):
            cost = slow * (here - sums[start]) + messages[end - 1 - start]
            if cost <= cap:
                total = before[start] + cost * cost * weight + (end - start) ** 2
                if total < best:
                    best, at = total, start
    return best, at

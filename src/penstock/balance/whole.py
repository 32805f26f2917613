"""A task in whole numbers, as sums up to each unit.

Sums of floats would decide by their rounding between cuts that are equally good. So seconds and
bytes are written as whole numbers of one common fraction. Only the ratio of two devices' speeds is
rounded, to a part in 2**40.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from math import gcd, inf, lcm

from penstock.balance.task import Task

_ONE = 1 << 40


@dataclass(frozen=True)
class Whole:
    """A stage that takes the units from a to b costs slow * (sums[b] - sums[a]) + its messages."""

    sums: list[int]
    slow: list[int]  # by stage
    messages: Messages
    kept: list[list[int]]  # by stage: kept[b] - kept[a] is the memory that units a to b take
    room: list[int]  # by rank; what is no limit is all there could be
    ranks: tuple[int, ...]  # of the stages
    may_end: list[bool]  # can a stage end before this unit?

    @property
    def units(self) -> int:
        """How many."""
        return len(self.sums) - 1

    @property
    def stages(self) -> int:
        """How many."""
        return len(self.slow)

    @staticmethod
    def of(task: Task) -> Whole:
        """The same task."""
        fastest = max(device.speed for device in task.devices)
        slow = [round(Fraction(fastest) / Fraction(d.speed) * _ONE) for d in task.devices]
        shrink = gcd(_ONE, *slow)
        # all seconds times the fastest speed, and times what makes them whole
        seconds = [Fraction(unit.seconds) for unit in task.units]
        byte = Fraction(task.second_a_byte) * Fraction(fastest) * (_ONE // shrink)
        sizes = [Fraction(value.size) * byte for value in task.values]
        scale = _common(seconds + sizes)
        kept, room = _memory(task)
        return Whole(
            sums=_sums(scale * second for second in seconds),
            slow=[slow[rank] // shrink for rank in task.placement],
            messages=Messages.of(task, [int(scale * size) for size in sizes]),
            kept=kept,
            room=room,
            ranks=task.placement,
            may_end=[not unit.joined for unit in task.units] + [True],
        )

    def fits(self, room: Sequence[int]) -> bool:
        """Is there any cut of which each stage keeps to its room?

        What a stage can take from a later start reaches as far or further, so the ends that can be
        reached are found from left to right.
        """
        starts = [0]
        for kept, most in zip(self.kept, room, strict=True):
            ends: list[int] = []
            done = 0
            for start in starts:
                far = bisect_right(kept, kept[start] + most)
                ends += [e for e in range(max(start + 1, done), far) if self.may_end[e]]
                done = max(done, far)
            starts = ends
        return bool(starts) and starts[-1] == self.units


@dataclass(frozen=True)
class Messages:
    """What the messages of a stage cost, wherever it starts and ends."""

    made: list[list[tuple[int, int, int]]]  # by unit: (first use, last use, cost) of each value
    used: list[list[tuple[int, int]]]  # by unit: (next use, cost) of each value that it uses

    @staticmethod
    def of(task: Task, costs: Sequence[int]) -> Messages:
        """Of the values that cost anything to send."""
        never = len(task.units)
        made: list[list[tuple[int, int, int]]] = [[] for _ in task.units]
        used: list[list[tuple[int, int]]] = [[] for _ in task.units]
        for value, cost in zip(task.values, costs, strict=True):
            if cost and value.dsts:
                dsts = sorted(set(value.dsts))
                made[value.src].append((dsts[0], dsts[-1], cost))
                for dst, later in pairwise((*dsts, never)):
                    used[dst].append((later, cost))
        return Messages(made, used)

    def before(self, end: int, low: int) -> list[int]:
        """For stages that end there and start at end - 1, end - 2 and so on, down to low."""
        found = []
        cost = 0
        for start in range(end - 1, low - 1, -1):
            for first, last, size in self.made[start]:
                if first < end:
                    cost -= size  # it came from before, and now is the stage's own
                if last >= end:
                    cost += size
            for later, size in self.used[start]:
                if later >= end:
                    cost += size
            found.append(cost)
        return found


def _memory(task: Task) -> tuple[list[list[int]], list[int]]:
    holds = [Fraction(unit.holds) for unit in task.units]
    keeps = [Fraction(unit.keeps) for unit in task.units]
    scale = _common(holds + keeps)
    held, one = _sums(scale * size for size in holds), _sums(scale * size for size in keeps)
    kept = [[h + number * k for h, k in zip(held, one, strict=True)] for number in task.in_flight]
    most = sum(found[-1] for found in kept)
    room = [
        most if device.memory == inf else min(most, int(scale * Fraction(device.memory)))
        for device in task.devices
    ]
    return kept, room


def _common(numbers: Iterable[Fraction]) -> int:
    return lcm(*(number.denominator for number in numbers))


def _sums(numbers: Iterable[Fraction]) -> list[int]:
    return list(accumulate(map(int, numbers), initial=0))

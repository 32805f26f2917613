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

from penstock.balance.task import CutProblem

_SPEED_SCALE = 1 << 40


@dataclass(frozen=True)
class IntegerCutProblem:
    """A stage that takes the units from a to b costs slow * (sums[b] - sums[a]) + its messages."""

    prefix_costs: list[int]
    slowness: list[int]  # by stage
    message_costs: MessageCosts
    prefix_memory: list[
        list[int]
    ]  # by stage: kept[b] - kept[a] is the memory that units a to b take
    rank_memory: list[int]  # by rank; what is no limit is all there could be
    placement: tuple[int, ...]  # of the stages
    can_cut_before: list[bool]  # can a stage end before this unit?

    @property
    def unit_count(self) -> int:
        """How many."""
        return len(self.prefix_costs) - 1

    @property
    def stages(self) -> int:
        """How many."""
        return len(self.slowness)

    @staticmethod
    def from_problem(problem: CutProblem) -> IntegerCutProblem:
        """The same task."""
        fastest = max(device.speed for device in problem.devices)
        slow = [
            round(Fraction(fastest) / Fraction(d.speed) * _SPEED_SCALE) for d in problem.devices
        ]
        shrink = gcd(_SPEED_SCALE, *slow)
        # all seconds times the fastest speed, and times what makes them whole
        seconds = [Fraction(unit.seconds) for unit in problem.units]
        byte = Fraction(problem.seconds_per_byte) * Fraction(fastest) * (_SPEED_SCALE // shrink)
        sizes = [Fraction(value.size) * byte for value in problem.values]
        scale = _common_denominator(seconds + sizes)
        kept, room = _scale_memory(problem)
        return IntegerCutProblem(
            prefix_costs=_prefix_sums(scale * second for second in seconds),
            slowness=[slow[rank] // shrink for rank in problem.placement],
            message_costs=MessageCosts.from_problem(problem, [int(scale * size) for size in sizes]),
            prefix_memory=kept,
            rank_memory=room,
            placement=problem.placement,
            can_cut_before=[not unit.joined_to_previous for unit in problem.units] + [True],
        )

    def is_feasible(self, stage_memory: Sequence[int]) -> bool:
        """Is there any cut of which each stage keeps to its room?

        What a stage can take from a later start reaches as far or further, so the ends that can be
        reached are found from left to right.
        """
        starts = [0]
        for kept, most in zip(self.prefix_memory, stage_memory, strict=True):
            ends: list[int] = []
            done = 0
            for start in starts:
                far = bisect_right(kept, kept[start] + most)
                ends += [e for e in range(max(start + 1, done), far) if self.can_cut_before[e]]
                done = max(done, far)
            starts = ends
        return bool(starts) and starts[-1] == self.unit_count


@dataclass(frozen=True)
class MessageCosts:
    """What the messages of a stage cost, wherever it starts and ends."""

    produced_at: list[
        list[tuple[int, int, int]]
    ]  # by unit: (first use, last use, cost) of each value
    consumed_at: list[list[tuple[int, int]]]  # by unit: (next use, cost) of each value that it uses

    @staticmethod
    def from_problem(problem: CutProblem, costs: Sequence[int]) -> MessageCosts:
        """Of the values that cost anything to send."""
        never = len(problem.units)
        made: list[list[tuple[int, int, int]]] = [[] for _ in problem.units]
        used: list[list[tuple[int, int]]] = [[] for _ in problem.units]
        for value, cost in zip(problem.values, costs, strict=True):
            if cost and value.dsts:
                dsts = sorted(set(value.dsts))
                made[value.src].append((dsts[0], dsts[-1], cost))
                for dst, later in pairwise((*dsts, never)):
                    used[dst].append((later, cost))
        return MessageCosts(made, used)

    def stage_costs(self, end: int, first_start: int) -> list[int]:
        """For stages that end there and start at end - 1, end - 2 and so on, down to low."""
        found = []
        cost = 0
        for start in range(end - 1, first_start - 1, -1):
            for first, last, size in self.produced_at[start]:
                if first < end:
                    cost -= size  # it came from before, and now is the stage's own
                if last >= end:
                    cost += size
            for later, size in self.consumed_at[start]:
                if later >= end:
                    cost += size
            found.append(cost)
        return found


def _scale_memory(problem: CutProblem) -> tuple[list[list[int]], list[int]]:
    holds = [Fraction(unit.static_bytes) for unit in problem.units]
    keeps = [Fraction(unit.activation_bytes) for unit in problem.units]
    scale = _common_denominator(holds + keeps)
    held, one = (
        _prefix_sums(scale * size for size in holds),
        _prefix_sums(scale * size for size in keeps),
    )
    kept = [
        [h + number * k for h, k in zip(held, one, strict=True)] for number in problem.in_flight
    ]
    most = sum(found[-1] for found in kept)
    room = [
        most if device.memory == inf else min(most, int(scale * Fraction(device.memory)))
        for device in problem.devices
    ]
    return kept, room


def _common_denominator(numbers: Iterable[Fraction]) -> int:
    return lcm(*(number.denominator for number in numbers))


def _prefix_sums(numbers: Iterable[Fraction]) -> list[int]:
    return list(accumulate(map(int, numbers), initial=0))

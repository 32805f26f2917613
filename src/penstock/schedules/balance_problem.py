"""What is to be cut, and for which devices; what a cut comes to, stage by stage."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from math import gcd, inf, lcm

from penstock.errors import ArgumentError


@dataclass(frozen=True)
class UnitLoad:
    """One of the pieces that a stage takes some neighbours of."""

    seconds: float  # of F, I and W of one micro-batch, on a device of speed 1
    static_bytes: float = 0.0  # bytes, always: parameters, their gradients, an optimizer's state
    activation_bytes: float = 0.0  # bytes, for each micro-batch whose backward is still to come
    joined_to_previous: bool = False  # to the unit before: both go to one stage


@dataclass(frozen=True)
class UnitOutput:
    """What one unit makes and later ones use. A skip connection is one more of these.

    It goes straight to each stage that uses it, once, and not at all to the one that makes it.
    """

    src: int
    dsts: tuple[int, ...]
    size: float  # bytes: its own, and those of its gradient on the way back


@dataclass(frozen=True)
class DeviceCapacity:
    """What a rank computes with: how fast, against the seconds of the units, and its bytes."""

    speed: float = 1.0
    memory: float = inf


@dataclass(frozen=True)
class StageLoad:
    """What one stage takes upon it.

    `seconds` are those of its units and of its messages: what arrives from stages before, and
    what leaves for stages after. A value leaves once, however many of them use it: if each
    counted, what a stage costs would hang on where the stages after it are cut.
    """

    units: range
    seconds: float
    received_bytes: float  # bytes
    sent_bytes: float
    memory: float  # bytes: what it holds, and what its micro-batches in flight keep


@dataclass(frozen=True)
class EvaluatedCut:
    """How many neighbouring units each stage takes, and what that comes to."""

    counts: tuple[int, ...]
    loads: tuple[StageLoad, ...]

    @property
    def slowest_stage(self) -> int:
        """The stage that all others wait for; the first of several."""
        return max(range(len(self.loads)), key=lambda stage: self.loads[stage].seconds)

    @property
    def bottleneck_seconds(self) -> float:
        """Its seconds."""
        return self.loads[self.slowest_stage].seconds


@dataclass(frozen=True)
class CutProblem:
    """Units in order, the values between them, and a device for each rank.

    `placement` is the rank of each stage (left out: one stage a rank); the stages of a rank share
    its memory. `in_flight` is how many micro-batches a stage keeps at once (left out: what 1f1b
    keeps if there are enough of them). A byte of a message takes `second_a_byte`.
    """

    units: tuple[UnitLoad, ...]
    devices: tuple[DeviceCapacity, ...]
    values: tuple[UnitOutput, ...] = ()
    placement: tuple[int, ...] = ()
    in_flight: tuple[int, ...] = ()
    seconds_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for name in ("units", "devices", "values", "placement", "in_flight"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.placement:
            object.__setattr__(self, "placement", tuple(range(len(self.devices))))
        stages = len(self.placement)
        if not self.in_flight:
            object.__setattr__(self, "in_flight", tuple(range(stages, 0, -1)))
        problems = [*self._find_invalid_numbers(), *self._find_invalid_indices()]
        if problems:
            raise ArgumentError("; ".join(problems))
        check_stage_count(self.units, stages)

    @property
    def stages(self) -> int:
        """How many."""
        return len(self.placement)

    def device_of(self, stage: int) -> DeviceCapacity:
        """The device that computes it."""
        return self.devices[self.placement[stage]]

    def evaluate(self, counts: Sequence[int]) -> EvaluatedCut:
        """What a cut comes to, whether or not it fits or is any good."""
        check_cut(counts, len(self.units))
        if len(counts) != self.stages:
            raise ArgumentError(f"{list(counts)} makes {len(counts)} stages, not {self.stages}")
        ends = list(accumulate(counts, initial=0))
        loads = (self._stage_load(at, range(a, ends[at + 1])) for at, a in enumerate(ends[:-1]))
        return EvaluatedCut(tuple(counts), tuple(loads))

    def _stage_load(self, stage: int, units: range) -> StageLoad:
        own = [self.units[unit] for unit in units]
        received = [
            v for v in self.values if v.src < units.start and _has_consumer_in(v.dsts, units)
        ]
        sent = [v for v in self.values if v.src in units and max(v.dsts, default=0) >= units.stop]
        arrives, leaves = sum(v.size for v in received), sum(v.size for v in sent)
        return StageLoad(
            units,
            sum(unit.seconds for unit in own) / self.device_of(stage).speed
            + self.seconds_per_byte * (arrives + leaves),
            arrives,
            leaves,
            sum(unit.static_bytes for unit in own)
            + self.in_flight[stage] * sum(u.activation_bytes for u in own),
        )

    def _find_invalid_numbers(self) -> Iterator[str]:
        found = [(f"unit {at} costs", unit.seconds) for at, unit in enumerate(self.units)]
        for at, unit in enumerate(self.units):
            found += [
                (f"unit {at} holds", unit.static_bytes),
                (f"unit {at} keeps", unit.activation_bytes),
            ]
        found += [(f"the value of unit {v.src} has a size of", v.size) for v in self.values]
        found.append(("a byte takes", self.seconds_per_byte))
        wrong = [f"{what} {number}" for what, number in found if not 0 <= number < inf]
        if wrong:
            yield f"{', '.join(wrong)}: a cost is a number from 0 up"
        for rank, device in enumerate(self.devices):
            if not 0 < device.speed < inf or not device.memory >= 0:
                yield (
                    f"rank {rank} has speed {device.speed} and memory {device.memory}: a speed is "
                    "more than 0, and memory a number from 0 up"
                )

    def _find_invalid_indices(self) -> Iterator[str]:
        for value in self.values:
            if not all(0 <= value.src < dst < len(self.units) for dst in value.dsts):
                yield (
                    f"a value goes from unit {value.src} to {list(value.dsts)} of "
                    f"{len(self.units)} units: it goes to later ones"
                )
        strange = sorted({rank for rank in self.placement if not 0 <= rank < len(self.devices)})
        if strange:
            yield f"placement names ranks {strange}, and there are {len(self.devices)} devices"
        if len(self.in_flight) != len(self.placement) or min(self.in_flight, default=1) < 1:
            yield (
                f"in_flight is {list(self.in_flight)} for {len(self.placement)} stages: give each "
                "the number of micro-batches that it keeps at once, 1 or more"
            )


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


def check_stage_count(units: Sequence[UnitLoad], stages: int) -> None:
    """Refuse more stages than can be cut, or none."""
    apart = sum(not unit.joined_to_previous for unit in units[1:]) + bool(units)
    if not 1 <= stages <= apart:
        joined = f" ({len(units) - apart} of them joined to the one before)"
        raise ArgumentError(
            f"{len(units)} units{joined if apart < len(units) else ''} cannot be cut into {stages} "
            "stages: each stage takes at least one unit, and there is at least one stage"
        )


def _has_consumer_in(dsts: Sequence[int], units: range) -> bool:
    return any(dst in units for dst in dsts)


# -------------------------------------------------------------------------------------------------
# A task in whole numbers, as sums up to each unit.
#
# Sums of floats would decide by their rounding between cuts that are equally good. So seconds and
# bytes are written as whole numbers of one common fraction. Only the ratio of two devices' speeds is
# rounded, to a part in 2**40.
# -------------------------------------------------------------------------------------------------

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

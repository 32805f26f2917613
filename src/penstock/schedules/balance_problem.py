"""The problem of cutting a model into stages: units in order, the values between them, devices.

A cut gives each stage some neighbouring units. `CutProblem.evaluate` says what a cut costs, stage
by stage; `balance.find_best_cut` searches for the best one. `IntegerCutProblem` is the same problem
in whole numbers, in the form that the search needs.
"""

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
    """The cost of one unit, the smallest piece of a model that a stage can take.

    seconds             of F, I and W of one micro-batch together, on a device of speed 1
    static_bytes        memory that is always needed: parameters, gradients, optimizer state
    activation_bytes    memory for each micro-batch whose backward is still to come
    joined_to_previous  True if this unit must be on the same stage as the unit before
    """

    seconds: float
    static_bytes: float = 0.0
    activation_bytes: float = 0.0
    joined_to_previous: bool = False


@dataclass(frozen=True)
class UnitOutput:
    """A value that one unit makes and later units use. A skip connection is one more of these.

    The value is sent directly to each other stage that uses it, once. `size` counts the bytes of
    the value and of its gradient on the way back.
    """

    src: int
    dsts: tuple[int, ...]
    size: float


@dataclass(frozen=True)
class DeviceCapacity:
    """The device of a rank: its speed, by which the units' seconds are divided, and its memory."""

    speed: float = 1.0
    memory: float = inf


@dataclass(frozen=True)
class StageLoad:
    """The load of one stage.

    `seconds` includes the messages: values that arrive from stages before, and values that leave
    for stages after. A value that leaves counts once, however many stages use it. Otherwise the
    cost of a stage would depend on where the stages after it are cut, and the search could not go
    stage by stage. `memory` counts the static bytes and the activations of all micro-batches in
    flight.
    """

    units: range
    seconds: float
    received_bytes: float
    sent_bytes: float
    memory: float


@dataclass(frozen=True)
class EvaluatedCut:
    """A cut (the number of units of each stage) and the load of each stage."""

    counts: tuple[int, ...]
    loads: tuple[StageLoad, ...]

    @property
    def slowest_stage(self) -> int:
        """The stage that takes longest; the first one if several do."""
        return max(range(len(self.loads)), key=lambda stage: self.loads[stage].seconds)

    @property
    def bottleneck_seconds(self) -> float:
        """The seconds of the slowest stage."""
        return self.loads[self.slowest_stage].seconds


@dataclass(frozen=True)
class CutProblem:
    """The units in order, the values between them, and a device for each rank.

    placement         the rank of each stage; by default one stage per rank. The stages of a rank
                      share its memory.
    in_flight         how many micro-batches each stage keeps at once; by default as many as 1F1B
                      keeps if there are enough of them
    seconds_per_byte  the time that one byte of a message takes
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
        """The number of stages."""
        return len(self.placement)

    def device_of(self, stage: int) -> DeviceCapacity:
        """Return the device that computes a stage."""
        return self.devices[self.placement[stage]]

    def evaluate(self, counts: Sequence[int]) -> EvaluatedCut:
        """Return a cut with its loads, whether or not it fits in memory."""
        check_cut(counts, len(self.units))
        if len(counts) != self.stages:
            raise ArgumentError(f"{list(counts)} makes {len(counts)} stages, not {self.stages}")
        ends = list(accumulate(counts, initial=0))
        loads = (
            self._stage_load(stage, range(start, ends[stage + 1]))
            for stage, start in enumerate(ends[:-1])
        )
        return EvaluatedCut(tuple(counts), tuple(loads))

    def _stage_load(self, stage: int, units: range) -> StageLoad:
        stage_units = [self.units[unit] for unit in units]
        received = [
            v for v in self.values if v.src < units.start and _has_consumer_in(v.dsts, units)
        ]
        sent = [v for v in self.values if v.src in units and max(v.dsts, default=0) >= units.stop]
        arrives, leaves = sum(v.size for v in received), sum(v.size for v in sent)
        return StageLoad(
            units,
            sum(unit.seconds for unit in stage_units) / self.device_of(stage).speed
            + self.seconds_per_byte * (arrives + leaves),
            arrives,
            leaves,
            sum(unit.static_bytes for unit in stage_units)
            + self.in_flight[stage] * sum(u.activation_bytes for u in stage_units),
        )

    def _find_invalid_numbers(self) -> Iterator[str]:
        numbers = [(f"unit {index} costs", unit.seconds) for index, unit in enumerate(self.units)]
        for index, unit in enumerate(self.units):
            numbers += [
                (f"unit {index} holds", unit.static_bytes),
                (f"unit {index} keeps", unit.activation_bytes),
            ]
        numbers += [(f"the value of unit {v.src} has a size of", v.size) for v in self.values]
        numbers.append(("a byte takes", self.seconds_per_byte))
        wrong = [f"{label} {number}" for label, number in numbers if not 0 <= number < inf]
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
                    f"{len(self.units)} units: a value only goes to later units"
                )
        unknown = sorted({rank for rank in self.placement if not 0 <= rank < len(self.devices)})
        if unknown:
            yield f"placement names ranks {unknown}, but there are {len(self.devices)} devices"
        if len(self.in_flight) != len(self.placement) or min(self.in_flight, default=1) < 1:
            yield (
                f"in_flight is {list(self.in_flight)} for {len(self.placement)} stages: give each "
                "the number of micro-batches that it keeps at once, 1 or more"
            )


def check_cut(counts: Sequence[int], units: int) -> None:
    """Raise if the counts are not a cut of this number of units.

    >>> check_cut([3, 1, 2], units=6)
    >>> check_cut([3, 2], units=6)
    Traceback (most recent call last):
    penstock.errors.ArgumentError: [3, 2] is not a cut of 6 units: the stages take 5 together
    """
    problems = [
        f"stage {stage} takes {count}, and each takes at least one"
        for stage, count in enumerate(counts)
        if count < 1
    ]
    if sum(counts) != units:
        problems.append(f"the stages take {sum(counts)} together")
    if problems:
        raise ArgumentError(f"{list(counts)} is not a cut of {units} units: {'; '.join(problems)}")


def check_stage_count(units: Sequence[UnitLoad], stages: int) -> None:
    """Raise if the units cannot be cut into this number of stages."""
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
# The same problem in whole numbers, as sums up to each unit.
#
# With floats, rounding errors would decide between cuts that are equally good. So seconds and bytes
# are scaled by a common denominator, which makes them whole numbers. Only the ratio of the speeds
# of two devices is rounded, to one part in 2**40.
# -------------------------------------------------------------------------------------------------

_SPEED_SCALE = 1 << 40


@dataclass(frozen=True)
class IntegerCutProblem:
    """The problem in whole numbers.

    A stage that takes the units a to b - 1 costs

        slowness[stage] * (prefix_costs[b] - prefix_costs[a]) + the cost of its messages

    and needs prefix_memory[stage][b] - prefix_memory[stage][a] of memory.

    prefix_costs    the cost of all units before each unit
    slowness        by stage, the inverse of its device's speed
    prefix_memory   by stage, because stages keep different numbers of micro-batches
    rank_memory     by rank; a device without a limit has as much as all units could need
    placement       the rank of each stage
    can_cut_before  for each unit, whether a stage may end before it
    """

    prefix_costs: list[int]
    slowness: list[int]
    message_costs: MessageCosts
    prefix_memory: list[list[int]]
    rank_memory: list[int]
    placement: tuple[int, ...]
    can_cut_before: list[bool]

    @property
    def unit_count(self) -> int:
        """The number of units."""
        return len(self.prefix_costs) - 1

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.slowness)

    @staticmethod
    def from_problem(problem: CutProblem) -> IntegerCutProblem:
        """Return a problem in whole numbers."""
        fastest = max(device.speed for device in problem.devices)
        slowness = [
            round(Fraction(fastest) / Fraction(d.speed) * _SPEED_SCALE) for d in problem.devices
        ]
        # Equal devices have slowness _SPEED_SCALE each. Dividing by the common factor makes it 1.
        shrink = gcd(_SPEED_SCALE, *slowness)
        # A unit costs its seconds times the slowness, which is relative to the fastest device.
        # Messages do not depend on the device, so they are scaled to match here.
        seconds = [Fraction(unit.seconds) for unit in problem.units]
        byte = Fraction(problem.seconds_per_byte) * Fraction(fastest) * (_SPEED_SCALE // shrink)
        sizes = [Fraction(value.size) * byte for value in problem.values]
        scale = _common_denominator(seconds + sizes)
        prefix_memory, rank_memory = _scale_memory(problem)
        return IntegerCutProblem(
            prefix_costs=_prefix_sums(scale * second for second in seconds),
            slowness=[slowness[rank] // shrink for rank in problem.placement],
            message_costs=MessageCosts.from_problem(problem, [int(scale * size) for size in sizes]),
            prefix_memory=prefix_memory,
            rank_memory=rank_memory,
            placement=problem.placement,
            can_cut_before=[not unit.joined_to_previous for unit in problem.units] + [True],
        )

    def is_feasible(self, stage_memory: Sequence[int]) -> bool:
        """Return True if there is a cut in which no stage needs more than its memory.

        This finds, stage by stage, all ends that the stages so far can reach. A stage that starts
        later reaches as far or further, so each end is visited once, from left to right.
        """
        starts = [0]
        for sums, limit in zip(self.prefix_memory, stage_memory, strict=True):
            ends: list[int] = []
            done = 0
            for start in starts:
                far = bisect_right(sums, sums[start] + limit)
                ends += [e for e in range(max(start + 1, done), far) if self.can_cut_before[e]]
                done = max(done, far)
            starts = ends
        return bool(starts) and starts[-1] == self.unit_count


@dataclass(frozen=True)
class MessageCosts:
    """The cost of a stage's messages, wherever the stage starts and ends.

    produced_at  by unit: (first use, last use, cost) of each value that it makes
    consumed_at  by unit: (next use, cost) of each value that it uses
    """

    produced_at: list[list[tuple[int, int, int]]]
    consumed_at: list[list[tuple[int, int]]]

    @staticmethod
    def from_problem(problem: CutProblem, costs: Sequence[int]) -> MessageCosts:
        """Return the message costs, given the cost of each value. Free values are left out."""
        never = len(problem.units)
        produced: list[list[tuple[int, int, int]]] = [[] for _ in problem.units]
        used: list[list[tuple[int, int]]] = [[] for _ in problem.units]
        for value, cost in zip(problem.values, costs, strict=True):
            if cost and value.dsts:
                dsts = sorted(set(value.dsts))
                produced[value.src].append((dsts[0], dsts[-1], cost))
                for dst, later in pairwise((*dsts, never)):
                    used[dst].append((later, cost))
        return MessageCosts(produced, used)

    def stage_costs(self, end: int, first_start: int) -> list[int]:
        """Return the message costs of the stages that end before unit `end`.

        They start at end - 1, end - 2 and so on, down to `first_start`, in this order. Each step
        adds one unit at the front of the stage and updates the cost.
        """
        costs = []
        cost = 0
        for start in range(end - 1, first_start - 1, -1):
            for first_use, last_use, size in self.produced_at[start]:
                if first_use < end:
                    cost -= size  # it was received, and now the stage makes it itself
                if last_use >= end:
                    cost += size  # a later stage uses it, so it is sent
            for later, size in self.consumed_at[start]:
                if later >= end:
                    cost += size  # the last use within the stage counts, so each value counts once
            costs.append(cost)
        return costs


def _scale_memory(problem: CutProblem) -> tuple[list[list[int]], list[int]]:
    """Return `prefix_memory` and `rank_memory` of the problem in whole numbers."""
    static = [Fraction(unit.static_bytes) for unit in problem.units]
    activations = [Fraction(unit.activation_bytes) for unit in problem.units]
    scale = _common_denominator(static + activations)
    static_sums, activation_sums = (
        _prefix_sums(scale * size for size in static),
        _prefix_sums(scale * size for size in activations),
    )
    prefix_memory = [
        [s + number * a for s, a in zip(static_sums, activation_sums, strict=True)]
        for number in problem.in_flight
    ]
    most = sum(sums[-1] for sums in prefix_memory)
    rank_memory = [
        most if device.memory == inf else min(most, int(scale * Fraction(device.memory)))
        for device in problem.devices
    ]
    return prefix_memory, rank_memory


def _common_denominator(numbers: Iterable[Fraction]) -> int:
    return lcm(*(number.denominator for number in numbers))


def _prefix_sums(numbers: Iterable[Fraction]) -> list[int]:
    return list(accumulate(map(int, numbers), initial=0))

"""What is to be cut, and for which devices; what a cut comes to, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

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

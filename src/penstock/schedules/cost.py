"""What actions cost: seconds, and bytes (or any unit) of activations; and what that adds up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isclose

from penstock.errors import ArgumentError
from penstock.schedules.ir import Compute, Op, lifetimes


@dataclass(frozen=True)
class Cost:
    """Seconds of F, I and W and the size of the activations, one entry a stage.

    B takes I + W, R takes F. A message arrives `send` seconds after it was made and occupies
    nobody. `activation` is what one micro-batch keeps on the stage for its backward.
    """

    F: tuple[float, ...]
    I: tuple[float, ...]
    W: tuple[float, ...]
    activation: tuple[float, ...]
    send: float = 0.0

    def __post_init__(self) -> None:
        for name in ("F", "I", "W", "activation"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        columns = {"F": self.F, "I": self.I, "W": self.W, "activation": self.activation}
        if len({len(column) for column in columns.values()}) > 1:
            found = ", ".join(f"{name} has {len(column)}" for name, column in columns.items())
            raise ArgumentError(f"each needs one entry for every stage, but {found}")
        for name, column in (*columns.items(), ("send", (self.send,))):
            for stage, number in enumerate(column):
                if not 0 <= number < float("inf"):
                    where = name if name == "send" else f"{name} of stage {stage}"
                    raise ArgumentError(f"{where} is {number}: a cost is a number from 0 up")

    @staticmethod
    def even(
        placement: Sequence[int],
        F: float = 1.0,
        I: float = 1.0,
        W: float = 1.0,
        send: float = 0.0,
    ) -> Cost:
        """F, I and W of a rank's whole share, divided evenly among the stages it owns."""
        owned = Counter(placement)

        def divided(share: float) -> tuple[float, ...]:
            return tuple(share / owned[rank] for rank in placement)

        return Cost(divided(F), divided(I), divided(W), divided(1.0), send)

    def scaled(self, factors: Sequence[float]) -> Cost:
        """The same, with each stage's seconds times its factor.

        >>> Cost.even((0, 1)).scaled([1, 1.5]).F
        (1.0, 1.5)
        """
        columns = [
            tuple(number * factor for number, factor in zip(column, factors, strict=True))
            for column in (self.F, self.I, self.W)
        ]
        return Cost(columns[0], columns[1], columns[2], self.activation, self.send)

    def seconds(self, action: Compute) -> float:
        """How long the action occupies its rank."""
        return self._seconds_by_op[action.op][action.stage]

    @cached_property
    def _seconds_by_op(self) -> dict[Op, tuple[float, ...]]:
        full = tuple(i + w for i, w in zip(self.I, self.W, strict=True))
        return {Op.F: self.F, Op.B: full, Op.I: self.I, Op.W: self.W, Op.R: self.F}


def exceeds(size: float, cap: float) -> bool:
    """Is it more, by more than the dust that sums of fractions gather?"""
    return size > cap and not isclose(size, cap, rel_tol=1e-9)


def track_live_memory(lane: Sequence[Compute], cost: Cost) -> Iterator[tuple[int, bool, float]]:
    """How much is alive after each change: (step, at its end or at its start, size).

    A rank does one thing at a time, so the order of its lane says it all; seconds do not matter.
    """
    changes = []
    for (stage, _), (born, last) in lifetimes(lane).items():
        changes += [(born, False, cost.activation[stage]), (last, True, -cost.activation[stage])]
    size = 0.0
    for step, at_end, change in sorted(changes):
        size += change
        yield step, at_end, round(size, 12) + 0.0


def fits_in_memory(lane: Sequence[Compute], cost: Cost, cap: float) -> bool:
    """Does a lane never hold more than its cap?"""
    return not any(exceeds(size, cap) for _, _, size in track_live_memory(lane, cost))


def expand_memory_caps(memory: float | Sequence[float], ranks: int) -> list[float]:
    """A cap for each rank, from one for all or one for each."""
    caps = list(memory) if isinstance(memory, Sequence) else [memory] * ranks
    if len(caps) != ranks:
        raise ArgumentError(
            f"memory has {len(caps)} entries for {ranks} ranks: give one number for all, or one "
            "a rank"
        )
    return caps

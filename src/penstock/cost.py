"""What actions cost: seconds, and bytes (or any unit) of activations, stage by stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.errors import ArgumentError
from penstock.ir import Compute, Op


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
        lengths = {len(column) for column in (self.F, self.I, self.W, self.activation)}
        if len(lengths) > 1:
            raise ArgumentError("F, I, W and activation need one entry for every stage")
        numbers = (self.send, *self.F, *self.I, *self.W, *self.activation)
        if not all(0 <= number < float("inf") for number in numbers):
            raise ArgumentError("a cost is a number from 0 up")

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

    def seconds(self, action: Compute) -> float:
        """How long the action occupies its rank."""
        return self._seconds[action.op][action.stage]

    @cached_property
    def _seconds(self) -> dict[Op, tuple[float, ...]]:
        full = tuple(i + w for i, w in zip(self.I, self.W, strict=True))
        return {Op.F: self.F, Op.B: full, Op.I: self.I, Op.W: self.W, Op.R: self.F}

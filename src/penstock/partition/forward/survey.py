"""What a model was seen to consist of when it was cut: for people to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.partition.forward.division import TraceAssignment
from penstock.partition.forward.trace import UnitCall


@dataclass(frozen=True)
class UnitCost:
    """Of one call and one micro-batch: seconds of F, I and W, and bytes kept for its backward.

    `holds` are the bytes there always: parameters and buffers, and for what is trained a gradient
    and an optimizer's state.
    """

    forward: float
    input_grad: float
    weight_grad: float
    activation_bytes: int
    resident_bytes: int

    @property
    def seconds(self) -> float:
        """Of all three."""
        return self.forward + self.input_grad + self.weight_grad


@dataclass(frozen=True)
class CutSummary:
    """The calls of units in order, how many each stage takes, and what goes between stages."""

    calls: tuple[UnitCall, ...]
    calls_per_stage: tuple[int, ...]
    assignment: TraceAssignment
    costs: Sequence[UnitCost] = ()  # empty: not measured

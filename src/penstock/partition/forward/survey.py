"""What a model was seen to consist of when it was cut: for people to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.partition.forward.division import Division
from penstock.partition.forward.trace import CallOf


@dataclass(frozen=True)
class UnitCost:
    """Of one call and one micro-batch: seconds of F, I and W, and bytes kept for its backward.

    `holds` are the bytes there always: parameters and buffers, and for what is trained a gradient
    and an optimizer's state.
    """

    forward: float
    inputs: float
    weights: float
    keeps: int
    holds: int

    @property
    def seconds(self) -> float:
        """Of all three."""
        return self.forward + self.inputs + self.weights


@dataclass(frozen=True)
class Survey:
    """The calls of units in order, how many each stage takes, and what goes between stages."""

    calls: tuple[CallOf, ...]
    counts: tuple[int, ...]
    division: Division
    costs: Sequence[UnitCost] = ()  # empty: not measured

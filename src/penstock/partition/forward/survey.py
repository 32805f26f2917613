"""What a model was seen to consist of when it was cut: for people to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.partition.forward.division import Division
from penstock.partition.forward.trace import CallOf


@dataclass(frozen=True)
class UnitCost:
    """What one call of a unit costs for one micro-batch."""

    forward: float  # seconds
    inputs: float  # of the gradient of its inputs
    weights: float  # of that of its weights
    keeps: int  # bytes for its backward
    holds: int  # bytes of its parameters, their gradients and an optimizer's state


@dataclass(frozen=True)
class Survey:
    """The calls of units in order, how many each stage takes, and what goes between stages."""

    calls: tuple[CallOf, ...]
    counts: tuple[int, ...]
    division: Division
    costs: Sequence[UnitCost] = ()  # empty: not measured

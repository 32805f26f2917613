"""Where to cut a chain of units into stages, so that the slowest stage is fast."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.balance.best import find_best_cut
from penstock.balance.task import (
    CutProblem,
    DeviceCapacity,
    EvaluatedCut,
    StageLoad,
    UnitLoad,
    UnitOutput,
    check_cut,
    check_stage_count,
)

__all__ = [
    "CutProblem",
    "DeviceCapacity",
    "EvaluatedCut",
    "StageLoad",
    "UnitLoad",
    "UnitOutput",
    "balance_costs",
    "check_cut",
    "find_best_cut",
]


def balance_costs(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """How many neighbouring units each of so many equal devices takes, if only costs count.

    >>> cut([1] * 10, 4)
    (3, 3, 2, 2)
    >>> cut([1, 1, 1, 6, 1, 1], 3)
    (3, 1, 2)
    """
    units = tuple(map(UnitLoad, costs))
    check_stage_count(units, stages)
    return find_best_cut(CutProblem(units, (DeviceCapacity(),) * stages)).counts

"""Where to cut a chain of units into stages, so that the slowest stage is fast."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.balance.best import best_cut
from penstock.balance.task import Cut, Device, Load, Task, Unit, Value, check_count, check_cut

__all__ = [
    "Cut",
    "Device",
    "Load",
    "Task",
    "Unit",
    "Value",
    "best_cut",
    "check_cut",
    "cut",
]


def cut(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """How many neighbouring units each of so many equal devices takes, if only costs count.

    >>> cut([1] * 10, 4)
    (3, 3, 2, 2)
    >>> cut([1, 1, 1, 6, 1, 1], 3)
    (3, 1, 2)
    """
    units = tuple(map(Unit, costs))
    check_count(units, stages)
    return best_cut(Task(units, (Device(),) * stages)).counts

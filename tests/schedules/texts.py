"""Actions and schedules from their text."""

from __future__ import annotations

from penstock.schedules.ir import Compute, Op, Schedule
from penstock.schedules.notation import loads


def action(word: str) -> Compute:
    """Parse a compute action such as `2F0`."""
    return Compute(Op(word[1]), int(word[0]), int(word[2]))


def schedule(text: str) -> Schedule:
    """Parse a schedule, not a program."""
    found = loads(text)
    assert isinstance(found, Schedule)
    return found

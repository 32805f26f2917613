"""What a stage has to see to because a forward changes tensors in place.

A tensor is one value before a change and another one after it. What is sent is the value of its
time, though the tensor be changed afterwards; and what another stage changes is, from then on, what
arrives from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from penstock.partition.forward.division import Division, sources_of
from penstock.partition.forward.trace import New, Same, Step


class Kept(NamedTuple):
    """A value that is needed when the step is over."""

    value: int
    place: New | Same | int  # in the result, among the arguments, or as an older value
    sent: bool
    copied: bool  # it is changed in place, later on


def roots(steps: Sequence[Step]) -> dict[int, int]:
    """Of each value that came of a change: what it was at first."""
    found: dict[int, int] = {}
    for step in steps:
        for old, new in step.changes.items():
            found[new] = found.get(old, old)
    return found


class Changing:
    """What a stage has to see to because tensors are changed in place."""

    def __init__(self, division: Division, stage: int) -> None:
        steps, self._portion = division.trace.steps, division.portions[stage]
        self._leaving = {v for values in self._portion.departing.values() for v in values}
        self._shared = Counter(v for portion in division.portions for v in portion.needs)
        self._changed: set[int] = set()  # by this stage
        self._held: set[int] = set()
        for at, step in reversed(list(enumerate(steps))):
            here = at in self._portion.runs
            self._changed.update(step.changes if here else ())
            wanted = self._leaving | self._held if here else self._portion.needs | self._held
            self._held |= {
                old for old, new in step.changes.items() if new in wanted and old not in step.takes
            }

    def keeps(self, step: Step) -> tuple[Kept, ...]:
        """The values of a step that are sent, or looked for when what they look at is changed."""
        made = set(step.result.made if step.result else ()) | set(step.changes.values())
        return tuple(
            Kept(value, sources_of(step, value), value in self._leaving, value in self._changed)
            for value in sorted(made & (self._leaving | self._held))
        )

    def rebinds(self, step: Step) -> tuple[tuple[int, int], ...]:
        """What another stage changes in the step, and is used here afterwards."""
        wanted = self._portion.needs | self._held
        return tuple((old, new) for old, new in step.changes.items() if new in wanted)

    def copied(self) -> tuple[int, ...]:
        """What arrives here, is changed here, and is elsewhere, too."""
        arriving = {v for values in self._portion.arriving.values() for v in values}
        return tuple(sorted(v for v in arriving & self._changed if self._shared[v] > 1))

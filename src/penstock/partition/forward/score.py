"""What a stage does at each step of a forward, worked out before it is performed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from penstock.partition.forward.absent import Absent
from penstock.partition.forward.division import Division, made_by, sources_of
from penstock.partition.forward.filled import Filled
from penstock.partition.forward.tables import TYING
from penstock.partition.forward.trace import Kind, New, Same, Step, Trace
from penstock.partition.forward.watching import Handle

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Act:
    """What a stage does at a step."""

    step: Step
    runs: bool
    ready: Any = None  # what it gives instead, if it does not run
    plain: bool = True  # `ready` is given as it is
    keeps: tuple[Kept, ...] = ()
    shapes: tuple[Shape | None, ...] = ()  # of what a unit gives, if something rests on it
    rebinds: tuple[tuple[int, int], ...] = ()  # values that are now others, which arrive
    fills: bool = False  # a unit: it puts something into a list or a dict that it is given


class Kept(NamedTuple):
    """A value that is needed when the step is over."""

    value: int
    place: New | Same | int  # in the result, among the arguments, or as an older value
    sent: bool
    copied: bool  # it is changed in place, later on


@dataclass(frozen=True)
class Score:
    """All that a stage does in a forward, ready to be performed."""

    acts: tuple[Act, ...]
    end: int
    inputs: tuple[Any, ...]  # what stands for inputs that it does not take, by their places
    given: tuple[int, ...]
    arriving: Mapping[int, tuple[int, ...]]
    departing: Mapping[int, tuple[int, ...]]
    copied: tuple[int, ...]  # of what arrives
    roots: Mapping[int, int]  # of what was changed in place: the value that it was at first
    last: bool
    anew: tuple[str, ...]  # buffers that it assigns anew
    device: torch.device
    draws: bool  # random numbers, between units
    mutates: bool  # what arrives, or is given, in place


def score_of(division: Division, stage: int, device: torch.device) -> Score:
    """Of a stage on a device."""
    trace, portion = division.trace, division.portions[stage]
    stand_ins: dict[int, Absent] = {}

    def absent(value: int) -> Absent:
        if value not in stand_ins:
            stand_ins[value] = Absent.of(trace.values[value].look, device, value)
        return stand_ins[value]

    changing, measured = _Changing(division, stage), _measured(trace)
    acts = []
    for at, step in enumerate(trace.steps):
        runs = at in portion.runs or step.kind is Kind.CALL
        if runs:
            fills = step.result is not None and step.result.spec.context is Filled
            shapes = _shapes(trace, step, measured)
            acts.append(Act(step, True, keeps=changing.keeps(step), shapes=shapes, fills=fills))
            continue
        ready, plain = _ready(step, absent)
        acts.append(Act(step, False, ready, plain, rebinds=changing.rebinds(step)))
    last = stage == len(division.portions) - 1
    return Score(
        tuple(acts),
        len(acts) + 1 if last else portion.end,
        tuple(absent(value) for value in trace.inputs),
        tuple(portion.given),
        {source: tuple(values) for source, values in portion.arriving.items()},
        {dst: tuple(values) for dst, values in portion.departing.items()},
        changing.copied(),
        _roots(trace.steps),
        last,
        tuple(name for name in trace.lasting if division.writes[name] == stage),
        device,
        any(trace.steps[at].draws for at in portion.runs),
        changing.mutates(trace.inputs),
    )


def _measured(trace: Trace) -> set[int]:
    """Values on whose shapes something rests that the host knows, and so every stage."""
    found = set(trace.measured)
    for step in reversed(trace.steps):
        if step.kind is not Kind.UNIT and not found.isdisjoint(made_by(step)):
            found.update(step.takes)
    return found


def _shapes(trace: Trace, step: Step, measured: set[int]) -> tuple[Shape | None, ...]:
    """Of what a unit gives."""
    if step.kind is not Kind.UNIT or step.result is None or measured.isdisjoint(step.result.made):
        return ()
    return tuple(
        trace.values[leaf.value].look.shape
        if isinstance(leaf, New) and leaf.value in measured
        else None
        for leaf in step.result.leaves
    )


def _roots(steps: Sequence[Step]) -> dict[int, int]:
    found: dict[int, int] = {}
    for step in steps:
        for old, new in step.changes.items():
            found[new] = found.get(old, old)
    return found


class _Changing:
    """What a stage has to see to because tensors are changed in place."""

    def __init__(self, division: Division, stage: int) -> None:
        steps, self._portion = division.trace.steps, division.portions[stage]
        self._leaving = {v for values in self._portion.departing.values() for v in values}
        self._arriving = {v for values in self._portion.arriving.values() for v in values}
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
        found = self._arriving & self._changed
        return tuple(sorted(value for value in found if self._shared[value] > 1))

    def mutates(self, inputs: Sequence[int]) -> bool:
        """Does the stage change what is not its own?"""
        given = {inputs[at] for at in self._portion.given}
        return not self._changed.isdisjoint(self._arriving | given)


def _ready(step: Step, absent: Callable[[int], Absent]) -> tuple[Any, bool]:
    if step.kind is Kind.READ:
        return step.outcome, True
    if step.result is None:
        return (Handle() if step.func in TYING else None), True
    leaves = [absent(leaf.value) if isinstance(leaf, New) else leaf for leaf in step.result.leaves]
    if len(leaves) == 1 and isinstance(leaves[0], Absent) and step.result.spec.is_leaf():
        return leaves[0], True
    return leaves, False

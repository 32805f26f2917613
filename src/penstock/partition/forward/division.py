"""A forward divided among stages: who runs which step, and which values go from whom to whom.

Units stand where the cut puts them. An operation between units runs on the last stage among those
that make what it takes, or on the stage that uses what it makes, if that sends no more bytes. What
follows from the inputs alone is computed by every stage that needs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import CutError
from penstock.partition.forward.tables import GRADIENTS, called
from penstock.partition.forward.trace import CallOf, Kind, New, Same, Step, Trace, Value

Homes = Mapping[str, frozenset[int]]  # the stages that have a parameter, or write a buffer


@dataclass
class Portion:
    """One stage's part of a forward."""

    runs: set[int] = field(default_factory=set)  # steps
    needs: set[int] = field(default_factory=set)  # values
    given: list[int] = field(default_factory=list)  # inputs that it takes
    arriving: dict[int, list[int]] = field(default_factory=dict)  # values, by source
    departing: dict[int, list[int]] = field(default_factory=dict)  # by destination
    end: int = 0  # one after its last step


@dataclass(frozen=True)
class Division:
    """A trace and what each stage does of it."""

    trace: Trace
    portions: tuple[Portion, ...]
    stages: Mapping[int, int]  # of the steps that run on one stage alone
    uses: Mapping[str, frozenset[int]]  # parameters that are used between units, by stages
    reads: Mapping[str, frozenset[int]]  # the same of buffers
    writes: Mapping[str, int]  # buffers that are changed there, by stages

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Who sends to whom."""
        return [(s, dst) for s, p in enumerate(self.portions) for dst in p.departing]


def divide(
    trace: Trace, placed: Callable[[CallOf, int], int], stages: int, homes: Homes | None = None
) -> Division:
    """`placed` gives the stage of a unit's call, after calls on the stage that it is told.

    With `homes`, parameters are at home there already.
    """
    where = _Placing(trace, stages, homes)
    where.place_units(placed)
    where.place_glue()
    portions = [Portion() for _ in range(stages)]
    for at, stage in where.stages.items():
        portions[stage].runs.add(at)
        portions[stage].needs.update(where.takes(at))
        changed = [(old, trace.values[old]) for old in trace.steps[at].changes]
        # others that share the memory: made here, so that they can be sent as they are then
        portions[stage].needs.update(old for old, v in changed if v.free and v.maker is not None)
    last = portions[stages - 1]
    last.needs.update(trace.output.made)
    for value in trace.lasting.values():
        maker = trace.values[value].maker
        portions[where.stages.get(-1 if maker is None else maker, 0)].needs.add(value)
    for stage, portion in enumerate(portions):
        _fill(stage, portion, trace, where.stages)
    for stage, portion in enumerate(portions):
        for source, values in portion.arriving.items():
            portions[source].departing[stage] = values
    _check_changes(trace, where.stages, portions)
    _check_gradients(trace, where.stages)
    uses = _users(trace, portions, lambda v: v.parameter)
    reads = _users(trace, portions, lambda v: v.buffer)
    writes = _writers(trace, where.stages, reads)
    return Division(trace, tuple(portions), dict(where.stages), uses, reads, writes)


def digest_of(division: Division) -> str:
    """A few letters: the same where units are on the same stages, and the same values go there."""
    trace = division.trace
    told: list[Any] = sorted((str(trace.steps[at].func), division.stages[at]) for at in trace.calls)
    for portion in division.portions:
        for source, values in sorted(portion.arriving.items()):
            those = [trace.values[value] for value in values]
            told.append((source, [f"{value.name} {value.look}" for value in those]))
        told.append(portion.given)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:12]


class _Placing:
    """Where each step that runs on one stage alone does."""

    def __init__(self, trace: Trace, stages: int, homes: Homes | None) -> None:
        self.trace, self._count, self._homes = trace, stages, homes
        self.stages: dict[int, int] = {}
        self._users: dict[int, list[int]] = {}
        for at, step in enumerate(trace.steps):
            for value in step.takes:
                self._users.setdefault(value, []).append(at)
        self._late = set(trace.output.made)
        self._changers = {old: at for at, step in enumerate(trace.steps) for old in step.changes}

    def takes(self, at: int) -> Iterable[int]:
        """The values that a step needs."""
        return self.trace.steps[at].takes

    def place_units(self, placed: Callable[[CallOf, int], int]) -> None:
        """As the cut says."""
        before = 0
        for at in self.trace.calls:
            step = self.trace.steps[at]
            before = self.stages[at] = placed(step.func, before)

    def place_glue(self) -> None:
        """First as early as what they take allows; then, from the end, where it is used."""
        early: dict[int, int | None] = {}
        for at, step in enumerate(self.trace.steps):
            if self._is_everywhere(step):
                continue
            if step.kind is not Kind.UNIT:
                early[at] = self._earliest(step, early)
                continue
            early[at] = self.stages[at]
        for at in reversed(early):
            if at not in self.stages:
                self.stages[at] = self._placed(at, early[at])

    def _is_everywhere(self, step: Step) -> bool:
        reads = step.kind is Kind.READ and not step.lasting  # else it is a check, made once
        return step.free or reads or step.kind is Kind.CALL

    def _earliest(self, step: Step, early: Mapping[int, int | None]) -> int | None:
        makers = [self.trace.values[value].maker for value in step.takes]
        found = [early[m] for m in makers if m is not None and m in early]
        known = [stage for stage in found if stage is not None]
        return max(known) if known else None

    def _placed(self, at: int, early: int | None) -> int:
        step = self.trace.steps[at]
        made = made_by(step)
        users = [self.stages[u] for value in made for u in self._users.get(value, ())
                 if u in self.stages]  # fmt: skip
        if made & self._late:
            users.append(self._count - 1)
        first = min(users, default=early or 0)
        changed = [self.stages.get(self._changers.get(value, -1), 0) for value in made]
        if step.changes or not users:
            chosen = early if early is not None else first
        elif (early or 0) < max(changed, default=0) <= first:
            chosen = max(changed)  # what is changed in place is made there, from what it looks at
        elif early is None or (first > early and self._may_sink(at, made, first)):
            chosen = first
        else:
            chosen = early
        return self._at_home(step, chosen, early)

    def _may_sink(self, at: int, made: set[int], to: int) -> bool:
        """Does it send no more bytes, if it runs where its result is used?"""
        values = self.trace.values
        out = sum(values[value].look.size for value in made)
        step = self.trace.steps[at]
        into = 0
        for value in set(step.takes):
            if values[value].free or values[value].parameter or self._goes_to(value, to, at):
                continue
            into += values[value].look.size
        changed = {old for s in self.trace.steps[at:] for old in s.changes}
        return into <= out and not changed & set(step.takes)

    def _goes_to(self, value: int, stage: int, but: int) -> bool:
        """Is it sent there anyway?"""
        users = self._users.get(value, ())
        return any(self.stages.get(user) == stage for user in users if user != but)

    def _at_home(self, step: Step, chosen: int, early: int | None) -> int:
        """A parameter that has its home already is used there, and a buffer that is written."""
        if self._homes is None:
            return chosen
        for value in (self.trace.values[at] for at in step.takes):
            name = value.parameter or value.buffer
            if not value.parameter and name not in self._homes:
                continue
            homes = sorted(self._homes[name])
            fitting = [home for home in homes if home >= (early or 0)]
            if not fitting:
                raise CutError(
                    f"at {step.where}, {called(step.func)} needs '{name}' of stage {homes[-1]} "
                    f"together with a value of stage {early}, and with the example it was not so: "
                    "make the Pipe with an example like these inputs"
                )
            chosen = fitting[0] if chosen not in homes else chosen
        return chosen


def _fill(stage: int, portion: Portion, trace: Trace, stages: Mapping[int, int]) -> None:
    """What it needs: made here, taken from the inputs, computed along, or sent by another."""
    waiting, seen = list(portion.needs), set(portion.needs)
    while waiting:
        value = trace.values[waiting.pop()]
        if value.maker is None or value.maker in portion.runs:
            continue
        step = trace.steps[value.maker]
        if not step.free:
            continue
        portion.runs.add(value.maker)
        new = set(step.takes) - seen
        seen |= new
        waiting += new
    portion.needs = seen
    for at in sorted(seen):
        value = trace.values[at]
        if value.given is not None:
            portion.given.append(value.given)
        source = None if value.maker is None else stages.get(value.maker)
        if source is None or source == stage:
            continue
        if source > stage:
            raise _backwards(trace, value.maker or 0, source, stage)
        portion.arriving.setdefault(source, []).append(at)
    for values in portion.arriving.values():
        values.sort(key=lambda at: trace.values[at].name)
    portion.given.sort()
    portion.end = max(portion.runs, default=-1) + 1


def _backwards(trace: Trace, maker: int, source: int, stage: int) -> CutError:
    step = trace.steps[maker]
    what = f"unit '{step.func}'" if step.kind is Kind.UNIT else called(step.func)
    return CutError(
        f"at {step.where}, {what} is on stage {source}, and what it makes is used on stage "
        f"{stage}, which is before: with these inputs the model calls its units in another order "
        "than with the example; make the Pipe with an example like these"
    )


def _check_changes(trace: Trace, stages: Mapping[int, int], portions: list[Portion]) -> None:
    """Who changes a tensor in place must have all that shares its memory, if it is used again."""
    needed = set().union(*(portion.needs for portion in portions))
    for at, stage in stages.items():
        step = trace.steps[at]
        for old, new in step.changes.items():
            maker = trace.values[old].maker
            if new not in needed or old in step.takes:
                continue
            home = None if maker is None else stages.get(maker, stage)
            if home not in (None, stage) and not _seen_here(trace, step, old, stages, stage):
                raise CutError(
                    f"at {step.where}, {called(step.func)} changes a tensor in place of which "
                    f"stage {home} has a view that is used again: clone it before you change it, "
                    "or put both into one unit with units="
                )


def _check_gradients(trace: Trace, stages: Mapping[int, int]) -> None:
    """Who goes backward inside the forward must have computed all that lies between."""
    for at, step in enumerate(trace.steps):
        if step.func not in GRADIENTS or at not in stages:
            continue
        after, before = set(step.takes), set(step.takes)
        earlier = list(enumerate(trace.steps[:at]))
        for _, one in earlier:
            after |= made_by(one) if after.intersection(one.takes) else set()
        between = []
        for number, one in reversed(earlier):
            if before & made_by(one):
                before.update(one.takes)
                between += [number] if after.intersection(one.takes) else []
        homes = {stages.get(number, stages[at]) for number in between} | {stages[at]}
        if len(homes) > 1:
            raise CutError(
                f"at {step.where}, {called(step.func)} goes backward inside the forward, through "
                f"what stages {', '.join(map(str, sorted(homes)))} compute: put it all into one "
                "unit with units=, or cut elsewhere with stages="
            )


def made_by(step: Step) -> set[int]:
    """The values that there are after it."""
    return {*(step.result.made if step.result else ()), *step.changes.values()}


def _seen_here(trace: Trace, step: Step, base: int, stages: Mapping[int, int], stage: int) -> bool:
    """Was what the step changes made on this stage, as a view of the base that arrives?"""
    waiting = [value for value in step.takes if value in step.changes]
    while waiting:
        maker = trace.values[waiting.pop()].maker
        if maker is None or stages.get(maker) != stage:
            continue
        takes = trace.steps[maker].takes
        if base in takes:
            return True
        waiting += [value for value in takes if value in step.changes]
    return False


def _users(
    trace: Trace, portions: Sequence[Portion], name_of: Callable[[Value], str]
) -> dict[str, frozenset[int]]:
    found: dict[str, set[int]] = {}
    for stage, portion in enumerate(portions):
        for at in portion.needs:
            value = trace.values[at]
            if value.maker is None and name_of(value):
                found.setdefault(name_of(value), set()).add(stage)
    return {name: frozenset(where) for name, where in found.items()}


def _writers(
    trace: Trace, stages: Mapping[int, int], readers: Mapping[str, frozenset[int]]
) -> dict[str, int]:
    """Who changes a buffer must be the only one that has it."""
    found: dict[str, set[int]] = {}
    for at, stage in stages.items():
        for old in trace.steps[at].changes:
            if trace.values[old].buffer:
                found.setdefault(trace.values[old].buffer, set()).add(stage)
    for name, value in trace.lasting.items():
        maker = trace.values[value].maker
        found.setdefault(name, set()).add(stages.get(-1 if maker is None else maker, 0))
    for name, writers in found.items():
        having = sorted(writers | readers.get(name, frozenset()))
        if len(having) > 1:
            raise CutError(
                f"the forward changes the buffer '{name}' between units, and stages "
                f"{', '.join(map(str, having))} would have it, each at its own time: change and "
                "read it in one unit, or cut elsewhere with stages="
            )
    return {name: min(writers) for name, writers in found.items()}


def sources_of(step: Step, value: int) -> New | Same | int:
    """Where a step has a value: in its result, among its arguments, or as an older value."""
    assert step.result is not None
    for leaf in step.result.leaves:
        if isinstance(leaf, New) and leaf.value == value:
            return leaf
    for old, new in step.changes.items():
        if new == value:
            return Same(step.takes.index(old)) if old in step.takes else old
    raise AssertionError("a value that the step does not make")

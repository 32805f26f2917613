"""One pipe, run and compared with what the unsplit model gave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn

from penstock.checking.memory import Scales, weigh
from penstock.checking.reference import Nature, Outcome, evaluation, nature_of, outcome, unsplit
from penstock.checking.report import Case, Compared, Difference, Failed, Memory, Refused, Run
from penstock.checking.subject import Subject, Values
from penstock.errors import PenstockError
from penstock.pipe import Pipe
from penstock.schedules.choice import Asked

SEED = 20_010  # of every run: what is drawn is the same


@dataclass(frozen=True)
class Expected:
    """What the unsplit model gave: two steps, and eval mode, also on half of the batch."""

    first: Outcome
    second: Outcome
    evaluated: tuple[tuple[str, Values, Outcome], ...]
    nature: Nature
    learning: bool  # can every input have a gradient?


def expect(subject: Subject) -> Expected:
    """Run the unsplit model: a step, another that adds to the gradients, and eval mode."""
    nature, calm = nature_of(subject), nature_of(subject, training=False)
    learning = _can_learn(subject)
    torch.manual_seed(SEED)
    model = subject.fresh()
    first = outcome(model, *unsplit(subject, model, subject.values, nature.whole))
    values = _second(subject, learning)
    second = outcome(model, *unsplit(subject, model, values, nature.whole), values)
    evaluated = [("the batch", subject.values, _evaluated(subject, model, subject.values, calm))]
    with suppress(Exception):  # a mask that is cut by mistake, say: training will show it
        half = subject.values.first_of(2)
        evaluated.append(("half of the batch", half, _evaluated(subject, model, half, calm)))
    return Expected(first, second, tuple(evaluated), nature, learning)


def _second(subject: Subject, learning: bool) -> Values:
    """The batch of the second step: its inputs want gradients, too, if that is possible."""
    return subject.values.learning() if learning else subject.values.mapped(torch.Tensor.detach)


def _can_learn(subject: Subject) -> bool:
    """A model that changes its input in place, say, cannot give it a gradient."""
    values = subject.values.learning()
    before = [tensor._version for tensor in values.inputs().values()]
    try:
        unsplit(subject, subject.fresh(), values, whole=True)
    except RuntimeError:
        return False
    return before == [tensor._version for tensor in values.inputs().values()]


def _evaluated(subject: Subject, model: nn.Module, values: Values, calm: Nature) -> Outcome:
    model.eval()
    with torch.no_grad():
        return evaluation(*unsplit(subject, model, values, calm.whole))


@dataclass(frozen=True)
class Asking:
    """A schedule, and in which ways it is run."""

    schedule: Asked
    name: str
    ranks: int
    checkpoint: str
    runtime: str

    @property
    def case(self) -> Case:
        """As it is reported."""
        return Case(self.name, self.ranks, self.checkpoint, self.runtime)


def attempt(subject: Subject, expected: Expected, scales: Scales, asking: Asking) -> Run:
    """Run the pipe, and compare."""
    try:
        found = list(_differences(subject, expected, asking))
        return Run(asking.case, Compared(tuple(found), _memory(subject, scales, asking)))
    except PenstockError as error:
        return Run(asking.case, Refused(str(error)))
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        text = f"{type(error).__name__}: {error} {notes}".strip()
        return Run(asking.case, Failed(text))


def _pipe(subject: Subject, asking: Asking) -> Pipe:
    """With the generator where every run begins."""
    torch.manual_seed(SEED)
    return subject.pipe(asking.schedule, asking.ranks, asking.checkpoint, asking.runtime)


def _differences(subject: Subject, expected: Expected, asking: Asking) -> Iterator[Difference]:
    pipe = _pipe(subject, asking)
    first = _step(subject, pipe, subject.values)
    yield from first.against(expected.first)
    values = _second(subject, expected.learning)
    result = subject.step(pipe, values)
    second = outcome(pipe, result.loss, result.outputs, values)
    for found in second.against(expected.second):
        yield found if found.kind == "inputs" else _as(found, "again")
    if expected.nature.draws:
        yield from _random(subject, expected, asking, first, second)
    pipe.eval()
    with torch.no_grad():
        for what, given, wanted in expected.evaluated:
            result = subject.step(pipe, given)
            for found in evaluation(result.loss, result.outputs).against(wanted):
                yield _as(found, "eval", f" of {what}")


def _as(found: Difference, kind: str, more: str = "") -> Difference:
    """The same among others of that kind."""
    name = f"{found.kind} {found.name}".strip() + more
    return Difference(kind, name, found.size, found.note)


def _step(subject: Subject, pipe: Pipe, values: Values) -> Outcome:
    result = subject.step(pipe, values)
    return outcome(pipe, result.loss, result.outputs)


def _random(
    subject: Subject, expected: Expected, asking: Asking, first: Outcome, second: Outcome
) -> Iterator[Difference]:
    """The same seed gives the same bits; the next one gives others, if the model's own do."""
    again = _step(subject, _pipe(subject, asking), subject.values)
    same = max((found.size for found in again.against(first)), default=0.0)
    yield Difference("random", "of a second run with the same seed", same)
    kinds = "loss", "outputs"
    if expected.first.differs_from(expected.second, *kinds):
        moved = first.differs_from(second, *kinds)
        note = "" if moved else "are the same with another seed"
        yield Difference("random", "numbers", 0.0 if moved else float("inf"), note)


def _memory(subject: Subject, scales: Scales, asking: Asking) -> Memory | None:
    if asking.runtime != "inline":
        return None
    return weigh(subject, scales, asking.schedule, asking.ranks, asking.checkpoint)

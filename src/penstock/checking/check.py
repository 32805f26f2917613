"""`penstock.check`: the proof, on a user's own model, that a pipe computes the same."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from penstock.checking.hints import hints_for
from penstock.checking.memory import Scales
from penstock.checking.reference import nature_of
from penstock.checking.report import Case, Refused, Report, Run
from penstock.checking.subject import Subject, Values, called, of_its_own, ranks_for
from penstock.checking.trial import Asking, Expected, attempt, expect
from penstock.errors import ArgumentError, PenstockError, RunError
from penstock.ir import Program, Schedule
from penstock.lower import CHECKPOINT_MODES
from penstock.options import RUNTIMES
from penstock.partition.forward.units import Asked as AskedUnits
from penstock.partition.sequential import is_layered
from penstock.schedules.choice import Asked, read
from penstock.schedules.registry import FAMILIES, family_of
from penstock.stage.added import added_losses
from penstock.stage.loss import own_loss, read_loss
from penstock.stage.reduction import LossFn

Progress = Callable[[int, int, str], None]  # runs done, runs in all, what comes next


def check(
    model: nn.Module,
    *batch: Any,
    target: Any = None,
    loss_fn: LossFn | None = None,
    reduction: str | None = None,
    stages: int | Sequence[int] = 4,
    chunks: int = 4,
    schedules: str | Sequence[Asked] = "all",
    checkpoints: Sequence[str] = ("never", "always"),
    runtimes: Sequence[str] = ("inline", "threads"),
    units: AskedUnits = None,
    tolerance: float = 1e-10,
    quiet: bool = False,
    progress: Progress | None = None,
    **side: Any,
) -> Report:
    """Run the model unsplit and as a pipe, under every schedule, and compare all numbers.

    Everything runs on copies, in float64 on the CPU: the model, its gradients and buffers, and
    the random state stay as they are. The batch of a model that is no Sequential may be a dict of
    inputs by name. Without a `loss_fn` the loss is the model's own, or, if it gives none, a mean
    over all numbers of its output. Prints the report unless `quiet`.

    >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    >>> report = check(layers, torch.randn(8, 4), schedules=["1f1b"], quiet=True)
    >>> report.ok
    True
    """
    named = _named(schedules)
    _check_ways("checkpoints", checkpoints, CHECKPOINT_MODES)
    _check_ways("runtimes", runtimes, RUNTIMES)
    if target is not None and loss_fn is None:
        raise ArgumentError("a target needs a loss_fn, which is called with output and target")
    with _leaving_no_trace():
        given = _given(model, batch, side, target)
        subject = Subject.of(model, given, loss_fn, reduction, stages, chunks, units)
        expected, subject = _reference(subject)
        rows = tuple(_runs(subject, expected, named, checkpoints, runtimes, progress))
        report = Report(_described(subject), str(expected.nature), tolerance, rows)
        if report.problems:
            hints = tuple(hints_for(subject, expected.nature, report))
            report = replace(report, hints=hints)
    if not quiet:
        print(report)  # noqa: T201
    return report


def _given(model: nn.Module, batch: tuple[Any, ...], side: dict[str, Any], target: Any) -> Values:
    """A dict of inputs by name is what a call with these would be."""
    named = batch[0] if len(batch) == 1 and not is_layered(model) else None
    if isinstance(named, Mapping):
        return Values((), {**named, **side}, target)
    return Values(batch, side, target)


def _named(schedules: str | Sequence[Asked]) -> list[tuple[str, str | Schedule]]:
    """Each with what it is called in the report."""
    if isinstance(schedules, str):
        schedules = _trained() if schedules == "all" else [schedules]
    if not schedules:
        raise ArgumentError(f"schedules is empty: give 'all', or some of {', '.join(_trained())}")
    return [_called(asked) for asked in schedules]


def _called(asked: Asked) -> tuple[str, str | Schedule]:
    schedule = read(asked) or "gpipe"
    if isinstance(schedule, Schedule):
        return "your own" if isinstance(asked, Schedule | Program) else str(asked), schedule
    if schedule != "fit" and not family_of(schedule).trains:
        raise ArgumentError(f"{schedule} has no backwards, so it has no gradients to check")
    return schedule, schedule


def _trained() -> list[str]:
    return [*(name for name, family in FAMILIES.items() if family.trains), "fit"]


def _check_ways(what: str, ways: Sequence[str], known: Sequence[str]) -> None:
    if isinstance(ways, str) or not ways or not set(ways) <= set(known):
        listed = ", ".join(repr(one) for one in known)
        raise ArgumentError(f"{what} is a list of some of {listed}, not {ways!r}")


def _reference(subject: Subject) -> tuple[Expected, Subject]:
    """What the unsplit model gives, with a loss of our own where none can be told."""
    nature = ""
    try:
        if subject.loss_fn is None and not _ends_in_a_loss(subject):
            subject = replace(subject, loss_fn=of_its_own)
        nature = str(nature_of(subject))
        return expect(subject), subject
    except PenstockError:
        raise
    except Exception as error:
        where = nature or "the unsplit model on the whole batch, in float64"
        error.add_note(f"This was a copy on the CPU, the reference: {where}.")
        raise


def _ends_in_a_loss(subject: Subject) -> bool:
    with torch.no_grad(), added_losses():
        output = called(subject.fresh(), subject.values.uncut())
    try:
        read_loss(own_loss(output), "the model gave")
    except RunError:
        return False
    return True


def _runs(
    subject: Subject,
    expected: Expected,
    named: Sequence[tuple[str, str | Schedule]],
    checkpoints: Sequence[str],
    runtimes: Sequence[str],
    progress: Progress | None,
) -> Iterator[Run]:
    scales = Scales(subject)
    ways = [
        (one, checkpoint, runtime)
        for one in named
        for checkpoint in checkpoints
        for runtime in runtimes
    ]
    for at, ((name, schedule), checkpoint, runtime) in enumerate(ways):
        if progress is not None:
            progress(at, len(ways), f"{name}, {checkpoint}, {runtime}")
        try:
            ranks = ranks_for(schedule, len(subject.partition.stages))
        except ArgumentError as error:
            yield Run(Case(name, 0, checkpoint, runtime), Refused(str(error)))
            continue
        asking = Asking(schedule, name, ranks, checkpoint, runtime)
        yield attempt(subject, expected, scales, asking)
    if progress is not None:
        progress(len(ways), len(ways), "done")


def _described(subject: Subject) -> str:
    numbers = sum(parameter.numel() for parameter in subject.model.parameters())
    cuts = " + ".join(map(str, subject.partition.counts))
    parts = "layers" if subject.prospect is None else "units"
    rows = subject.values.cut(subject.chunks)[1].counts
    return (
        f"{numbers:,} parameters; stages of {cuts} {parts}; "
        f"{sum(rows)} rows in micro-batches of {', '.join(map(str, rows))}"
    )


@contextmanager
def _leaving_no_trace() -> Iterator[None]:
    """Random states stay as they are; gradients are on, and each rank computes in one thread."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy and numpy.random.get_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng([]), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])

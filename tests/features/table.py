"""A row of the table: a feature, the scripts that train with it, and its verdict.

A feature is a model with a training script, which runs unsplit and as a pipe: under a schedule, in
a runtime, in a checkpoint mode, by `pipe.step` or `pipe(x)`. A cell of the table is equal, or it is
refused with a message; anything else is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import distributed, nn
from torch.nn.functional import mse_loss

from penstock import Pipe
from penstock.errors import PenstockError
from penstock.schedules.families import FAMILIES
from penstock.schedules.registry import default_stages_per_rank
from tests.oracle import (
    Batch,
    LossFn,
    Outcome,
    bitwise,
    differences,
    run_parts,
    run_pipe,
    run_whole,
    sizes_of,
    within,
)

STAGES = 4
SCHEDULES = [*(name for name, family in FAMILIES.items() if family.trains), "fit"]

# ---- scripts ------------------------------------------------------------------------------


class Trainee(Protocol):
    """Something that runs training steps: the unsplit model, or a pipe."""

    @property
    def module(self) -> nn.Module: ...

    def step(self, batch: Batch) -> Outcome: ...


Script = Callable[[Trainee], Iterator[Outcome]]


def given(rows: int = 8, seed: int = 1, dtype: torch.dtype = torch.float64) -> Batch:
    """Return a batch of six columns that requires gradients, and its target."""
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(rows, 6, generator=generator).to(dtype) for _ in range(2))
    return Batch((x.requires_grad_(),), {}, target)


def twice(trainee: Trainee, batch: Callable[[], Batch] = given) -> Iterator[Outcome]:
    """Run a step, an update of the parameters, and another step."""
    torch.manual_seed(2)
    yield trainee.step(batch())
    update(trainee.module)
    yield trainee.step(batch())


@torch.no_grad()
def update(module: nn.Module) -> None:
    """Take a step of SGD, and clear the gradients."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None


# ---- features -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One way to run a pipe: schedule, runtime, checkpoint mode, and `pipe.step` or `pipe(x)`."""

    schedule: str
    runtime: str
    checkpoint: str
    door: str = "step"


@dataclass(frozen=True)
class Feature:
    """A model, a script that trains it, and how results are compared."""

    name: str
    compared: str  # description on the page
    model: Callable[[], nn.Module]
    script: Script = twice
    loss_fn: LossFn | None = mse_loss
    whole: bool = True  # the reference sees the whole batch; otherwise micro-batches
    tolerance: float = 1e-10
    chunks: int = 4
    stages: Any = STAGES
    ways: tuple[tuple[str, str], ...] = (("inline", "never"), ("threads", "always"))
    doors: tuple[str, ...] = ("step", "call")  # of a row that is not on the page
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of Pipe
    changed: Callable[[Any], object] = lambda model: None  # applied to the model of the pipe only
    step: Callable[[Pipe, Batch], Outcome] | None = None  # instead of pipe.step
    reference: Callable[[Feature], Trainee] | None = None  # instead of Unsplit
    under: Callable[[], AbstractContextManager[Any]] = nullcontext  # context of each step
    after: Callable[[Pipe, Way], None] = lambda pipe, way: None  # further checks

    @cached_property
    def expected(self) -> list[Outcome]:
        """Return the outcomes of the unsplit model."""
        return list(self.script((self.reference or Unsplit)(self)))

    def found(self, way: Way) -> list[Outcome]:
        """Return the outcomes of a pipe."""
        piped = Piped(self, way)
        found = list(self.script(piped))
        self.after(piped.module, way)
        return found

    def ranks(self, schedule: str) -> int:
        """Return the ranks that a schedule needs for the stages."""
        stages = self.stages if isinstance(self.stages, int) else len(self.stages)
        return max(1, stages // default_stages_per_rank(schedule))


class Unsplit:
    """The unsplit model as a trainee."""

    def __init__(self, feature: Feature) -> None:
        self.module, self.feature = feature.model(), feature

    def step(self, batch: Batch) -> Outcome:
        with self.feature.under():
            if self.feature.whole:
                return run_whole(self.module, batch, self.feature.loss_fn)
            return run_parts(
                self.module,
                batch,
                self.feature.loss_fn,
                sizes=sizes_of(len(batch.inputs[0]), self.feature.chunks),
                deferred=bool(self.feature.options.get("deferred_batch_norm")),
            )


class Piped:
    """A pipe of the model as a trainee."""

    def __init__(self, feature: Feature, way: Way) -> None:
        model = feature.model()
        feature.changed(model)
        self.feature, self.door = feature, way.door
        here: dict[str, Any] = {
            "runtime": way.runtime,
            "devices": ["cpu"] * feature.ranks(way.schedule),
        }
        if way.runtime == "processes":  # this process is one of the ranks
            # To compile a layer takes longer than a heartbeat on a very busy machine.
            here = {"group": distributed.group.WORLD, "heartbeat": 60.0}
        self.module = Pipe(
            model,
            feature.chunks,
            way.checkpoint,
            stages=feature.stages,
            schedule=way.schedule,
            loss_fn=feature.loss_fn,
            **here,
            **feature.options,
        )

    def step(self, batch: Batch) -> Outcome:
        with self.feature.under():
            if self.feature.step is not None:
                return self.feature.step(self.module, batch)
            return run_pipe(self.module, batch, self.door)


def called(pipe: Pipe, batch: Batch) -> Outcome:
    """Run `pipe(x)` and `loss.backward()`."""
    return run_pipe(pipe, batch, "call")


# ---- verdicts -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Equal:
    """All numbers equal those of the unsplit model, in every way it was run."""


@dataclass(frozen=True)
class Refused:
    """The pipe raised the same PenstockError in every way it was run."""

    message: str


Verdict = Equal | Refused


class InBetween(AssertionError):
    """Neither equal nor refused: some number differs, or the ways of running it disagree."""


def verdict(feature: Feature, schedule: str) -> Verdict:
    """Run a feature in all its ways, which include both runtimes, and return the verdict."""
    found = {(way := Way(schedule, *some)): verdict_of_way(feature, way) for some in feature.ways}
    different = set(found.values())
    if len(different) > 1:
        raise InBetween("\n".join(f"{way}: {one}" for way, one in found.items()))
    return different.pop()


def verdict_of_way(feature: Feature, way: Way) -> Verdict:
    """Run a feature in one way, and return the verdict."""
    try:
        found = feature.found(way)
    except PenstockError as error:
        return Refused(str(error))
    return compared(feature, way, found)


def compared(feature: Feature, way: Way, found: Sequence[Outcome]) -> Verdict:
    """Return Equal if no number of any step differs, else raise."""
    same = within(feature.tolerance) if feature.tolerance else bitwise
    wrong = [
        f"step {at}: {difference}"
        for at, pair in enumerate(zip(found, feature.expected, strict=True))
        for difference in differences(*_without_metrics(way, *pair), same)
    ]
    if wrong:
        raise InBetween(f"{feature.name} under {way}:\n" + "\n".join(wrong))
    return Equal()


def _without_metrics(way: Way, found: Outcome, expected: Outcome) -> tuple[Outcome, Outcome]:
    """Leave out the metrics of a call, which returns none."""
    if found.metrics:
        return found, expected
    return found, Outcome(
        expected.loss, expected.output, expected.gradients, expected.buffers, expected.values
    )

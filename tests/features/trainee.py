"""A feature as a value, and the two things that train with it: the unsplit model and a pipe.

Both run the same script. The oracle is that of `penstock.check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import mse_loss

from penstock import Pipe
from penstock.checker.case import CheckedModel, StepArguments, count_ranks
from penstock.checker.reference import StepOutcome, collect_training_outcome, run_unsplit
from penstock.stage.loss import LossFn

STAGES = 4


class Trainee(Protocol):
    """Something that runs training steps."""

    @property
    def module(self) -> nn.Module: ...

    def step(self, values: StepArguments) -> StepOutcome: ...


Script = Callable[[Trainee], Iterator[StepOutcome]]


def given(rows: int = 8, seed: int = 1, dtype: torch.dtype = torch.float64) -> StepArguments:
    """Return a batch of six columns that requires gradients, and its target."""
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(rows, 6, generator=generator).to(dtype) for _ in range(2))
    return StepArguments((x.requires_grad_(),), {}, target)


def twice(trainee: Trainee, values: Callable[[], StepArguments] = given) -> Iterator[StepOutcome]:
    """Run a step, an update of the parameters, and another step."""
    torch.manual_seed(2)
    yield trainee.step(values())
    with torch.no_grad():
        for parameter in trainee.module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
    yield trainee.step(values())


@dataclass(frozen=True)
class Way:
    """One way to run a pipe: schedule, runtime, checkpoint mode."""

    schedule: str
    runtime: str
    checkpoint: str

    @property
    def ranks(self) -> int:
        return count_ranks(self.schedule, STAGES)


@dataclass(frozen=True)
class Feature:
    """A column of the table: a model, a script that trains it, and how results are compared."""

    name: str
    compared: str  # description on the page
    model: Callable[[], nn.Sequential]
    script: Script = twice
    loss_fn: LossFn = mse_loss
    whole: bool = True  # the reference sees the whole batch; otherwise micro-batches
    tolerance: float = 1e-10
    chunks: int = 4
    ways: tuple[tuple[str, str], ...] = (("inline", "never"), ("threads", "always"))
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of Pipe
    changed: Callable[[nn.Sequential], object] = lambda model: (
        None
    )  # applied to the model of the pipe only
    step: Callable[[Pipe, StepArguments], tuple[Tensor, Any]] | None = None  # instead of pipe.step
    reference: Callable[[Feature], Trainee] | None = None  # instead of Unsplit
    under: Callable[[], AbstractContextManager[Any]] = nullcontext  # context of each step
    after: Callable[[Pipe, Way], None] = lambda pipe, way: None  # further checks

    @cached_property
    def expected(self) -> list[StepOutcome]:
        """Return the outcomes of the unsplit model."""
        return list(self.script((self.reference or Unsplit)(self)))

    def found(self, way: Way) -> list[StepOutcome]:
        """Return the outcomes of a pipe."""
        piped = Piped(self, way)
        found = list(self.script(piped))
        self.after(piped.module, way)
        return found


class Unsplit:
    """The unsplit model as a trainee."""

    def __init__(self, feature: Feature) -> None:
        self.module = feature.model()
        self.whole, self.under = feature.whole, feature.under
        self.subject = CheckedModel(
            feature.model(), given(), feature.loss_fn, None, STAGES, feature.chunks
        )

    def step(self, values: StepArguments) -> StepOutcome:
        with self.under():
            found = run_unsplit(self.subject, self.module, values, self.whole)
        return collect_training_outcome(self.module, *found, values)


class Piped:
    """A pipe of the model as a trainee."""

    def __init__(self, feature: Feature, way: Way) -> None:
        model = feature.model()
        feature.changed(model)
        self.feature = feature
        here: dict[str, Any] = {"runtime": way.runtime, "devices": ["cpu"] * way.ranks}
        if way.runtime == "processes":  # this process is one of the ranks
            here = {"group": distributed.group.WORLD}
        self.module = Pipe(
            model,
            feature.chunks,
            way.checkpoint,
            stages=STAGES,
            schedule=way.schedule,
            loss_fn=feature.loss_fn,
            **here,
            **feature.options,
        )

    def step(self, values: StepArguments) -> StepOutcome:
        with self.feature.under():
            found = (self.feature.step or stepped)(self.module, values)
        return collect_training_outcome(self.module, *found, values)


def stepped(pipe: Pipe, values: StepArguments) -> tuple[Tensor, Any]:
    """Run `pipe.step(x, target=y)`."""
    result = pipe.step(*values.batch, target=values.target, outputs=True, **values.side)
    return result.loss, result.outputs


def called(pipe: Pipe, values: StepArguments) -> tuple[Tensor, Any]:
    """Run `pipe(x)` and `loss.backward()`."""
    output = pipe(*values.batch, **values.side)
    assert pipe.loss_fn is not None
    loss = pipe.loss_fn(output, values.target)
    loss.backward()
    return loss, output

"""What is asked of one call of a pipe, whichever runtime answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from penstock.cost import Cost
from penstock.errors import ArgumentError, KindError
from penstock.gradients.clip import Clipping
from penstock.gradients.replicas import Replicas
from penstock.ir import Program, Schedule
from penstock.partition.forward.whole import Whole
from penstock.partition.sequential import check_unchanged
from penstock.partition.split import Split
from penstock.run.call import Manner
from penstock.run.feed import Batch, Fed
from penstock.run.memory import Memory
from penstock.run.phase import Phase
from penstock.run.programs import Programs, Size
from penstock.run.training import HasTimeline, StepResult
from penstock.stage.reduction import LossFn
from penstock.stage.tape import Keep
from penstock.timeline import Timeline, simulate


@dataclass(frozen=True)
class Settings:
    """The options of a pipe that may change from call to call."""

    chunks: int
    checkpoint: str
    training: bool
    runtime: str
    reduction: str | None

    def size(self, chunks: int, trains: bool = True) -> Size:
        """Of a call with so many micro-batches."""
        return Size(chunks, self.training and trains, self.checkpoint)


@dataclass(frozen=True)
class Arrangement:
    """A model cut and placed, the programs that run it, and the layers as the pipe has them now."""

    split: Split
    programs: Programs
    replicas: Replicas
    layers: Mapping[str, nn.Module | None]

    def check(self) -> None:
        """The layers are those that were cut, and have been given their numbers."""
        how = self.split.partition.how
        if isinstance(how, Whole):
            how.check_unchanged()
        else:
            check_unchanged(self.layers, self.split.stages_here)
        self.split.blanks.check()

    def run_of_step(self, settings: Settings, fed: Fed) -> tuple[Program, Phase]:
        """The whole program; without gradients, its forwards."""
        programs = self.programs.on(fed.graph)
        if torch.is_grad_enabled():
            return programs.whole(settings.size(fed.chunks))
        program, forwards, _ = programs.halves(settings.size(fed.chunks, False))
        return program, forwards

    def forecast(self, settings: Settings, cost: Cost | None, last: HasTimeline | None) -> Timeline:
        """A training step on paper: at this cost, or at that of the last one, if there was one."""
        program, _ = self.programs.whole(settings.size(settings.chunks))
        if cost is None and last is not None:
            cost = last.timeline.cost
        return simulate(program, cost)


@dataclass(frozen=True)
class Lesson:
    """What a training step is to do with the outputs."""

    loss_fn: LossFn | None
    outputs: bool
    scaler: torch.amp.GradScaler | None
    optimizer: torch.optim.Optimizer | None = None  # takes its step, too

    def check(self) -> None:
        """The optimizer has something to go by, and may go by it."""
        if self.optimizer is None:
            return
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise KindError(
                f"optimizer is a torch.optim.Optimizer, not {type(self.optimizer).__name__}"
            )
        if not torch.is_grad_enabled():
            raise ArgumentError(
                "step(optimizer=...) under torch.no_grad: there are no gradients to go by; leave "
                "the optimizer out"
            )
        if self.scaler is not None:
            raise ArgumentError(
                "step(optimizer=..., scaler=...): the scaler decides whether the optimizer takes "
                "its step; leave the optimizer out, and call scaler.step(optimizer) after it"
            )


@dataclass(frozen=True)
class Ready:
    """A training step, made ready: what is fed, and what the gradients are multiplied by."""

    settings: Settings
    lesson: Lesson
    fed: Fed
    scale: Tensor | None


class Fellows(NamedTuple):
    """A group of all processes that save together, None if there is one; of which copy this is."""

    group: Any = None
    copy: int = 0


class Answers(Protocol):
    """What runs a pipe: in one process, or as one of several."""

    def forward(self, settings: Settings, batch: Batch) -> Any:
        """What the model computes of a batch."""

    def step(self, settings: Settings, batch: Batch, lesson: Lesson) -> StepResult:
        """Forward, loss and backward."""

    def calling(self, kind: str, **facts: object) -> AbstractContextManager[object]:
        """Within, what is raised on one rank is raised on all, if the facts are the same there."""

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float, how: Clipping) -> Tensor:
        """Clip by the norm over all ranks; gives the norm before."""

    def saves_with(self) -> Fellows:
        """With whom this process saves."""

    def forecast(self, settings: Settings, cost: Any) -> Timeline:
        """The timeline of a training step on paper."""

    def memory(self, settings: Settings, batch: Batch, lesson: Lesson) -> Memory:
        """What is alive in a training step, measured."""


def manner_of(schedule: Schedule, tracked: bool = False) -> Manner:
    """How the schedule has its cells computed, if there are gradients at all."""
    grad = torch.is_grad_enabled()

    def keep(stage: int, microbatch: int) -> Keep:
        if not grad:
            return Keep.NOTHING
        return Keep.INPUTS if (stage, microbatch) in schedule.recomputed else Keep.GRAPH

    def divided(stage: int, microbatch: int) -> bool:
        return grad and (stage, microbatch) in schedule.divided

    return Manner(keep, divided, tracked)

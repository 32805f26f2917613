"""What is asked of one call of a pipe, whichever runtime answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from penstock.data_parallel.clip import ClipGradOptions
from penstock.data_parallel.sync import Replicas
from penstock.errors import ArgumentError, PenstockTypeError
from penstock.model.placement import PlacedPartition
from penstock.model.sequential import check_layers_unchanged
from penstock.model.traced.traced_partition import TracedPartition
from penstock.runtime.execution import CellPolicy
from penstock.runtime.memory import Memory
from penstock.runtime.program_cache import Phase, ProgramCache, ProgramKey
from penstock.runtime.stage_inputs import Batch, StageInputs
from penstock.runtime.train_step import HasTimeline, StepResult
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Program, Schedule
from penstock.schedules.timeline import Timeline, simulate
from penstock.stage.loss import LossFn
from penstock.stage.stage_runner import SavedForBackward


@dataclass(frozen=True)
class CallOptions:
    """The options of a pipe that may change from call to call."""

    chunks: int
    checkpoint: str
    training: bool
    runtime: str
    reduction: str | None

    def build_program_key(self, chunks: int, allow_recompute: bool = True) -> ProgramKey:
        """Of a call with so many micro-batches."""
        return ProgramKey(chunks, self.training and allow_recompute, self.checkpoint)


@dataclass(frozen=True)
class PreparedPipe:
    """A model cut and placed, the programs that run it, and the layers as the pipe has them now."""

    placed_partition: PlacedPartition
    program_cache: ProgramCache
    replicas: Replicas
    layers: Mapping[str, nn.Module | None]

    def check_model_unchanged(self) -> None:
        """The layers are those that were cut, and have been given their numbers."""
        how = self.placed_partition.partition.how
        if isinstance(how, TracedPartition):
            how.check_unchanged()
        else:
            check_layers_unchanged(self.layers, self.placed_partition.local_stages)
        self.placed_partition.uninitialized_tensors.check_initialized()

    def select_step_program(
        self, options: CallOptions, stage_inputs: StageInputs
    ) -> tuple[Program, Phase]:
        """The whole program; without gradients, its forwards."""
        programs = self.program_cache.for_graph(stage_inputs.graph)
        if torch.is_grad_enabled():
            return programs.get_step_phase(options.build_program_key(stage_inputs.chunks))
        program, forwards, _ = programs.get_forward_backward_phases(
            options.build_program_key(stage_inputs.chunks, False)
        )
        return program, forwards

    def forecast(
        self, options: CallOptions, cost: Cost | None, last_measured: HasTimeline | None
    ) -> Timeline:
        """A training step on paper: at this cost, or at that of the last one, if there was one."""
        program, _ = self.program_cache.get_step_phase(options.build_program_key(options.chunks))
        if cost is None and last_measured is not None:
            cost = last_measured.timeline.cost
        return simulate(program, cost)


@dataclass(frozen=True)
class StepRequest:
    """What a training step is to do with the outputs."""

    loss_fn: LossFn | None
    return_outputs: bool
    scaler: torch.amp.GradScaler | None
    optimizer: torch.optim.Optimizer | None = None  # takes its step, too

    def validate(self) -> None:
        """The optimizer has something to go by, and may go by it."""
        if self.optimizer is None:
            return
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise PenstockTypeError(
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
class PreparedStep:
    """A training step, made ready: what is fed, and what the gradients are multiplied by."""

    options: CallOptions
    request: StepRequest
    stage_inputs: StageInputs
    loss_scale: Tensor | None


class CheckpointPeers(NamedTuple):
    """A group of all processes that save together, None if there is one; of which copy this is."""

    process_group: Any = None
    replica: int = 0


class Engine(Protocol):
    """What runs a pipe: in one process, or as one of several."""

    def forward(self, options: CallOptions, batch: Batch) -> Any:
        """What the model computes of a batch."""

    def step(self, options: CallOptions, batch: Batch, request: StepRequest) -> StepResult:
        """Forward, loss and backward."""

    def guard_call(self, call_name: str, **facts: object) -> AbstractContextManager[object]:
        """Within, what is raised on one rank is raised on all, if the facts are the same there."""

    def clip_grad_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float, options: ClipGradOptions
    ) -> Tensor:
        """Clip by the norm over all ranks; gives the norm before."""

    def get_checkpoint_peers(self) -> CheckpointPeers:
        """With whom this process saves."""

    def forecast(self, options: CallOptions, cost: Any) -> Timeline:
        """The timeline of a training step on paper."""

    def measure_memory(self, options: CallOptions, batch: Batch, request: StepRequest) -> Memory:
        """What is alive in a training step, measured."""


def build_cell_policy(schedule: Schedule, require_known_leaves: bool = False) -> CellPolicy:
    """How the schedule has its cells computed, if there are gradients at all."""
    grad = torch.is_grad_enabled()

    def saved_for_backward(stage: int, microbatch: int) -> SavedForBackward:
        if not grad:
            return SavedForBackward.NOTHING
        return (
            SavedForBackward.INPUTS
            if (stage, microbatch) in schedule.recomputed
            else SavedForBackward.GRAPH
        )

    def splits_backward(stage: int, microbatch: int) -> bool:
        return grad and (stage, microbatch) in schedule.divided

    return CellPolicy(saved_for_backward, splits_backward, require_known_leaves)

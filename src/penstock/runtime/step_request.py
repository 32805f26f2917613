"""The records of one call of a pipe, and `Engine`, the interface that answers it.

CallOptions    options of the pipe as they are now: chunks, checkpoint, training, runtime
StepRequest    arguments of `pipe.step`: loss function, outputs, scaler, optimizer
Batch          the inputs and the target (see stage_inputs.py)
PreparedPipe   the part that does not change between calls: stages, programs, replicas
PreparedStep   options, request and the batch split into micro-batches
"""

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
    """The options of a pipe that may change between calls, as attributes of the pipe."""

    chunks: int
    checkpoint: str
    training: bool
    runtime: str
    reduction: str | None

    def build_program_key(self, chunks: int, allow_recompute: bool = True) -> ProgramKey:
        """Return the key of the program for a call with `chunks` micro-batches."""
        # As in PyTorch's old `Pipe`, a model in eval mode is never recomputed.
        return ProgramKey(chunks, self.training and allow_recompute, self.checkpoint)


@dataclass(frozen=True)
class PreparedPipe:
    """A model that is cut and placed, with its programs.

    `layers` are the children of the pipe: the live dictionary, so later changes show.
    """

    placed_partition: PlacedPartition
    program_cache: ProgramCache
    replicas: Replicas
    layers: Mapping[str, nn.Module | None]

    def check_model_unchanged(self) -> None:
        """Raise if layers were replaced after the pipe was made, or are still on `meta`."""
        # A stage holds its layers. A layer that the user puts into the pipe later would be saved
        # and optimised, but it would not run.
        layout = self.placed_partition.partition.layout
        if isinstance(layout, TracedPartition):
            layout.check_unchanged()
        else:
            check_layers_unchanged(self.layers, self.placed_partition.local_stages)
        self.placed_partition.uninitialized_tensors.check_initialized()

    def select_step_program(
        self, options: CallOptions, stage_inputs: StageInputs
    ) -> tuple[Program, Phase]:
        """Return the program of a step and the phase to run.

        Under `torch.no_grad()` the phase has the forwards only.
        """
        programs = self.program_cache.for_graph(stage_inputs.graph)
        if torch.is_grad_enabled():
            return programs.get_step_phase(options.build_program_key(stage_inputs.chunks))
        # Without a backward there is nothing to recompute for.
        program, forwards, _ = programs.get_forward_backward_phases(
            options.build_program_key(stage_inputs.chunks, False)
        )
        return program, forwards

    def forecast(
        self, options: CallOptions, cost: Cost | None, last_measured: HasTimeline | None
    ) -> Timeline:
        """Return the simulated timeline of a training step.

        Without a `cost`, the measured costs of the last step are used, if there was one.
        """
        program, _ = self.program_cache.get_step_phase(options.build_program_key(options.chunks))
        if cost is None and last_measured is not None:
            cost = last_measured.timeline.cost
        return simulate(program, cost)


@dataclass(frozen=True)
class StepRequest:
    """The options of one training step: loss function, outputs, scaler, optimizer."""

    loss_fn: LossFn | None
    return_outputs: bool
    scaler: torch.amp.GradScaler | None
    optimizer: torch.optim.Optimizer | None = None  # its `step()` is called after the backwards

    def validate(self) -> None:
        """Raise if an optimizer was given and cannot step: no gradients, or a scaler decides."""
        if self.optimizer is None:
            return
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise PenstockTypeError(
                "optimizer must be a torch.optim.Optimizer, not "
                f"{type(self.optimizer).__name__}. Pass the optimizer itself."
            )
        if not torch.is_grad_enabled():
            raise ArgumentError(
                "step(optimizer=...) was called under torch.no_grad(), so there are no gradients. "
                "Leave the optimizer out, or enable gradients."
            )
        if self.scaler is not None:
            raise ArgumentError(
                "step(optimizer=..., scaler=...) was called, but the scaler decides whether the "
                "optimizer steps. Leave the optimizer out and call scaler.step(optimizer) after "
                "the step."
            )


@dataclass(frozen=True)
class PreparedStep:
    """A training step whose batch is split. Gradients are multiplied by `loss_scale`."""

    options: CallOptions
    request: StepRequest
    stage_inputs: StageInputs
    loss_scale: Tensor | None


class CheckpointPeers(NamedTuple):
    """The processes that save a checkpoint together."""

    channel: Any = None  # a control channel between all of them; None: this process saves alone
    replica: int = 0  # the replica of the pipe that this process belongs to


class Engine(Protocol):
    """The interface that runs a pipe: `LocalEngine` in one process, `DistributedEngine` in many."""

    def forward(self, options: CallOptions, batch: Batch) -> Any:
        """Return the output of the model for a batch."""

    def step(self, options: CallOptions, batch: Batch, request: StepRequest) -> StepResult:
        """Run forward, loss and backward of a batch."""

    def guard_call(self, call_name: str, **facts: object) -> AbstractContextManager[object]:
        """Return a context in which an error on one rank is raised on all ranks.

        All ranks compare the `facts` first and raise if they differ.
        """

    def clip_grad_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float, options: ClipGradOptions
    ) -> Tensor:
        """Clip gradients by their norm over all ranks. Return the norm before clipping."""

    def get_checkpoint_peers(self) -> CheckpointPeers:
        """Return the processes that this process saves checkpoints with."""

    def forecast(self, options: CallOptions, cost: Any) -> Timeline:
        """Return the simulated timeline of a training step."""

    def measure_memory(self, options: CallOptions, batch: Batch, request: StepRequest) -> Memory:
        """Run a training step and return the bytes alive after each action."""


def build_cell_policy(schedule: Schedule, require_known_leaves: bool = False) -> CellPolicy:
    """Return the rules by which a schedule computes its cells, in the caller's grad mode."""
    # Read here, in the caller's thread: the rules are applied by worker threads, whose grad mode is
    # their own.
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

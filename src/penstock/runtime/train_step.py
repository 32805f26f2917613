"""`run_train_step`: forward, loss and backward of a batch, as one phase under any schedule.

The order of events:

    1. the inputs of the micro-batches become payloads of the cells that take them
    2. the phase runs; when an output is there, the loss accumulator returns the gradient with
       which its backward begins
    3. gradients get their final scale, and those of replicated stages are reduced once
    4. inputs that require gradients pass theirs on to the caller's graph
    5. losses, outputs and metrics of the micro-batches become a `StepResult`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.data_parallel.sync import Replicas
from penstock.microbatch import MicrobatchRows, gather
from penstock.model.stage_inputs import StageInputs
from penstock.runtime.autograd_call import (
    Cell,
    build_input_payloads,
    collect_tensors_by_cell,
    propagate_version_bumps,
)
from penstock.runtime.execution import Execution
from penstock.runtime.loss_accumulator import LossAccumulator
from penstock.runtime.program_cache import Phase
from penstock.schedules.ir import Program
from penstock.schedules.timeline import Timeline
from penstock.torch_compat import pytree


class HasTimeline(Protocol):
    """The interface of a run that can build its timeline."""

    @property
    def timeline(self) -> Timeline:
        """The measured timeline."""


class RuntimeUsed(NamedTuple):
    """The runtime that ran a step, and the reason if it is not the one that was requested."""

    runtime: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.runtime}: {self.why}" if self.why else self.runtime


@dataclass(frozen=True)
class StepResult:
    """The result of `Pipe.step`.

    Attributes:
        loss: The loss of the batch, detached, with the auxiliary losses that layers have added.
        outputs: The output of the model for the whole batch. None unless `step` was called with
            `outputs=True`.
        metrics: The metrics that `loss_fn` returned, combined over the micro-batches.
        measured: The run, with its timestamps.
        ran: The runtime that ran the step, and why it was not the requested one, if it was not.

    >>> from torch import nn
    >>> from penstock import Pipe
    >>> layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> pipe = Pipe(layers, chunks=2, stages=2, devices=["cpu", "cpu"], loss_fn=nn.MSELoss())
    >>> result = pipe.step(torch.zeros(6, 4), target=torch.zeros(6, 2), outputs=True)
    >>> result.outputs.shape, str(result.ran)
    (torch.Size([6, 2]), 'threads')
    """

    loss: Tensor
    outputs: Any
    metrics: dict[str, Any]
    measured: HasTimeline
    ran: RuntimeUsed = RuntimeUsed("processes")  # noqa: RUF009 (a value)

    @property
    def timeline(self) -> Timeline:
        """The measured timeline of the step. On a GPU, reading it waits until the step has ended.

        Returns:
            A `Timeline` that can be drawn and compared with `Pipe.forecast`.
        """
        return self.measured.timeline

    def __repr__(self) -> str:
        return f"StepResult(loss={self.loss.item():.6g})"


def run_train_step(
    execution: Execution,
    program: Program,
    phase: Phase,
    stage_inputs: StageInputs,
    loss_accumulator: LossAccumulator,
    replicas: Replicas,
) -> StepResult:
    """Run a training step and return its result.

    On an error, gradients of earlier steps are as they were before the step.
    """
    tensors_by_cell = collect_tensors_by_cell(stage_inputs.by_stage)
    execution.cell_io.inputs = build_input_payloads(stage_inputs.by_stage)
    # The worker of the last stage asks the accumulator for each micro-batch's first gradient, so
    # that a backward can begin while other micro-batches are still in their forward.
    execution.cell_io.compute_output_gradients, execution.cell_io.before_backward = (
        loss_accumulator.compute_output_gradients,
        loss_accumulator.before_backward,
    )
    with replicas.deferred_sync() as deferred:
        try:
            execution.run(phase)
        except BaseException:
            loss_accumulator.restore_gradients()
            raise
        # Gradients get their final scale before they are reduced over replicas, which happens when
        # the context ends. FSDP keeps its gradients elsewhere and needs the factor itself.
        loss_accumulator.finish_gradients()
        deferred.rescale_factor = loss_accumulator.rescale_factor
    for cell, payload in execution.cell_io.inputs.items():
        propagate_version_bumps(tensors_by_cell[cell], payload.tensors)
    backpropagate_to_inputs(tensors_by_cell, execution, loss_accumulator.rescale_factor)
    microbatch_losses = loss_accumulator.microbatch_losses
    outputs = [m.extras.output[0] for m in microbatch_losses if m.extras.output]
    return StepResult(
        loss_accumulator.compute_total_loss(),
        gather(outputs, stage_inputs.rows) if outputs else None,
        combine_metrics(loss_accumulator, stage_inputs.rows),
        execution.build_measured_run(program),
    )


def combine_metrics(loss_accumulator: LossAccumulator, rows: MicrobatchRows) -> dict[str, Any]:
    """Combine the metrics of the micro-batches, name by name."""
    device = loss_accumulator.microbatch_losses[0].loss.device
    metrics = [
        microbatch_loss.extras.metrics for microbatch_loss in loss_accumulator.microbatch_losses
    ]
    return {
        name: _combine_metric([m[name] for m in metrics], loss_accumulator, rows, device)
        for name in metrics[0]
    }


def _combine_metric(
    values: Sequence[Any],
    loss_accumulator: LossAccumulator,
    rows: MicrobatchRows,
    device: torch.device,
) -> Any:
    """Combine one metric: numbers like the losses, tensors with rows like the outputs.

    If the micro-batches return different structures, the metric is the list of their values.
    """
    # A metric may be a tree, such as a dict of numbers. Its leaves are combined one by one.
    flattened = [pytree.tree_flatten(value) for value in values]
    if any(spec != flattened[0][1] for _, spec in flattened):
        return list(values)

    def combine_leaves(leaves: tuple[Any, ...]) -> Any:
        if all(map(_is_scalar, leaves)):
            return loss_accumulator.combine([_to_scalar_tensor(leaf, device) for leaf in leaves])
        return gather(leaves, rows)

    leaves = [
        combine_leaves(leaves) for leaves in zip(*(leaves for leaves, _ in flattened), strict=True)
    ]
    return pytree.tree_unflatten(leaves, flattened[0][1])


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


def _to_scalar_tensor(value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value
    # The dtypes of Python's own numbers, so that a metric loses no digits.
    dtype = torch.float64 if isinstance(value, float) else torch.int64
    return torch.full((), value, dtype=dtype, device=device)


def backpropagate_to_inputs(
    tensors_by_cell: Mapping[Cell, Sequence[Tensor]],
    execution: Execution,
    rescale_factor: Tensor | None,
) -> None:
    """Pass the gradients of the pipe's inputs on to the graph that computed these inputs.

    An input may be the output of another module, such as an encoder in front of the pipe. One
    backward for all micro-batches runs that module's hooks once, with the gradient of the batch.
    """
    pairs = [
        (tensor, gradient if rescale_factor is None else _scale_gradient(gradient, rescale_factor))
        for cell, payload in sorted(execution.cell_io.input_gradients.items())
        if cell in tensors_by_cell  # otherwise the input came from another process
        for tensor, gradient in zip(tensors_by_cell[cell], payload.tensors, strict=True)
        if gradient is not None
    ]
    if pairs:
        tensors, gradients = zip(*pairs, strict=True)
        torch.autograd.backward(tensors, gradients)


def _scale_gradient(gradient: Tensor, factor: Tensor) -> Tensor:
    return (gradient * factor.to(gradient.device)).to(gradient.dtype)

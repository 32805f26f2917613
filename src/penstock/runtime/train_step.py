"""The other door: forward, loss and backward of a batch in one go, under any schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.data_parallel.sync import Replicas
from penstock.microbatch import MicrobatchRows, gather
from penstock.runtime.autograd_call import (
    Cell,
    build_input_payloads,
    collect_tensors_by_cell,
    propagate_version_bumps,
)
from penstock.runtime.execution import Execution
from penstock.runtime.loss_accumulator import LossAccumulator
from penstock.runtime.program_cache import Phase
from penstock.runtime.stage_inputs import StageInputs
from penstock.schedules.ir import Program
from penstock.schedules.timeline import Timeline
from penstock.torch_compat import pytree


class HasTimeline(Protocol):
    """A run that took place."""

    @property
    def timeline(self) -> Timeline:
        """When everything ran."""


class RuntimeUsed(NamedTuple):
    """What carried a step out, and why it was that, if another was asked for."""

    runtime: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.runtime}: {self.why}" if self.why else self.runtime


@dataclass(frozen=True)
class StepResult:
    """What `Pipe.step` gives back."""

    loss: Tensor
    outputs: Any
    metrics: dict[str, Any]
    measured: HasTimeline
    ran: RuntimeUsed = RuntimeUsed("processes")  # noqa: RUF009 (a value)

    @property
    def timeline(self) -> Timeline:
        """When everything ran. On a GPU, reading it waits until the step has ended."""
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
    """Run the phase over micro-batches; the ledger says what their losses come to.

    The gradients of stages that have replicas are reduced once.
    """
    given = collect_tensors_by_cell(stage_inputs.by_stage)
    execution.cell_io.inputs = build_input_payloads(stage_inputs.by_stage)
    execution.cell_io.compute_output_gradients, execution.cell_io.before_backward = (
        loss_accumulator.compute_output_gradients,
        loss_accumulator.before_backward,
    )
    with replicas.deferred_sync() as held:
        try:
            execution.run(phase)
        except BaseException:
            loss_accumulator.restore_gradients()
            raise
        loss_accumulator.finish_gradients()
        held.rescale_factor = loss_accumulator.rescale_factor
    for cell, parcel in execution.cell_io.inputs.items():
        propagate_version_bumps(given[cell], parcel.tensors)
    backpropagate_to_inputs(given, execution, loss_accumulator.rescale_factor)
    scores = loss_accumulator.microbatch_losses
    asked = [score.extras.output[0] for score in scores if score.extras.output]
    return StepResult(
        loss_accumulator.compute_total_loss(),
        gather(asked, stage_inputs.rows) if asked else None,
        combine_metrics(loss_accumulator, stage_inputs.rows),
        execution.build_measured_run(program),
    )


def combine_metrics(loss_accumulator: LossAccumulator, rows: MicrobatchRows) -> dict[str, Any]:
    """Those of the micro-batches put together, name by name."""
    device = loss_accumulator.microbatch_losses[0].loss.device
    columns = [score.extras.metrics for score in loss_accumulator.microbatch_losses]
    return {
        name: _combine_metric([c[name] for c in columns], loss_accumulator, rows, device)
        for name in columns[0]
    }


def _combine_metric(
    values: Sequence[Any],
    loss_accumulator: LossAccumulator,
    rows: MicrobatchRows,
    device: torch.device,
) -> Any:
    """Numbers as the losses, all else as outputs are."""
    flat = [pytree.tree_flatten(value) for value in values]
    if any(spec != flat[0][1] for _, spec in flat):
        return list(values)

    def combine_leaves(leaves: tuple[Any, ...]) -> Any:
        if all(map(_is_scalar, leaves)):
            return loss_accumulator.combine([_to_scalar_tensor(leaf, device) for leaf in leaves])
        return gather(leaves, rows)

    leaves = [
        combine_leaves(leaves) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return pytree.tree_unflatten(leaves, flat[0][1])


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


def _to_scalar_tensor(value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value
    kind = torch.float64 if isinstance(value, float) else torch.int64
    return torch.full((), value, dtype=kind, device=device)


def backpropagate_to_inputs(
    tensors_by_cell: Mapping[Cell, Sequence[Tensor]],
    execution: Execution,
    rescale_factor: Tensor | None,
) -> None:
    """If what was given was computed by something that learns: let it learn, once."""
    found = [
        (tensor, gradient if rescale_factor is None else _scale_gradient(gradient, rescale_factor))
        for cell, parcel in sorted(execution.cell_io.input_gradients.items())
        if cell in tensors_by_cell  # else it came from another process
        for tensor, gradient in zip(tensors_by_cell[cell], parcel.tensors, strict=True)
        if gradient is not None
    ]
    if found:
        tensors, gradients = zip(*found, strict=True)
        torch.autograd.backward(tensors, gradients)


def _scale_gradient(gradient: Tensor, factor: Tensor) -> Tensor:
    return (gradient * factor.to(gradient.device)).to(gradient.dtype)

"""`Request`: one call of a pipe, from the public method down to the split of its batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from penstock.errors import ArgumentError, PenstockTypeError
from penstock.model.stage_inputs import Batch
from penstock.schedules.lowering import RecomputeTable
from penstock.stage.loss import LossFn


@dataclass(frozen=True)
class Request(Batch):
    """The batch of one call of a pipe, with the options of the call and of the pipe.

    Attributes:
        checkpoint: Which micro-batches are recomputed: "always", "except_last" or "never", or for
            each stage one of these or a bool for each micro-batch.
        training: Whether the pipe is in training mode.
        runtime: The runtime that was asked for.
        loss_fn: The loss of a step. None: the model computes it.
        scaler: The scaler of the gradients of a step.
        scale: A constant factor of the gradients of a step.
        optimizer: The optimizer whose `step()` is called after the backwards.
        audit: Which calls are compared with the unsplit model: "first", "off", or every n-th.
    """

    checkpoint: RecomputeTable = "except_last"
    training: bool = True
    runtime: str = "threads"
    loss_fn: LossFn | None = None
    scaler: torch.amp.GradScaler | None = None
    scale: float = 1.0
    optimizer: torch.optim.Optimizer | None = None
    audit: str | int = "off"

    def describe_options(self) -> dict[str, str | float | bool | None]:
        """Return the options that decide what is computed, by name.

        All ranks compare them before a call, and a captured step is replayed only for equal ones.
        """
        return {
            "chunks": self.chunks,
            "checkpoint": str(self.checkpoint),
            "training mode": self.training,
            "reduction": self.reduction,
            "outputs": self.return_outputs,
            "scaler": self.scaler is not None,
            "scale": self.scale,
            "optimizer": self.optimizer is not None,
        }

    def check_optimizer(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raise if an optimizer was given and cannot step the parameters of the pipe."""
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
        # Usually the first parameter of one is the first of the other.
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        if not any(p is q for p in parameters for q in stepped):
            raise ArgumentError(
                "step(optimizer=...) was called with an optimizer that has none of the parameters "
                "of the pipe, so it would not train it. Make the optimizer after the pipe, from "
                "pipe.parameters()."
            )

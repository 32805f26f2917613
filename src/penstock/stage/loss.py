"""The last stage of a training step: it ends in the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from penstock.errors import RunError
from penstock.stage.stage import OUTSIDE, Compute

LossFn = Callable[..., Any]


class Scored:
    """The last stage's computation, and the loss of its output.

    From outside comes the target, after the batch if this is also the first stage; outside go
    the loss and, on request, the output.
    """

    def __init__(
        self, compute: Compute, loss_fn: LossFn | None, has_target: bool, outputs: bool
    ) -> None:
        self._compute, self._loss_fn = compute, loss_fn
        self._has_target, self._outputs = has_target, outputs

    def __call__(self, arrived: Mapping[int, tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
        """As the stage's, with the loss in the place of the output, or before it."""
        targets: tuple[Any, ...] = ()
        if self._has_target:
            *batch, target = arrived[OUTSIDE]
            arrived = {**arrived, OUTSIDE: tuple(batch)}
            targets = (target,)
        departing = self._compute(arrived)
        (output,) = departing[OUTSIDE]
        loss = self._loss_fn(output, *targets) if self._loss_fn else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss)
            source = "loss_fn gave" if self._loss_fn else "the model, without a loss_fn, gave"
            raise RunError(f"a loss is one number, but {source} {found}: reduce it to a scalar")
        loss = loss.reshape(())
        if loss.untyped_storage().nbytes() > loss.nbytes:
            loss = loss.clone()  # that of mse_loss has the memory of its output, and is kept
        return {**departing, OUTSIDE: (loss, output) if self._outputs else (loss,)}

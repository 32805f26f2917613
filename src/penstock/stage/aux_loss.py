"""Auxiliary losses that layers add in their forward: `penstock.add_loss`.

Examples are the load-balancing loss of a router and a penalty on activations. In a training step
the loss of a layer reaches the end of the pipeline like any other value:

    stage 0                    stage 1                         last stage
    add_loss(a)  -- a -->      add_loss(b)  -- a + b -->       loss of the micro-batch, and a + b

Each stage sends its sum to the last of its destinations, as one more value of the message. The last
stage returns the total beside the loss of the micro-batch. There it is weighted by rows, reported
and differentiated; its gradient flows back along the same messages.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.errors import PenstockTypeError, RunError
from penstock.stage.stage import OUTSIDE
from penstock.torch_compat import are_checkpoint_hooks, get_saved_tensor_hooks, is_in_backward


class AuxLossSink(Protocol):
    """The receiver of the losses that layers add: a list, or an object that takes none."""

    def append(self, loss: Tensor, /) -> None:
        """Take one loss."""


class _AuxLossState(threading.local):
    """The receiver of the losses that layers add in this thread, or None."""

    def __init__(self) -> None:
        self.sink: AuxLossSink | None = None


thread_state = _AuxLossState()


def add_loss(value: Tensor) -> None:
    """Add an auxiliary loss to the loss of the current micro-batch, from inside a layer.

    It counts in `Pipe.step`, and in an unsplit model inside `added_losses`. Anywhere else, a loss
    that does not require grad is dropped, and any other raises.

    Args:
        value: A tensor with one element: the mean over the rows of this micro-batch.

    Raises:
        PenstockTypeError: `value` is not a tensor with one element.
        RunError: `value` requires grad, and the loss would be lost: the forward belongs neither to
            `Pipe.step` nor to `added_losses`.

    Example:

    >>> class Penalised(torch.nn.Linear):
    ...     def forward(self, x: Tensor) -> Tensor:
    ...         y = super().forward(x)
    ...         add_loss(1e-3 * y.square().mean())
    ...         return y
    """
    _check_scalar(value)
    if _is_torch_checkpoint_recompute():
        return
    if thread_state.sink is not None:
        thread_state.sink.append(value.reshape(()))
    elif value.requires_grad and torch.is_grad_enabled():
        raise RunError(
            "a layer added a loss that nothing collects, so it would be lost. Train with "
            "pipe.step, or call the model inside `with penstock.added_losses()`. Inside "
            "torch.utils.checkpoint, set use_reentrant=False."
        )


@contextmanager
def added_losses() -> Iterator[list[Tensor]]:
    """Collect the losses that layers of an unsplit model add inside the context, in order.

    Returns:
        A context manager that yields a list. The list grows as layers call `add_loss`.

    Example:

    >>> with added_losses() as extra:
    ...     add_loss(torch.tensor(0.5))
    >>> sum(extra)
    tensor(0.5000)
    """
    losses: list[Tensor] = []
    previous, thread_state.sink = thread_state.sink, losses
    try:
        yield losses
    finally:
        thread_state.sink = previous


def _check_scalar(value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        description = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value)
        raise PenstockTypeError(
            f"penstock.add_loss takes a tensor with one element, not {description}. Reduce it "
            "first, for example with value.mean()."
        )


def _is_torch_checkpoint_recompute() -> bool:
    """Return whether `torch.utils.checkpoint` repeats a forward that has already added its losses.

    It does so inside a backward, with its own hooks on saved tensors.
    """
    return is_in_backward() and are_checkpoint_hooks(get_saved_tensor_hooks())


# ---- on the way to the last stage --------------------------------------------------------------


class CollectedLosses(list[Tensor]):
    """The losses of one cell: those that its layers add, after those of earlier stages.

    `layer_count` is how many there were when the loss function began, which may add losses, too,
    and take out all of them. None: no loss function has run.
    """

    layer_count: int | None = None


class CarriedLoss(NamedTuple):
    """The sum of the losses that were added so far: the last value of a message that carries it."""

    loss: Tensor


def take_carried_losses(
    inputs: Mapping[int, tuple[Any, ...]],
) -> tuple[dict[int, tuple[Any, ...]], CollectedLosses]:
    """Return the inputs of a stage without the carried losses, and these losses."""
    losses, remaining = CollectedLosses(), {}
    for source, values in inputs.items():
        if values and type(values[-1]) is CarriedLoss:
            *values, carried = values  # type: ignore[assignment]
            losses.append(carried.loss)
        remaining[source] = tuple(values)
    return remaining, losses


def carry_losses(
    outputs: dict[int, tuple[Any, ...]], losses: Sequence[Tensor]
) -> dict[int, tuple[Any, ...]]:
    """Return the outputs of a stage with the sum of the losses for the last of its destinations.

    The last stage returns it to the caller, in memory of its own.
    """
    destination = max(outputs)
    total = sum_losses(losses)
    if destination == OUTSIDE:
        total = total.clone()
    return {**outputs, destination: (*outputs[destination], CarriedLoss(total))}


def sum_losses(losses: Sequence[Tensor]) -> Tensor:
    """Return the sum of the losses, on the device of the first one."""
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss.to(total.device)
    return total


# ---- in `pipe(x)` --------------------------------------------------------------------------------


class _DroppingSink:
    """A sink that drops every loss."""

    def append(self, loss: Tensor) -> None:
        """Do nothing."""


class _RejectingSink:
    """A sink that takes no loss."""

    def append(self, loss: Tensor) -> None:
        """Raise."""
        raise RunError(
            "a layer added a loss inside pipe(x), which computes no loss to add it to. Train with "
            "pipe.step(x, target=y)."
        )


def select_forward_sink() -> AuxLossSink:
    """Return the sink for `pipe(x)`.

    It raises if a loss would be missed: gradients are enabled, or the caller is inside
    `added_losses`. Otherwise it drops the loss.
    """
    is_missed = torch.is_grad_enabled() or thread_state.sink is not None
    return _RejectingSink() if is_missed else _DroppingSink()

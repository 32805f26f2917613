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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import PenstockTypeError, RunError
from penstock.stage.recompute import is_checkpointing, is_recomputing
from penstock.stage.stage import OUTSIDE, Stage, StageFunction
from penstock.torch_compat import are_checkpoint_hooks, get_saved_tensor_hooks, is_in_backward

LossCallback = Callable[[Tensor], object]


class _AuxLossState(threading.local):
    """The receiver of the losses that layers add in this thread, or None."""

    def __init__(self) -> None:
        self.callback: LossCallback | None = None


_thread_state = _AuxLossState()


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
    if _thread_state.callback is not None:
        _thread_state.callback(value.reshape(()))
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
    with collect_aux_losses(losses.append):
        yield losses


# A class and not a generator with @contextmanager, as every cell enters one and this is faster.
class collect_aux_losses:  # noqa: N801
    """A context manager that passes each `add_loss` of this thread to a callback."""

    __slots__ = ("_callback", "_previous")

    def __init__(self, callback: LossCallback) -> None:
        self._callback = callback

    def __enter__(self) -> None:
        self._previous, _thread_state.callback = _thread_state.callback, self._callback

    def __exit__(self, *_: object) -> None:
        _thread_state.callback = self._previous


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


class _CarriedLoss(NamedTuple):
    """The sum of the losses that were added so far, sent along with the values of a message."""

    loss: Tensor


class AuxLossCounter:
    """A check that recomputations of a stage add as many losses as its forwards did.

    The value of an auxiliary loss comes from the forward, its gradient from the recomputation. A
    layer that adds it in only one of the two would train on a loss that is not reported, or report
    one that it does not train on.
    """

    def __init__(self) -> None:
        # How many forwards that are not recomputed yet have added each number of losses. Cells are
        # not distinguished: a recomputation needs any forward with the same number.
        self._forward_counts: Counter[int] = Counter()

    def count(self, aux_losses: Sequence[Tensor]) -> None:
        """Count the losses of one forward or recomputation, and raise if they do not match.

        Losses that arrived from earlier stages count, too.
        """
        self._forward_counts[len(aux_losses)] += is_checkpointing() - is_recomputing()
        if self._forward_counts[len(aux_losses)] < 0:
            raise RunError(
                f"these layers added {len(aux_losses)} losses in their recomputation, but not in "
                "their forward. Call penstock.add_loss in both; the loss counts only once."
            )


class AuxLossStageFunction:
    """The computation of a stage that sends on the losses of its layers and of earlier stages."""

    def __init__(self, compute: StageFunction) -> None:
        self._compute, self._counter = compute, AuxLossCounter()

    def __call__(self, inputs: Mapping[int, tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
        """Run the stage, and append the sum of the losses to the values for one destination."""
        inputs, losses = split_aux_losses(inputs)
        with collect_aux_losses(losses.append):
            outputs = self._compute(inputs)
        self._counter.count(losses)
        if not losses:
            return outputs
        dst = max(outputs)
        assert dst != OUTSIDE, "the stage feeds no other stage"
        return {**outputs, dst: (*outputs[dst], _CarriedLoss(sum_losses(losses)))}


def block_aux_losses(stages: Sequence[Stage]) -> Sequence[Stage]:
    """Return the stages for `pipe(x)`, in which `add_loss` raises or does nothing.

    It raises if the loss would be missed: gradients are enabled, or the caller is inside
    `added_losses`. Otherwise the loss is dropped.
    """
    callback = (
        _reject_loss
        if torch.is_grad_enabled() or _thread_state.callback is not None
        else _drop_loss
    )
    return [
        replace(stage, compute=_NoAuxLossStageFunction(stage.compute, callback)) for stage in stages
    ]


class _NoAuxLossStageFunction:
    """The computation of a stage that does not send losses on, but calls a callback for each."""

    def __init__(self, compute: StageFunction, callback: LossCallback) -> None:
        self._compute, self._callback = compute, callback

    def __call__(self, inputs: Mapping[int, tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
        """Run the stage."""
        with collect_aux_losses(self._callback):
            return self._compute(inputs)


def _drop_loss(loss: Tensor) -> None:
    pass


def _reject_loss(loss: Tensor) -> None:
    raise RunError(
        "a layer added a loss inside pipe(x), which computes no loss to add it to. Train with "
        "pipe.step(x, target=y)."
    )


def split_aux_losses(
    inputs: Mapping[int, tuple[Any, ...]],
) -> tuple[Mapping[int, tuple[Any, ...]], list[Tensor]]:
    """Return the inputs of a stage without the carried losses, and these losses."""
    losses = [v[-1].loss for v in inputs.values() if v and isinstance(v[-1], _CarriedLoss)]
    if losses:
        inputs = {
            source: values[:-1] if isinstance(values[-1], _CarriedLoss) else values
            for source, values in inputs.items()
        }
    return inputs, losses


def sum_losses(losses: Sequence[Tensor]) -> Tensor:
    """Return the sum of the losses, on the device of the first one."""
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss.to(total.device)
    return total

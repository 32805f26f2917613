"""Losses that layers add from inside: `penstock.add_loss`.

In a training step such a loss goes with the message to the last stage that its stage feeds, and
from there on, until the last stage of all gives it out beside the micro-batch's loss. There it is
weighted by rows, reported and differentiated.
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
from penstock.stage.caller_context import is_from_torch_checkpoint
from penstock.stage.recompute import is_checkpointing, is_recomputing
from penstock.stage.stage import OUTSIDE, Stage, StageFunction

LossCallback = Callable[[Tensor], object]


class _AuxLossState(threading.local):
    def __init__(self) -> None:
        self.callback: LossCallback | None = None


_thread_state = _AuxLossState()


def add_loss(value: Tensor) -> None:
    """In a layer: add one number to the loss, a mean over the rows of this micro-batch.

    It counts in `Pipe.step`, and within `added_losses`. Elsewhere, one that wants a gradient is an
    error, and any other is dropped.

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
            "a layer added a loss where nobody takes it: train with pipe.step, or call the model "
            "within penstock.added_losses(); torch.utils.checkpoint needs use_reentrant=False"
        )


@contextmanager
def added_losses() -> Iterator[list[Tensor]]:
    """Within, the losses that layers of an unsplit model add, in order.

    >>> with added_losses() as extra:
    ...     add_loss(torch.tensor(0.5))
    >>> sum(extra)
    tensor(0.5000)
    """
    found: list[Tensor] = []
    with collect_aux_losses(found.append):
        yield found


class collect_aux_losses:  # noqa: N801 (a context, as a function would give; every cell enters one)
    """Within, in this thread, whoever is told of each."""

    __slots__ = ("_callback", "_previous")

    def __init__(self, callback: LossCallback) -> None:
        self._callback = callback

    def __enter__(self) -> None:
        self._previous, _thread_state.callback = _thread_state.callback, self._callback

    def __exit__(self, *_: object) -> None:
        _thread_state.callback = self._previous


def _check_scalar(value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value)
        raise PenstockTypeError(
            f"an added loss is a tensor with one number, not {found}: reduce it first"
        )


def _is_torch_checkpoint_recompute() -> bool:
    """Is this the recomputation of a `torch.utils.checkpoint`, whose forward has added it?"""
    if torch._C._current_graph_task_id() == -1:
        return False
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return is_from_torch_checkpoint(hooks)


# ---- on the way to the last stage ---------------------------------------------------------


class _CarriedLoss(NamedTuple):
    """What was added so far, beside the values of a message."""

    loss: Tensor


class AuxLossCounter:
    """What the layers of a stage add in one step: as much in a recomputation as in a forward."""

    def __init__(self) -> None:
        self._forward_counts: Counter[int] = Counter()  # of forwards that were not yet recomputed

    def count(self, aux_losses: Sequence[Tensor]) -> None:
        """What layers have added now, and what came from stages before."""
        self._forward_counts[len(aux_losses)] += is_checkpointing() - is_recomputing()
        if self._forward_counts[len(aux_losses)] < 0:
            raise RunError(
                f"these layers add {len(aux_losses)} losses in their recomputation, and did not in "
                "their forward: call penstock.add_loss alike in both, it is counted once"
            )


class AuxLossStageFunction:
    """A stage's computation; what its layers add goes on, with what came from stages before."""

    def __init__(self, compute: StageFunction) -> None:
        self._compute, self._counter = compute, AuxLossCounter()

    def __call__(self, inputs: Mapping[int, tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
        """As the stage's, with the added losses for the last of its destinations."""
        inputs, added = split_aux_losses(inputs)
        with collect_aux_losses(added.append):
            departing = self._compute(inputs)
        self._counter.count(added)
        if not added:
            return departing
        dst = max(departing)
        assert dst != OUTSIDE, "a stage that feeds none"
        return {**departing, dst: (*departing[dst], _CarriedLoss(sum_losses(added)))}


def block_aux_losses(stages: Sequence[Stage]) -> Sequence[Stage]:
    """The stages behind `pipe(x)`: where a loss that is added would be missed, nobody may add one.

    It is not missed in a forward without gradients, unless the caller waits for it.
    """
    take = (
        _reject_loss
        if torch.is_grad_enabled() or _thread_state.callback is not None
        else _drop_loss
    )
    return [
        replace(stage, compute=_NoAuxLossStageFunction(stage.compute, take)) for stage in stages
    ]


class _NoAuxLossStageFunction:
    """A stage's computation, from which added losses do not go on."""

    def __init__(self, compute: StageFunction, callback: LossCallback) -> None:
        self._compute, self._callback = compute, callback

    def __call__(self, inputs: Mapping[int, tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
        """As the stage's."""
        with collect_aux_losses(self._callback):
            return self._compute(inputs)


def _drop_loss(loss: Tensor) -> None:
    pass


def _reject_loss(loss: Tensor) -> None:
    raise RunError(
        "a layer added a loss behind pipe(x), which has none to add it to: train with "
        "pipe.step(x, target=y)"
    )


def split_aux_losses(
    inputs: Mapping[int, tuple[Any, ...]],
) -> tuple[Mapping[int, tuple[Any, ...]], list[Tensor]]:
    """What arrived, without the added losses, and those."""
    added = [v[-1].loss for v in inputs.values() if v and isinstance(v[-1], _CarriedLoss)]
    if added:
        inputs = {
            source: values[:-1] if isinstance(values[-1], _CarriedLoss) else values
            for source, values in inputs.items()
        }
    return inputs, added


def sum_losses(losses: Sequence[Tensor]) -> Tensor:
    """One number, where the first of them is."""
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss.to(total.device)
    return total

"""What the micro-batches of a training step count for, and what their losses come to.

The step's loss is the sum of theirs; or their mean, by rows, or by weights. Weights that the
loss returns are all known only after the last forward, and by then backwards have begun. The
gradients of such a step are in a unit of their own, apart from earlier ones, until its end.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import PenstockTypeError, RunError
from penstock.stage.loss import DEFAULT_IGNORE_INDEX, NO_EXTRAS, LossExtras, LossReduction
from penstock.stage.payload import Payload, unflatten_values
from penstock.stage.stage_runner import StageRunner
from penstock.torch_compat import pytree


def read_loss_scale(scaler: Any, device: torch.device) -> Tensor | None:
    """The factor of a `torch.amp.GradScaler`; None without one.

    >>> read_loss_scale(torch.amp.GradScaler("cpu", init_scale=8.0), torch.device("cpu"))
    tensor(8.)
    """
    if scaler is None:
        return None
    if not isinstance(scaler, torch.amp.GradScaler):
        raise PenstockTypeError(f"scaler is a torch.amp.GradScaler, not {type(scaler).__name__}")
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return scale


class MicrobatchLoss(NamedTuple):
    """What one micro-batch came to."""

    loss: Tensor
    extras: LossExtras = NO_EXTRAS
    aux_loss: Tensor | None = None  # by layers


@dataclass(frozen=True)
class ReplicaShare:
    """What a pipe counts for, whose batch is a part of one: others have the rest, in copies of it.

    Gradients are those of the whole batch's loss, times the number of copies: their mean over the
    copies is then the gradient, also of steps that were added up before.
    """

    replica_count: int = 1
    row_share: float = 1.0  # its share of all rows
    global_target_count: float | None = None  # what the targets of all count for

    def compute_row_factor(self) -> float:
        """The factor of gradients of a mean by rows."""
        return self.row_share * self.replica_count


class LossAccumulator:
    """The scores of one step, and what is made of them.

    `shares` are the micro-batches' parts of the rows. Gradients are multiplied by `scale`.
    """

    def __init__(
        self,
        reduction: LossReduction,
        row_shares: Sequence[float],
        targets: Sequence[tuple[Any, ...]],
        loss_scale: Tensor | None = None,
    ) -> None:
        self._is_sum, self._loss_scale = reduction.is_sum, loss_scale
        self._row_shares = row_shares
        self._loss_shares: Sequence[float] = (
            [1] * len(row_shares) if reduction.is_sum else row_shares
        )
        self._microbatch_losses: dict[int, MicrobatchLoss] = {}
        self._first_extras: LossExtras | None = None
        self._gradient_divisor: Tensor | None = None  # what the gradients' weights are divided by
        self._previous_gradients: PreviousGradients | None = None
        self._replica_share = ReplicaShare()
        self._global_weight: Tensor | None = None
        self._targets = targets
        given = [target for values in targets for target in values if isinstance(target, Tensor)]
        if reduction.target_counter is not None and len(given) == len(row_shares):
            self._gradient_divisor = torch.stack(
                [reduction.target_counter(target) for target in given]
            ).sum()

    @property
    def is_sum(self) -> bool:
        """Is the step's loss the sum of theirs?"""
        return self._is_sum

    @property
    def target_count(self) -> Tensor | None:
        """Before the step: what all targets count for, if that is known."""
        return self._gradient_divisor

    def set_replica_share(self, replica_share: ReplicaShare) -> None:
        """Before the step: this is a part of a larger batch."""
        self._replica_share = replica_share
        if self._gradient_divisor is not None and replica_share.global_target_count is not None:
            self._gradient_divisor = torch.full_like(
                self._gradient_divisor,
                replica_share.global_target_count / replica_share.replica_count,
            )

    @property
    def microbatch_losses(self) -> list[MicrobatchLoss]:
        """In the order of the micro-batches."""
        return [self._microbatch_losses[i] for i in range(len(self._loss_shares))]

    # ---- while the step runs --------------------------------------------------------------

    def compute_output_gradients(self, microbatch: int, outputs: Payload) -> Payload:
        """The gradients with which a micro-batch's backward begins: of its loss, and of no other.

        What layers have added stands last. It is a mean by rows, whatever the loss is.
        """
        score = MicrobatchLoss(*unflatten_values(outputs.tensors, outputs.layout))  # type: ignore[arg-type]
        self._check_consistent_extras(score.extras)
        self._microbatch_losses[microbatch] = score
        seeds: list[Tensor | None] = [None for _ in outputs.tensors]
        seeds[0] = self._compute_loss_gradient(microbatch, score)
        if score.aux_loss is not None:
            share = self._row_shares[microbatch] * self._replica_share.compute_row_factor()
            seeds[-1] = self._apply_loss_scale(torch.full_like(score.aux_loss, share))
        return Payload(tuple(seeds))

    def before_backward(self, stage_runner: StageRunner, microbatch: int) -> None:
        """Before a cell's backward: set earlier gradients aside, if these are of another unit."""
        if self._previous_gradients is not None:
            self._previous_gradients.set_aside(stage_runner, microbatch)

    def _compute_loss_gradient(self, microbatch: int, microbatch_loss: MicrobatchLoss) -> Tensor:
        loss, weight = microbatch_loss.loss, microbatch_loss.extras.weight
        if weight is None:
            factor = (
                self._replica_share.replica_count
                if self._is_sum
                else self._replica_share.compute_row_factor()
            )
            return self._apply_loss_scale(
                torch.full_like(loss, self._loss_shares[microbatch] * factor)
            )
        if self._gradient_divisor is None:
            self._gradient_divisor = weight.masked_fill(weight == 0, 1) * len(self._loss_shares)
            self._previous_gradients = PreviousGradients()
        return self._apply_loss_scale(weight / self._gradient_divisor).to(loss.dtype)

    def _apply_loss_scale(self, gradient: Tensor) -> Tensor:
        return (
            gradient
            if self._loss_scale is None
            else (gradient * self._loss_scale).to(gradient.dtype)
        )

    def _check_consistent_extras(self, extras: LossExtras) -> None:
        first = self._first_extras = self._first_extras or extras
        if extras.weight is not None and self._is_sum:
            raise RunError(
                "loss_fn gave a weight, and reduction='sum' has no use for it: leave the weight "
                "out, or take reduction='mean'"
            )
        if (first.weight is None) != (extras.weight is None):
            raise RunError(
                "loss_fn gave a weight for one micro-batch and none for another: give one for all "
                "of them, or for none"
            )
        if first.metrics.keys() != extras.metrics.keys():
            raise RunError(
                f"loss_fn gave the metrics {_format_metric_names(first)} for one micro-batch and {_format_metric_names(extras)} "
                "for another: give the same for all of them"
            )

    # ---- after it -------------------------------------------------------------------------

    @property
    def _weights(self) -> list[Tensor]:
        """None at all, if the loss has none."""
        found = [score.extras.weight for score in self.microbatch_losses]
        return [weight for weight in found if weight is not None]

    @property
    def total_weight(self) -> Tensor | None:
        """What the step's loss counts for among those of several copies; None: by its rows."""
        weights = self._weights
        return _sum_tensors(weights) if weights else None

    def combine(self, values: Sequence[Tensor]) -> Tensor:
        """One number of those of the micro-batches, as for their losses."""
        weights = self._weights
        if not weights:
            return _sum_tensors(
                [n * share for n, share in zip(values, self._loss_shares, strict=True)]
            )
        pairs = zip(values, weights, strict=True)
        terms = [(n.to(w.device) * w).masked_fill(w == 0, 0) for n, w in pairs]
        mean = _sum_tensors(terms) / _sum_tensors(weights)
        return mean.to(values[0].dtype) if values[0].is_floating_point() else mean

    def compute_loss(self) -> Tensor:
        """The step's, without what layers have added."""
        total = self.combine([score.loss for score in self.microbatch_losses])
        if not self._is_sum and not self._weights and _has_ignored_targets(self._targets):
            warnings.warn(
                f"there is a {DEFAULT_IGNORE_INDEX} among the targets, which PyTorch's losses ignore, and this "
                "loss, which is not one of them alone, gives no weight, so that each micro-batch "
                "counts by its rows: return (loss, weight), with the number of targets that count",
                stacklevel=5,
            )
        return total.detach()

    def compute_aux_losses(self) -> list[Tensor]:
        """What layers have added to it, of each micro-batch."""
        shares = zip(self.microbatch_losses, self._row_shares, strict=True)
        return [
            score.aux_loss.detach() * share for score, share in shares if score.aux_loss is not None
        ]

    def compute_total_loss(self) -> Tensor:
        """The step's loss, with what layers have added."""
        total = self.compute_loss()
        for added in self.compute_aux_losses():
            total = total + added.to(total.device)
        return total

    def set_global_weight(self, global_weight: Tensor) -> None:
        """After the step: those of all copies together."""
        self._global_weight = global_weight

    @property
    def needs_rescale(self) -> bool:
        """Are this step's gradients of another unit than earlier ones, until its end?"""
        return self._previous_gradients is not None

    @property
    def rescale_factor(self) -> Tensor | None:
        """What this step's gradients are to be multiplied by; None if they are right already."""
        if self._previous_gradients is None:
            return None
        assert self._gradient_divisor is not None
        if self._global_weight is None:
            return self._gradient_divisor / _sum_tensors(self._weights)
        return self._gradient_divisor / (
            self._global_weight.to(self._gradient_divisor.device)
            / self._replica_share.replica_count
        )

    def finish_gradients(self) -> None:
        """Add this step's gradients to the earlier ones."""
        if self._previous_gradients is not None:
            factor = self.rescale_factor
            assert factor is not None
            self._previous_gradients.add_rescaled(factor)

    def restore_gradients(self) -> None:
        """The step has failed: gradients are as they were before it."""
        if self._previous_gradients is not None:
            self._previous_gradients.restore()


class PreviousGradients:
    """Gradients of earlier steps, while one runs whose own are of another unit."""

    def __init__(self) -> None:
        self._gradient_by_leaf: dict[Tensor, Tensor | None] = {}
        self._lock = threading.Lock()

    def set_aside(self, stage_runner: StageRunner, microbatch: int) -> None:
        """Those that the cell's backward would add to, once; another cell may add to others."""
        leaves = dict.fromkeys(stage_runner.find_leaves(microbatch))
        with self._lock:
            for leaf in leaves:
                if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                    raise RunError(
                        f"a parameter of shape {tuple(leaf.shape)} has a hook, and the weights "
                        "that loss_fn gives are not all known when it runs: remove the hook, or "
                        "take reduction='sum' and divide by the whole batch's weight in loss_fn"
                    )
                if leaf not in self._gradient_by_leaf:
                    self._gradient_by_leaf[leaf], leaf.grad = leaf.grad, None

    @torch.no_grad()
    def add_rescaled(self, rescale_factor: Tensor) -> None:
        """All together, this step's multiplied by the factor."""
        for leaf, earlier in self._gradient_by_leaf.items():
            new, leaf.grad = leaf.grad, earlier
            if new is None:
                continue
            new.mul_(rescale_factor.to(new.device))
            if earlier is None:
                leaf.grad = new
            elif earlier.is_sparse and not new.is_sparse:
                leaf.grad = new + earlier
            else:
                earlier.add_(new)

    def restore(self) -> None:
        """The earlier ones alone."""
        for leaf, earlier in self._gradient_by_leaf.items():
            leaf.grad = earlier


def _has_ignored_targets(targets: Sequence[tuple[Any, ...]]) -> bool:
    """Those on the host alone are looked at: others would have to be waited for."""
    values = [value for target in targets for value in target]
    if not all(isinstance(value, Tensor) for value in values):
        values = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    found = [t for t in values if t.dtype == torch.int64 and not t.is_cuda]
    return any(bool((t == DEFAULT_IGNORE_INDEX).any()) for t in found)


def _sum_tensors(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0]
    for number in tensors[1:]:
        total = total + number
    return total


def _format_metric_names(extras: LossExtras) -> str:
    return ", ".join(map(repr, extras.metrics)) or "(none)"

"""The loss of a training step, combined from its micro-batches, and the scale of its gradients.

With losses l_i, rows r_i and weights w_i of the micro-batches:

    reduction                              loss of the step         gradient of l_i
    sum                                    sum of l_i               1
    mean                                   sum of l_i r_i / sum r   r_i / sum r
    mean, targets counted before the step  sum of l_i w_i / sum w   w_i / sum w
    mean, loss_fn returns Weighted         sum of l_i w_i / sum w   w_i / d, then times d / sum w

In the last row sum w is known only after the last forward, and by then backwards have begun. The
step therefore uses a provisional divisor d, the weight of the first micro-batch times the number of
micro-batches. Gradients of earlier steps are set aside meanwhile (`PreviousGradients`). At the end
this step's gradients are multiplied by d / sum w and added to the earlier ones.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import PenstockTypeError, RunError
from penstock.microbatch import MicrobatchRows, gather
from penstock.stage.aux_loss import CarriedLoss
from penstock.stage.loss import NO_EXTRAS, LossExtras, LossReduction
from penstock.stage.loss_terms import TermComparison
from penstock.stage.payload import Payload, unflatten_values
from penstock.stage.stage_runner import StageRunner
from penstock.torch_compat import pytree


def read_loss_scale(scaler: Any, scale: float, device: torch.device) -> Tensor | None:
    """Return `scale` times that of a `torch.amp.GradScaler`, or None if gradients keep their size.

    >>> read_loss_scale(torch.amp.GradScaler("cpu", init_scale=8.0), 0.5, torch.device("cpu"))
    tensor(4.)
    """
    if scaler is None:
        return None if scale == 1 else torch.full((), scale, device=device)
    if not isinstance(scaler, torch.amp.GradScaler):
        raise PenstockTypeError(
            f"scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}. For a constant "
            "factor, use scale=."
        )
    scaled: Tensor = scaler.scale(torch.full((), scale, device=device))
    return scaled


class MicrobatchLoss(NamedTuple):
    """The loss of one micro-batch, and what came with it."""

    loss: Tensor
    extras: LossExtras = NO_EXTRAS
    aux_loss: Tensor | None = None  # the sum that layers have added with `add_loss`


@dataclass(frozen=True)
class ReplicaShare:
    """The share that one replica of a pipe has in the global batch.

    Gradients of a replica are those of the global loss times the number of replicas. Their mean
    over the replicas is then the global gradient, even if steps were accumulated before.
    """

    replica_count: int = 1
    row_share: float = 1.0  # rows of this replica / rows of all replicas
    global_target_count: float | None = None  # counted targets of all replicas, if known

    def compute_row_factor(self) -> float:
        """Return the factor of the gradients of a mean over rows."""
        return self.row_share * self.replica_count


class LossAccumulator:
    """The losses of one step: it collects them, scales their gradients and combines them.

    `row_shares` are the fractions of the rows that the micro-batches have. Gradients are
    multiplied by `loss_scale`; the loss is not. The `comparison` raises if losses that are averaged
    by rows are not means over rows.
    """

    def __init__(
        self,
        reduction: LossReduction,
        row_shares: Sequence[float],
        targets: Sequence[tuple[Any, ...]],
        loss_scale: Tensor | None = None,
        comparison: TermComparison | None = None,
    ) -> None:
        self._is_sum, self._loss_scale = reduction.is_sum, loss_scale
        self._row_shares = row_shares
        self._loss_shares: Sequence[float] = (
            [1] * len(row_shares) if reduction.is_sum else row_shares
        )
        self._microbatch_losses: dict[int, MicrobatchLoss] = {}
        self._first_extras: LossExtras | None = None
        self._gradient_divisor: Tensor | None = None  # sum w, or d, of the module docstring
        self._previous_gradients: PreviousGradients | None = None
        self._replica_share = ReplicaShare()
        self._global_weight: Tensor | None = None
        self.comparison = comparison
        target_tensors = [
            target for values in targets for target in values if isinstance(target, Tensor)
        ]
        if reduction.target_counter is not None and len(target_tensors) == len(row_shares):
            self._gradient_divisor = torch.stack(
                [reduction.target_counter(target) for target in target_tensors]
            ).sum()

    @property
    def is_sum(self) -> bool:
        """Return whether the loss of the step is the sum of the micro-batches' losses."""
        return self._is_sum

    @property
    def target_count(self) -> Tensor | None:
        """The counted targets of the whole batch, if they are known. Read it before the step."""
        return self._gradient_divisor

    def set_replica_share(self, replica_share: ReplicaShare) -> None:
        """Declare that the batch is part of a larger one. Call it before the step."""
        self._replica_share = replica_share
        # Divide by the global count and multiply by the number of replicas; see `ReplicaShare`.
        if self._gradient_divisor is not None and replica_share.global_target_count is not None:
            self._gradient_divisor = torch.full_like(
                self._gradient_divisor,
                replica_share.global_target_count / replica_share.replica_count,
            )

    @property
    def microbatch_losses(self) -> list[MicrobatchLoss]:
        """The losses in the order of the micro-batches."""
        return [self._microbatch_losses[i] for i in range(len(self._loss_shares))]

    # ---- during the step, called by the worker of the last stage --------------------------

    def compute_output_gradients(self, microbatch: int, outputs: Payload) -> Payload:
        """Record the loss of a micro-batch. Return the gradients with which its backward begins."""
        values = unflatten_values(outputs.tensors, outputs.layout)  # type: ignore[arg-type]
        aux_loss = None
        if type(values[-1]) is CarriedLoss:
            values, aux_loss = values[:-1], values[-1].loss
        loss, extras = values if len(values) > 1 else (values[0], NO_EXTRAS)
        microbatch_loss = MicrobatchLoss(loss, extras, aux_loss)
        if extras is not self._first_extras:  # most losses have none
            self._check_consistent_extras(extras)
        if self.comparison is not None:
            self.comparison.add(microbatch)
        self._microbatch_losses[microbatch] = microbatch_loss
        # Among the tensors of the output, the loss comes first and the auxiliary loss last. The
        # others (weight, metrics, outputs) get no gradient.
        gradients: list[Tensor | None] = [None] * len(outputs.tensors)
        gradients[0] = self._compute_loss_gradient(microbatch, microbatch_loss)
        if microbatch_loss.aux_loss is not None:
            # An auxiliary loss is averaged over rows, whatever the reduction of the loss is.
            share = self._row_shares[microbatch] * self._replica_share.compute_row_factor()
            gradients[-1] = self._apply_loss_scale(torch.full_like(microbatch_loss.aux_loss, share))
        return Payload(tuple(gradients))

    def before_backward(self, stage_runner: StageRunner, microbatch: int) -> None:
        """Set earlier gradients aside before a cell's backward, if the scale is provisional."""
        if self._previous_gradients is not None:
            self._previous_gradients.set_aside(stage_runner, microbatch)

    def _compute_loss_gradient(self, microbatch: int, microbatch_loss: MicrobatchLoss) -> Tensor:
        loss, weight = microbatch_loss.loss, microbatch_loss.extras.weight
        if weight is None:
            # A sum over replicas becomes a mean by the reduction, so the count makes up for it.
            share = self._replica_share
            factor = share.replica_count if self._is_sum else share.compute_row_factor()
            gradient = torch.full_like(loss, self._loss_shares[microbatch] * factor)
            return self._apply_loss_scale(gradient)
        if self._gradient_divisor is None:
            # The provisional divisor d. It estimates the final one, so that gradients have about
            # their final size until they are rescaled.
            self._gradient_divisor = weight.masked_fill(weight == 0, 1) * len(self._loss_shares)
            self._previous_gradients = PreviousGradients()
        return self._apply_loss_scale(weight / self._gradient_divisor).to(loss.dtype)

    def _apply_loss_scale(self, gradient: Tensor) -> Tensor:
        if self._loss_scale is None:
            return gradient
        return (gradient * self._loss_scale).to(gradient.dtype)

    def _check_consistent_extras(self, extras: LossExtras) -> None:
        first_extras = self._first_extras = self._first_extras or extras
        if extras.weight is not None and self._is_sum:
            raise RunError(
                "loss_fn returned a weight, but reduction='sum' does not use one. Return the loss "
                "without the weight, or use reduction='mean'."
            )
        if (first_extras.weight is None) != (extras.weight is None):
            raise RunError(
                "loss_fn returned a weight for one micro-batch and none for another. Return one "
                "for every micro-batch, or for none."
            )
        if first_extras.metrics.keys() != extras.metrics.keys():
            raise RunError(
                f"loss_fn returned the metrics {_format_metric_names(first_extras)} for one "
                f"micro-batch and {_format_metric_names(extras)} for another. Return the same "
                "metrics for every micro-batch."
            )

    # ---- after the step -------------------------------------------------------------------

    @property
    def _weights(self) -> list[Tensor]:
        """The weights of the micro-batches. Empty if the loss has no weights."""
        weights = [microbatch_loss.extras.weight for microbatch_loss in self.microbatch_losses]
        return [weight for weight in weights if weight is not None]

    @property
    def total_weight(self) -> Tensor | None:
        """The weight of the step's loss among the replicas. None: its rows are its weight."""
        weights = self._weights
        return _sum_tensors(weights) if weights else None

    def combine(self, values: Sequence[Tensor]) -> Tensor:
        """Combine one number of each micro-batch into one, in the way their losses are combined."""
        weights = self._weights
        if not weights:
            return _sum_tensors(_scale_tensors(values, self._loss_shares))
        pairs = zip(values, weights, strict=True)
        # A micro-batch without counted targets has weight 0, and its mean loss is NaN.
        terms = [
            (value.to(weight.device) * weight).masked_fill(weight == 0, 0)
            for value, weight in pairs
        ]
        mean = _sum_tensors(terms) / _sum_tensors(weights)
        return mean.to(values[0].dtype) if values[0].is_floating_point() else mean

    def compute_loss(self) -> Tensor:
        """Return the loss of the step, without auxiliary losses."""
        losses = [microbatch_loss.loss for microbatch_loss in self.microbatch_losses]
        return self.combine(losses).detach()

    def compute_aux_losses(self) -> list[Tensor]:
        """Return the auxiliary loss of each micro-batch that has one, times its share of rows."""
        shares = zip(self.microbatch_losses, self._row_shares, strict=True)
        return [
            microbatch_loss.aux_loss.detach() * share
            for microbatch_loss, share in shares
            if microbatch_loss.aux_loss is not None
        ]

    def compute_total_loss(self) -> Tensor:
        """Return the loss of the step, auxiliary losses included."""
        total = self.compute_loss()
        for aux_loss in self.compute_aux_losses():
            total = total + aux_loss.to(total.device)
        return total

    def set_global_weight(self, global_weight: Tensor) -> None:
        """Set the sum of the weights of all replicas. Call it after the step."""
        self._global_weight = global_weight

    @property
    def needs_rescale(self) -> bool:
        """Return whether this step's gradients have a provisional scale until the step ends."""
        return self._previous_gradients is not None

    @property
    def rescale_factor(self) -> Tensor | None:
        """The factor that corrects this step's gradients. None if their scale is final."""
        if self._previous_gradients is None:
            return None
        assert self._gradient_divisor is not None
        if self._global_weight is None:
            return self._gradient_divisor / _sum_tensors(self._weights)
        return self._gradient_divisor / (
            self._global_weight.to(self._gradient_divisor.device)
            / self._replica_share.replica_count
        )

    def finish_gradients(self, rescale_factor: Tensor | None) -> None:
        """Rescale this step's gradients if needed, and add them to those of earlier steps."""
        if self._previous_gradients is not None:
            assert rescale_factor is not None
            self._previous_gradients.add_rescaled(rescale_factor)

    def restore_gradients(self) -> None:
        """Restore the gradients of earlier steps after the step has failed."""
        if self._previous_gradients is not None:
            self._previous_gradients.restore()


class PreviousGradients:
    """The gradients of earlier steps, set aside while a step with a provisional scale runs.

    Stages run in several threads, and a tied parameter belongs to several stages. The lock lets
    only one of them set a parameter's gradient aside.
    """

    def __init__(self) -> None:
        self._gradient_by_leaf: dict[Tensor, Tensor | None] = {}
        self._lock = threading.Lock()

    def set_aside(self, stage_runner: StageRunner, microbatch: int) -> None:
        """Take away the `.grad` of the leaves of a cell, unless an earlier cell has done so."""
        leaves = dict.fromkeys(stage_runner.find_leaves(microbatch))
        with self._lock:
            for leaf in leaves:
                if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                    # Hooks of parameters run at the end of the step. That of another leaf would
                    # see a gradient with the provisional scale.
                    raise RunError(
                        f"a tensor of shape {tuple(leaf.shape)} has a hook, but loss_fn returns "
                        "weights, so the gradient has its final scale only after the hook. Make "
                        "the tensor a parameter of its layer, or remove the hook."
                    )
                if leaf not in self._gradient_by_leaf:
                    self._gradient_by_leaf[leaf], leaf.grad = leaf.grad, None

    @torch.no_grad()
    def add_rescaled(self, rescale_factor: Tensor) -> None:
        """Multiply this step's gradients by the factor and add the earlier ones."""
        for leaf, earlier in self._gradient_by_leaf.items():
            new, leaf.grad = leaf.grad, earlier
            if new is None:
                continue
            new.mul_(rescale_factor.to(new.device))
            # Like autograd, add into the earlier gradient, so that its memory stays. A dense
            # gradient cannot be added into a sparse one.
            if earlier is None:
                leaf.grad = new
            elif earlier.is_sparse and not new.is_sparse:
                leaf.grad = new + earlier
            else:
                earlier.add_(new)

    def restore(self) -> None:
        """Put the earlier gradients back and drop those of this step."""
        for leaf, earlier in self._gradient_by_leaf.items():
            leaf.grad = earlier


def combine_metrics(loss_accumulator: LossAccumulator, rows: MicrobatchRows) -> dict[str, Any]:
    """Combine the metrics of the micro-batches, name by name."""
    losses = loss_accumulator.microbatch_losses
    metrics = [microbatch_loss.extras.metrics for microbatch_loss in losses]
    if not metrics[0]:
        return {}
    device = losses[0].loss.device
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
        return gather(leaves, rows._replace(output_dims=()))

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


def _scale_tensors(tensors: Sequence[Tensor], factors: Sequence[float]) -> Sequence[Tensor]:
    """Return each tensor times its factor."""
    first = tensors[0]
    # A number times a Python number takes PyTorch 4 us, which it takes once if all are alike.
    are_alike = (
        len(tensors) > 2
        and len(set(factors)) == 1
        and all(
            not t.dim() and t.dtype is first.dtype and t.device == first.device for t in tensors
        )
    )
    if are_alike:
        return (torch.stack(tuple(tensors)) * factors[0]).unbind()
    return [tensor * factor for tensor, factor in zip(tensors, factors, strict=True)]


def _sum_tensors(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _format_metric_names(extras: LossExtras) -> str:
    return ", ".join(map(repr, extras.metrics)) or "(none)"

"""Clip gradients by their norm over all ranks, as if the model were not split.

The norms are combined in three steps:

    1. in this process: the ordinary gradients, and the local shards of DTensors
    2. over the process groups along which a DTensor is sharded (tensor parallelism, FSDP)
    3. over the ranks of the pipeline, which all have different parameters
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from penstock.data_parallel.dtensor import (
    AnyProcessGroup,
    PeerRanks,
    all_reduce,
    find_mesh_groups,
    is_dtensor,
    to_local,
)
from penstock.errors import RunError


@dataclass(frozen=True)
class ClipGradOptions:
    """The optional arguments of `nn.utils.clip_grad_norm_`."""

    norm_type: float = 2.0
    error_if_nonfinite: bool = False
    foreach: bool | None = None


@torch.no_grad()
def compute_total_grad_norm(
    parameters: Sequence[nn.Parameter], ranks: PeerRanks | None, options: ClipGradOptions
) -> Tensor:
    """Return `nn.utils.get_total_norm` of the gradients of the unsplit model.

    `parameters` are those that this rank owns; every parameter of the model has one owner. All
    ranks call this, whether they have gradients or not, and so do all processes that hold shards of
    the same DTensors.
    """
    order = float(options.norm_type)
    plain_gradients = [p.grad for p in parameters if p.grad is not None and not is_dtensor(p)]
    plain_norm = nn.utils.get_total_norm(plain_gradients, order, foreach=options.foreach)
    dtensors = [p for p in parameters if is_dtensor(p)]
    if ranks is None and not dtensors:
        return plain_norm
    # From here on norms are combined in float64, so that combining them loses no precision.
    device = next((p.device for p in parameters), plain_norm.device)
    first_norm = (
        plain_norm.to(device, torch.float64) if plain_gradients else _neutral_norm(order, device)
    )
    local_norm = _combine_norms(
        [first_norm, *_compute_dtensor_norms(dtensors, order, device)], order
    )
    if ranks is None:
        return local_norm
    return _combine_norms(
        ranks.all_gather(local_norm.cpu(), "the norm of its gradients"), order
    ).to(device)


@torch.no_grad()
def clip_grads_with_norm(
    parameters: Sequence[nn.Parameter],
    total_norm: Tensor,
    max_norm: float,
    options: ClipGradOptions,
) -> None:
    """Scale the gradients down so that their total norm is at most `max_norm`."""
    if options.error_if_nonfinite and not bool(total_norm.isfinite()):
        raise RunError(
            f"the total norm of order {float(options.norm_type):g} of the gradients over all "
            f"stages is non-finite ({total_norm.item()}), so they cannot be clipped. Find the "
            "layer that produced it, or leave error_if_nonfinite out."
        )
    plain_parameters = [p for p in parameters if not is_dtensor(p)]
    nn.utils.clip_grads_with_norm_(plain_parameters, max_norm, total_norm, options.foreach)
    # DTensors are scaled here, shard by shard, with the factor that PyTorch's function uses.
    factor = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    for shard in (to_local(p.grad) for p in parameters if p.grad is not None and is_dtensor(p)):
        shard.mul_(factor.to(shard.device))


def _combine_norms(norms: Sequence[Tensor], order: float) -> Tensor:
    """Return the norm of a vector whose parts have these norms. Order 0 counts nonzero entries."""
    stacked = torch.stack(list(norms))
    return stacked.sum() if order == 0 else torch.linalg.vector_norm(stacked, order)


def _compute_dtensor_norms(
    parameters: Sequence[nn.Parameter], order: float, device: torch.device
) -> list[Tensor]:
    """Return norms of unsharded gradients in float64, one for each set of process groups.

    Parameters that are sharded over the same groups share one all-reduce.
    """
    # The groups come from the parameter, not from its gradient: a rank without the gradient must
    # take part in the same all-reduces.
    parameters_by_groups: dict[tuple[AnyProcessGroup, ...], list[nn.Parameter]] = {}
    for parameter in parameters:
        parameters_by_groups.setdefault(
            tuple(find_mesh_groups(parameter, sharded_only=True)), []
        ).append(parameter)
    group_norms = []
    for groups, sharded_parameters in parameters_by_groups.items():
        shards = [_get_local_gradient(parameter) for parameter in sharded_parameters]
        shard_norms = [
            torch.linalg.vector_norm(shard, order).to(device, torch.float64)
            if shard.numel()
            else _neutral_norm(order, device)
            for shard in shards
        ]
        norms = _all_reduce_norms(torch.stack(shard_norms), order, groups)
        group_norms.append(torch.linalg.vector_norm(norms, order))
    return group_norms


def _get_local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the local shard of a gradient, sharded like its parameter. Empty if there is none."""
    gradient = parameter.grad
    if gradient is None:
        return to_local(parameter).new_empty(0)
    if gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return to_local(gradient)


def _neutral_norm(order: float, device: torch.device) -> Tensor:
    """Return the norm of an empty vector, which leaves others unchanged when combined."""
    return torch.full((), inf if order < 0 else 0.0, dtype=torch.float64, device=device)


def _all_reduce_norms(norms: Tensor, order: float, groups: Sequence[AnyProcessGroup]) -> Tensor:
    """Combine each norm of a shard with those of the other shards, over the groups."""
    if not groups:
        return norms
    if abs(order) == inf:
        # The minimum (order -inf) is the negative maximum of the negatives. MAX does not pass NaN
        # on reliably, so NaN travels as a flag of its own.
        sign = 1 if order > 0 else -1
        norms_and_nans = torch.stack([sign * norms, norms.isnan().double()])
        norms_and_nans = norms_and_nans.nan_to_num(0.0, inf, -inf)
        maxima, has_nan = all_reduce(norms_and_nans, ReduceOp.MAX, groups).unbind()
        return maxima.mul(sign).masked_fill(has_nan > 0, torch.nan)
    if order == 0:
        return all_reduce(norms, ReduceOp.SUM, groups)
    powers = all_reduce(norms.pow(order), ReduceOp.SUM, groups)
    return powers.pow(1 / order)

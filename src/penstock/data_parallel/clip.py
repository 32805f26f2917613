"""Gradients clipped by their norm over all ranks."""

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
    """The arguments of `nn.utils.clip_grad_norm_` after the largest norm."""

    norm_type: float = 2.0
    error_if_nonfinite: bool = False
    foreach: bool | None = None


@torch.no_grad()
def compute_total_grad_norm(
    parameters: Sequence[nn.Parameter], ranks: PeerRanks | None, options: ClipGradOptions
) -> Tensor:
    """As `nn.utils.get_total_norm` of the gradients of the unsplit model.

    Each parameter of the model is `owned` by one of the ranks. All of them call this, whether they
    have gradients or not; so do all that have parts of a DTensor.
    """
    order = float(options.norm_type)
    plain = [p.grad for p in parameters if p.grad is not None and not is_dtensor(p)]
    total = nn.utils.get_total_norm(plain, order, foreach=options.foreach)
    in_parts = [p for p in parameters if is_dtensor(p)]
    if ranks is None and not in_parts:
        return total
    device = next((p.device for p in parameters), total.device)
    of_plain = total.to(device, torch.float64) if plain else _neutral_norm(order, device)
    mine = _combine_norms([of_plain, *_compute_dtensor_norms(in_parts, order, device)], order)
    if ranks is None:
        return mine
    return _combine_norms(ranks.all_gather(mine.cpu(), "the norm of its gradients"), order).to(
        device
    )


@torch.no_grad()
def clip_grads_with_norm(
    parameters: Sequence[nn.Parameter],
    total_norm: Tensor,
    max_norm: float,
    options: ClipGradOptions,
) -> None:
    """Scale the gradients, if their total norm is larger than the largest."""
    if options.error_if_nonfinite and not bool(total_norm.isfinite()):
        raise RunError(
            f"the total norm of order {float(options.norm_type):g} of the gradients over all stages is "
            f"non-finite, {total_norm.item()}, so that they cannot be clipped: look for the layer that "
            "gave it, or leave error_if_nonfinite out"
        )
    plain = [p for p in parameters if not is_dtensor(p)]
    nn.utils.clip_grads_with_norm_(plain, max_norm, total_norm, options.foreach)
    factor = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    for part in (to_local(p.grad) for p in parameters if p.grad is not None and is_dtensor(p)):
        part.mul_(factor.to(part.device))


def _combine_norms(norms: Sequence[Tensor], order: float) -> Tensor:
    """The norm of what has these."""
    each = torch.stack(list(norms))
    return each.sum() if order == 0 else torch.linalg.vector_norm(each, order)


def _compute_dtensor_norms(
    parameters: Sequence[nn.Parameter], order: float, device: torch.device
) -> list[Tensor]:
    """Norms of whole gradients, in float64: one for all that are sharded over the same ranks."""
    alike: dict[tuple[AnyProcessGroup, ...], list[nn.Parameter]] = {}
    for parameter in parameters:  # not of its gradient: a rank that has none takes part, too
        alike.setdefault(tuple(find_mesh_groups(parameter, sharded_only=True)), []).append(
            parameter
        )
    found = []
    for groups, those in alike.items():
        parts = [_get_local_gradient(parameter) for parameter in those]
        norms = [
            torch.linalg.vector_norm(part, order).to(device, torch.float64)
            if part.numel()
            else _neutral_norm(order, device)
            for part in parts
        ]
        whole = _all_reduce_norms(torch.stack(norms), order, groups)
        found.append(torch.linalg.vector_norm(whole, order))
    return found


def _get_local_gradient(parameter: nn.Parameter) -> Tensor:
    """This process's, in parts as the parameter is; empty if there is none."""
    gradient = parameter.grad
    if gradient is None:
        return to_local(parameter).new_empty(0)
    if gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return to_local(gradient)


def _neutral_norm(order: float, device: torch.device) -> Tensor:
    """The norm that changes no other."""
    return torch.full((), inf if order < 0 else 0.0, dtype=torch.float64, device=device)


def _all_reduce_norms(norms: Tensor, order: float, groups: Sequence[AnyProcessGroup]) -> Tensor:
    """Each norm with those of the groups' other ranks: of what they have together."""
    if not groups:
        return norms
    if abs(order) == inf:
        sign = 1 if order > 0 else -1
        both = torch.stack([sign * norms, norms.isnan().double()]).nan_to_num(0.0, inf, -inf)
        most, nan = all_reduce(both, ReduceOp.MAX, groups).unbind()
        return most.mul(sign).masked_fill(nan > 0, torch.nan)
    if order == 0:
        return all_reduce(norms, ReduceOp.SUM, groups)
    powers = all_reduce(norms.pow(order), ReduceOp.SUM, groups)
    return powers.pow(1 / order)

"""Gradients clipped by their norm over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from penstock.errors import RunError
from penstock.gradients.shards import Group, groups_of, is_in_parts, local, meeting_place, reduce


@torch.no_grad()
def clip_grad_norm(
    parameters: Sequence[nn.Parameter],
    owned: Sequence[nn.Parameter],
    group: Group | None,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """As `nn.utils.clip_grad_norm_` of the unsplit model's parameters; gives the norm before.

    The gradients of `parameters` are scaled. Those of `owned` ones count in the norm, with those of
    the group's other ranks: each parameter of the model is owned by one of them. Every rank of the
    group calls this, whether it has gradients or not; so do all that have parts of a DTensor.
    """
    order = float(norm_type)
    plain = [p.grad for p in owned if p.grad is not None and not is_in_parts(p)]
    total = nn.utils.get_total_norm(plain, order, foreach=foreach)
    in_parts = [p for p in owned if is_in_parts(p)]
    if group is not None or in_parts:
        device = meeting_place(owned, group)
        of_plain = total.to(device, torch.float64) if plain else _nothing(order, device)
        total = _over_ranks([of_plain, *_norms_of_parts(in_parts, order, device)], order, group)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RunError(
            f"the total norm of order {order:g} of the gradients over all stages is non-finite, "
            f"{total.item()}, so that they cannot be clipped: look for the layer that gave it, or "
            "leave error_if_nonfinite out"
        )
    nn.utils.clip_grads_with_norm_(
        [p for p in parameters if not is_in_parts(p)], max_norm, total, foreach
    )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for part in (local(p.grad) for p in parameters if p.grad is not None and is_in_parts(p)):
        part.mul_(factor.to(part.device))
    return total


def _over_ranks(norms: Sequence[Tensor], order: float, group: Group | None) -> Tensor:
    """One norm of those of this rank and of the group's other ranks."""
    each = torch.stack(list(norms))
    mine = each.sum() if order == 0 else torch.linalg.vector_norm(each, order)
    return mine if group is None else _together(mine[None], order, [group])[0]


def _norms_of_parts(
    parameters: Sequence[nn.Parameter], order: float, device: torch.device
) -> list[Tensor]:
    """Norms of whole gradients, in float64: one for all that are sharded over the same ranks."""
    alike: dict[tuple[Group, ...], list[nn.Parameter]] = {}
    for parameter in parameters:  # not of its gradient: a rank that has none takes part, too
        alike.setdefault(tuple(groups_of(parameter, sharded=True)), []).append(parameter)
    found = []
    for groups, those in alike.items():
        parts = [_part_of_gradient(parameter) for parameter in those]
        norms = [
            torch.linalg.vector_norm(part, order).to(device, torch.float64)
            if part.numel()
            else _nothing(order, device)
            for part in parts
        ]
        whole = _together(torch.stack(norms), order, groups)
        found.append(torch.linalg.vector_norm(whole, order))
    return found


def _part_of_gradient(parameter: nn.Parameter) -> Tensor:
    """This process's, in parts as the parameter is; empty if there is none."""
    gradient = parameter.grad
    if gradient is None:
        return local(parameter).new_empty(0)
    if gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return local(gradient)


def _nothing(order: float, device: torch.device) -> Tensor:
    """The norm that changes no other."""
    return torch.full((), inf if order < 0 else 0.0, dtype=torch.float64, device=device)


def _together(norms: Tensor, order: float, groups: Sequence[Group]) -> Tensor:
    """Each norm with those of the groups' other ranks: of what they have together."""
    if not groups:
        return norms
    if abs(order) == inf:
        sign = 1 if order > 0 else -1
        both = torch.stack([sign * norms, norms.isnan().double()]).nan_to_num(0.0, inf, -inf)
        most, nan = reduce(both, ReduceOp.MAX, groups).unbind()
        return most.mul(sign).masked_fill(nan > 0, torch.nan)
    if order == 0:
        return reduce(norms, ReduceOp.SUM, groups)
    powers = reduce(norms.pow(order), ReduceOp.SUM, groups)
    return powers.pow(1 / order)

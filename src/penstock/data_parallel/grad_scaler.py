"""A gradient that is not finite anywhere is so everywhere.

A `torch.amp.GradScaler` looks at the gradients of its own process, and skips the optimizer's step
if one of them is not finite. Ranks that do not agree on that would train different models.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from penstock.data_parallel.dtensor import PeerRanks, all_reduce, find_all_mesh_groups, to_local


@torch.no_grad()
def propagate_overflow(parameters: Sequence[nn.Parameter], ranks: PeerRanks | None) -> None:
    """If a gradient of any rank is not finite, let every gradient of all ranks have an infinity.

    In every one, as each may belong to another optimizer. Those who have parts of the same DTensors
    agree, and so do the ranks, who all call this. On a GPU nobody waits for it, if there is no
    other rank, and the parts' groups work on the device.
    """
    groups = find_all_mesh_groups(parameters)
    if not groups and ranks is None:
        return
    gradients = [_get_local_values(p.grad) for p in parameters if p.grad is not None]
    here = [gradient for gradient in gradients if gradient.numel()]
    finite = nn.utils.get_total_norm(here, inf).isfinite()
    found = all_reduce((~finite).float(), ReduceOp.MAX, groups)
    if ranks is not None:
        found = torch.stack(ranks.all_gather(found.cpu(), "whether its gradients are finite")).max()
    if not found.is_cuda and not found.item():
        return
    for gradient in here:
        gradient[(0,) * gradient.dim()].add_(torch.where(found > 0, inf, 0.0).to(gradient.device))


def _get_local_values(gradient: Tensor) -> Tensor:
    """Those that are here."""
    gradient = to_local(gradient)
    return gradient if gradient.layout is torch.strided else gradient._values()

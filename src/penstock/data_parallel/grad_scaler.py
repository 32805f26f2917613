"""Let all ranks agree on gradient overflow, for `torch.amp.GradScaler`.

A GradScaler skips the optimizer's step if a gradient of its own process is not finite. If only some
ranks skip, the stages and replicas of one model drift apart.
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
    """Put an infinity into every gradient if any gradient of any rank is not finite.

    Every gradient gets one, because each parameter may belong to another optimizer. All ranks call
    this, and so do all processes that hold shards of the same DTensors.
    """
    groups = find_all_mesh_groups(parameters)
    if not groups and ranks is None:
        return
    gradients = [_get_local_values(p.grad) for p in parameters if p.grad is not None]
    nonempty = [gradient for gradient in gradients if gradient.numel()]
    is_finite = nn.utils.get_total_norm(nonempty, inf).isfinite()
    overflow = all_reduce((~is_finite).float(), ReduceOp.MAX, groups)
    if ranks is not None:
        overflow = torch.stack(
            ranks.all_gather(overflow.cpu(), "whether its gradients are finite")
        ).max()
    # On an accelerator the answer is not read, because that would make the host wait for the
    # device. Adding 0 or infinity to one entry of each gradient does the same.
    if overflow.is_cpu and not overflow.item():
        return
    for gradient in nonempty:
        gradient[(0,) * gradient.dim()].add_(
            torch.where(overflow > 0, inf, 0.0).to(gradient.device)
        )


def _get_local_values(gradient: Tensor) -> Tensor:
    """Return the local shard of a gradient, or the values of a sparse gradient."""
    gradient = to_local(gradient)
    return gradient if gradient.layout is torch.strided else gradient._values()

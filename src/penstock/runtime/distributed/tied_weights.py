"""Parameters that ranks in several processes share: each has its own, and all learn the same.

While a step runs, each computes with a stand-in. After it, what the stand-ins have learned is
summed over the holders, and every holder's parameter gets the sum: so their optimizers go on alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.model.tied import TiedTensor
from penstock.runtime.distributed.control_channel import ControlChannel
from penstock.runtime.tied_gradients import (
    collect_module_and_tensor_ids,
    find_shared_ids,
    unwrap_stage_modules,
)
from penstock.stage.parameter_proxies import ProxyPool, StageProxies, unwrap_proxy
from penstock.stage.stage import Stage


class DistributedTiedGradients:
    """Of one call, on one rank."""

    def __init__(
        self,
        stages: Sequence[Stage],
        tied_tensors: Sequence[TiedTensor],
        chunks: int,
        channel: ControlChannel,
    ) -> None:
        self._channel = channel
        self._tied_tensors = [tie for tie in tied_tensors if tie.local_tensor is not None]
        tensors = [unwrap_proxy(tie.local_tensor) for tie in self._tied_tensors]
        learning = {id(t): t for t in tensors if t.requires_grad}
        self._proxy_pool = ProxyPool(None, learning.keys())
        shared = {id(tensor) for tensor in tensors}
        modules = [unwrap_stage_modules(stage) for stage in stages]
        if chunks > 1:
            shared |= find_shared_ids([collect_module_and_tensor_ids(those) for those in modules])
        self.proxies = {
            stage.index: StageProxies(those, self._proxy_pool, shared)
            for stage, those in zip(stages, modules, strict=True)
        }

    def accumulate_gradients(self) -> None:
        """Sum, in the same order of ties on every rank."""
        learned = {id(owner): gradient for owner, gradient in self._proxy_pool.take_gradients()}
        for tie in self._tied_tensors if torch.is_grad_enabled() else ():
            parameter = unwrap_proxy(tie.local_tensor)
            if not isinstance(parameter, nn.Parameter):
                continue
            mine = learned.get(id(parameter))
            if mine is not None and mine.layout is not torch.strided:
                raise RunError(
                    f"'{tie.name}', which ranks share, has a sparse gradient, and those are not "
                    "summed over processes: make its layer with sparse=False"
                )
            total = self._channel.all_reduce_sum(tie.ranks, mine, parameter)
            if total is None:
                continue
            if not parameter.requires_grad:
                raise RunError(
                    f"'{tie.name}' is shared by ranks {', '.join(map(str, tie.ranks))}, and is "
                    "frozen on this one but not on all: freeze it on every rank that has it, under "
                    "each of its names, or on none"
                )
            torch.autograd.backward([parameter], [total])


@torch.no_grad()
def broadcast_tied_weights(tied_tensors: Sequence[TiedTensor], channel: ControlChannel) -> None:
    """Give every holder what the owner has."""
    for each in tied_tensors:
        tensor = each.local_tensor
        if tensor is None or tensor.device.type == "meta":
            continue
        mine: Tensor | None = tensor.detach() if each.owner_rank == channel.rank else None
        owners = channel.all_reduce_sum(each.ranks, mine, tensor)
        assert owners is not None
        tensor.copy_(owners)

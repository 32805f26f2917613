"""Parameters that stages on several processes share (tied weights).

Every rank that has a stage with the parameter holds a copy of it: a holder. The first one is its
owner. While a step runs, each holder computes with a proxy that collects the gradient of this rank.
After the step the gradients are summed over the holders, and every holder gets the sum. So the
optimizers of all holders make the same update, and the copies stay equal to the last bit.
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
    """The tied parameters of one call on one rank: their proxies, and the sum of their gradients.

    `proxies` has the parameter proxies of each local stage, by stage index.
    """

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
        trainable = {id(t): t for t in tensors if t.requires_grad}
        self._proxy_pool = ProxyPool(None, trainable.keys())
        shared = {id(tensor) for tensor in tensors}
        stage_modules = [unwrap_stage_modules(stage) for stage in stages]
        # StageProxies raises if a layer changes one of the `shared` tensors in place. With several
        # micro-batches, stages take turns in another order than in the unsplit model, so this
        # also holds for tensors that only stages of this rank share.
        if chunks > 1:
            shared |= find_shared_ids(
                [collect_module_and_tensor_ids(modules) for modules in stage_modules]
            )
        self.proxies = {
            stage.index: StageProxies(modules, self._proxy_pool, shared)
            for stage, modules in zip(stages, stage_modules, strict=True)
        }

    def accumulate_gradients(self) -> None:
        """Add the sum over all holders to the gradient of each tied parameter.

        All ranks go through the ties in the same order, or their messages would not match.
        """
        local_gradients = {id(owner): value for owner, value in self._proxy_pool.take_gradients()}
        for tie in self._tied_tensors if torch.is_grad_enabled() else ():
            parameter = unwrap_proxy(tie.local_tensor)
            if not isinstance(parameter, nn.Parameter):
                continue
            gradient = local_gradients.get(id(parameter))
            if gradient is not None and gradient.layout is not torch.strided:
                raise RunError(
                    f"'{tie.name}' is shared by several ranks and has a sparse gradient, which "
                    "cannot be summed over processes. Create its layer with sparse=False."
                )
            total = self._channel.all_reduce_sum(tie.ranks, gradient, parameter)
            if total is None:
                continue
            if not parameter.requires_grad:
                raise RunError(
                    f"'{tie.name}' is shared by ranks {', '.join(map(str, tie.ranks))}, but it is "
                    "frozen on this rank and not on all of them. Freeze it under each of its "
                    "names on every rank that has it, or on none."
                )
            # Not `parameter.grad += total`: hooks of the parameter must see the gradient.
            torch.autograd.backward([parameter], [total])


@torch.no_grad()
def broadcast_tied_weights(tied_tensors: Sequence[TiedTensor], channel: ControlChannel) -> None:
    """Copy each tied tensor from its owner to all other holders.

    Processes may have initialised their copies with different random numbers.
    """
    for tie in tied_tensors:
        tensor = tie.local_tensor
        if tensor is None or tensor.device.type == "meta":
            continue
        # A sum to which only the owner contributes is a broadcast.
        owner_value: Tensor | None = tensor.detach() if tie.owner_rank == channel.rank else None
        value = channel.all_reduce_sum(tie.ranks, owner_value, tensor)
        assert value is not None
        tensor.copy_(value)

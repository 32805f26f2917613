"""Gradients of tied weights: parameters that several stages share.

The rank of the first stage that has a shared parameter owns it.

    ranks in           one process                          several processes
    the parameter is   one tensor                           a copy on each rank that has it
    proxies on         every rank but the owner             every rank that has a copy
    after a run        gradients of the proxies are added   gradients of the proxies are summed over
                       to the owner's `.grad`               the ranks and added to each `.grad`

A proxy has the values of the parameter and a `.grad` of its own (stage/parameter_proxies.py). With
several processes the optimizers of all ranks make the same update, and the copies stay equal to the
last bit.

No stage may change a shared tensor while it computes. In the unsplit model the layers that share
it run one after another; stages run at the same time, or at different micro-batches.

A model without shared tensors, as most are, needs none of this: the `build_` functions return None.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from penstock.device.device import Device
from penstock.errors import RunError
from penstock.model.tied import TiedTensor
from penstock.stage.parameter_proxies import ProxyPool, StageProxies, has_hooks, unwrap_proxy
from penstock.stage.stage import Stage, StageMembers, collect_members, find_shared_ids

# ---- ranks of one process ------------------------------------------------------------------------


class LocalTiedWeights:
    """The tied weights of one call in one process.

    Attributes:
        proxies: The proxies of each stage, by stage.
    """

    def __init__(self, pools: Sequence[ProxyPool], proxies: Mapping[int, StageProxies]) -> None:
        self._pools, self.proxies = pools, proxies

    def accumulate_gradients(self) -> None:
        """Add the gradients of the proxies to those of the original parameters, rank after rank."""
        # One backward for all: the hooks of a parameter then see the sum of what the other ranks
        # add, once. The order of the ranks is fixed, so the sum is the same in every run.
        pairs = [pair for pool in self._pools for pair in pool.take_gradients()]
        if pairs:
            owners = [owner for owner, _ in pairs]
            torch.autograd.backward(
                owners, [gradient.to(owner.device) for owner, gradient in pairs]
            )


def build_local_tied_weights(
    stages: Sequence[Stage],
    members_by_stage: Sequence[StageMembers],
    shared_ids: set[int],
    devices: Sequence[Device],
    placement: Sequence[int],
    proxy_hooked: bool,
    chunks: int,
) -> LocalTiedWeights | None:
    """Return the tied weights of one call, or None if no stage needs a proxy.

    With `proxy_hooked`, parameters with hooks get proxies, too. Through `pipe(x)` a hook must see
    the gradient of the whole batch, and a stage has one gradient for each micro-batch.
    """
    ranks = [placement[stage.index] for stage in stages]
    owners: dict[int, int] = {}
    if shared_ids and len(devices) > 1:
        owners = _find_owner_ranks(stages, ranks, members_by_stage)
    # Nothing that is shared may change while stages compute. With one micro-batch, the stages of
    # one rank run one after another, as in the unsplit model. Then only what several ranks share
    # has to stay the same.
    unchanging_ids: Collection[int] = shared_ids if chunks > 1 else owners
    if not unchanging_ids and not (proxy_hooked and _has_hooked_parameter(members_by_stage)):
        return None
    pools = [
        ProxyPool(
            device.device, {key for key, owner in owners.items() if owner != rank}, proxy_hooked
        )
        for rank, device in enumerate(devices)
    ]
    proxies = {
        stage.index: StageProxies(_list_modules(stage), pools[rank], unchanging_ids)
        for stage, rank in zip(stages, ranks, strict=True)
    }
    return LocalTiedWeights(pools, proxies)


def _find_owner_ranks(
    stages: Sequence[Stage], ranks: Sequence[int], members_by_stage: Sequence[StageMembers]
) -> dict[int, int]:
    """Return the ids of modules, parameters and buffers that several ranks have, with their owners.

    The owner is the rank of the first stage that has the object. A layer of the pipe is owned by
    the rank of its own stage, even if an earlier stage refers to it.
    """
    owner_by_id = {
        id(layer): rank for stage, rank in zip(stages, ranks, strict=True) for layer in stage.layers
    }
    owners: dict[int, int] = {}
    for rank, members in zip(ranks, members_by_stage, strict=True):
        for key in members:
            owner = owner_by_id.setdefault(key, rank)
            if owner != rank:
                owners[key] = owner
    return owners


# ---- ranks of several processes ------------------------------------------------------------------


class RankSum(Protocol):
    """The connection between processes that sums tensors."""

    rank: int

    def all_reduce_sum(
        self, ranks: Sequence[int], tensor: Tensor | None, like: Tensor
    ) -> Tensor | None:
        """Return the sum of these ranks' tensors, or None if no rank has one."""


class DistributedTiedWeights:
    """The tied weights of one call on one of several processes.

    Attributes:
        proxies: The proxies of each local stage, by stage.
    """

    def __init__(
        self,
        tied_tensors: Sequence[TiedTensor],
        pool: ProxyPool,
        proxies: Mapping[int, StageProxies],
        channel: RankSum,
    ) -> None:
        self._tied_tensors, self._pool, self.proxies = tied_tensors, pool, proxies
        self._channel = channel

    def accumulate_gradients(self) -> None:
        """Add the sum over all ranks to the gradient of each tied parameter.

        All ranks go through the ties in the same order, or their messages would not match.
        """
        local_gradients = {id(owner): value for owner, value in self._pool.take_gradients()}
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


def build_distributed_tied_weights(
    stages: Sequence[Stage], tied_tensors: Sequence[TiedTensor], chunks: int, channel: RankSum
) -> DistributedTiedWeights | None:
    """Return the tied weights of one call on this rank, or None if its stages share nothing."""
    tied_tensors = [tie for tie in tied_tensors if tie.local_tensor is not None]
    tensors = [unwrap_proxy(tie.local_tensor) for tie in tied_tensors]
    unchanging_ids = {id(tensor) for tensor in tensors}
    # With several micro-batches, stages take turns in another order than in the unsplit model. So
    # tensors that only stages of this rank share must not change either.
    if chunks > 1:
        unchanging_ids |= find_shared_ids([collect_members(stage) for stage in stages])
    if not unchanging_ids:
        return None
    pool = ProxyPool(None, {id(tensor) for tensor in tensors if tensor.requires_grad})
    proxies = {
        stage.index: StageProxies(_list_modules(stage), pool, unchanging_ids) for stage in stages
    }
    return DistributedTiedWeights(tied_tensors, pool, proxies, channel)


@torch.no_grad()
def broadcast_tied_weights(tied_tensors: Sequence[TiedTensor], channel: RankSum) -> None:
    """Copy each tied tensor from its owner to all other ranks that have it.

    Processes may have initialised their copies with different random numbers.
    """
    for tie in tied_tensors:
        tensor = tie.local_tensor
        if tensor is None or tensor.device.type == "meta":
            continue
        # A sum to which only the owner contributes is a broadcast.
        owner_value = tensor.detach() if tie.owner_rank == channel.rank else None
        value = channel.all_reduce_sum(tie.ranks, owner_value, tensor)
        assert value is not None
        tensor.copy_(value)


# ---- finding what stages share -------------------------------------------------------------------


def _list_modules(stage: Stage) -> list[nn.Module]:
    """Return the modules of a stage, without the proxies that another call may have put in."""
    return [unwrap_proxy(module) for module in stage.modules()]


def _has_hooked_parameter(members_by_stage: Sequence[StageMembers]) -> bool:
    # In every call, so without a call for each member: nearly none has hooks.
    hooked = [m for members in members_by_stage for m in members.values() if m._backward_hooks]
    return any(map(has_hooks, hooked))

"""Gradients of tied weights among ranks of one process: owners, proxies, and the sum of gradients.

A parameter that several stages share is owned by the rank of the first stage that has it. Stages of
other ranks compute with proxies. After a run, the caller's thread adds the gradients of the proxies
to the owner's `.grad`.

    stage 0, rank 0: embedding.weight  <──── gradient of the proxy, added after the run
    stage 3, rank 1: proxy of embedding.weight (same values, `.grad` of its own)

No stage may change a shared tensor while it computes. In the unsplit model the layers that share
it run one after another; stages run at the same time, or at different micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from penstock.device.device import Device
from penstock.stage.parameter_proxies import ProxyPool, StageProxies, unwrap_proxy
from penstock.stage.stage import Stage


class LocalTiedWeights:
    """The tied weights of one call, with the `proxies` of each stage.

    With `proxy_hooked`, parameters with hooks get proxies, too. Through `pipe(x)` a hook must see
    the gradient of the whole batch, and a stage has one gradient for each micro-batch.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        devices: Sequence[Device],
        placement: Sequence[int],
        proxy_hooked: bool,
        chunks: int,
    ) -> None:
        modules_by_stage = [unwrap_stage_modules(stage) for stage in stages]
        ranks = [placement[stage.index] for stage in stages]
        ids_by_stage = [collect_module_and_tensor_ids(modules) for modules in modules_by_stage]
        shared_ids = find_shared_ids(ids_by_stage)
        owners = (
            _find_owner_ranks(stages, ranks, ids_by_stage)
            if shared_ids and len(devices) > 1
            else {}
        )
        self._proxy_pools = [
            ProxyPool(
                device.device,
                {key for key, owner in owners.items() if owner != rank},
                proxy_hooked,
            )
            for rank, device in enumerate(devices)
        ]
        # Nothing that is shared may change while stages compute. With one micro-batch, the stages
        # of one rank run one after another, as in the unsplit model. Then only what several ranks
        # share has to stay the same.
        self.proxies = {
            stage.index: StageProxies(
                modules, self._proxy_pools[rank], shared_ids if chunks > 1 else owners
            )
            for stage, rank, modules in zip(stages, ranks, modules_by_stage, strict=True)
        }

    def accumulate_gradients(self) -> None:
        """Add the gradients of the proxies to those of the original parameters, rank after rank."""
        # One backward for all: the hooks of a parameter then see the sum of what the other ranks
        # add, once. The order of the ranks is fixed, so the sum is the same in every run.
        pairs = [pair for pool in self._proxy_pools for pair in pool.take_gradients()]
        if pairs:
            owners = [owner for owner, _ in pairs]
            torch.autograd.backward(
                owners, [gradient.to(owner.device) for owner, gradient in pairs]
            )


def build_local_tied_weights(
    stages: Sequence[Stage],
    devices: Sequence[Device],
    placement: Sequence[int],
    proxy_hooked: bool,
    chunks: int,
) -> LocalTiedWeights | None:
    """Return the tied weights of one call, or None if no stage needs proxies."""
    tied_weights = LocalTiedWeights(stages, devices, placement, proxy_hooked, chunks)
    return tied_weights if any(tied_weights.proxies.values()) else None


def unwrap_stage_modules(stage: Stage) -> list[nn.Module]:
    """Return the modules of a stage, without the proxies that another call may have put in."""
    return [unwrap_proxy(module) for module in stage.modules()]


def find_shared_ids(ids_by_stage: Sequence[set[int]]) -> set[int]:
    """Return the ids that several stages have."""
    distinct: set[int] = set().union(*ids_by_stage)
    if len(distinct) == sum(map(len, ids_by_stage)):
        return set()  # nothing is shared, as in most models
    counts = Counter(key for ids in ids_by_stage for key in ids)
    return {key for key, count in counts.items() if count > 1}


def _find_owner_ranks(
    stages: Sequence[Stage], ranks: Sequence[int], ids_by_stage: Sequence[set[int]]
) -> dict[int, int]:
    """Return the ids of modules, parameters and buffers that several ranks have, with their owners.

    The owner is the rank of the first stage that has the object. A layer of the pipe is owned by
    the rank of its own stage, even if an earlier stage refers to it.
    """
    owner_by_id = {
        id(layer): rank for stage, rank in zip(stages, ranks, strict=True) for layer in stage.layers
    }
    owners: dict[int, int] = {}
    for rank, ids in zip(ranks, ids_by_stage, strict=True):
        for key in ids:
            owner = owner_by_id.setdefault(key, rank)
            if owner != rank:
                owners[key] = owner
    return owners


def collect_module_and_tensor_ids(modules: Sequence[nn.Module]) -> set[int]:
    """Return the ids of modules, of their parameters and of their buffers."""
    # Ids instead of the objects: hashing a tensor is slow, and this runs in every call.
    ids = {id(unwrap_proxy(t)) for m in modules for t in m._parameters.values() if t is not None}
    ids.update([id(unwrap_proxy(t)) for m in modules for t in m._buffers.values() if t is not None])
    ids.update(map(id, modules))
    return ids

"""What several stages share: who owns it, what the others compute with, and who gets the gradient.

A parameter is the first stage's that has it; stages of other ranks compute with stand-ins. What
these learn is added to the owner's `.grad` after the run, by the caller's thread.

No stage may change what is shared while it computes: in the unsplit model the layers that share it
take turns, and stages do not, as soon as there are several ranks or micro-batches.
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
    """Of one call: `stand_ins` for each stage. With `hooked`, for parameters with hooks, too."""

    def __init__(
        self,
        stages: Sequence[Stage],
        devices: Sequence[Device],
        placement: Sequence[int],
        proxy_hooked: bool,
        chunks: int,
    ) -> None:
        modules = [unwrap_stage_modules(stage) for stage in stages]
        ranks = [placement[stage.index] for stage in stages]
        held = [collect_module_and_tensor_ids(those) for those in modules]
        shared = find_shared_ids(held)
        owners = _find_owner_ranks(stages, ranks, held) if shared and len(devices) > 1 else {}
        self._proxy_pools = [
            ProxyPool(
                place.device, {key for key, owner in owners.items() if owner != rank}, proxy_hooked
            )
            for rank, place in enumerate(devices)
        ]
        self.proxies = {
            stage.index: StageProxies(
                those, self._proxy_pools[rank], shared if chunks > 1 else owners
            )
            for stage, rank, those in zip(stages, ranks, modules, strict=True)
        }

    def accumulate_gradients(self) -> None:
        """Hand over what the stand-ins have learned: in one backward, rank after rank.

        So the hooks of an owner see the sum of what all other ranks add, once.
        """
        learned = [pair for doubles in self._proxy_pools for pair in doubles.take_gradients()]
        if learned:
            owners = [owner for owner, _ in learned]
            torch.autograd.backward(owners, [g.to(owner.device) for owner, g in learned])


def unwrap_stage_modules(stage: Stage) -> list[nn.Module]:
    """The stage's own, though another call may be computing with stand-ins for them."""
    return [unwrap_proxy(module) for module in stage.modules()]


def find_shared_ids(ids_by_stage: Sequence[set[int]]) -> set[int]:
    """The ids that several stages have."""
    once: set[int] = set().union(*ids_by_stage)
    if len(once) == sum(map(len, ids_by_stage)):
        return set()  # as for most models
    counts = Counter(key for ids in ids_by_stage for key in ids)
    return {key for key, times in counts.items() if times > 1}


def _find_owner_ranks(
    stages: Sequence[Stage], ranks: Sequence[int], ids_by_stage: Sequence[set[int]]
) -> dict[int, int]:
    """The ids of modules, parameters and buffers that several ranks have, with their owners.

    It is the rank of the first stage; that of a layer of the pipe itself is its own stage's.
    """
    first = {id(layer): rank for s, rank in zip(stages, ranks, strict=True) for layer in s.layers}
    owners: dict[int, int] = {}
    for rank, ids in zip(ranks, ids_by_stage, strict=True):
        for key in ids:
            owner = first.setdefault(key, rank)
            if owner != rank:
                owners[key] = owner
    return owners


def collect_module_and_tensor_ids(modules: Sequence[nn.Module]) -> set[int]:
    """The ids of the modules and of their tensors."""
    ids = {id(unwrap_proxy(t)) for m in modules for t in m._parameters.values() if t is not None}
    ids.update([id(unwrap_proxy(t)) for m in modules for t in m._buffers.values() if t is not None])
    ids.update(map(id, modules))
    return ids

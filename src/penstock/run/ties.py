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

from penstock.stage.places import Place
from penstock.stage.stage import Stage
from penstock.stage.stand_ins import Doubles, StandIns, real


class Ties:
    """Of one call: `stand_ins` for each stage. With `hooked`, for parameters with hooks, too."""

    def __init__(
        self,
        stages: Sequence[Stage],
        places: Sequence[Place],
        placement: Sequence[int],
        hooked: bool,
        chunks: int,
    ) -> None:
        modules = [modules_of(stage) for stage in stages]
        ranks = [placement[stage.index] for stage in stages]
        held = [held_by(those) for those in modules]
        shared = held_by_several(held)
        owners = _owners(stages, ranks, held) if shared and len(places) > 1 else {}
        self._doubles = [
            Doubles(place.device, {key for key, owner in owners.items() if owner != rank}, hooked)
            for rank, place in enumerate(places)
        ]
        self.stand_ins = {
            stage.index: StandIns(those, self._doubles[rank], shared if chunks > 1 else owners)
            for stage, rank, those in zip(stages, ranks, modules, strict=True)
        }

    def settle(self) -> None:
        """Hand over what the stand-ins have learned: in one backward, rank after rank.

        So the hooks of an owner see the sum of what all other ranks add, once.
        """
        learned = [pair for doubles in self._doubles for pair in doubles.learned()]
        if learned:
            owners = [owner for owner, _ in learned]
            torch.autograd.backward(owners, [g.to(owner.device) for owner, g in learned])


def modules_of(stage: Stage) -> list[nn.Module]:
    """The stage's own, though another call may be computing with stand-ins for them."""
    return [real(module) for module in stage.modules()]


def held_by_several(held: Sequence[set[int]]) -> set[int]:
    """The ids that several stages have."""
    once: set[int] = set().union(*held)
    if len(once) == sum(map(len, held)):
        return set()  # as for most models
    counts = Counter(key for ids in held for key in ids)
    return {key for key, times in counts.items() if times > 1}


def _owners(
    stages: Sequence[Stage], ranks: Sequence[int], held: Sequence[set[int]]
) -> dict[int, int]:
    """The ids of modules, parameters and buffers that several ranks have, with their owners.

    It is the rank of the first stage; that of a layer of the pipe itself is its own stage's.
    """
    first = {id(layer): rank for s, rank in zip(stages, ranks, strict=True) for layer in s.layers}
    owners: dict[int, int] = {}
    for rank, ids in zip(ranks, held, strict=True):
        for key in ids:
            owner = first.setdefault(key, rank)
            if owner != rank:
                owners[key] = owner
    return owners


def held_by(modules: Sequence[nn.Module]) -> set[int]:
    """The ids of the modules and of their tensors."""
    ids = {id(real(t)) for m in modules for t in m._parameters.values() if t is not None}
    ids.update([id(real(t)) for m in modules for t in m._buffers.values() if t is not None])
    ids.update(map(id, modules))
    return ids

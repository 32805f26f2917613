"""Parameters that ranks in several processes share: each has its own, and all learn the same.

While a step runs, each computes with a stand-in. After it, what the stand-ins have learned is
summed over the holders, and every holder's parameter gets the sum: so their optimizers go on alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.partition.tied import Tie
from penstock.run.processes.peers import Peers
from penstock.run.ties import held_by, held_by_several, modules_of
from penstock.stage.stage import Stage
from penstock.stage.stand_ins import Doubles, StandIns, real


class TiesBetween:
    """Of one call, on one rank."""

    def __init__(
        self, stages: Sequence[Stage], ties: Sequence[Tie], chunks: int, peers: Peers
    ) -> None:
        self._peers = peers
        self._ties = [tie for tie in ties if tie.tensor is not None]
        tensors = [real(tie.tensor) for tie in self._ties]
        learning = {id(t): t for t in tensors if t.requires_grad}
        self._doubles = Doubles(None, learning.keys())
        shared = {id(tensor) for tensor in tensors}
        modules = [modules_of(stage) for stage in stages]
        if chunks > 1:
            shared |= held_by_several([held_by(those) for those in modules])
        self.stand_ins = {
            stage.index: StandIns(those, self._doubles, shared)
            for stage, those in zip(stages, modules, strict=True)
        }

    def settle(self) -> None:
        """Sum, in the same order of ties on every rank."""
        learned = {id(owner): gradient for owner, gradient in self._doubles.learned()}
        for tie in self._ties if torch.is_grad_enabled() else ():
            parameter = real(tie.tensor)
            if not isinstance(parameter, nn.Parameter):
                continue
            mine = learned.get(id(parameter))
            if mine is not None and mine.layout is not torch.strided:
                raise RunError(
                    f"'{tie.name}', which ranks share, has a sparse gradient, and those are not "
                    "summed over processes: make its layer with sparse=False"
                )
            total = self._peers.summed(tie.holders, mine, parameter)
            if total is None:
                continue
            if not parameter.requires_grad:
                raise RunError(
                    f"'{tie.name}' is shared by ranks {', '.join(map(str, tie.holders))}, and is "
                    "frozen on this one but not on all: freeze it on every rank that has it, under "
                    "each of its names, or on none"
                )
            torch.autograd.backward([parameter], [total])


@torch.no_grad()
def tie(ties: Sequence[Tie], peers: Peers) -> None:
    """Give every holder what the owner has."""
    for each in ties:
        tensor = each.tensor
        if tensor is None or tensor.device.type == "meta":
            continue
        mine: Tensor | None = tensor.detach() if each.owner == peers.rank else None
        owners = peers.summed(each.holders, mine, tensor)
        assert owners is not None
        tensor.copy_(owners)

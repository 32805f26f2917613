"""How to wake what waits in a gloo group. No call of PyTorch's own does."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch

from penstock.runtime.distributed.links import PointToPointGroup

_ABORT_TAG = 2**31 - 7  # nobody sends under it


def abort_gloo(group: PointToPointGroup) -> None:
    """Let every operation of the group fail, those that wait and those to come.

    A receive that times out closes its connections: of all peers, one after the other, as some may
    be closed already.
    """
    byte = torch.empty(1, dtype=torch.uint8)
    for peer in set(range(group.size())) - {group.rank()}:
        with suppress(RuntimeError):
            group.recv([byte], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))

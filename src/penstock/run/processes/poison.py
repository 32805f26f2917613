"""How to wake what waits in a process group. No call of PyTorch's own does."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_TAG = 2**31 - 7  # nobody sends under it


def poison(group: ProcessGroup) -> None:
    """Let every operation of the group fail, those that wait and those to come.

    With gloo, a receive that times out closes its connections: of all peers, one after the other,
    as some may be closed already. With NCCL, `abort` does it, in a thread of its own: it may wait.
    """
    backends = dist.get_backend_config(group)
    if "gloo" in backends:
        byte = torch.empty(1, dtype=torch.uint8)
        for peer in set(range(group.size())) - {group.rank()}:
            with suppress(RuntimeError):
                group.recv([byte], peer, _TAG).wait(timedelta(milliseconds=1))
    if "nccl" in backends:
        threading.Thread(target=group.abort, name="penstock-abort", daemon=True).start()

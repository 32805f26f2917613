"""The ranks of a pipe gather before they open connections.

rank 1 ── here ──► rank 0 ── all are here, or who is missing ──► rank 1
rank 2 ── here ──►        ─────────────────────────────────────► rank 2

Over a gloo group it is seen at once if a process has ended.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from penstock.errors import RemoteError

GATHERING = 120.0  # seconds for all ranks to come
_TAG = 2**31 - 9  # of the group: nobody sends under it
_HERE, _GONE, _LATE = range(3)


def gather(store: Store, rank: int, size: int, group: ProcessGroup | None = None) -> None:
    """Wait until every rank is here: of the store, or of a group that is theirs."""
    if group is not None and "cpu:gloo" in dist.get_backend_config(group):
        found = _over(group, rank, size)
    else:
        found = _through(store, rank, size)
    for state, what in ((_GONE, "ended before it came"), (_LATE, "did not come in time")):
        missing = [other for other in range(size) if found[other] == state]
        if missing:
            raise RemoteError(
                f"rank {', '.join(map(str, missing))} {what} to make the pipe, or to go on with "
                f"it: its own output may say why. Make and call the pipe equally often on every "
                f"rank, at most {GATHERING:g} s apart",
                "died" if state == _GONE else "left",
                missing[0],
            )


def _through(store: Store, rank: int, size: int) -> list[int]:
    keys = [f"here/{other}" for other in range(size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, timedelta(seconds=GATHERING))
    except dist.DistStoreError:
        return [_HERE if store.check([key]) else _LATE for key in keys]
    return [_HERE] * size


def _over(group: ProcessGroup, rank: int, size: int) -> list[int]:
    """The first hears of all until their time is over, and tells all."""
    found = torch.zeros(size, dtype=torch.int64)
    if rank:
        found[0] = _heard(group, found, 0, 2 * GATHERING, tell=torch.zeros(1, dtype=torch.int64))
        return found.tolist()
    until = time.monotonic() + GATHERING
    for other in range(1, size):
        said = torch.zeros(1, dtype=torch.int64)
        found[other] = _heard(group, said, other, max(0.1, until - time.monotonic()))
    for other in range(1, size):
        with suppress(RuntimeError):
            if found[other] == _HERE:
                group.send([found], other, _TAG).wait()
    return found.tolist()


def _heard(
    group: ProcessGroup, into: Tensor, rank: int, within: float, tell: Tensor | None = None
) -> int:
    """What a rank says, after it was told that this one is here."""
    over = time.monotonic() + 0.9 * within  # gloo's clock is not this one
    try:
        told = None if tell is None else group.send([tell], rank, _TAG)
        group.recv([into], rank, _TAG).wait(timedelta(seconds=within))
        if told is not None:
            told.wait()
    except RuntimeError:
        return _LATE if time.monotonic() >= over else _GONE
    return _HERE

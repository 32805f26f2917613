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

ARRIVAL_TIMEOUT = 120.0  # seconds for all ranks to come
_ARRIVAL_TAG = 2**31 - 9  # of the group: nobody sends under it
_ARRIVED, _DIED, _TIMED_OUT = range(3)


def wait_for_all_ranks(
    store: Store, rank: int, size: int, group: ProcessGroup | None = None
) -> None:
    """Wait until every rank is here: of the store, or of a group that is theirs."""
    if group is not None and "cpu:gloo" in dist.get_backend_config(group):
        found = _wait_over_group(group, rank, size)
    else:
        found = _wait_through_store(store, rank, size)
    for state, what in ((_DIED, "ended before it came"), (_TIMED_OUT, "did not come in time")):
        missing = [other for other in range(size) if found[other] == state]
        if missing:
            raise RemoteError(
                f"rank {', '.join(map(str, missing))} {what} to make the pipe, or to go on with "
                f"it: its own output may say why. Make and call the pipe equally often on every "
                f"rank, at most {ARRIVAL_TIMEOUT:g} s apart",
                "died" if state == _DIED else "left",
                missing[0],
            )


def _wait_through_store(store: Store, rank: int, size: int) -> list[int]:
    keys = [f"here/{other}" for other in range(size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, timedelta(seconds=ARRIVAL_TIMEOUT))
    except dist.DistStoreError:
        return [_ARRIVED if store.check([key]) else _TIMED_OUT for key in keys]
    return [_ARRIVED] * size


def _wait_over_group(group: ProcessGroup, rank: int, size: int) -> list[int]:
    """The first hears of all until their time is over, and tells all."""
    found = torch.zeros(size, dtype=torch.int64)
    if rank:
        found[0] = _receive_arrival(
            group, found, 0, 2 * ARRIVAL_TIMEOUT, announcement=torch.zeros(1, dtype=torch.int64)
        )
        return found.tolist()
    until = time.monotonic() + ARRIVAL_TIMEOUT
    for other in range(1, size):
        said = torch.zeros(1, dtype=torch.int64)
        found[other] = _receive_arrival(group, said, other, max(0.1, until - time.monotonic()))
    for other in range(1, size):
        with suppress(RuntimeError):
            if found[other] == _ARRIVED:
                group.send([found], other, _ARRIVAL_TAG).wait()
    return found.tolist()


def _receive_arrival(
    group: ProcessGroup,
    buffer: Tensor,
    rank: int,
    timeout: float,
    announcement: Tensor | None = None,
) -> int:
    """What a rank says, after it was told that this one is here."""
    over = time.monotonic() + 0.9 * timeout  # gloo's clock is not this one
    try:
        told = None if announcement is None else group.send([announcement], rank, _ARRIVAL_TAG)
        group.recv([buffer], rank, _ARRIVAL_TAG).wait(timedelta(seconds=timeout))
        if told is not None:
            told.wait()
    except RuntimeError:
        return _TIMED_OUT if time.monotonic() >= over else _DIED
    return _ARRIVED

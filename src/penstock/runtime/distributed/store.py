"""A store for some processes, apart from all else that is stored in it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.errors import RemoteError


class SharedStore(NamedTuple):
    """A store, and which of the processes serves it; None: another one does."""

    store: Store
    host_rank: int | None


def open_shared_store(
    ranks: Sequence[int], name: str, world_store: Store | None = None
) -> SharedStore:
    """A store for a name, and for some processes, by their ranks in the world.

    Each of them calls it once, with the same name. It is a store over TCP, which threads can clone:
    that of the world, or one of its own. A launcher that starts the ranks again may keep its store:
    each world has its own part of it.
    """
    if world_store is None:
        assert dist.group.WORLD is not None
        world_store = dist.group.WORLD.get_group_store()
    part = f"penstock/{'-'.join(map(str, ranks))}/{name}"
    if isinstance(_unwrap_prefix_store(world_store), TCPStore):
        launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host = None if launched or 0 not in ranks else ranks.index(0)
        return SharedStore(PrefixStore(part, world_store), host)
    served = _serve_on_first_rank(
        PrefixStore(part, world_store), ranks.index(dist.get_rank()), len(ranks)
    )
    return SharedStore(PrefixStore(part, served), 0)


def _unwrap_prefix_store(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _serve_on_first_rank(bootstrap_store: Store, rank: int, size: int) -> TCPStore:
    """A store of their own; its address stands in one that they have."""
    name = socket.gethostname()
    if rank == 0:
        served = TCPStore(name, 0, is_master=True, wait_for_workers=False)
        bootstrap_store.set("address", json.dumps([name, served.port]))
        served.wait([f"here/{other}" for other in range(1, size)])  # before anybody drops it
        return served
    host, port = json.loads(bootstrap_store.get("address"))  # it waits for it
    host = "localhost" if host == name else host
    reached = TCPStore(host, port, is_master=False, wait_for_workers=False)
    reached.set(f"here/{rank}", "")
    return reached


# -------------------------------------------------------------------------------------------------
# The ranks of a pipe gather before they open connections.
#
# rank 1 ── here ──► rank 0 ── all are here, or who is missing ──► rank 1
# rank 2 ── here ──►        ─────────────────────────────────────► rank 2
#
# Over a gloo group it is seen at once if a process has ended.
# -------------------------------------------------------------------------------------------------

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

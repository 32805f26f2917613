"""A store for some processes, apart from all else that is stored in it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store


class Shared(NamedTuple):
    """A store, and which of the processes serves it; None: another one does."""

    store: Store
    host: int | None


def store_of(ranks: Sequence[int], name: str, world: Store | None = None) -> Shared:
    """A store for a name, and for some processes, by their ranks in the world.

    Each of them calls it once, with the same name. It is a store over TCP, which threads can clone:
    that of the world, or one of its own. A launcher that starts the ranks again may keep its store:
    each world has its own part of it.
    """
    if world is None:
        assert dist.group.WORLD is not None
        world = dist.group.WORLD.get_group_store()
    part = f"penstock/{'-'.join(map(str, ranks))}/{name}"
    if isinstance(_whole(world), TCPStore):
        launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host = None if launched or 0 not in ranks else ranks.index(0)
        return Shared(PrefixStore(part, world), host)
    served = _served_by_the_first(
        PrefixStore(part, world), ranks.index(dist.get_rank()), len(ranks)
    )
    return Shared(PrefixStore(part, served), 0)


def _whole(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _served_by_the_first(known: Store, rank: int, size: int) -> TCPStore:
    """A store of their own; its address stands in one that they have."""
    name = socket.gethostname()
    if rank == 0:
        served = TCPStore(name, 0, is_master=True, wait_for_workers=False)
        known.set("address", json.dumps([name, served.port]))
        served.wait([f"here/{other}" for other in range(1, size)])  # before anybody drops it
        return served
    host, port = json.loads(known.get("address"))  # it waits for it
    host = "localhost" if host == name else host
    reached = TCPStore(host, port, is_master=False, wait_for_workers=False)
    reached.set(f"here/{rank}", "")
    return reached

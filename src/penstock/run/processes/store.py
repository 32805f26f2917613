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

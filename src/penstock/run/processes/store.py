"""A store for the ranks of one group, apart from all else that is stored in it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

_ADDRESS = 512  # bytes, more than a name and a port need


class Shared(NamedTuple):
    """A store, and the rank of the group that serves it; None: another process does."""

    store: Store
    host: int | None
    base: Store  # that it is a part of

    def among(self, ranks: Sequence[int], name: str) -> Store:
        """A store for other ranks of the world, who have the same base."""
        return _part(self.base, ranks, name)


def store_of(group: ProcessGroup, name: str) -> Shared:
    """A store for this group and name. Every rank of the group calls it, with the same name.

    A store over TCP, which threads can clone: that of the world, or one of the group's own. A
    launcher that starts the ranks again may keep its store: each world has its own part of it.
    """
    ranks = dist.get_process_group_ranks(group)
    assert dist.group.WORLD is not None
    base: Store = dist.group.WORLD.get_group_store()
    if isinstance(_whole(base), TCPStore):
        launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host = None if launched or 0 not in ranks else ranks.index(0)
    else:
        base, host = _served_by_the_first(group), 0
    return Shared(_part(base, ranks, name), host, base)


def _whole(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _part(base: Store, ranks: Sequence[int], name: str) -> Store:
    return PrefixStore(f"penstock/{'-'.join(map(str, ranks))}/{name}", base)


def _served_by_the_first(group: ProcessGroup) -> TCPStore:
    """A store of the group's own; its address goes through the group."""
    name = socket.gethostname()
    first = dist.get_rank(group) == 0
    served = TCPStore(name, 0, is_master=True, wait_for_workers=False) if first else None
    line = json.dumps([name, served.port]).encode() if served is not None else b""
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"
    address = torch.zeros(_ADDRESS, dtype=torch.uint8, device=device)
    address[: len(line)] = torch.tensor(list(line), dtype=torch.uint8)
    dist.broadcast(address, dist.get_global_rank(group, 0), group=group)
    if served is not None:
        served.wait([f"here/{rank}" for rank in range(1, group.size())])  # before anybody drops it
        return served
    host, port = json.loads(bytes(address.tolist()).rstrip(b"\0"))
    host = "localhost" if host == name else host
    reached = TCPStore(host, port, is_master=False, wait_for_workers=False)
    reached.set(f"here/{group.rank()}", "")
    return reached

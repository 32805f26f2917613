"""How ranks that have a store in common find each other, also in a store that is not new.

The store of `torchrun` outlives its workers: after a restart it is full of what the dead have
written, addresses among it. The number of restarts tells nothing apart, as each host counts for
itself. So rank 0 draws a name that nobody has used, and the others say hello under that name, each
with a token of its own, until they are answered.

    rank 0    start = 7f3a                 7f3a/1 ?  -> 7f3a/everyone = ..., 7f3a/1/c05e = ""
    rank 1    start ?  -> 7f3a/1 = c05e, its word              7f3a/1/c05e ?  -> they have met
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple
from uuid import uuid4

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.errors import RunError
from penstock.launch.torchrun_env import RankEnv

_START_KEY = "penstock/start"
_RETRY_INTERVAL = 0.25  # seconds after which a rank asks whether rank 0 has started anew
_EXTRA_TIMEOUT = 5.0  # seconds that the others stay longer than rank 0, which may come last


class JoinedRanks(NamedTuple):
    """Those who came: the word of each, by its rank, and a part of the store for them alone."""

    store: Store
    rank_info: dict[int, str]

    def find_missing(self, world_size: int) -> list[int]:
        """The ranks that did not come."""
        return [rank for rank in range(world_size) if rank not in self.rank_info]


def open_store(env: RankEnv, timeout: float) -> Store:
    """The store that all ranks have in common."""
    mine = env.rank == 0 and not env.launcher_has_store
    limit = timedelta(seconds=timeout)
    try:
        store = TCPStore(
            env.master_addr,
            env.master_port,
            is_master=mine,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        why = str(error).strip().splitlines()[0]
        raise RunError(
            f"rank {env.rank} on {socket.gethostname()} does not reach the ranks' store at "
            f"{env.master_addr}:{env.master_port} within {timeout:g} s: is rank 0 running there, does the "
            f"name lead to it, and is the port open? ({why})"
        ) from error
    assert isinstance(store, Store)
    return store


def join_rendezvous(
    store: Store, rank: int, world_size: int, info: str, timeout: float
) -> JoinedRanks:
    """Wait for all ranks, or for as many as come in time. Every rank hears the same."""
    token = uuid4().hex
    if rank == 0:
        return _host_rendezvous(store, world_size, info, token, timeout)
    return _attend_rendezvous(store, rank, info, token, 2 * timeout + _EXTRA_TIMEOUT)


def _host_rendezvous(
    store: Store, world_size: int, info: str, token: str, timeout: float
) -> JoinedRanks:
    part = _prefix_store(store, token)
    store.set(_START_KEY, token)
    until = time.monotonic() + timeout
    came = [
        rank
        for rank in range(1, world_size)
        if wait_for_keys(part, [str(rank)], until - time.monotonic())
    ]
    said = {rank: json.loads(part.get(str(rank))) for rank in came}
    words = {0: info} | {rank: text for rank, (_, text) in said.items()}
    part.set("everyone", json.dumps(list(words.items())))
    for rank, (theirs, _) in said.items():
        part.set(f"{rank}/{theirs}", "")
    return JoinedRanks(part, words)


def _attend_rendezvous(
    store: Store, rank: int, info: str, token: str, timeout: float
) -> JoinedRanks:
    until = time.monotonic() + timeout
    while wait_for_keys(store, [_START_KEY], until - time.monotonic()):
        part = _prefix_store(store, store.get(_START_KEY).decode())
        part.set(str(rank), json.dumps([token, info]))
        if wait_for_keys(part, [f"{rank}/{token}"], min(_RETRY_INTERVAL, until - time.monotonic())):
            return JoinedRanks(part, dict(json.loads(part.get("everyone"))))
        if time.monotonic() > until:
            break
    raise RunError(f"rank {rank} was not answered by rank 0 within {timeout:g} s: is it running?")


def _prefix_store(store: Store, name: str) -> Store:
    return PrefixStore(f"penstock/{name}", store)


def wait_for_keys(store: Store, keys: Sequence[str], timeout: float) -> bool:
    """Are all of them there, at the latest then? (A store that waits itself warns at the end.)"""
    until, pause = time.monotonic() + timeout, 0.002
    while not store.check(list(keys)):
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return True

"""Rendezvous of the ranks in a TCP store that may hold keys of earlier runs.

The store of `torchrun` outlives its workers. After a restart it still has the keys of the dead
ranks, among them addresses that no longer answer. The restart counter does not help to tell runs
apart, because each host counts for itself. So rank 0 draws a new random name (a token) for the run.
Every other rank announces itself under that name, with a token of its own, until rank 0 answers
that token:

    key            set by   value
    start          rank 0   7f3a                     the token of this run
    7f3a/1         rank 1   c05e, info of rank 1     repeated if `start` changes
    7f3a/everyone  rank 0   the info of all ranks
    7f3a/1/c05e    rank 0   ""                       rank 1 has joined this run

A rank that read the `start` of a dead run gets no answer there, and reads `start` again.
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
_RETRY_INTERVAL = 0.25  # seconds after which a rank without an answer reads `start` again
_EXTRA_TIMEOUT = 5.0  # seconds that the others wait longer than rank 0, which may start last


class JoinedRanks(NamedTuple):
    """The result of a rendezvous: a store for this run, and the info of each rank that came."""

    store: Store
    rank_info: dict[int, str]

    def find_missing(self, world_size: int) -> list[int]:
        """Return the ranks that did not come."""
        return [rank for rank in range(world_size) if rank not in self.rank_info]


def open_store(env: RankEnv, timeout: float) -> Store:
    """Return the TCP store at MASTER_ADDR. Rank 0 serves it unless the launcher does."""
    is_host = env.rank == 0 and not env.launcher_has_store
    limit = timedelta(seconds=timeout)
    try:
        store = TCPStore(
            env.master_addr,
            env.master_port,
            is_master=is_host,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(
            f"rank {env.rank} on {socket.gethostname()} could not reach the store of the ranks at "
            f"{env.master_addr}:{env.master_port} within {timeout:g} s. Check that rank 0 runs "
            f"there, that the host name resolves to it, and that the port is open. ({reason})"
        ) from error
    assert isinstance(store, Store)
    return store


def join_rendezvous(
    store: Store, rank: int, world_size: int, info: str, timeout: float
) -> JoinedRanks:
    """Wait for all ranks, and return those that came in time. The result is the same on all."""
    token = uuid4().hex
    if rank == 0:
        return _host_rendezvous(store, world_size, info, token, timeout)
    return _attend_rendezvous(store, rank, info, token, 2 * timeout + _EXTRA_TIMEOUT)


def _host_rendezvous(
    store: Store, world_size: int, info: str, token: str, timeout: float
) -> JoinedRanks:
    run_store = _prefix_store(store, token)
    store.set(_START_KEY, token)
    deadline = time.monotonic() + timeout
    arrived_ranks = [
        rank
        for rank in range(1, world_size)
        if wait_for_keys(run_store, [str(rank)], deadline - time.monotonic())
    ]
    announcements = {rank: json.loads(run_store.get(str(rank))) for rank in arrived_ranks}
    rank_info = {0: info} | {rank: text for rank, (_, text) in announcements.items()}
    # Before the answers: a rank reads this key as soon as it is answered.
    run_store.set("everyone", json.dumps(list(rank_info.items())))
    for rank, (rank_token, _) in announcements.items():
        run_store.set(f"{rank}/{rank_token}", "")
    return JoinedRanks(run_store, rank_info)


def _attend_rendezvous(
    store: Store, rank: int, info: str, token: str, timeout: float
) -> JoinedRanks:
    deadline = time.monotonic() + timeout
    while wait_for_keys(store, [_START_KEY], deadline - time.monotonic()):
        run_store = _prefix_store(store, store.get(_START_KEY).decode())
        run_store.set(str(rank), json.dumps([token, info]))
        if wait_for_keys(
            run_store, [f"{rank}/{token}"], min(_RETRY_INTERVAL, deadline - time.monotonic())
        ):
            return JoinedRanks(run_store, dict(json.loads(run_store.get("everyone"))))
        if time.monotonic() > deadline:
            break
    raise RunError(
        f"rank {rank} got no answer from rank 0 within {timeout:g} s. Check that rank 0 is running."
    )


def _prefix_store(store: Store, name: str) -> Store:
    return PrefixStore(f"penstock/{name}", store)


def wait_for_keys(store: Store, keys: Sequence[str], timeout: float) -> bool:
    """Return whether all keys are set before the timeout.

    This polls, because `Store.wait` prints a warning when its timeout ends.
    """
    deadline, pause = time.monotonic() + timeout, 0.002
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return True

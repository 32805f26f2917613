"""Values that the ranks exchange through a key-value store, before they have process groups.

join_rendezvous      the ranks of a launcher find each other; each gets the info of all
gather_in_store      every rank gets the values of all, as JSON, within a time limit
open_shared_store    a TCP store for the ranks of a pipe, with a namespace of its own
wait_for_all_ranks   a barrier before the ranks open connections; its error names the missing
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.errors import RemoteError, RunError


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


def gather_in_store(
    store: Store, name: str, rank: int, ranks: Sequence[int], value: Any, timeout: float
) -> dict[int, Any]:
    """Return the values of the ranks that have called this before the timeout, by rank.

    The values travel as JSON. Each name can be used once in a store.
    """
    store.set(f"{name}/{rank}", json.dumps(value))
    keys = {other: f"{name}/{other}" for other in ranks}
    wait_for_keys(store, [*keys.values()], timeout)
    present = [other for other, key in keys.items() if store.check([key])]
    return {other: json.loads(store.get(keys[other])) for other in present}


# -------------------------------------------------------------------------------------------------
# Rendezvous of the ranks in a TCP store that may hold keys of earlier runs
#
# The store of `torchrun` outlives its workers. After a restart it still has the keys of the dead
# ranks, among them addresses that no longer answer. The restart counter does not help to tell runs
# apart, because each host counts for itself. So rank 0 draws a new random name (a token) for the
# run. Every other rank announces itself under that name, with a token of its own, until rank 0
# answers that token:
#
#     key            set by   value
#     start          rank 0   7f3a                     the token of this run
#     7f3a/1         rank 1   c05e, info of rank 1     repeated if `start` changes
#     7f3a/everyone  rank 0   the info of all ranks
#     7f3a/1/c05e    rank 0   ""                       rank 1 has joined this run
#
# A rank that read the `start` of a dead run gets no answer there, and reads `start` again.
# -------------------------------------------------------------------------------------------------

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
    run_store = PrefixStore(f"penstock/{token}", store)
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
        run_store = PrefixStore(f"penstock/{store.get(_START_KEY).decode()}", store)
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


# -------------------------------------------------------------------------------------------------
# The store of a pipe
# -------------------------------------------------------------------------------------------------


class SharedStore(NamedTuple):
    """A store and the rank that serves it. `host_rank` is None if another process serves it."""

    store: Store
    host_rank: int | None


def open_shared_store(
    ranks: Sequence[int], name: str, world_store: Store | None = None
) -> SharedStore:
    """Return a TCP store for these global ranks, with a namespace for `name`.

    Each of the ranks calls this once with the same name. The store is the one of the default
    process group if that is a TCP store, else a new one that the first rank serves.

    The watchdog relies on TCP: its listener thread blocks in a `clone()` of this store until
    another rank sets a key.
    """
    if world_store is None:
        assert dist.group.WORLD is not None
        # torchrun keeps its store when it restarts the ranks, with all keys of the dead ones. The
        # store of the default group is a part of it with a prefix that is new after each restart.
        world_store = dist.group.WORLD.get_group_store()
    prefix = f"penstock/{'-'.join(map(str, ranks))}/{name}"
    if isinstance(_unwrap_prefix_store(world_store), TCPStore):
        launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host = None if launched or 0 not in ranks else ranks.index(0)
        return SharedStore(PrefixStore(prefix, world_store), host)
    store = _serve_on_first_rank(
        PrefixStore(prefix, world_store), ranks.index(dist.get_rank()), len(ranks)
    )
    return SharedStore(PrefixStore(prefix, store), 0)


def _unwrap_prefix_store(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _serve_on_first_rank(bootstrap_store: Store, rank: int, size: int) -> TCPStore:
    """Return a new TCP store that rank 0 serves. Its address is exchanged in `bootstrap_store`."""
    host_name = socket.gethostname()
    if rank == 0:
        server = TCPStore(host_name, 0, is_master=True, wait_for_workers=False)
        bootstrap_store.set("address", json.dumps([host_name, server.port]))
        # The server lives as long as this object. Wait until every client is connected, or an
        # early error here would close it under them.
        server.wait([f"here/{other}" for other in range(1, size)])
        return server
    host, port = json.loads(bootstrap_store.get("address"))  # blocks until the key is set
    host = "localhost" if host == host_name else host
    client = TCPStore(host, port, is_master=False, wait_for_workers=False)
    client.set(f"here/{rank}", "")
    return client


# -------------------------------------------------------------------------------------------------
# The barrier before the ranks open connections
#
# rank 1 ── here ──► rank 0 ── all are here, or who is missing ──► rank 1
# rank 2 ── here ──►        ─────────────────────────────────────► rank 2
#
# `dist.barrier()` would work, but its error does not say which rank is missing. Over a gloo group
# the other ranks notice the exit of a process at once, because its connection closes. Through the
# store they notice it only after the timeout.
# -------------------------------------------------------------------------------------------------

ARRIVAL_TIMEOUT = 120.0  # seconds for all ranks to arrive
_ARRIVAL_TAG = 2**31 - 9  # nothing else is sent under this tag of the user's group
_ARRIVED, _DIED, _TIMED_OUT = range(3)


def wait_for_all_ranks(
    store: Store, rank: int, size: int, group: ProcessGroup | None = None
) -> None:
    """Wait until every rank has called this function, and raise RemoteError if one does not.

    The ranks meet over `group` if it has a gloo backend, else through the store.
    """
    if group is not None and "cpu:gloo" in dist.get_backend_config(group):
        states = _wait_over_group(group, rank, size)
    else:
        states = _wait_through_store(store, rank, size)
    for state, problem in (
        (_DIED, "exited before it arrived"),
        (_TIMED_OUT, "did not arrive in time"),
    ):
        missing = [other for other in range(size) if states[other] == state]
        if missing:
            raise RemoteError(
                f"rank {', '.join(map(str, missing))} {problem} to create the pipe, or to reopen "
                f"it after a failure. Its output may say why. Create and call the pipe equally "
                f"often on every rank, at most {ARRIVAL_TIMEOUT:g} s apart.",
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
    """Return the state of each rank. Rank 0 hears from all until the timeout and tells all."""
    states = torch.zeros(size, dtype=torch.int64)
    if rank:
        # Rank 0 may itself wait one timeout for a rank that never comes: allow twice that.
        states[0] = _receive_arrival(
            group, states, 0, 2 * ARRIVAL_TIMEOUT, announcement=torch.zeros(1, dtype=torch.int64)
        )
        return states.tolist()
    deadline = time.monotonic() + ARRIVAL_TIMEOUT
    for other in range(1, size):
        announcement = torch.zeros(1, dtype=torch.int64)
        states[other] = _receive_arrival(
            group, announcement, other, max(0.1, deadline - time.monotonic())
        )
    for other in range(1, size):
        with suppress(RuntimeError):
            if states[other] == _ARRIVED:
                group.send([states], other, _ARRIVAL_TAG).wait()
    return states.tolist()


def _receive_arrival(
    group: ProcessGroup,
    buffer: Tensor,
    rank: int,
    timeout: float,
    announcement: Tensor | None = None,
) -> int:
    """Send the announcement to a rank, if there is one, and receive its answer into the buffer.

    Return one of _ARRIVED, _DIED and _TIMED_OUT. gloo raises the same RuntimeError for a timeout
    and for a closed connection, so the clock decides which of the two it was.
    """
    # 0.9: gloo measures the timeout with a clock of its own and may end a little early.
    timeout_time = time.monotonic() + 0.9 * timeout
    try:
        send = None if announcement is None else group.send([announcement], rank, _ARRIVAL_TAG)
        group.recv([buffer], rank, _ARRIVAL_TAG).wait(timedelta(seconds=timeout))
        if send is not None:
            send.wait()
    except RuntimeError:
        return _TIMED_OUT if time.monotonic() >= timeout_time else _DIED
    return _ARRIVED

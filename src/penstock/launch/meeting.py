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
from penstock.launch.launched import Launched

_START = "penstock/start"
_AGAIN = 0.25  # seconds after which a rank asks whether rank 0 has started anew
_LATER = 5.0  # seconds that the others stay longer than rank 0, which may come last


class Met(NamedTuple):
    """Those who came: the word of each, by its rank, and a part of the store for them alone."""

    store: Store
    words: dict[int, str]

    def missing(self, size: int) -> list[int]:
        """The ranks that did not come."""
        return [rank for rank in range(size) if rank not in self.words]


def open_store(seat: Launched, seconds: float) -> Store:
    """The store that all ranks have in common."""
    mine = seat.rank == 0 and not seat.has_store
    limit = timedelta(seconds=seconds)
    try:
        store = TCPStore(
            seat.address,
            seat.port,
            is_master=mine,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        why = str(error).strip().splitlines()[0]
        raise RunError(
            f"rank {seat.rank} on {socket.gethostname()} does not reach the ranks' store at "
            f"{seat.address}:{seat.port} within {seconds:g} s: is rank 0 running there, does the "
            f"name lead to it, and is the port open? ({why})"
        ) from error
    assert isinstance(store, Store)
    return store


def meet(store: Store, rank: int, size: int, word: str, patience: float) -> Met:
    """Wait for all ranks, or for as many as come in time. Every rank hears the same."""
    token = uuid4().hex
    if rank == 0:
        return _invite(store, size, word, token, patience)
    return _come(store, rank, word, token, 2 * patience + _LATER)


def _invite(store: Store, size: int, word: str, token: str, patience: float) -> Met:
    part = _part(store, token)
    store.set(_START, token)
    until = time.monotonic() + patience
    came = [rank for rank in range(1, size) if told(part, [str(rank)], until - time.monotonic())]
    said = {rank: json.loads(part.get(str(rank))) for rank in came}
    words = {0: word} | {rank: text for rank, (_, text) in said.items()}
    part.set("everyone", json.dumps(list(words.items())))
    for rank, (theirs, _) in said.items():
        part.set(f"{rank}/{theirs}", "")
    return Met(part, words)


def _come(store: Store, rank: int, word: str, token: str, patience: float) -> Met:
    until = time.monotonic() + patience
    while told(store, [_START], until - time.monotonic()):
        part = _part(store, store.get(_START).decode())
        part.set(str(rank), json.dumps([token, word]))
        if told(part, [f"{rank}/{token}"], min(_AGAIN, until - time.monotonic())):
            return Met(part, dict(json.loads(part.get("everyone"))))
        if time.monotonic() > until:
            break
    raise RunError(f"rank {rank} was not answered by rank 0 within {patience:g} s: is it running?")


def _part(store: Store, name: str) -> Store:
    return PrefixStore(f"penstock/{name}", store)


def told(store: Store, keys: Sequence[str], seconds: float) -> bool:
    """Are all of them there, at the latest then? (A store that waits itself warns at the end.)"""
    until, pause = time.monotonic() + seconds, 0.002
    while not store.check(list(keys)):
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return True

"""Ranks find each other in a store, also when it holds the keys of an earlier start."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.errors import RunError
from penstock.runtime.distributed.store import (
    JoinedRanks,
    gather_in_store,
    join_rendezvous,
    open_shared_store,
    wait_for_keys,
)
from tests.distributed.ranks import ranks


def exchanged(path: Path) -> tuple[bool, int | None, bytes]:
    world = PrefixStore("world", FileStore(str(path), dist.get_world_size()))
    store, host = open_shared_store(range(dist.get_world_size()), "pipe0", world)
    assert isinstance(store, PrefixStore)
    store.set(f"rank{dist.get_rank()}", f"from {dist.get_rank()}")
    found: bytes = store.get(f"rank{2 - dist.get_rank()}")
    dist.barrier()
    return isinstance(store.underlying_store, TCPStore), host, found


def test_shared_store_is_over_tcp_for_a_file_store(tmp_path: Path) -> None:
    for rank, (over_tcp, host, found) in enumerate(ranks(3).run(exchanged, tmp_path / "f")):
        assert over_tcp
        assert host == 0
        assert found == f"from {2 - rank}".encode()


def clients(size: int) -> list[Store]:
    """Return a store, and a separate client of it for each rank."""
    first: Any = TCPStore("localhost", 0, None, True, timedelta(seconds=20), wait_for_workers=False)
    return [first] + [
        TCPStore("localhost", first.port, None, False, timedelta(seconds=20))
        for _ in range(size - 1)
    ]


def met_by(
    stores: list[Store], order: list[int], word: str, patience: float = 20
) -> list[JoinedRanks]:
    """Let all ranks join at the same time, started in this order."""
    with ThreadPoolExecutor(len(stores)) as pool:
        going = {}
        for rank in order:
            text = f"{word} {rank}"
            going[rank] = pool.submit(
                join_rendezvous, stores[rank], rank, len(stores), text, patience
            )
            time.sleep(0.02)
        return [going[rank].result() for rank in sorted(going)]


def test_every_rank_receives_the_info_of_all_ranks() -> None:
    for met in met_by(clients(3), [2, 0, 1], "rank"):
        assert met.rank_info == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
        assert met.find_missing(3) == []


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_second_rendezvous_in_the_same_store_ignores_the_first(order: list[int]) -> None:
    stores = clients(3)
    before = met_by(stores, [0, 1, 2], "before")
    before[1].store.set("address", "of the dead")
    after = met_by(stores, order, "after")
    for met in after:
        assert met.rank_info == {rank: f"after {rank}" for rank in range(3)}
        assert not met.store.check(["address"])
    after[2].store.set("address", "of the living")
    assert after[0].store.get("address") == b"of the living"
    assert before[0].store.get("address") == b"of the dead"


def test_missing_rank_is_reported_by_all_ranks() -> None:
    stores = clients(3)
    for met in met_by(stores, [0, 2], "rank", patience=2):
        assert met.rank_info == {0: "rank 0", 2: "rank 2"}
        assert met.find_missing(3) == [1]


def test_missing_rank_0_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    store.set("penstock/start", "of the dead")
    monkeypatch.setattr("penstock.runtime.distributed.store._RETRY_INTERVAL", 0.01)
    monkeypatch.setattr("penstock.runtime.distributed.store._EXTRA_TIMEOUT", 0.1)
    with pytest.raises(RunError, match=r"rank 1 got no answer from rank 0 within 0.3 s"):
        join_rendezvous(store, 1, 2, "hello", 0.1)


def test_wait_for_keys_respects_its_timeout() -> None:
    store = HashStore()
    store.set("a", "")
    assert wait_for_keys(store, ["a"], 0)
    assert not wait_for_keys(store, ["a", "b"], 0.01)


def test_gather_in_store_returns_the_values_of_the_ranks_that_came() -> None:
    store = HashStore()
    gather_in_store(store, "facts", 2, [2], {"free": 1.5}, 0)
    assert gather_in_store(store, "facts", 0, [0, 1, 2], None, 0.01) == {0: None, 2: {"free": 1.5}}

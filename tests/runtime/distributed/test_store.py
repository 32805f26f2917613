"""The store of a pipe, whatever the process group was created with."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from penstock.runtime.distributed.store import open_shared_store
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

"""One RPC worker for the tests that need one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import rpc

collect_ignore_glob = ["scripts/*"]  # test_install.py runs them in separate processes


@pytest.fixture(scope="session")
def rpc_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store: Path = tmp_path_factory.mktemp("rpc") / "store"
    # The default transport polls shared memory, and keeps a core busy until the session ends.
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", _transports=["uv"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about its own use of a process group
        rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
    yield
    rpc.shutdown()

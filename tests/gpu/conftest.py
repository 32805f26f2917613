"""Configuration of the GPU tests: few at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest

AT_ONCE = 4  # on one GPU; more would not be faster, and would run out of its memory


@pytest.fixture(autouse=True)
def _one_of_few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Wait while as many other workers run GPU tests."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with (shared / f"gpu-{worker % AT_ONCE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

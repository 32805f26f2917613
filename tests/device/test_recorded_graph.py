"""A capture that the driver has invalidated is ended, shown with a fake of PyTorch's graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from penstock.device import recorded_graph
from penstock.device.recorded_graph import GraphMemoryPools, RecordedCudaGraph

DEVICE = torch.device("cuda", 0)
capturing: list[bool] = []  # one entry per capture in progress, False once it is invalid
at_work: set[int] = set()  # memory pools that the allocator believes are in use by a capture


class Graph:
    pool: int

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert pool not in at_work
        self.pool = pool
        at_work.add(pool)
        capturing.append(True)

    def capture_end(self) -> None:
        if not capturing or not capturing.pop():
            raise RuntimeError("operation failed due to a previous error during capture")
        at_work.remove(self.pool)

    def reset(self) -> None:
        assert self.pool not in at_work


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing.clear()
    at_work.clear()
    handles = iter(range(1, 100))
    entered: Callable[..., Any] = lambda *_: nullcontext()  # noqa: E731
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    fakes: dict[str, Any] = {"CUDAGraph": Graph, "Stream": object, "device": entered}
    fakes |= {"stream": entered, "synchronize": nothing, "empty_cache": nothing}
    fakes["graph_pool_handle"] = lambda: next(handles)
    fakes["Stream"] = lambda device: object()
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(
        recorded_graph, "_begin_driver_capture", lambda stream: capturing.append(True)
    )


def raises() -> None:
    raise LookupError("planted")


def gives_up() -> None:
    """Invalidate the capture as the driver does when the body waits; PyTorch raises at once."""
    capturing[-1] = False
    raise RuntimeError("operation not permitted when stream is capturing")


def gives_up_quietly() -> None:
    capturing[-1] = False


@pytest.mark.parametrize("body", [raises, gives_up, gives_up_quietly])
def test_failed_capture_is_ended(body: Callable[[], None]) -> None:
    pools = GraphMemoryPools()
    for _ in range(3):
        with pytest.raises((LookupError, RuntimeError)):
            RecordedCudaGraph([DEVICE], pools).capture(body)
        assert not capturing
        assert not at_work
    RecordedCudaGraph([DEVICE], pools).capture(lambda: None)


def test_graph_memory_pool_is_shared_while_in_use() -> None:
    pools = GraphMemoryPools()
    with pytest.raises(LookupError):
        RecordedCudaGraph([DEVICE], pools).capture(raises)
    first, second = (RecordedCudaGraph([DEVICE], pools) for _ in range(2))
    first.capture(lambda: None)
    second.capture(lambda: None)
    assert pools.get_first_device_pool() == pools.get_first_device_pool() == 2
    del first
    assert pools.get_first_device_pool() == 2
    del second
    assert pools.get_first_device_pool() == 3  # PyTorch refuses a pool that no graph uses any more

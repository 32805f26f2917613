"""Lifetimes: borrowed storage within a capture, and recorded graphs with their pipe."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from penstock.device.device import Cpu
from penstock.device.recorded_graph import GraphMemoryPools
from penstock.runtime.cuda_graph import graph_cache
from penstock.runtime.cuda_graph.capture_transport import BorrowedStorage, CaptureTransport
from penstock.stage.payload import Payload
from tests.runtime.cuda_graph.emulated import EmulatedGraph
from tests.runtime.cuda_graph.support import (
    batch,
    captures_of,
    emulate,
    pipe_pair,
    recordings,
    stack,
)

Made = TypeVar("Made")


class Computed(EmulatedGraph):
    """A graph that records nothing, and so keeps nothing alive."""

    def capture(self, body: Callable[[], Made]) -> Made:
        return body()

    def replay(self) -> None:
        pass


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Record the largest number of borrowed storages, and the number of sends."""
    found = {"loans": 0, "sent": 0}

    class Counted(CaptureTransport):
        def take_released(self, owner: int, reader: int) -> list[BorrowedStorage]:
            living = sum(map(len, self.borrowed.values()))
            found["loans"] = max(found["loans"], living)
            found["sent"] += 1
            return super().take_released(owner, reader)

    monkeypatch.setattr(graph_cache, "CaptureTransport", Counted)
    return found


def after_two_steps(chunks: int, **options: Any) -> None:
    layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))
    pair = pipe_pair(layers.double(), chunks=chunks, **options)
    for number in range(2):
        x, y = batch(number, 2 * chunks, out=8)
        pair.graph.step(x, target=y)
    assert recordings(pair.graph) == [1]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
def test_borrowed_storage_does_not_grow_with_micro_batches(
    schedule: str, checkpoint: str, most: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch, Computed)
    ranks = 2 if schedule == "interleaved" else 4
    options = {"schedule": schedule, "checkpoint": checkpoint, "devices": ["cpu"] * ranks}
    after_two_steps(8, **options)
    few, sent = most["loans"], most["sent"]
    after_two_steps(32, **options)
    assert most["sent"] > 4 * sent  # the sum over both runs
    assert most["loans"] <= few + 2
    assert few < sent / 2


def test_borrowed_storage_is_released_when_its_reader_has_dropped_it() -> None:
    transport = CaptureTransport([Cpu(), Cpu()], [0, 1])
    payload = Payload((torch.ones(3), None))
    borrowed = BorrowedStorage(payload)
    assert not borrowed.is_released
    view = payload.tensors[0].view(1, 3)  # type: ignore[union-attr]
    del payload
    assert not borrowed.is_released
    del view
    assert borrowed.is_released
    assert transport.take_released(0, 1) == []
    assert BorrowedStorage(Payload((None,))).is_released


def refs_of(pipe: Any) -> list[weakref.ref[Any]]:
    made = captures_of(pipe)
    found: list[Any] = [made, *made._history.graphs.values()]
    found += [one.graph for one in made._history.graphs.values()]
    found += [buffer.tensor for buffer in made._grad_buffers._buffers.values()]
    return [weakref.ref(one) for one in found]


def test_recorded_graphs_are_freed_with_their_pipe() -> None:
    """They are freed at once: GPU memory must not wait for the garbage collector."""
    pair = pipe_pair(stack(nn.Dropout(0.2), nn.BatchNorm1d(8)))
    for number, rows in enumerate([11, 11, 11, 8, 8]):
        pair.train(1, number, rows)
    refs = refs_of(pair.graph)
    assert len(refs) > 5
    gc.collect()
    gc.disable()
    try:
        del pair
        left = [ref() for ref in refs if ref() is not None]
        assert left == []
    finally:
        gc.enable()


def test_recorded_graph_keeps_no_batch_and_no_loss_alive() -> None:
    pair = pipe_pair(stack())
    kept: list[weakref.ref[Any]] = []
    for number in range(4):
        x, y = batch(number)
        kept += [weakref.ref(x), weakref.ref(y)]
        result = pair.graph.step(x, target=y, outputs=True)
        kept += [weakref.ref(result.loss), weakref.ref(result.outputs)]
        del x, y, result
    gc.collect()
    assert [ref() for ref in kept if ref() is not None] == []


def test_graph_keys_keep_no_tensor_alive() -> None:
    pair = pipe_pair(stack(), loss_fn=None)
    kept: list[weakref.ref[Tensor]] = []
    alive: list[Tensor] = []
    for number in range(4):
        x, y = batch(number, 12)
        rows = y[:3].clone()
        kept.append(weakref.ref(rows))
        alive.append(torch.ones(100 + number))
        pair.graph.step(x, loss_fn=lambda o: nn.functional.mse_loss(o, rows))  # noqa: B023
        if not recordings(pair.graph):
            del rows
            gc.collect()
            assert kept[-1]() is None or number == 3


def test_failed_capture_keeps_no_tensor_alive() -> None:
    made: list[weakref.ref[Tensor]] = []

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            made.append(weakref.ref(y))
            return y * float(y.detach().sum())

    pair = pipe_pair(stack(Asks()), "auto")
    x, y = batch(0)
    pair.step(x, target=y)
    with pytest.warns(match="it waits"):
        pair.step(x, target=y, ran="threads")
    gc.collect()
    assert [ref() for ref in made if ref() is not None] == []


def test_old_graphs_are_dropped_before_a_new_one_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    living: list[weakref.ref[Any]] = []
    most = 0

    class Noted(EmulatedGraph):
        def __init__(self, devices: Sequence[torch.device], pools: GraphMemoryPools) -> None:
            nonlocal most
            super().__init__(devices, pools)
            living.append(weakref.ref(self))
            most = max(most, sum(ref() is not None for ref in living))

    emulate(monkeypatch, Noted)
    monkeypatch.setattr(graph_cache, "MAX_GRAPHS", 2)
    pair = pipe_pair(stack())
    for rows in (8, 8, 9, 9, 10, 10, 11, 11):
        x, y = batch(rows, rows)
        pair.step(x, target=y)
        del x, y
    assert len(living) == 4
    assert most == 2


def test_replay_has_a_timeline() -> None:
    pair = pipe_pair(stack())
    results = []
    for number in range(4):
        x, y = batch(number)
        results.append(pair.step(x, target=y))
        assert results[-1].timeline.makespan > 0
        assert pair.graph.forecast().makespan > 0
    assert results[2].timeline.makespan > 0

"""Tests of live memory during a step, measured by the CUDA allocator on virtual GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock import Pipe
from penstock.runtime.memory import AllocatorProbe
from tests.gpu.support import needs_gpu, virtual_gpus

pytestmark = needs_gpu

RANKS, CHUNKS, ROWS, SIZE = 4, 8, 512, 512
CELL = 2 * ROWS * SIZE * 4  # bytes that a block keeps per micro-batch, with its output


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * 2


def made(**options: Any) -> Pipe:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(RANKS)))
    devices = options.pop("devices", None) or virtual_gpus(RANKS)
    return Pipe(
        model, CHUNKS, options.pop("checkpoint", "never"), stages=RANKS,
        devices=devices, loss_fn=mse_loss, **options,
    )  # fmt: skip


def batch() -> Tensor:
    return torch.randn(CHUNKS * ROWS, SIZE, device="cuda:0")


def test_allocator_probe_separates_streams_of_virtual_gpus() -> None:
    first, second = penstock.virtual_devices("cuda:0", 2)
    probe = AllocatorProbe({0: first, 1: second})
    before = probe.read_live_bytes()
    with first.activate():
        kept = torch.empty(1 << 20, dtype=torch.uint8, device="cuda:0")
    assert probe.read_live_bytes()[0] - before[0] == 1 << 20
    assert probe.read_live_bytes()[1] == before[1]
    kept.record_stream(second.compute_stream)
    del kept
    # The probe counts it as freed at once, though another stream may still read it.
    assert probe.read_live_bytes()[0] == before[0]


@pytest.mark.parametrize(("schedule", "alive"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [8, 8, 8, 8])])
@pytest.mark.parametrize("runtime", ["inline", "threads"])
def test_gpu_peak_memory_matches_the_schedule(
    runtime: str, schedule: str, alive: list[int]
) -> None:
    x = batch()
    memory = made(schedule=schedule, runtime=runtime).memory(x, target=-x)
    assert memory.activation[:3] == (CELL,) * 3
    for peak, cells in zip(memory.peak, alive, strict=True):
        assert cells * CELL <= peak <= (cells + 1.5) * CELL
    assert memory.forecast.peak[:3] == tuple(CELL * cells for cells in alive[:3])
    assert all(memory.readings[-1].alive[rank] < CELL for rank in range(RANKS))


def test_gpu_memory_matches_that_of_the_cpu() -> None:
    """The CPU counts the bytes of storages, the GPU those of blocks of 512 bytes."""
    x = batch()
    there = made(schedule="1f1b").memory(x, target=-x)
    here = made(schedule="1f1b", devices=["cpu"] * RANKS).memory(x.cpu(), target=-x.cpu())
    assert here.program == there.program
    for one, other in zip(there.peak, here.peak, strict=True):
        assert one == pytest.approx(other, abs=0.01 * CELL)


def test_memory_profiling_on_gpu_has_no_side_effects() -> None:
    x = batch()
    found = []
    for looks in (False, True):
        pipe = made(schedule="1f1b")
        torch.manual_seed(1)
        losses = []
        for _ in range(2):
            losses.append(pipe.step(x, target=-x).loss)
            if looks:
                pipe.memory(x, target=-x)
        losses.append(torch.rand(3, device="cuda:0"))
        found.append([*losses, *(p.grad for p in pipe.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *found))

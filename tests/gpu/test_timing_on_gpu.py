"""Tests of step timing on a GPU: by few, reused events, or by timestamps in a captured step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock import Pipe
from penstock.device.device import Gpu
from penstock.runtime.execution import MeasuredRun
from tests.gpu.support import needs_gpu, virtual_gpus

pytestmark = needs_gpu

RANKS, CHUNKS = 2, 6


def made(devices: list[Any], **options: Any) -> Pipe:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, device="cuda:0") for _ in range(RANKS)))
    return Pipe(model, CHUNKS, "always", devices=devices, stages=RANKS, loss_fn=mse_loss, **options)


def batch() -> Tensor:
    return torch.randn(CHUNKS * 64, 64, device="cuda:0")


class Busy(nn.Module):
    """A layer that keeps its stream busy, so that the host is ahead of it."""

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(20_000_000)
        return x * 1


@pytest.mark.parametrize("runtime", ["inline", "threads"])
def test_later_steps_on_gpu_create_no_events(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made_by: list[object] = []
    kind = type(Gpu(torch.device("cuda:0"))._event_pool.record(torch.cuda.current_stream(), None))
    new = kind.__new__

    def counted(cls: Any) -> Any:
        made_by.append(cls)
        return new(cls)

    monkeypatch.setattr(kind, "__new__", staticmethod(counted))
    devices = virtual_gpus(RANKS)
    pipe, x = made(devices, schedule="1f1b", runtime=runtime), batch()
    counts = []  # of events, by step
    for _ in range(14):
        made_by.clear()
        pipe.step(x, target=x)
        torch.cuda.synchronize()  # a busy GPU would still hold the events of the step before
        counts.append(len(made_by))
    assert sum(counts[4:]) <= 10 + 2 * CHUNKS  # the starts of steps; the rest varies a little


def test_busy_stream_uses_one_event_between_two_actions() -> None:
    device = Gpu(torch.device("cuda:0"))
    with device.activate():
        torch.cuda._sleep(20_000_000)
        end = device.record_timestamp()
        assert device.record_timestamp(end) is end
        torch.cuda.synchronize()
        assert device.record_timestamp(end) is not end


@pytest.mark.parametrize("runtime", ["inline", "threads", "graph"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_timeline_on_gpu_is_complete_and_ordered(schedule: str, runtime: str) -> None:
    devices = virtual_gpus(RANKS)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64, device="cuda:0"), Busy()) for _ in range(RANKS))
    )
    pipe = Pipe(
        model, CHUNKS, "never", devices=devices, stages=RANKS, loss_fn=mse_loss, schedule=schedule,
        runtime=runtime,
    )  # fmt: skip
    x = batch()
    for _ in range(4):
        timeline = pipe.step(x, target=x).timeline
    for lane in timeline.computes:
        assert all(one.end <= other.start + 1e-6 for one, other in pairwise(lane))
    forwards = [s for lane in timeline.computes for s in lane if str(s.action)[1] == "F"]
    assert min(s.end - s.start for s in forwards) > 0.003  # each sleeps for some 10 ms


def test_kept_result_on_gpu_keeps_its_events() -> None:
    devices = virtual_gpus(RANKS)
    pipe, x = made(devices, schedule="1f1b"), batch()
    kept = pipe.step(x, target=x)
    torch.cuda.synchronize()
    measured = kept.measured
    assert isinstance(measured, MeasuredRun)
    before = measured.timeline.makespan
    fresh = MeasuredRun(measured.program, measured.timed_actions, measured.time_origins)
    for _ in range(5):
        pipe.step(x, target=x)
    torch.cuda.synchronize()
    assert fresh.timeline.makespan == pytest.approx(before)

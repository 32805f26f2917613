"""Steps on a GPU are timed: by events that are few, and used again; by stamps if captured."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock import Pipe
from penstock.device.device import Gpu
from penstock.runtime.execution import MeasuredRun

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

RANKS, CHUNKS = 2, 6


def made(places: list[Any], **options: Any) -> Pipe:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, device="cuda:0") for _ in range(RANKS)))
    return Pipe(model, CHUNKS, "always", devices=places, stages=RANKS, loss_fn=mse_loss, **options)


def batch() -> Tensor:
    return torch.randn(CHUNKS * 64, 64, device="cuda:0")


class Busy(nn.Module):
    """Keeps its stream busy, so that the host is ahead of it."""

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(20_000_000)
        return x * 1


@pytest.mark.parametrize("runtime", ["inline", "threads"])
def test_later_steps_make_no_events(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made_by: list[object] = []
    kind = type(Gpu(torch.device("cuda:0"))._event_pool.record(torch.cuda.current_stream(), None))
    new = kind.__new__

    def counted(cls: Any) -> Any:
        made_by.append(cls)
        return new(cls)

    monkeypatch.setattr(kind, "__new__", staticmethod(counted))
    places = list(penstock.virtual_devices("cuda:0", RANKS))
    pipe, x = made(places, schedule="1f1b", runtime=runtime), batch()
    for _ in range(4):
        pipe.step(x, target=x)
    torch.cuda.synchronize()
    before = len(made_by)
    for _ in range(10):
        pipe.step(x, target=x)
    assert len(made_by) - before <= 10 + 2 * CHUNKS  # where a step begins; chains differ a little


def test_a_stream_that_is_busy_has_one_event_between_two_actions() -> None:
    place = Gpu(torch.device("cuda:0"))
    with place.activate():
        torch.cuda._sleep(20_000_000)
        end = place.record_timestamp()
        assert place.record_timestamp(end) is end
        torch.cuda.synchronize()
        assert place.record_timestamp(end) is not end


@pytest.mark.parametrize("runtime", ["inline", "threads", "graph"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_what_is_measured_is_whole_and_in_order(schedule: str, runtime: str) -> None:
    places = list(penstock.virtual_devices("cuda:0", RANKS))
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64, device="cuda:0"), Busy()) for _ in range(RANKS))
    )
    pipe = Pipe(
        model, CHUNKS, "never", devices=places, stages=RANKS, loss_fn=mse_loss, schedule=schedule,
        runtime=runtime,
    )  # fmt: skip
    x = batch()
    for _ in range(4):
        timeline = pipe.step(x, target=x).timeline
    for lane in timeline.computes:
        assert all(one.end <= other.start + 1e-6 for one, other in pairwise(lane))
    forwards = [s for lane in timeline.computes for s in lane if str(s.action)[1] == "F"]
    assert min(s.end - s.start for s in forwards) > 0.003  # each sleeps for some 10 ms


def test_a_result_that_is_kept_keeps_its_events() -> None:
    places = list(penstock.virtual_devices("cuda:0", RANKS))
    pipe, x = made(places, schedule="1f1b"), batch()
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

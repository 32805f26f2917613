"""The timeline of a replay, from timestamps of devices whose clocks differ."""

from __future__ import annotations

import pytest
import torch

from penstock import lower, schedules
from penstock.device.device import GraphTimestamp
from penstock.device.nvidia import ReplayTimestamps
from penstock.runtime.cuda_graph.graph_cache import _ReplayMeasurement
from penstock.runtime.execution import MeasuredRun
from penstock.runtime.worker import TimedAction, bind_lane

DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize("apart", [0, 10**15])  # nanoseconds between the clocks
def test_replay_timeline_with_different_device_clocks(apart: int) -> None:
    program = lower(schedules.gpipe(ranks=2, chunks=1))
    marks = [
        [
            TimedAction(
                step, GraphTimestamp(device, 2 * at + 1), GraphTimestamp(device, 2 * at + 2)
            )
            for at, step in enumerate(bind_lane(program, rank))
        ]
        for rank, device in enumerate(DEVICES)
    ]
    captured = MeasuredRun(program, marks, [GraphTimestamp(device, 0) for device in DEVICES])
    for nanoseconds in (1000, 3000):
        written = {
            device: [2**60 + rank * apart + nanoseconds * torch.arange(20)]
            for rank, device in enumerate(DEVICES)
        }
        for span in _ReplayMeasurement(captured, ReplayTimestamps(written)).timeline.spans:
            assert span.end - span.start == pytest.approx(1e-9 * nanoseconds)
            assert span.start == pytest.approx(1e-9 * nanoseconds * (2 * span.step + 1))

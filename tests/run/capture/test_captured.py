"""When a replay did what: by the times that it has written, of devices whose clocks differ."""

from __future__ import annotations

import pytest
import torch

from penstock import lower, schedules
from penstock.run.call import Measured
from penstock.run.capture.captured import _Replayed
from penstock.run.worker import Mark, steps_of
from penstock.stage.places import Stamp
from penstock.stage.stamps import Times

DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize("apart", [0, 10**15])  # nanoseconds between the clocks
def test_each_replay_has_its_own_times(apart: int) -> None:
    program = lower(schedules.gpipe(ranks=2, chunks=1))
    marks = [
        [
            Mark(step, Stamp(device, 2 * at + 1), Stamp(device, 2 * at + 2))
            for at, step in enumerate(steps_of(program, rank))
        ]
        for rank, device in enumerate(DEVICES)
    ]
    captured = Measured(program, marks, [Stamp(device, 0) for device in DEVICES])
    for nanoseconds in (1000, 3000):
        written = {
            device: [2**60 + rank * apart + nanoseconds * torch.arange(20)]
            for rank, device in enumerate(DEVICES)
        }
        for span in _Replayed(captured, Times(written)).timeline.spans:
            assert span.end - span.start == pytest.approx(1e-9 * nanoseconds)
            assert span.start == pytest.approx(1e-9 * nanoseconds * (2 * span.step + 1))

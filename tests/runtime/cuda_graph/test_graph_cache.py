"""Captured steps under every schedule, the parts of a graph key, and the timeline of a replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as for_all

from penstock import lower, schedules
from penstock.device.device import GraphTimestamp
from penstock.device.nvidia import ReplayTimestamps
from penstock.runtime.cuda_graph.graph_cache import _ReplayMeasurement
from penstock.runtime.execution import MeasuredRun
from penstock.runtime.worker import bind_lane
from penstock.schedules import FAMILIES
from tests.gpu.support import Bottom, Top
from tests.runtime.cuda_graph.support import pipe_pair, recordings, stack

SCHEDULES = [name for name, family in FAMILIES.items() if family.trains]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    parts = [Top(8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 8), nn.BatchNorm1d(8)]
    more = [nn.ReLU(inplace=True), nn.Linear(8, 8), Bottom(), nn.Linear(8, 4)]
    return nn.Sequential(*parts, *more).double()


MODES = ("never", "except_last", "always")


@pytest.mark.parametrize(
    ("schedule", "mode"), [(name, MODES[at % 3]) for at, name in enumerate(SCHEDULES)]
)
def test_captured_steps_equal_inline_steps_under_every_schedule(schedule: str, mode: str) -> None:
    ranks = 4 // FAMILIES[schedule].stages_per_rank
    pair = pipe_pair(layers(), schedule=schedule, checkpoint=mode, devices=["cpu"] * ranks)
    for number in range(5):
        if number != 3:  # gradients accumulate once
            pair.each(nn.Module.zero_grad)
        pair.train(1, number)
    assert recordings(pair.graph) == [4]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by[0]


def test_change_inside_an_attribute_selects_another_recording() -> None:
    pair = pipe_pair(stack(Scaled()))
    for number, by in enumerate([1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0, 2.0]):
        for pipe in pair.both:
            pipe[1].by[0] = by
        pair.train(1, number)
    assert recordings(pair.graph) == [3, 3]


def twice(_: Any, given: Any, *made: Any) -> Any:
    """Double what a hook may replace: the output of a forward, or the gradients of a backward."""
    if made and isinstance(made[0], Tensor):
        return made[0] * 2
    return tuple(None if one is None else one * 2 for one in given)


HOOKS: dict[str, Callable[[Any], Any]] = {
    "forward": for_all.register_module_forward_hook,
    "forward pre": for_all.register_module_forward_pre_hook,
    "backward": for_all.register_module_full_backward_hook,
    "backward pre": for_all.register_module_full_backward_pre_hook,
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("which", HOOKS)
def test_global_module_hooks_select_another_recording(which: str) -> None:
    """Hooks that run before a backward were once not part of the key: replays ignored them."""
    pair = pipe_pair(stack())
    for number in range(6):
        handle = HOOKS[which](twice) if number > 2 else None
        try:
            pair.train(1, number)
        finally:
            if handle is not None:
                handle.remove()


DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize("apart", [0, 10**15])  # nanoseconds between the clocks
def test_replay_timeline_with_different_device_clocks(apart: int) -> None:
    program = lower(schedules.gpipe(ranks=2, chunks=1))
    marks = [
        [
            (step, GraphTimestamp(device, 2 * at + 1), GraphTimestamp(device, 2 * at + 2))
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

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from penstock import Compute, Pipe
from penstock.device.device import Cpu
from penstock.schedules.ir import Op
from penstock.schedules.timeline import Timeline
from tests.support import SCHEDULES, Traced, Watch, each_schedule, numbered


@each_schedule
def test_inline_runs_actions_in_the_order_of_the_simulator(schedule: str) -> None:
    seen_actions: list[str] = []
    stages = 2 * SCHEDULES[schedule]
    layers = [Traced(seen_actions.append, stage) for stage in range(stages)]
    pipe = Pipe(
        nn.Sequential(*layers), 4, "always", stages=stages, schedule=schedule, runtime="inline",
        loss_fn=torch.sum,
    )  # fmt: skip
    forecast = pipe.forecast()
    result = pipe.step(numbered(4))
    assert seen_actions == as_layers_see(result.timeline)
    assert sorted(seen_actions) == sorted(as_layers_see(forecast))


def as_layers_see(timeline: Timeline) -> list[str]:
    """Return the actions as a layer sees them: an I is a backward, and a W does not reach it."""
    actions = [s.action for s in timeline.spans if isinstance(s.action, Compute)]
    return [str(a).replace("I", "B") for a in actions if a.op is not Op.W]


def test_inline_uses_only_the_calling_thread() -> None:
    seen = set()
    look = Watch(lambda x: seen.add(threading.current_thread()))
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), look), 2, stages=2, runtime="inline")
    pipe[0].weight.register_hook(lambda gradient: seen.add(threading.current_thread()))
    pipe(torch.randn(4, 3)).sum().backward()
    assert seen == {threading.current_thread()}


@pytest.mark.parametrize("enabled", [True, False])
def test_inline_leaves_autograd_multithreading_unchanged(enabled: bool) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3)), 2, runtime="inline")
    with torch.autograd.set_multithreading_enabled(enabled):
        pipe(torch.randn(4, 3)).sum().backward()
        assert torch._C._is_multithreading_enabled() == enabled


def test_inline_activates_a_device_that_needs_it() -> None:
    active: list[bool] = []

    class HostWithContext(Cpu):
        needs_activation = True

        @contextmanager
        def activate(self) -> Iterator[None]:
            active.append(True)
            yield
            active.pop()

    seen: list[bool] = []
    layers = nn.Sequential(Watch(lambda x: seen.append(bool(active))), nn.Linear(3, 3))
    devices = [HostWithContext(), Cpu()]
    Pipe(layers, 2, stages=2, devices=devices, runtime="inline")(torch.randn(4, 3))
    assert seen
    assert all(seen)

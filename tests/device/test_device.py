"""Tests that timing records few events and reuses them."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock import Compute, Pipe, Recv
from penstock.device.device import Cpu, EventPool, GraphTimestamp, Timestamp
from penstock.runtime.worker import TimedAction, TimedActionLog
from penstock.schedules.ir import consumes


class Event:
    """An event on a counting stream, which is always behind the host, or never."""

    made = recorded = time = 0
    behind = True

    def __init__(self) -> None:
        Event.made += 1
        self.at = -1

    def record(self, stream: Any) -> None:
        Event.recorded += 1
        Event.time += 1
        self.at = Event.time

    def query(self) -> bool:
        return not Event.behind

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return float(end.at - self.at)


@pytest.fixture(autouse=True)
def _from_zero() -> None:
    Event.made = Event.recorded = Event.time = 0
    Event.behind = True


class Streamed(Cpu):
    """A device that takes timestamps by events, as a GPU does."""

    def __init__(self) -> None:
        self.timers = EventPool(Event)

    def record_timestamp(self, previous: Any = None) -> Any:
        return self.timers.record(None, previous)

    def record_send_end(self, start: Any) -> Any:
        return start

    def recycle_timestamps(self, timestamps: Iterable[Timestamp]) -> None:
        self.timers.recycle(timestamps)


def made(**options: Any) -> Pipe:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    devices = [Streamed() for _ in range(3)]
    return Pipe(
        layers,
        4,
        "always",
        stages=3,
        devices=devices,
        loss_fn=mse_loss,
        runtime="inline",
        **options,
    )


def step(pipe: Pipe) -> Any:
    x = torch.randn(8, 4)
    return pipe.step(x, target=x)


# ---- events -------------------------------------------------------------------------------


def test_event_pool_reuses_recycled_events() -> None:
    timers = EventPool(Event)
    first = timers.record(None, None)
    timers.recycle([first, first, 3.0])
    assert timers.record(None, None) is first
    assert timers.record(None, None) is not first


def test_event_pool_reuses_a_pending_event_as_the_next_start() -> None:
    timers = EventPool(Event)
    end = timers.record(None, None)
    assert timers.record(None, end) is end
    Event.behind = False  # the stream may have waited for the host
    assert timers.record(None, end) is not end


def test_event_pool_ignores_timestamps_of_other_types() -> None:
    """Those of the host clock and of a captured step are ignored."""
    timers = EventPool(Event)
    timers.recycle([0.0, GraphTimestamp(torch.device("cpu"), 0)])
    timers.record(None, None)
    assert Event.made == 1


def test_timed_action_log_recycles_its_events_when_deleted() -> None:
    device = Streamed()
    log = TimedActionLog(device)
    event: Any = device.record_timestamp()
    log.append(TimedAction(None, event, event))  # type: ignore[arg-type]
    kept = [log]
    del log
    assert device.record_timestamp() is not event
    kept.clear()
    gc.collect()
    assert device.record_timestamp() is event


# ---- training steps -----------------------------------------------------------------------


def expected(pipe: Pipe, behind: bool) -> int:
    """Return the expected number of events.

    There is one per computation, and one more for its start where a message arrived or the stream
    was idle.
    """
    program = pipe.forecast().program
    count = 1  # the start of the step: the three ranks share one device
    for rank, lane in enumerate(program.lanes):
        fresh = True
        for action in lane:
            if isinstance(action, Compute):
                got = _from_others(program, rank, action)
                count += 1 + (fresh or got or not behind)
                fresh = False
    return count


def _from_others(program: Any, rank: int, action: Compute) -> bool:
    placement = program.schedule.placement
    return any(placement[m.src] != rank for m in consumes(action, program.graph))


@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_step_records_the_fewest_events(schedule: str, behind: bool) -> None:
    Event.behind = behind
    pipe = made(schedule=schedule)
    step(pipe)
    assert Event.recorded == expected(pipe, behind)


def test_later_steps_create_no_new_events() -> None:
    pipe = made(schedule="1f1b")
    for _ in range(3):
        step(pipe)
    before = Event.made
    recorded = Event.recorded
    for _ in range(3):
        step(pipe)
    assert Event.recorded > recorded
    assert Event.made - before <= 3  # the start of each step


def test_kept_result_keeps_its_timeline() -> None:
    pipe = made(schedule="1f1b")
    kept = step(pipe)
    spans = [(s.start, s.end) for s in step(made(schedule="1f1b")).timeline.spans]
    for _ in range(4):
        step(pipe)
    found = [(s.start, s.end) for s in kept.timeline.spans]
    assert found == spans


def test_measured_timeline_is_ordered_and_complete() -> None:
    timeline = step(made(schedule="zb-h1")).timeline
    for lane in timeline.computes:
        assert all(one.end <= other.start for one, other in pairwise(lane))
        assert all(span.start < span.end for span in lane)
    assert len(timeline.spans) == sum(
        not isinstance(action, Recv) for lane in timeline.program.lanes for action in lane
    )


def test_cpu_takes_two_timestamps_per_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    now = Cpu.record_timestamp

    def counted(self: Cpu, after: Any = None) -> float:
        calls.append(0.0)
        return now(self, after)

    monkeypatch.setattr(Cpu, "record_timestamp", counted)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = Pipe(layers, 2, stages=2, devices=["cpu"] * 2, loss_fn=mse_loss, runtime="inline")
    x: Tensor = torch.randn(4, 4)
    result = pipe.step(x, target=x)
    actions = [action for lane in result.timeline.program.lanes for action in lane]
    computes = sum(isinstance(action, Compute) for action in actions)
    assert len(calls) == 1 + 2 * computes

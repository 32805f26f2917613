"""Events that tell the time are few, and used again."""

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
    """On a stream that counts, and is always behind the host, or never."""

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
    """Tells the time by events, as a GPU does."""

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
    places = [Streamed() for _ in range(3)]
    return Pipe(
        layers, 4, "always", stages=3, devices=places, loss_fn=mse_loss, runtime="inline", **options
    )


def step(pipe: Pipe) -> Any:
    x = torch.randn(8, 4)
    return pipe.step(x, target=x)


# ---- events -------------------------------------------------------------------------------


def test_an_event_that_was_given_back_is_used_again() -> None:
    timers = EventPool(Event)
    first = timers.record(None, None)
    timers.recycle([first, first, 3.0])
    assert timers.record(None, None) is first
    assert timers.record(None, None) is not first


def test_one_that_has_not_come_is_the_next_moment_too() -> None:
    timers = EventPool(Event)
    end = timers.record(None, None)
    assert timers.record(None, end) is end
    Event.behind = False  # the stream may have waited for the host
    assert timers.record(None, end) is not end


def test_moments_of_another_kind_are_not_taken() -> None:
    """The clock's, and those of a captured step."""
    timers = EventPool(Event)
    timers.recycle([0.0, GraphTimestamp(torch.device("cpu"), 0)])
    timers.record(None, None)
    assert Event.made == 1


def test_marks_are_forgotten_when_nobody_has_them() -> None:
    place = Streamed()
    marks = TimedActionLog(place)
    event: Any = place.record_timestamp()
    marks.append(TimedAction(None, event, event))  # type: ignore[arg-type]
    kept = [marks]
    del marks
    assert place.record_timestamp() is not event
    kept.clear()
    gc.collect()
    assert place.record_timestamp() is event


# ---- in steps -----------------------------------------------------------------------------


def expected(pipe: Pipe, behind: bool) -> int:
    """One a computation; one more for its start, where a message came or the stream was idle."""
    program = pipe.forecast().program
    count = 1  # where all begin: the three have one device
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
def test_as_few_are_recorded_as_tell_all(schedule: str, behind: bool) -> None:
    Event.behind = behind
    pipe = made(schedule=schedule)
    step(pipe)
    assert Event.recorded == expected(pipe, behind)


def test_later_steps_make_none() -> None:
    pipe = made(schedule="1f1b")
    for _ in range(3):
        step(pipe)
    before = Event.made
    recorded = Event.recorded
    for _ in range(3):
        step(pipe)
    assert Event.recorded > recorded
    assert Event.made - before <= 3  # where each step begins


def test_a_result_that_is_kept_keeps_its_events() -> None:
    pipe = made(schedule="1f1b")
    kept = step(pipe)
    spans = [(s.start, s.end) for s in step(made(schedule="1f1b")).timeline.spans]
    for _ in range(4):
        step(pipe)
    found = [(s.start, s.end) for s in kept.timeline.spans]
    assert found == spans


def test_what_is_measured_is_in_order_and_whole() -> None:
    timeline = step(made(schedule="zb-h1")).timeline
    for lane in timeline.computes:
        assert all(one.end <= other.start for one, other in pairwise(lane))
        assert all(span.start < span.end for span in lane)
    assert len(timeline.spans) == sum(
        not isinstance(action, Recv) for lane in timeline.program.lanes for action in lane
    )


def test_on_the_host_two_clock_readings_an_action(monkeypatch: pytest.MonkeyPatch) -> None:
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

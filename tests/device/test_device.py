"""Tests of devices: streams and events emulated on the CPU, and accelerators without them."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock import Compute, Pipe, Recv
from penstock.device.device import (
    Cpu,
    EagerAccelerator,
    EventPool,
    Gpu,
    GraphTimestamp,
    resolve_device,
    transfer,
)
from penstock.errors import ArgumentError
from penstock.runtime.worker import TimedActionLog
from penstock.schedules.ir import consumes
from penstock.stage.payload import Payload


class Event:
    """A timing event on a counting stream, which is always behind the host, or never."""

    made = recorded = time = 0
    behind = True

    def __new__(cls, enable_timing: bool = False) -> Any:
        return super().__new__(cls)

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


class Stream:
    """A stream that notes which streams it has waited for."""

    def __init__(self, device: Any = None) -> None:
        self.waited_for: list[Stream] = []

    def record_event(self) -> Stream:
        return self  # an event of this stream, as far as these tests look

    def wait_event(self, event: Stream) -> None:
        self.waited_for.append(event)

    wait_stream = wait_event


@pytest.fixture(autouse=True)
def caller_stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Let `Gpu` use these streams and events on the CPU. Return the stream of the caller."""
    Event.made = Event.recorded = Event.time = 0
    Event.behind = True
    caller = Stream()
    module = SimpleNamespace(
        Stream=Stream,
        Event=Event,
        stream=lambda stream: nullcontext(),
        device=lambda device: nullcontext(),
        current_stream=lambda device: caller,
        device_count=lambda: 0,  # a CUDA build of PyTorch asks for it, also without a GPU
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return caller


def make_gpu() -> Gpu:
    return Gpu(torch.device("cpu"))


def made(**options: Any) -> Pipe:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    options.setdefault("devices", [make_gpu() for _ in range(3)])
    return Pipe(layers, 4, "always", stages=3, loss_fn=mse_loss, runtime="inline", **options)


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
    device = make_gpu()
    log = TimedActionLog(device)
    event: Any = device.record_timestamp()
    log.append((None, event, event))  # type: ignore[arg-type]
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_cpu_timestamps_per_compute(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is alone in its thread begins an action where the last one ended."""
    calls: list[float] = []
    now = Cpu.record_timestamp

    def counted(self: Cpu, after: Any = None) -> float:
        calls.append(0.0)
        return now(self, after)

    monkeypatch.setattr(Cpu, "record_timestamp", counted)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = Pipe(layers, 2, stages=2, devices=["cpu"] * ranks, loss_fn=mse_loss, runtime="inline")
    x: Tensor = torch.randn(4, 4)
    result = pipe.step(x, target=x)
    actions = [action for lane in result.timeline.program.lanes for action in lane]
    computes = sum(isinstance(action, Compute) for action in actions)
    assert len(calls) == 1 + (2 * computes if ranks > 1 else 1 + computes)


# ---- streams ------------------------------------------------------------------------------


def test_receiver_waits_for_the_sender_alone() -> None:
    sender, receiver, other = make_gpu(), make_gpu(), make_gpu()
    payload = Payload((torch.ones(2),))
    assert transfer(payload, sender, receiver).receive_on(receiver) is payload
    assert receiver.compute_stream.waited_for == [sender.compute_stream]
    assert not other.compute_stream.waited_for


def test_step_is_ordered_with_the_streams_of_the_caller(caller_stream: Stream) -> None:
    devices = [make_gpu() for _ in range(3)]
    step(made(schedule="1f1b", devices=devices))
    first, second, third = (device.compute_stream for device in devices)
    assert caller_stream.waited_for == [first, second, third]
    assert {*first.waited_for} == {caller_stream, second}
    assert {*second.waited_for} == {caller_stream, first, third}


def test_messages_through_host_memory_use_the_copy_stream() -> None:
    gpu, tensor, buffer = make_gpu(), torch.arange(3.0), torch.zeros(3)
    copied: Any = gpu.copy_to_host([tensor], [buffer])
    assert copied is gpu.copy_stream
    assert gpu.copy_stream.waited_for == [gpu.compute_stream]
    assert torch.equal(buffer, tensor)
    (received,) = gpu.copy_from_host([buffer])
    assert torch.equal(received, tensor)
    assert gpu.compute_stream.waited_for == [gpu.copy_stream]


# ---- accelerators without streams ---------------------------------------------------------


class FakeAccelerator(EagerAccelerator):
    """An accelerator without streams, in host memory, that counts how often the host waits."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.waits = 0

    def record_timestamp(self, previous: Any = None) -> float:
        self.waits += 1
        return super().record_timestamp(previous)


@pytest.mark.parametrize("runtime", ["auto", "inline", "threads"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_eager_accelerator_trains_as_the_unsplit_model(schedule: str, runtime: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(8, 4)
    loss = sum(mse_loss(layers(part), part) / 4 for part in x.chunk(4))
    assert isinstance(loss, Tensor)
    loss.backward()
    expected_grads = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
    layers.zero_grad()
    devices = [FakeAccelerator() for _ in range(3)]
    pipe = Pipe(
        layers, 4, stages=3, devices=devices, schedule=schedule, loss_fn=mse_loss, runtime=runtime
    )
    result = pipe.step(x, target=x)
    torch.testing.assert_close(result.loss, loss.detach())
    for parameter, gradient in zip(layers.parameters(), expected_grads, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert all(device.waits for device in devices)
    assert result.timeline.makespan > 0


def test_message_to_an_eager_accelerator_is_copied() -> None:
    """The meta device stands for an accelerator with memory of its own."""
    receiver = EagerAccelerator(torch.device("meta"))
    payload = transfer(Payload((torch.ones(2), None)), Cpu(), receiver).receive_on(receiver)
    moved, missing = payload.tensors
    assert moved is not None
    assert moved.is_meta
    assert missing is None


def test_graph_runtime_on_an_eager_accelerator_is_refused() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    devices = [FakeAccelerator(), FakeAccelerator()]
    pipe = Pipe(layers, 2, stages=2, devices=devices, loss_fn=mse_loss, runtime="graph")
    with pytest.raises(ArgumentError, match="rank 0 is on cpu, which has no CUDA graphs"):
        step(pipe)


# ---- the class of a device ----------------------------------------------------------------


@pytest.fixture
def accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let PyTorch report two accelerators of the type that the test asks for."""
    kind: str = request.param
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    return kind


@pytest.mark.parametrize(
    ("accelerator", "device_class"),
    [("cuda", Gpu), ("xpu", Gpu), ("mps", EagerAccelerator)],
    indirect=["accelerator"],
)
def test_class_of_a_device_follows_from_its_streams(
    accelerator: str, device_class: type[object]
) -> None:
    device = resolve_device(accelerator)
    assert type(device) is device_class
    assert repr(device) == f"{accelerator}:1"
    assert repr(resolve_device(f"{accelerator}:0")) == f"{accelerator}:0"
    assert device.has_graphs == (accelerator == "cuda")
    with pytest.raises(ArgumentError, match=f"sees here are cpu, {accelerator}:0, {accelerator}:1"):
        resolve_device(f"{accelerator}:2")


def test_rocm_has_streams_but_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    gpu = Gpu(torch.device("cuda:0"))
    assert gpu.has_streams
    assert not gpu.has_graphs

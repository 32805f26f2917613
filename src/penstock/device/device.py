"""Where ranks compute: the CPU, a GPU, or a part of one; and how tensors get from one to another.

On a GPU each rank has one stream to compute on and one for copies. A parcel is copied on the
sender's copy stream as soon as it has been computed, and its receiver's stream waits for that
alone: nobody waits for a whole device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from penstock.errors import ArgumentError
from penstock.stage.payload import Payload

# -------------------------------------------------------------------------------------------------
# Events that tell the time on a stream, used again when nobody looks at them any more.
#
# To make one costs the host as much as to record it, and every action of every step has some. So a
# stream keeps those whose readers are gone.
# -------------------------------------------------------------------------------------------------


class EventLike(Protocol):
    """As CUDA's."""

    def record(self, stream: Any) -> None:
        """From now on it means this moment on the stream."""

    def query(self) -> bool:
        """Has the moment come?"""


E = TypeVar("E", bound=EventLike)


class EventPool(Generic[E]):
    """Those of one stream. Threads may take some and give some back at the same time."""

    def __init__(self, event_class: type[E]) -> None:
        self._event_class = event_class  # of no other use: what is of this kind may be used again
        self._free: list[E] = []

    def record(self, stream: Any, previous: E | None) -> E:
        """This moment; or `after`, if nothing was asked of the stream since, and it has not come.

        If it has, the stream may have been idle in between: the host was late.
        """
        if previous is not None and not previous.query():
            return previous
        try:
            event = self._free.pop()
        except IndexError:
            event = self._event_class()
        event.record(stream)
        return event

    def recycle(self, events: Iterable[object]) -> None:
        """Nobody reads these any more. Those of another kind are not taken."""
        found = {id(event): event for event in events if isinstance(event, self._event_class)}
        self._free += found.values()


# -------------------------------------------------------------------------------------------------


class GraphTimestamp(NamedTuple):
    """A moment of which each replay of a captured step writes down when it was."""

    device: torch.device
    slot: int


Timestamp = float | torch.cuda.Event | GraphTimestamp


class Device(Protocol):
    """What a rank needs to know of its device."""

    device: torch.device

    def activate(self) -> Any:
        """Within, this thread computes there."""

    def record_timestamp(self, previous: Timestamp | None = None) -> Timestamp:
        """A moment in the order of what is computed there.

        It may be the one that it comes `after`, if there is nothing in between.
        """

    def record_send_end(self, start: Timestamp) -> Timestamp:
        """When a message that was begun to be sent then was on its way."""

    def recycle_timestamps(self, timestamps: Iterable[Timestamp]) -> None:
        """Nobody asks for these any more."""

    def receive(self, payload: Payload) -> Payload:
        """What another rank sent, for what is computed here from now on."""

    def wait_for_caller(self, caller_streams: CallerStreams) -> None:
        """What is computed from now on comes after what the caller has asked for so far."""

    def release_to_caller(self, caller_streams: CallerStreams) -> None:
        """What the caller asks for from now on comes after what is computed so far."""


class CallerStreams:
    """The caller's current stream on each device, and an event on it, made when first needed."""

    def __init__(self) -> None:
        self._events: dict[torch.device, torch.cuda.Event] = {}

    def current(self, device: torch.device) -> torch.cuda.Stream:
        """Current on the device."""
        return torch.cuda.current_stream(device)

    def event(self, device: torch.device) -> torch.cuda.Event:
        """One event of the caller's, whoever asks first."""
        if device not in self._events:
            self._events[device] = self.current(device).record_event()
        return self._events[device]


_NULL_CONTEXT = nullcontext()


class Cpu:
    """The host itself."""

    device = torch.device("cpu")

    def __repr__(self) -> str:
        return "cpu"

    def activate(self) -> AbstractContextManager[None]:
        """Every thread is there."""
        return _NULL_CONTEXT

    def record_timestamp(self, previous: Timestamp | None = None) -> float:
        """The host's clock."""
        return time.perf_counter()

    def record_send_end(self, start: Timestamp) -> float:
        """The host's clock."""
        return time.perf_counter()

    def recycle_timestamps(self, timestamps: Iterable[Timestamp]) -> None:
        """They are numbers."""

    def receive(self, payload: Payload) -> Payload:
        """All ranks share the host's memory."""
        return payload

    def wait_for_caller(self, caller_streams: CallerStreams) -> None:
        """Everything on the host is in order as it is."""

    def release_to_caller(self, caller_streams: CallerStreams) -> None:
        """Everything on the host is in order as it is."""


class _TimingEvent(torch.cuda.Event):
    """An event that is used again: told from moments of other kinds, which are not."""

    def __new__(cls) -> _TimingEvent:
        made: _TimingEvent = super().__new__(cls, enable_timing=True)  # type: ignore[no-untyped-call]
        return made


class Gpu:
    """A CUDA device, or a group of its multiprocessors, with streams of its own."""

    def __init__(
        self,
        device: torch.device,
        name: str | None = None,
        create_stream: Callable[[], torch.cuda.Stream] | None = None,
    ) -> None:
        self.device = device
        self._name = name or str(device)
        make = create_stream or (lambda: torch.cuda.Stream(device))
        self.compute_stream, self.copy_stream = make(), make()
        self._event_pool = EventPool(_TimingEvent)

    def __repr__(self) -> str:
        return self._name

    def __deepcopy__(self, memo: Any) -> Gpu:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return resolve_device, (str(self.device),)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Within, kernels go to the compute stream."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.compute_stream):
            yield

    def record_timestamp(self, previous: Timestamp | None = None) -> Timestamp:
        """An event on the compute stream. In a layer that is captured, nobody asks for times."""
        if torch.cuda.is_current_stream_capturing():
            return 0.0
        return self._event_pool.record(
            self.compute_stream, previous if isinstance(previous, _TimingEvent) else None
        )

    def record_send_end(self, start: Timestamp) -> Timestamp:
        """The compute stream has no part in it."""
        return start

    def recycle_timestamps(self, timestamps: Iterable[Timestamp]) -> None:
        """They are used again."""
        self._event_pool.recycle(timestamps)

    def receive(self, payload: Payload) -> Payload:
        """It was copied on its way."""
        return payload

    def wait_for_caller(self, caller_streams: CallerStreams) -> None:
        """The compute stream waits for the caller's."""
        self.compute_stream.wait_event(caller_streams.event(self.device))

    def release_to_caller(self, caller_streams: CallerStreams) -> None:
        """The caller's stream waits for the compute stream."""
        caller_streams.current(self.device).wait_stream(self.compute_stream)


class InFlightPayload:
    """A parcel on its way, and the event after which its receiver may read it.

    If it is `lent`, its sender looks after the memory.
    """

    def __init__(
        self, payload: Payload, ready_event: torch.cuda.Event | None = None, borrowed: bool = False
    ) -> None:
        self._payload, self._ready_event, self._borrowed = payload, ready_event, borrowed

    def receive_on(self, receiver: Device) -> Payload:
        """The parcel, for what the receiver computes from now on."""
        if self._ready_event is not None and isinstance(receiver, Gpu):
            receiver.compute_stream.wait_event(self._ready_event)
            if not self._borrowed:
                record_stream(receiver.compute_stream, self._payload.tensors)
        return receiver.receive(self._payload)


def record_stream(stream: torch.cuda.Stream, tensors: Iterable[Tensor | None]) -> None:
    """Keep the allocator from giving their memory away before the stream has read them."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(stream)


def shares_memory(sender: Device, receiver: Device) -> bool:
    """Is what the one has computed in the other's memory already?"""
    return sender.device == receiver.device


def transfer(payload: Payload, sender: Device, receiver: Device) -> InFlightPayload:
    """Send a parcel that was computed at one place to another.

    Within one GPU nothing is copied: a copy would wait until a kernel ends, since kernels that
    multiply large matrices give none of their multiprocessors back before.
    """
    if isinstance(sender, Gpu):
        computed = sender.compute_stream.record_event()
        if shares_memory(sender, receiver):
            return InFlightPayload(payload, computed)
        sender.copy_stream.wait_event(computed)
        record_stream(sender.copy_stream, payload.tensors)
        with torch.cuda.device(sender.device), torch.cuda.stream(sender.copy_stream):
            moved = payload.map_tensors(lambda t: copy_to_device(t, receiver.device))
            return InFlightPayload(moved, sender.copy_stream.record_event())
    if isinstance(receiver, Gpu):  # from pageable memory: the host waits for the copy
        with torch.cuda.device(receiver.device), torch.cuda.stream(receiver.copy_stream):
            moved = payload.map_tensors(lambda t: copy_to_device(t, receiver.device))
            return InFlightPayload(moved, receiver.copy_stream.record_event())
    return InFlightPayload(payload)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, made on the current stream."""
    return tensor.to(device, non_blocking=device.type == "cuda", copy=True)


def resolve_device(device: Any) -> Device:
    """The place that a user means by a device."""
    if isinstance(device, Cpu | Gpu):
        return device
    named: torch.device = torch.device(device)
    if named.type == "cpu":
        return Cpu()
    if named.type != "cuda":
        raise ArgumentError(f"a stage runs on a CPU or a CUDA device, not on '{named}'")
    if (named.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(
            f"there is no '{named}' here: PyTorch sees {torch.cuda.device_count()} CUDA devices"
        )
    index = torch.cuda.current_device() if str(named) == "cuda" else named.index
    return Gpu(torch.device("cuda", index))

"""The device of a rank (the CPU, a GPU, or a part of one), and transfers between devices.

On a GPU each rank has one stream for kernels and one for copies. A message between two GPUs is
ordered by events, and the host does not wait for it:

    sender    compute stream   [ stage 0 ]--computed event
                                              |
    sender    copy stream                  [ copy ]--ready event
                                                         |
    receiver  compute stream                         [ stage 1 ]

The receiver waits for the copy of one payload only, never for a whole device. On the CPU all ranks
share the host's memory, and nothing is copied.
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

# ---- timing events -----------------------------------------------------------------------------
#
# Every action of every step records when it began and ended. Creating an event costs the host as
# much as recording it, so a stream reuses the events whose times have been read.


class EventLike(Protocol):
    """An event with the methods of `torch.cuda.Event` that the pool needs."""

    def record(self, stream: Any) -> None:
        """Let the event mark the current end of the stream."""

    def query(self) -> bool:
        """Return whether the stream has reached the event."""


E = TypeVar("E", bound=EventLike)


class EventPool(Generic[E]):
    """The timing events of one stream.

    Several threads may record and recycle at the same time. Popping from a list and extending it
    need no lock of their own.

    Args:
        event_class: A class that is used for nothing else, so that every event of this class may be
            reused.
    """

    def __init__(self, event_class: type[E]) -> None:
        self._event_class = event_class
        self._free: list[E] = []

    def record(self, stream: Any, previous: E | None) -> E:
        """Return an event for the current end of the stream.

        Args:
            stream: The stream.
            previous: The last event, if nothing was launched on the stream since. If the stream has
                not reached it yet, it marks the same moment and is returned. If it has, the stream
                may have been idle since then, and a new event is needed.
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
        """Take back events whose times have been read. Objects of other classes are ignored."""
        reusable = {id(event): event for event in events if isinstance(event, self._event_class)}
        self._free += reusable.values()


# ---- devices -----------------------------------------------------------------------------------


class GraphTimestamp(NamedTuple):
    """A point of a captured step. Each replay writes its time into this slot."""

    device: torch.device
    slot: int


Timestamp = float | torch.cuda.Event | GraphTimestamp


class Device(Protocol):
    """The interface of a device to its rank.

    A GPU queues work on a stream. `wait_for_caller` and `release_to_caller` order that stream with
    the caller's, at the start and at the end of a call. The CPU runs work when it is called, and
    there most methods do nothing.
    """

    device: torch.device

    def activate(self) -> Any:
        """Return a context in which this thread computes on the device."""

    def record_timestamp(self, previous: Timestamp | None = None) -> Timestamp:
        """Return a timestamp after everything that was launched on the device so far.

        It may be `previous`, if nothing was launched since that was recorded.
        """

    def record_send_end(self, start: Timestamp) -> Timestamp:
        """Return the timestamp at which a send ended that began at `start`."""

    def recycle_timestamps(self, timestamps: Iterable[Timestamp]) -> None:
        """Take back timestamps that have been read."""

    def receive(self, payload: Payload) -> Payload:
        """Return a payload of another rank, ready for the work that is launched next."""

    def wait_for_caller(self, caller_streams: CallerStreams) -> None:
        """Order all work that is launched from now on after the caller's work so far."""

    def release_to_caller(self, caller_streams: CallerStreams) -> None:
        """Order all work that the caller launches from now on after the device's work so far."""


class CallerStreams:
    """The caller's current stream on each device, with one event per stream for all ranks on it."""

    def __init__(self) -> None:
        self._events: dict[torch.device, torch.cuda.Event] = {}

    def current(self, device: torch.device) -> torch.cuda.Stream:
        """Return the caller's current stream on the device."""
        return torch.cuda.current_stream(device)

    def event(self, device: torch.device) -> torch.cuda.Event:
        """Return an event on the caller's stream; the first call records it."""
        # All ranks wait for one event: the caller is inside the pipe and launches no more work.
        if device not in self._events:
            self._events[device] = self.current(device).record_event()
        return self._events[device]


_NULL_CONTEXT = nullcontext()


class Cpu:
    """The host. All its ranks share memory and a clock, so most methods have nothing to do."""

    device = torch.device("cpu")

    def __repr__(self) -> str:
        return "cpu"

    def activate(self) -> AbstractContextManager[None]:
        """Return a null context: every thread computes on the host."""
        return _NULL_CONTEXT

    def record_timestamp(self, previous: Timestamp | None = None) -> float:
        """Return the time of the host's clock."""
        return time.perf_counter()

    def record_send_end(self, start: Timestamp) -> float:
        """Return the time of the host's clock."""
        return time.perf_counter()

    def recycle_timestamps(self, timestamps: Iterable[Timestamp]) -> None:
        """Do nothing: the timestamps are numbers."""

    def receive(self, payload: Payload) -> Payload:
        """Return the payload itself."""
        return payload

    def wait_for_caller(self, caller_streams: CallerStreams) -> None:
        """Do nothing: the host runs everything when it is called."""

    def release_to_caller(self, caller_streams: CallerStreams) -> None:
        """Do nothing: the host runs everything when it is called."""


class _TimingEvent(torch.cuda.Event):
    """A timing event of a pool. Its class tells it apart from timestamps that are not reusable."""

    def __new__(cls) -> _TimingEvent:
        event: _TimingEvent = super().__new__(cls, enable_timing=True)  # type: ignore[no-untyped-call]
        return event


class Gpu:
    """A CUDA device, or a group of its multiprocessors, with streams of its own.

    Args:
        device: The CUDA device.
        name: The name for messages; by default that of the device.
        create_stream: A function that creates a stream; by default a stream of the whole device.
    """

    def __init__(
        self,
        device: torch.device,
        name: str | None = None,
        create_stream: Callable[[], torch.cuda.Stream] | None = None,
    ) -> None:
        self.device = device
        self._name = name or str(device)
        make_stream = create_stream or (lambda: torch.cuda.Stream(device))
        self.compute_stream, self.copy_stream = make_stream(), make_stream()
        self._event_pool = EventPool(_TimingEvent)

    def __repr__(self) -> str:
        return self._name

    # A stream belongs to its process. A deep copy of a pipe uses the same device and streams, and
    # an unpickled pipe makes new ones.
    def __deepcopy__(self, memo: Any) -> Gpu:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return resolve_device, (str(self.device),)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Launch the kernels of this thread on the compute stream inside the context."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.compute_stream):
            yield

    def record_timestamp(self, previous: Timestamp | None = None) -> Timestamp:
        """Return an event on the compute stream, or 0.0 while the stream is captured.

        A pipe inside a layer that is being captured reports no times, and a timing event would
        become a part of the graph.
        """
        if torch.cuda.is_current_stream_capturing():
            return 0.0
        return self._event_pool.record(
            self.compute_stream, previous if isinstance(previous, _TimingEvent) else None
        )

    def record_send_end(self, start: Timestamp) -> Timestamp:
        """Return the start: the compute stream has no part in a send."""
        return start

    def recycle_timestamps(self, timestamps: Iterable[Timestamp]) -> None:
        """Return the events to the pool."""
        self._event_pool.recycle(timestamps)

    def receive(self, payload: Payload) -> Payload:
        """Return the payload itself: `transfer` has copied it to this device."""
        return payload

    def wait_for_caller(self, caller_streams: CallerStreams) -> None:
        """Let the compute stream wait for the caller's stream."""
        self.compute_stream.wait_event(caller_streams.event(self.device))

    def release_to_caller(self, caller_streams: CallerStreams) -> None:
        """Let the caller's stream wait for the compute stream."""
        caller_streams.current(self.device).wait_stream(self.compute_stream)


# ---- transfers ---------------------------------------------------------------------------------


class InFlightPayload:
    """A payload that has been sent, and the event after which the receiver may read it.

    Args:
        payload: The payload, in memory that the receiver can read.
        ready_event: The event on the sender's stream, or None if the payload is ready.
        borrowed: Whether the sender keeps the memory alive until the receiver has read it.
            Otherwise `record_stream` tells the allocator that the receiver's stream uses it.
    """

    def __init__(
        self, payload: Payload, ready_event: torch.cuda.Event | None = None, borrowed: bool = False
    ) -> None:
        self._payload, self._ready_event, self._borrowed = payload, ready_event, borrowed

    def receive_on(self, receiver: Device) -> Payload:
        """Return the payload, and order the receiver's next work after its arrival."""
        if self._ready_event is not None and isinstance(receiver, Gpu):
            receiver.compute_stream.wait_event(self._ready_event)
            if not self._borrowed:
                record_stream(receiver.compute_stream, self._payload.tensors)
        return receiver.receive(self._payload)


def record_stream(stream: torch.cuda.Stream, tensors: Iterable[Tensor | None]) -> None:
    """Keep the caching allocator from reusing the tensors' memory before the stream has read it."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(stream)


def shares_memory(sender: Device, receiver: Device) -> bool:
    """Return whether the receiver can read the sender's memory without a copy."""
    return sender.device == receiver.device


def transfer(payload: Payload, sender: Device, receiver: Device) -> InFlightPayload:
    """Send a payload from one device to another, and return it with the event of its arrival.

    Between ranks on one GPU nothing is copied. A copy would have to wait for the running kernel, as
    a kernel that multiplies large matrices releases no multiprocessor before it ends.
    """
    if isinstance(sender, Gpu):
        # The copy waits for the event of this payload, not for kernels that are launched later.
        computed = sender.compute_stream.record_event()
        if shares_memory(sender, receiver):
            return InFlightPayload(payload, computed)
        sender.copy_stream.wait_event(computed)
        record_stream(sender.copy_stream, payload.tensors)
        with torch.cuda.device(sender.device), torch.cuda.stream(sender.copy_stream):
            moved = payload.map_tensors(lambda t: copy_to_device(t, receiver.device))
            return InFlightPayload(moved, sender.copy_stream.record_event())
    if isinstance(receiver, Gpu):  # from pageable memory, so the host waits for the copy
        with torch.cuda.device(receiver.device), torch.cuda.stream(receiver.copy_stream):
            moved = payload.map_tensors(lambda t: copy_to_device(t, receiver.device))
            return InFlightPayload(moved, receiver.copy_stream.record_event())
    return InFlightPayload(payload)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device, made on the current stream."""
    return tensor.to(device, non_blocking=device.type == "cuda", copy=True)


def resolve_device(device: Any) -> Device:
    """Return the device object for a device, a string such as "cuda:0", or a device object.

    Raises:
        ArgumentError: The device is neither a CPU nor a CUDA device, or it does not exist.
    """
    if isinstance(device, Cpu | Gpu):
        return device
    named: torch.device = torch.device(device)
    if named.type == "cpu":
        return Cpu()
    if named.type != "cuda":
        raise ArgumentError(
            f"a stage runs on a CPU or a CUDA device, not on '{named}'. Use 'cpu' or 'cuda:0'."
        )
    if (named.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(
            f"there is no device '{named}': PyTorch sees {torch.cuda.device_count()} CUDA devices. "
            "Use one of these, or 'cpu'."
        )
    index = torch.cuda.current_device() if str(named) == "cuda" else named.index
    return Gpu(torch.device("cuda", index))

"""The device of a rank (the CPU, an accelerator, or a part of one), and transfers between devices.

| class            | device                                  | work                                |
|------------------|-----------------------------------------|-------------------------------------|
| Cpu              | the host                                | runs when it is called              |
| Gpu              | an accelerator with streams: CUDA, XPU  | is queued on streams of the rank    |
| EagerAccelerator | an accelerator without them: MPS        | is queued on the device's one queue |

`resolve_device` chooses the class by what PyTorch offers for the type of device.

On a GPU each rank has one stream for kernels and one for copies. A message between two GPUs is
ordered by events, and the host does not wait for it:

    sender    compute stream   [ stage 0 ]--computed event
                                              |
    sender    copy stream                  [ copy ]--ready event
                                                         |
    receiver  compute stream                         [ stage 1 ]

The receiver waits for the copy of one payload only, never for a whole device. Ranks on the CPU, or
on one accelerator, share its memory, and nothing is copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from time import perf_counter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from penstock.device.accelerator import (
    get_default_generator,
    has_nvidia_driver,
    has_streams,
    is_captured,
    list_accelerators,
    resolve_index,
    synchronize,
)
from penstock.errors import ArgumentError
from penstock.stage.payload import Payload

# ---- timing events -----------------------------------------------------------------------------
#
# Every action of every step records when it began and ended. Creating an event costs the host as
# much as recording it, so a stream reuses the events whose times have been read.


class EventLike(Protocol):
    """An event with the methods of `torch.Event` that the pool needs."""

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
        self.event_class = event_class
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
            event = self.event_class()
        event.record(stream)
        return event

    def recycle(self, events: Iterable[object]) -> None:
        """Take back events whose times have been read. Objects of other classes are ignored."""
        reusable = {id(event): event for event in events if isinstance(event, self.event_class)}
        self._free += reusable.values()


# ---- devices -----------------------------------------------------------------------------------


class GraphTimestamp(NamedTuple):
    """A point of a captured step. Each replay writes its time into this slot."""

    device: torch.device
    slot: int


Timestamp = float | torch.Event | GraphTimestamp


class Device(Protocol):
    """The interface of a device to its rank.

    A GPU queues work on a stream. `wait_for_caller` and `release_to_caller` order that stream with
    the caller's, at the start and at the end of a call. The CPU runs work when it is called, and
    there most methods do nothing.

    Attributes:
        device: PyTorch's name of the device.
        needs_activation: Whether `activate` has anything to do.
        has_streams: Whether the rank queues its work on streams of its own.
        has_graphs: Whether a step can be captured as a CUDA graph and replayed.
        copies_received: Whether the rank copies what it receives from a rank on the same device.
    """

    device: torch.device
    needs_activation: bool
    has_streams: bool
    has_graphs: bool
    copies_received: bool

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

    def record_event(self) -> torch.Event | None:
        """Return an event after everything that was launched so far, or None without streams."""

    def copy_to_host(
        self, tensors: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> torch.Event | None:
        """Copy tensors into host memory. Return an event to wait for, or None if they are there."""

    def copy_from_host(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Return copies on the device, for the work that is launched next."""

    def list_stream_handles(self) -> list[int]:
        """Return the handles by which PyTorch's allocator knows the streams of this rank."""

    def wait_for_caller(self, caller_streams: CallerStreams) -> None:
        """Order all work that is launched from now on after the caller's work so far."""

    def release_to_caller(self, caller_streams: CallerStreams) -> None:
        """Order all work that the caller launches from now on after the device's work so far."""


class CallerStreams:
    """The caller's current stream on each device, with one event per stream for all ranks on it."""

    def __init__(self) -> None:
        self._events: dict[torch.device, torch.Event] = {}

    def current(self, device: torch.device) -> torch.Stream:
        """Return the caller's current stream on the device."""
        stream: torch.Stream = torch.get_device_module(device).current_stream(device)
        return stream

    def event(self, device: torch.device) -> torch.Event:
        """Return an event on the caller's stream; the first call records it."""
        # All ranks wait for one event: the caller is inside the pipe and launches no more work.
        if device not in self._events:
            self._events[device] = self.current(device).record_event()
        return self._events[device]


_NULL_CONTEXT = nullcontext()
_STREAM_HANDLES = ("cuda_stream", "sycl_queue")  # attributes of a stream, by device type


class Cpu:
    """The host. All its ranks share memory and a clock, so most methods have nothing to do."""

    device = torch.device("cpu")
    needs_activation = has_streams = has_graphs = copies_received = False

    def __repr__(self) -> str:
        return str(self.device)

    def activate(self) -> AbstractContextManager[Any]:
        """Return a null context: every thread computes on the host."""
        return _NULL_CONTEXT

    def record_timestamp(self, previous: Timestamp | None = None) -> float:
        """Return the time of the host's clock."""
        return perf_counter()

    def record_send_end(self, start: Timestamp) -> float:
        """Return the time of the host's clock."""
        return perf_counter()

    def recycle_timestamps(self, timestamps: Iterable[Timestamp]) -> None:
        """Do nothing: the timestamps are numbers."""

    def record_event(self) -> None:
        """Return None: work has ended when its call returns."""

    def copy_to_host(self, tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Copy the tensors, and wait for it."""
        for tensor, buffer in zip(tensors, buffers, strict=True):
            buffer.copy_(tensor)

    def copy_from_host(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Return copies on the device, and wait for them."""
        return [copy_to_device(buffer, self.device) for buffer in buffers]

    def list_stream_handles(self) -> list[int]:
        """Return an empty list."""
        return []

    def wait_for_caller(self, caller_streams: CallerStreams) -> None:
        """Do nothing: the host runs everything when it is called."""

    def release_to_caller(self, caller_streams: CallerStreams) -> None:
        """Do nothing: the host runs everything when it is called."""


class EagerAccelerator(Cpu):
    """An accelerator without streams, or whose streams PyTorch does not offer, such as MPS.

    It runs the work of all its ranks in the order of their calls, and in order with the caller's.
    Only copies to another device and timestamps wait for it.
    """

    needs_activation = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def activate(self) -> AbstractContextManager[Any]:
        """Make the device the current one of this thread inside the context."""
        return torch.accelerator.device_index(self.device.index)

    def record_timestamp(self, previous: Timestamp | None = None) -> float:
        """Wait for the device, and return the time of the host's clock."""
        synchronize(self.device)
        return perf_counter()

    def record_send_end(self, start: Timestamp) -> float:
        """Wait for the device, and return the time of the host's clock."""
        return self.record_timestamp()


@cache
def _make_timing_event_class(event_class: type[torch.Event]) -> type[torch.Event]:
    """Return the class of the timing events of all pools.

    Its class tells such an event apart from timestamps that are not reusable.
    """

    class TimingEvent(event_class):  # type: ignore[misc, valid-type]
        def __new__(cls) -> Any:
            return super().__new__(cls, enable_timing=True)

    return TimingEvent


class Gpu:
    """An accelerator with streams, or a group of its multiprocessors, with streams of its own.

    Streams and events are those of the device type's module, such as `torch.cuda.Stream`. Their
    methods do not check their arguments in older releases of PyTorch: given a plain `torch.Stream`
    or `torch.Event`, they would read memory as something else.

    Args:
        device: The accelerator.
        name: The name for messages; by default that of the device.
        create_stream: A function that creates a stream; by default a stream of the whole device.

    Attributes:
        module: The module of the device type, such as `torch.cuda`.
    """

    needs_activation = has_streams = True
    copies_received = False

    def __init__(
        self,
        device: torch.device,
        name: str | None = None,
        create_stream: Callable[[], Any] | None = None,
    ) -> None:
        self.device = device
        self.has_graphs = has_nvidia_driver(device.type)
        self._name = name or str(device)
        self.module = torch.get_device_module(device)
        make_stream = create_stream or (lambda: self.module.Stream(device))
        self.compute_stream, self.copy_stream = make_stream(), make_stream()
        self._event_pool = EventPool(_make_timing_event_class(self.module.Event))

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
        with self.module.device(self.device), self.module.stream(self.compute_stream):
            yield

    def record_timestamp(self, previous: Timestamp | None = None) -> Timestamp:
        """Return an event on the compute stream, or 0.0 while the stream is captured.

        A pipe inside a layer that is being captured reports no times, and a timing event would
        become a part of the graph.
        """
        if is_captured(self.device):
            return 0.0
        reusable = previous if isinstance(previous, self._event_pool.event_class) else None
        return self._event_pool.record(self.compute_stream, reusable)

    def record_send_end(self, start: Timestamp) -> Timestamp:
        """Return the start: the compute stream has no part in a send."""
        return start

    def recycle_timestamps(self, timestamps: Iterable[Timestamp]) -> None:
        """Return the events to the pool."""
        self._event_pool.recycle(timestamps)

    def record_event(self) -> torch.Event:
        """Return an event on the compute stream."""
        event: torch.Event = self.compute_stream.record_event()
        return event

    def copy_to_host(self, tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> torch.Event:
        """Copy the tensors into pinned memory, on the copy stream beside the computation."""
        self.copy_stream.wait_event(self.record_event())
        # Without this the caching allocator could reuse the tensors while they are copied.
        record_stream(self.copy_stream, tensors)
        with self.module.stream(self.copy_stream):
            for tensor, buffer in zip(tensors, buffers, strict=True):
                buffer.copy_(tensor, non_blocking=True)
        copied: torch.Event = self.copy_stream.record_event()
        return copied

    def copy_from_host(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Copy the buffers on the copy stream, and let the compute stream wait for that."""
        with self.module.stream(self.copy_stream):
            received = [buffer.to(self.device, non_blocking=True) for buffer in buffers]
        self.compute_stream.wait_event(self.copy_stream.record_event())
        record_stream(self.compute_stream, received)
        return received

    def list_stream_handles(self) -> list[int]:
        """Return the native handles of both streams, or an empty list where they have none."""
        names = [name for name in _STREAM_HANDLES if hasattr(self.compute_stream, name)]
        return [getattr(s, name) for name in names for s in (self.compute_stream, self.copy_stream)]

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
        self, payload: Payload, ready_event: torch.Event | None = None, borrowed: bool = False
    ) -> None:
        self._payload, self._ready_event, self._borrowed = payload, ready_event, borrowed

    def receive_on(self, receiver: Device) -> Payload:
        """Return the payload, and order the receiver's next work after its arrival."""
        if self._ready_event is not None and isinstance(receiver, Gpu):
            receiver.compute_stream.wait_event(self._ready_event)
            if not self._borrowed:
                record_stream(receiver.compute_stream, self._payload.tensors)
        if receiver.copies_received:
            return self._payload.map_tensors(Tensor.clone)
        return self._payload


def record_stream(stream: torch.Stream, tensors: Iterable[Tensor | None]) -> None:
    """Keep the caching allocator from reusing the tensors' memory before the stream has read it."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_cpu:
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
        with sender.module.device(sender.device), sender.module.stream(sender.copy_stream):
            moved = payload.map_tensors(lambda t: copy_to_device(t, receiver.device))
            return InFlightPayload(moved, sender.copy_stream.record_event())
    if isinstance(receiver, Gpu):  # from pageable memory, so the host waits for the copy
        with receiver.module.device(receiver.device), receiver.module.stream(receiver.copy_stream):
            moved = payload.map_tensors(lambda t: copy_to_device(t, receiver.device))
            return InFlightPayload(moved, receiver.copy_stream.record_event())
    if sender.device != receiver.device:  # without streams the host waits for the copy
        payload = payload.map_tensors(lambda t: copy_to_device(t, receiver.device))
    return InFlightPayload(payload)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device, made on the current stream."""
    return tensor.to(device, non_blocking=has_streams(device.type), copy=True)


def resolve_device(device: Any) -> Device:
    """Return the device object for a device, a string such as "cuda:0", or a device object.

    Raises:
        ArgumentError: The device does not exist, or PyTorch does not see it.
    """
    if isinstance(device, Cpu | Gpu):
        return device
    available = list_accelerators()
    try:
        named: torch.device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        names = ", ".join(map(str, ("cpu", *available)))
        raise ArgumentError(
            f"{device!r} is not a device. The devices that PyTorch sees here are {names}; a GPU is "
            "called 'cuda:0'."
        ) from error
    if named.type == "cpu":
        return Cpu()
    if torch.device(named.type, named.index or 0) not in available:
        names = ", ".join(map(str, ("cpu", *available)))
        raise ArgumentError(
            f"a stage cannot run on '{named}'. The devices that PyTorch sees here are {names}."
        )
    named = resolve_index(named)
    return Gpu(named) if has_streams(named.type) else EagerAccelerator(named)


# ---- default generators ------------------------------------------------------------------------


def read_rng_states(devices: Iterable[torch.device]) -> list[Tensor]:
    """Return the states of the default generators of the CPU and of these devices."""
    states = [torch.default_generator.get_state()]
    for name in sorted({str(device) for device in devices if device.type != "cpu"}):
        states.append(get_default_generator(torch.device(name)).get_state())
    return states


def are_same_rng_states(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Return whether the states of generators, which are bytes on the host, are the same."""
    # In every call, and `torch.equal` takes three times as long.
    return [*map(_read_bytes, first)] == [*map(_read_bytes, second)]


def _read_bytes(state: Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.nbytes)

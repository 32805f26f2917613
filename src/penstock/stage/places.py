"""Where ranks compute: the CPU, a GPU, or a part of one; and how tensors get from one to another.

On a GPU each rank has one stream to compute on and one for copies. A parcel is copied on the
sender's copy stream as soon as it has been computed, and its receiver's stream waits for that
alone: nobody waits for a whole device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.errors import ArgumentError
from penstock.stage.parcel import Parcel
from penstock.stage.timing import Timers


class Stamp(NamedTuple):
    """A moment of which each replay of a captured step writes down when it was."""

    device: torch.device
    number: int


Moment = float | torch.cuda.Event | Stamp


class Place(Protocol):
    """What a rank needs to know of its device."""

    device: torch.device

    def entered(self) -> Any:
        """Within, this thread computes there."""

    def now(self, after: Moment | None = None) -> Moment:
        """A moment in the order of what is computed there.

        It may be the one that it comes `after`, if there is nothing in between.
        """

    def sent(self, start: Moment) -> Moment:
        """When a message that was begun to be sent then was on its way."""

    def forget(self, moments: Iterable[Moment]) -> None:
        """Nobody asks for these any more."""

    def arrived(self, parcel: Parcel) -> Parcel:
        """What another rank sent, for what is computed here from now on."""

    def join(self, streams: Streams) -> None:
        """What is computed from now on comes after what the caller has asked for so far."""

    def part(self, streams: Streams) -> None:
        """What the caller asks for from now on comes after what is computed so far."""


class Streams:
    """The caller's current stream on each device, and an event on it, made when first needed."""

    def __init__(self) -> None:
        self._events: dict[torch.device, torch.cuda.Event] = {}

    def of(self, device: torch.device) -> torch.cuda.Stream:
        """Current on the device."""
        return torch.cuda.current_stream(device)

    def event(self, device: torch.device) -> torch.cuda.Event:
        """One event of the caller's, whoever asks first."""
        if device not in self._events:
            self._events[device] = self.of(device).record_event()
        return self._events[device]


_NOTHING_TO_ENTER = nullcontext()


class Cpu:
    """The host itself."""

    device = torch.device("cpu")

    def __repr__(self) -> str:
        return "cpu"

    def entered(self) -> AbstractContextManager[None]:
        """Every thread is there."""
        return _NOTHING_TO_ENTER

    def now(self, after: Moment | None = None) -> float:
        """The host's clock."""
        return time.perf_counter()

    def sent(self, start: Moment) -> float:
        """The host's clock."""
        return time.perf_counter()

    def forget(self, moments: Iterable[Moment]) -> None:
        """They are numbers."""

    def arrived(self, parcel: Parcel) -> Parcel:
        """All ranks share the host's memory."""
        return parcel

    def join(self, streams: Streams) -> None:
        """Everything on the host is in order as it is."""

    def part(self, streams: Streams) -> None:
        """Everything on the host is in order as it is."""


class _Timer(torch.cuda.Event):
    """An event that is used again: told from moments of other kinds, which are not."""

    def __new__(cls) -> _Timer:
        made: _Timer = super().__new__(cls, enable_timing=True)  # type: ignore[no-untyped-call]
        return made


class Gpu:
    """A CUDA device, or a group of its multiprocessors, with streams of its own."""

    def __init__(
        self,
        device: torch.device,
        name: str | None = None,
        stream: Callable[[], torch.cuda.Stream] | None = None,
    ) -> None:
        self.device = device
        self._name = name or str(device)
        make = stream or (lambda: torch.cuda.Stream(device))
        self.compute, self.copy = make(), make()
        self._timers = Timers(_Timer)

    def __repr__(self) -> str:
        return self._name

    def __deepcopy__(self, memo: Any) -> Gpu:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return place_at, (str(self.device),)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within, kernels go to the compute stream."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.compute):
            yield

    def now(self, after: Moment | None = None) -> Moment:
        """An event on the compute stream. In a layer that is captured, nobody asks for times."""
        if torch.cuda.is_current_stream_capturing():
            return 0.0
        return self._timers.now(self.compute, after if isinstance(after, _Timer) else None)

    def sent(self, start: Moment) -> Moment:
        """The compute stream has no part in it."""
        return start

    def forget(self, moments: Iterable[Moment]) -> None:
        """They are used again."""
        self._timers.give_back(moments)

    def arrived(self, parcel: Parcel) -> Parcel:
        """It was copied on its way."""
        return parcel

    def join(self, streams: Streams) -> None:
        """The compute stream waits for the caller's."""
        self.compute.wait_event(streams.event(self.device))

    def part(self, streams: Streams) -> None:
        """The caller's stream waits for the compute stream."""
        streams.of(self.device).wait_stream(self.compute)


class Delivery:
    """A parcel on its way, and the event after which its receiver may read it.

    If it is `lent`, its sender looks after the memory.
    """

    def __init__(
        self, parcel: Parcel, copied: torch.cuda.Event | None = None, lent: bool = False
    ) -> None:
        self._parcel, self._copied, self._lent = parcel, copied, lent

    def taken(self, receiver: Place) -> Parcel:
        """The parcel, for what the receiver computes from now on."""
        if self._copied is not None and isinstance(receiver, Gpu):
            receiver.compute.wait_event(self._copied)
            if not self._lent:
                used_on(receiver.compute, self._parcel.tensors)
        return receiver.arrived(self._parcel)


def used_on(stream: torch.cuda.Stream, tensors: Iterable[Tensor | None]) -> None:
    """Keep the allocator from giving their memory away before the stream has read them."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(stream)


def within_reach(sender: Place, receiver: Place) -> bool:
    """Is what the one has computed in the other's memory already?"""
    return sender.device == receiver.device


def carry(parcel: Parcel, sender: Place, receiver: Place) -> Delivery:
    """Send a parcel that was computed at one place to another.

    Within one GPU nothing is copied: a copy would wait until a kernel ends, since kernels that
    multiply large matrices give none of their multiprocessors back before.
    """
    if isinstance(sender, Gpu):
        computed = sender.compute.record_event()
        if within_reach(sender, receiver):
            return Delivery(parcel, computed)
        sender.copy.wait_event(computed)
        used_on(sender.copy, parcel.tensors)
        with torch.cuda.device(sender.device), torch.cuda.stream(sender.copy):
            moved = parcel.moved(lambda t: copy(t, receiver.device))
            return Delivery(moved, sender.copy.record_event())
    if isinstance(receiver, Gpu):  # from pageable memory: the host waits for the copy
        with torch.cuda.device(receiver.device), torch.cuda.stream(receiver.copy):
            moved = parcel.moved(lambda t: copy(t, receiver.device))
            return Delivery(moved, receiver.copy.record_event())
    return Delivery(parcel)


def copy(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, made on the current stream."""
    return tensor.to(device, non_blocking=device.type == "cuda", copy=True)


def place_at(device: Any) -> Place:
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

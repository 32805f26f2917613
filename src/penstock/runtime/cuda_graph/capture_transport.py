"""Messages between the ranks of a captured step.

All ranks run in one thread, one action after another, so a message has always been sent when it is
received. Between streams, one CUDA event per message orders the receiver after the sender. Within
one device nothing is copied: the receiver reads the sender's memory.

That memory must not be reused before the receiver has read it. `Tensor.record_stream` does not
help here. Under capture the allocator keeps a block that was given to `record_stream` until the
capture ends, so memory would grow with the number of micro-batches. Instead, the sender keeps each
payload until the receiver has released it. It frees the payload the next time it receives a message
from that receiver, because its stream then waits for everything the receiver has read.

    rank 0   0F0 ─┐ sends x            1B0 has dropped x   ┌─ 0B0: waits for g, then frees x
    rank 1        └─ 1F0 ───────────── 1B0 ── sends g ─────┘

A value that many stages use (a mask, the rotation of positions) goes from one stage to all of them.
Each of these stages also waits for the stage before it, which has waited for the value itself. The
second wait would be one more edge of the graph that orders nothing. A graph with many such edges
runs several times slower, so each rank keeps a vector clock (`_Clock`) and leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.device.device import Device, InFlightPayload, shares_memory, transfer
from penstock.runtime.transport import Transport
from penstock.schedules.ir import Message
from penstock.stage.payload import Payload
from penstock.torch_compat import get_storage_use_count


class BorrowedStorage:
    """The memory of one payload, which belongs to the sender and is read by the receiver."""

    def __init__(self, payload: Payload) -> None:
        tensors = [tensor for tensor in payload.tensors if tensor is not None]
        self._storages = [tensor.untyped_storage() for tensor in tensors]

    @property
    def is_released(self) -> bool:
        """Return whether this object holds the last reference to the memory."""
        counts = [get_storage_use_count(storage) for storage in self._storages]
        return max(counts, default=1) <= 1


# The work that a stream is ordered after: for each rank, how many of its actions that have sent.
_Clock = list[int]


class _SentPayload(NamedTuple):
    delivery: InFlightPayload
    released: list[BorrowedStorage]  # earlier payloads of the receiver that the sender is done with
    sender: int
    clock: _Clock  # of the sender, with this message


class CaptureTransport:
    """The transport of a captured step: all ranks, in one thread."""

    def __init__(self, devices: Sequence[Device], placement: Sequence[int]) -> None:
        self.devices, self.placement = devices, placement
        self.sent: dict[Message, _SentPayload] = {}
        self.borrowed: dict[tuple[int, int], list[BorrowedStorage]] = {}  # by owner and reader
        self.clocks: list[_Clock] = [[0] * len(devices) for _ in devices]

    def endpoint(self, rank: int) -> Transport:
        """Return the transport of one rank."""
        return _CaptureEndpoint(self, rank)

    def take_released(self, owner: int, reader: int) -> list[BorrowedStorage]:
        """Remove and return the owner's payloads that the reader has released."""
        borrowed = self.borrowed.get((owner, reader), [])
        released = [storage for storage in borrowed if storage.is_released]
        self.borrowed[owner, reader] = [s for s in borrowed if s not in released]
        return released


class _CaptureEndpoint:
    def __init__(self, transport: CaptureTransport, rank: int) -> None:
        self._transport, self._rank = transport, rank
        self._device = transport.devices[rank]
        self._posted: list[Message] = []
        self._last_sender: tuple[int, int, bool] | None = None  # stage, micro-batch, whether an F

    def send(self, message: Message, payload: Payload) -> None:
        """Make the payload available to its receiver."""
        receiver = self._transport.placement[message.dst]
        receiver_device = self._transport.devices[receiver]
        # All messages of one action are ready at the same moment, that of the first.
        action = message.src, message.microbatch, message.src < message.dst
        is_first, self._last_sender = action != self._last_sender, action
        clock = self._transport.clocks[self._rank]
        clock[self._rank] += is_first
        # The message's event is recorded after this rank's last read of these payloads. They travel
        # with the message, and their owner frees them once its stream has waited for the event. It
        # may leave out the events of further messages, so these carry none.
        released = self._transport.take_released(receiver, self._rank) if is_first else []
        if shares_memory(self._device, receiver_device):
            self._transport.borrowed.setdefault((self._rank, receiver), []).append(
                BorrowedStorage(payload)
            )
            delivery = InFlightPayload(payload, self._device.record_event(), is_borrowed=True)
        else:  # between devices the payload is copied, and the copy is kept until the capture ends
            delivery = transfer(payload, self._device, receiver_device)
        self._transport.sent[message] = _SentPayload(delivery, released, self._rank, clock[:])

    def recv(self, message: Message) -> Callable[[], Payload]:
        """Return a function that returns the payload. The sender has sent it already."""
        self._posted.append(message)
        return lambda: self._receive(message)

    def _receive(self, message: Message) -> Payload:
        delivery, released, _, clock = self._transport.sent[message]
        if delivery.is_borrowed:
            self._order_after(message)
        payload = delivery.receive_on(self._device, is_ordered=delivery.is_borrowed)
        own_clock = self._transport.clocks[self._rank]
        own_clock[:] = map(max, own_clock, clock)
        # This rank's stream now waits for the sender, so its memory may be reused from here on.
        released.clear()
        self._posted.remove(message)
        del self._transport.sent[message]
        return payload

    def _order_after(self, message: Message) -> None:
        """Order this rank after a message, and after the others that the same action consumes.

        The latest message comes first: its sender has often waited for the others.
        """
        sent = self._transport.sent
        together = [m for m in self._posted if m[1:] == message[1:] and m in sent]
        own_clock = self._transport.clocks[self._rank]
        for other in sorted(together, key=lambda m: sum(sent[m].clock), reverse=True):
            delivery, _, sender, clock = sent[other]
            if delivery.is_borrowed and own_clock[sender] < clock[sender]:
                delivery.receive_on(self._device)
                own_clock[:] = map(max, own_clock, clock)

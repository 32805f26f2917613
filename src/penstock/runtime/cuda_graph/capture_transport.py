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


class _SentPayload(NamedTuple):
    delivery: InFlightPayload
    released: list[BorrowedStorage]  # earlier payloads of the receiver that the sender is done with


class CaptureTransport:
    """The transport of a captured step: all ranks, in one thread."""

    def __init__(self, devices: Sequence[Device], placement: Sequence[int]) -> None:
        self.devices, self.placement = devices, placement
        self.sent: dict[Message, _SentPayload] = {}
        self.borrowed: dict[tuple[int, int], list[BorrowedStorage]] = {}  # by owner and reader

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

    def send(self, message: Message, payload: Payload) -> None:
        """Make the payload available to its receiver."""
        receiver = self._transport.placement[message.dst]
        receiver_device = self._transport.devices[receiver]
        # The message's event is recorded after this rank's last read of these payloads. They travel
        # with the message, and their owner frees them once its stream has waited for the event.
        released = self._transport.take_released(receiver, self._rank)
        if shares_memory(self._device, receiver_device):
            self._transport.borrowed.setdefault((self._rank, receiver), []).append(
                BorrowedStorage(payload)
            )
            delivery = InFlightPayload(payload, self._device.record_event(), borrowed=True)
        else:  # between devices the payload is copied, and the copy is kept until the capture ends
            delivery = transfer(payload, self._device, receiver_device)
        self._transport.sent[message] = _SentPayload(delivery, released)

    def recv(self, message: Message) -> Callable[[], Payload]:
        """Return a function that returns the payload. The sender has sent it already."""
        return lambda: self._receive(message)

    def _receive(self, message: Message) -> Payload:
        delivery, released = self._transport.sent.pop(message)
        payload = delivery.receive_on(self._device)
        # This rank's stream now waits for the sender, so its memory may be reused from here on.
        released.clear()
        return payload

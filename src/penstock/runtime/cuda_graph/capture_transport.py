"""Messages between the ranks of a step that is captured: one event each, and nothing is copied
within a device.

The memory of a message is its sender's, and the receiver reads it. `record_stream`, which keeps it
from being used again too soon, keeps it until the capture ends: memory would grow with the number
of micro-batches. Here a message is a loan. It is returned when the receiver has dropped it, and
freed when the sender waits for a later message of the receiver's, as it does all the time.

    rank 0   0F0 ─┐ lends x            1B0 has dropped x   ┌─ 0B0: waits for g, and x is freed
    rank 1        └─ 1F0 ───────────── 1B0 ── sends g ─────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from penstock.device.device import Device, Gpu, InFlightPayload, shares_memory, transfer
from penstock.runtime.transport import Transport
from penstock.schedules.ir import Message
from penstock.stage.payload import Payload


class BorrowedStorage:
    """Memory of one rank that another reads."""

    def __init__(self, payload: Payload) -> None:
        tensors = [tensor for tensor in payload.tensors if tensor is not None]
        self._storages = [tensor.untyped_storage() for tensor in tensors]

    @property
    def is_released(self) -> bool:
        """Is this all that holds it?"""
        counts = [torch._C._storage_Use_Count(storage._cdata) for storage in self._storages]
        return max(counts, default=1) <= 1


class _SentPayload(NamedTuple):
    delivery: InFlightPayload
    released: list[BorrowedStorage]  # before it, by who has sent it to who receives it


class CaptureTransport:
    """What joins the ranks, all in one thread."""

    def __init__(self, devices: Sequence[Device], placement: Sequence[int]) -> None:
        self.devices, self.placement = devices, placement
        self.sent: dict[Message, _SentPayload] = {}
        self.borrowed: dict[tuple[int, int], list[BorrowedStorage]] = {}  # by owner and reader

    def endpoint(self, rank: int) -> Transport:
        """The rank's end."""
        return _CaptureEndpoint(self, rank)

    def take_released(self, owner: int, reader: int) -> list[BorrowedStorage]:
        """Those that the reader has returned by now."""
        loans = self.borrowed.get((owner, reader), [])
        returned = [loan for loan in loans if loan.is_released]
        self.borrowed[owner, reader] = [loan for loan in loans if loan not in returned]
        return returned


class _CaptureEndpoint:
    def __init__(self, transport: CaptureTransport, rank: int) -> None:
        self._transport, self._rank = transport, rank
        self._device = transport.devices[rank]

    def send(self, message: Message, payload: Payload) -> None:
        """From here on, who receives it may read it."""
        receiver = self._transport.placement[message.dst]
        place = self._transport.devices[receiver]
        back = self._transport.take_released(receiver, self._rank)
        if shares_memory(self._device, place):
            computed = (
                self._device.compute_stream.record_event()
                if isinstance(self._device, Gpu)
                else None
            )
            self._transport.borrowed.setdefault((self._rank, receiver), []).append(
                BorrowedStorage(payload)
            )
            delivery = InFlightPayload(payload, computed, borrowed=True)
        else:  # its copy is kept until the capture ends
            delivery = transfer(payload, self._device, place)
        self._transport.sent[message] = _SentPayload(delivery, back)

    def recv(self, message: Message) -> Callable[[], Payload]:
        """It has been sent already: they take turns."""
        return lambda: self._receive(message)

    def _receive(self, message: Message) -> Payload:
        delivery, returned = self._transport.sent.pop(message)
        parcel = delivery.receive_on(self._device)
        returned.clear()  # what is computed here from now on comes after all that read them
        return parcel

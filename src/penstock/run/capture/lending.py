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

from penstock.ir import Message
from penstock.run.transport import Transport
from penstock.stage.parcel import Parcel
from penstock.stage.places import Delivery, Gpu, Place, carry, within_reach


class Loan:
    """Memory of one rank that another reads."""

    def __init__(self, parcel: Parcel) -> None:
        tensors = [tensor for tensor in parcel.tensors if tensor is not None]
        self._storages = [tensor.untyped_storage() for tensor in tensors]

    @property
    def returned(self) -> bool:
        """Is this all that holds it?"""
        counts = [torch._C._storage_Use_Count(storage._cdata) for storage in self._storages]
        return max(counts, default=1) <= 1


class _Sent(NamedTuple):
    delivery: Delivery
    returned: list[Loan]  # before it, by who has sent it to who receives it


class Lending:
    """What joins the ranks, all in one thread."""

    def __init__(self, places: Sequence[Place], placement: Sequence[int]) -> None:
        self.places, self.placement = places, placement
        self.sent: dict[Message, _Sent] = {}
        self.loans: dict[tuple[int, int], list[Loan]] = {}  # by owner and reader

    def end(self, rank: int) -> Transport:
        """The rank's end."""
        return _End(self, rank)

    def taken_back(self, owner: int, reader: int) -> list[Loan]:
        """Those that the reader has returned by now."""
        loans = self.loans.get((owner, reader), [])
        returned = [loan for loan in loans if loan.returned]
        self.loans[owner, reader] = [loan for loan in loans if loan not in returned]
        return returned


class _End:
    def __init__(self, lending: Lending, rank: int) -> None:
        self._all, self._rank = lending, rank
        self._place = lending.places[rank]

    def send(self, message: Message, parcel: Parcel) -> None:
        """From here on, who receives it may read it."""
        receiver = self._all.placement[message.dst]
        place = self._all.places[receiver]
        back = self._all.taken_back(receiver, self._rank)
        if within_reach(self._place, place):
            computed = self._place.compute.record_event() if isinstance(self._place, Gpu) else None
            self._all.loans.setdefault((self._rank, receiver), []).append(Loan(parcel))
            delivery = Delivery(parcel, computed, lent=True)
        else:  # its copy is kept until the capture ends
            delivery = carry(parcel, self._place, place)
        self._all.sent[message] = _Sent(delivery, back)

    def recv(self, message: Message) -> Callable[[], Parcel]:
        """It has been sent already: they take turns."""
        return lambda: self._take(message)

    def _take(self, message: Message) -> Parcel:
        delivery, returned = self._all.sent.pop(message)
        parcel = delivery.taken(self._place)
        returned.clear()  # what is computed here from now on comes after all that read them
        return parcel

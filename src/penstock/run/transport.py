"""What carries messages between ranks; all that differs between runtimes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from penstock.ir import Message
from penstock.stage.parcel import Parcel
from penstock.stage.places import Delivery, Place, carry


class Stopped(Exception):
    """Another rank has failed; there is no sense in going on."""


class Transport(Protocol):
    """One rank's end."""

    def send(self, message: Message, parcel: Parcel) -> None:
        """Hand over; does not wait for the receiver."""

    def recv(self, message: Message) -> Callable[[], Parcel]:
        """Ask for a message; the call that it gives waits for it."""


class Boxes(Protocol):
    """What joins the ranks of one process."""

    def end(self, rank: int) -> Transport:
        """The rank's end."""


class Mailboxes:
    """One box a rank, in one process. Anybody puts in, its owner takes out."""

    def __init__(self, places: Sequence[Place], placement: Sequence[int]) -> None:
        self.places, self.placement = places, placement
        self.stopped = False
        self.boxes: list[SimpleQueue[tuple[Message, Delivery] | None]] = [
            SimpleQueue() for _ in places
        ]

    def end(self, rank: int) -> Mailbox:
        """The rank's end."""
        return Mailbox(self, rank)

    def stop(self) -> None:
        """Wake up everybody who waits, and let nobody begin another step."""
        self.stopped = True
        for box in self.boxes:
            box.put(None)


class Mailbox:
    """A rank's end of the mailboxes."""

    def __init__(self, mailboxes: Mailboxes, rank: int) -> None:
        self._all, self._rank = mailboxes, rank
        self._place = mailboxes.places[rank]
        self._box = mailboxes.boxes[rank]
        self._early: dict[Message, Delivery] = {}

    def send(self, message: Message, parcel: Parcel) -> None:
        """Put it into the box of its destination's rank."""
        receiver = self._all.placement[message.dst]
        delivery = carry(parcel, self._place, self._all.places[receiver])
        self._all.boxes[receiver].put((message, delivery))

    def recv(self, message: Message) -> Callable[[], Parcel]:
        """The boxes take what comes: there is nothing to prepare."""
        return lambda: self._wait(message).taken(self._place)

    def _wait(self, message: Message) -> Delivery:
        while message not in self._early:
            arrived = self._box.get()
            if arrived is None:
                self._box.put(None)
                raise Stopped
            self._early[arrived[0]] = arrived[1]
        return self._early.pop(message)

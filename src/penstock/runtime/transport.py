"""What carries messages between ranks; all that differs between runtimes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from penstock.device.device import Device, InFlightPayload, transfer
from penstock.schedules.ir import Message
from penstock.stage.payload import Payload


class Stopped(Exception):
    """Another rank has failed; there is no sense in going on."""


class Transport(Protocol):
    """One rank's end."""

    def send(self, message: Message, payload: Payload) -> None:
        """Hand over; does not wait for the receiver."""

    def recv(self, message: Message) -> Callable[[], Payload]:
        """Ask for a message; the call that it gives waits for it."""


class TransportFactory(Protocol):
    """What joins the ranks of one process."""

    def endpoint(self, rank: int) -> Transport:
        """The rank's end."""


class Mailboxes:
    """One box a rank, in one process. Anybody puts in, its owner takes out."""

    def __init__(self, devices: Sequence[Device], placement: Sequence[int]) -> None:
        self.devices, self.placement = devices, placement
        self.stopped = False
        self.queues: list[SimpleQueue[tuple[Message, InFlightPayload] | None]] = [
            SimpleQueue() for _ in devices
        ]

    def endpoint(self, rank: int) -> Mailbox:
        """The rank's end."""
        return Mailbox(self, rank)

    def stop(self) -> None:
        """Wake up everybody who waits, and let nobody begin another step."""
        self.stopped = True
        for box in self.queues:
            box.put(None)


class Mailbox:
    """A rank's end of the mailboxes."""

    def __init__(self, mailboxes: Mailboxes, rank: int) -> None:
        self._mailboxes, self._rank = mailboxes, rank
        self._device = mailboxes.devices[rank]
        self._queue = mailboxes.queues[rank]
        self._early_arrivals: dict[Message, InFlightPayload] = {}

    def send(self, message: Message, payload: Payload) -> None:
        """Put it into the box of its destination's rank."""
        receiver = self._mailboxes.placement[message.dst]
        delivery = transfer(payload, self._device, self._mailboxes.devices[receiver])
        self._mailboxes.queues[receiver].put((message, delivery))

    def recv(self, message: Message) -> Callable[[], Payload]:
        """The boxes take what comes: there is nothing to prepare."""
        return lambda: self._wait(message).receive_on(self._device)

    def _wait(self, message: Message) -> InFlightPayload:
        while message not in self._early_arrivals:
            arrived = self._queue.get()
            if arrived is None:
                self._queue.put(None)
                raise Stopped
            self._early_arrivals[arrived[0]] = arrived[1]
        return self._early_arrivals.pop(message)

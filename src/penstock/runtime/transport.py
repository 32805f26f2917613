"""The interface that carries messages between ranks, and its implementation for one process.

A `Worker` sends and receives through a `Transport` and knows nothing else about the other ranks.
In one process the transport is a `Mailbox`; `runtime/distributed/` has one for processes, and
`runtime/cuda_graph/` one for captured steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from penstock.device.device import Device, InFlightPayload, transfer
from penstock.schedules.ir import Message
from penstock.stage.payload import Payload


class Stopped(Exception):
    """Raised on a rank that waits or goes on after another rank has failed."""


class Transport(Protocol):
    """The end of the message channels that one rank holds."""

    def send(self, message: Message, payload: Payload) -> None:
        """Send a payload, without waiting for the receiver."""

    def recv(self, message: Message) -> Callable[[], Payload]:
        """Post a receive. Return a function that waits for the payload and returns it."""


class TransportFactory(Protocol):
    """The message channels among the ranks of one process."""

    def endpoint(self, rank: int) -> Transport:
        """Return the transport of a rank."""


class Mailboxes:
    """One queue per rank, in one process. Every rank puts messages in; the owner takes them out."""

    def __init__(self, devices: Sequence[Device], placement: Sequence[int]) -> None:
        self.devices, self.placement = devices, placement
        self.stopped = False
        self.queues: list[SimpleQueue[tuple[Message, InFlightPayload] | None]] = [
            SimpleQueue() for _ in devices
        ]

    def endpoint(self, rank: int) -> Mailbox:
        """Return the mailbox of a rank."""
        return Mailbox(self, rank)

    def stop(self) -> None:
        """Wake every rank that waits, and let no rank begin another action."""
        self.stopped = True
        for queue in self.queues:
            queue.put(None)


class Mailbox:
    """The transport of one rank over the queues of a `Mailboxes`."""

    def __init__(self, mailboxes: Mailboxes, rank: int) -> None:
        self._mailboxes, self._rank = mailboxes, rank
        self._device = mailboxes.devices[rank]
        self._queue = mailboxes.queues[rank]
        self._early_arrivals: dict[Message, InFlightPayload] = {}

    def send(self, message: Message, payload: Payload) -> None:
        """Put a payload into the queue of the receiver's rank and start its copy there."""
        receiver = self._mailboxes.placement[message.dst]
        delivery = transfer(payload, self._device, self._mailboxes.devices[receiver])
        self._mailboxes.queues[receiver].put((message, delivery))

    def recv(self, message: Message) -> Callable[[], Payload]:
        """Return a function that waits for the payload. The queue needs no preparation."""
        return lambda: self._wait(message).receive_on(self._device)

    def _wait(self, message: Message) -> InFlightPayload:
        # Messages of several senders share the queue, so others may arrive before this one. They
        # are set aside until their own receive asks for them.
        while message not in self._early_arrivals:
            arrival = self._queue.get()
            if arrival is None:
                self._queue.put(None)  # the mark stays, so that every later wait ends, too
                raise Stopped
            self._early_arrivals[arrival[0]] = arrival[1]
        return self._early_arrivals.pop(message)

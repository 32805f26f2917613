"""A transport that keeps nothing: a send blocks until its receiver takes it, as with NCCL.

It is for tests, of ours and of yours: what buffers hide, it shows. Only the order of the messages
between two ranks tells them apart, and ranks that wait for each other are told so at once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

from penstock.device.device import Device, InFlightPayload, transfer
from penstock.errors import RunError
from penstock.runtime.transport import Stopped
from penstock.schedules.ir import Message, Recv, Send
from penstock.stage.payload import Payload


def _create_locked_lock() -> Lock:
    lock = Lock()
    lock.acquire()
    return lock


@dataclass
class _PostedTransfer:
    """One end of a message, which waits for the other."""

    action: Send | Recv
    delivery: InFlightPayload | None
    is_matched: bool = False
    wakeup: Lock = field(default_factory=_create_locked_lock)


@dataclass
class _RendezvousChannel:
    """From one rank to another: what is sent and not received, and the other way round."""

    pending_sends: deque[_PostedTransfer] = field(default_factory=deque)
    pending_recvs: deque[_PostedTransfer] = field(default_factory=deque)


class Rendezvous:
    """In the place of `Mailboxes`, in one process: one thread a rank.

    blocking_recv  a receive blocks where it stands in the lane until its message is there; otherwise
                   it is posted there, and its message is waited for where it is used
    timeout        seconds after which a waiting rank gives up: its message was lost

    >>> from penstock.device.device import Cpu
    >>> ranks = Rendezvous([Cpu(), Cpu()], (0, 1), blocking_recv=False)
    >>> message = Message(0, 1, 0)  # of micro-batch 0, from stage 0 to stage 1
    >>> wait = ranks.endpoint(1).recv(message)
    >>> ranks.endpoint(0).send(message, Payload(()))  # before the receive, it would block
    >>> wait()
    Payload(tensors=(), layout=None, needs_grad=(), shared=frozenset())
    """

    def __init__(
        self,
        devices: Sequence[Device],
        placement: Sequence[int],
        *,
        blocking_recv: bool = True,
        timeout: float = 60.0,
    ) -> None:
        self.devices, self.placement = devices, placement
        self.blocking_recv, self.timeout = blocking_recv, timeout
        self.stopped = False
        self._lock = Lock()
        self._channels: defaultdict[tuple[int, int], _RendezvousChannel] = defaultdict(
            _RendezvousChannel
        )
        self._waiting: dict[
            int, tuple[int, _PostedTransfer]
        ] = {}  # by rank, for whom, and with what

    def endpoint(self, rank: int) -> RendezvousEndpoint:
        """The rank's end."""
        return RendezvousEndpoint(self, rank)

    def stop(self) -> None:
        """Wake up everybody who waits; nobody waits again."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        self.stopped = True
        for _, offer in self._waiting.values():
            offer.wakeup.release()
        self._waiting.clear()

    # ---- what the ends ask for ------------------------------------------------------------

    def post(self, rank: int, peer: int, mine: _PostedTransfer, blocking: bool) -> None:
        """Meet the other end of the road, or wait for it: now, or with `wait`."""
        sends = isinstance(mine.action, Send)
        with self._lock:
            if self.stopped:
                raise Stopped
            road = self._channels[(rank, peer) if sends else (peer, rank)]
            others, own = (
                (road.pending_recvs, road.pending_sends)
                if sends
                else (road.pending_sends, road.pending_recvs)
            )
            if not others:
                own.append(mine)
                if blocking:
                    self._register_wait(rank, peer, mine)
            else:
                theirs = others.popleft()
                self._check_order(rank, peer, mine, theirs)
                mine.delivery = theirs.delivery = mine.delivery or theirs.delivery
                mine.is_matched = theirs.is_matched = True
                mine.wakeup.release()
                if peer in self._waiting and self._waiting[peer][1] is theirs:
                    del self._waiting[peer]
                theirs.wakeup.release()
        if blocking:
            self._wait(rank, peer, mine)

    def wait(self, rank: int, peer: int, mine: _PostedTransfer) -> InFlightPayload:
        """What was posted has come."""
        with self._lock:
            if not mine.is_matched:
                if self.stopped:
                    raise Stopped
                self._register_wait(rank, peer, mine)
        self._wait(rank, peer, mine)
        assert mine.delivery is not None
        return mine.delivery

    def _register_wait(self, rank: int, peer: int, mine: _PostedTransfer) -> None:
        """Unless those whom it would wait for wait for it."""
        self._waiting[rank] = peer, mine
        chain, last = [rank], peer
        while last in self._waiting and last not in chain:
            chain.append(last)
            last = self._waiting[last][0]
        if last == rank:
            waits = "; ".join(self._describe_wait(each) for each in chain)
            self._stop()
            raise RunError(f"these ranks wait for each other, and would for ever: {waits}")

    def _wait(self, rank: int, peer: int, mine: _PostedTransfer) -> None:
        if not mine.wakeup.acquire(timeout=self.timeout):
            with self._lock:
                self._stop()
            raise RunError(
                f"rank {rank} has waited {self.timeout:g} s at {mine.action} for rank {peer}, "
                "which never came to the other end: the program has lost it, or rank "
                f"{peer} computes for longer than that; then give more patience"
            )
        if not mine.is_matched:
            raise Stopped

    def _check_order(
        self, rank: int, peer: int, mine: _PostedTransfer, theirs: _PostedTransfer
    ) -> None:
        if mine.action.message != theirs.action.message:
            self._stop()
            raise RunError(
                f"rank {rank} is at {mine.action} where rank {peer} is at {theirs.action}: between "
                "two ranks order alone tells messages apart, so both must have them in the same"
            )

    def _describe_wait(self, rank: int) -> str:
        peer, offer = self._waiting[rank]
        return f"rank {rank} at {offer.action} for rank {peer}"


class RendezvousEndpoint:
    """A rank's end of a rendezvous."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self._rendezvous, self._rank = rendezvous, rank
        self._device = rendezvous.devices[rank]

    def send(self, message: Message, payload: Payload) -> None:
        """Hand over, once the receiver is there."""
        receiver = self._rendezvous.placement[message.dst]
        delivery = transfer(payload, self._device, self._rendezvous.devices[receiver])
        self._rendezvous.post(
            self._rank, receiver, _PostedTransfer(Send(message), delivery), blocking=True
        )

    def recv(self, message: Message) -> Callable[[], Payload]:
        """Be there for the sender."""
        sender = self._rendezvous.placement[message.src]
        offer = _PostedTransfer(Recv(message), None)
        self._rendezvous.post(self._rank, sender, offer, self._rendezvous.blocking_recv)
        if self._rendezvous.blocking_recv:
            return lambda: self._take_payload(offer)
        return lambda: self._rendezvous.wait(self._rank, sender, offer).receive_on(self._device)

    def _take_payload(self, posted_recv: _PostedTransfer) -> Payload:
        assert posted_recv.delivery is not None
        return posted_recv.delivery.receive_on(self._device)

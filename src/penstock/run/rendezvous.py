"""A transport that keeps nothing: a send blocks until its receiver takes it, as with NCCL.

It is for tests, of ours and of yours: what buffers hide, it shows. Only the order of the messages
between two ranks tells them apart, and ranks that wait for each other are told so at once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

from penstock.errors import RunError
from penstock.ir import Message, Recv, Send
from penstock.run.transport import Stopped
from penstock.stage.parcel import Parcel
from penstock.stage.places import Delivery, Place, carry


def _locked() -> Lock:
    lock = Lock()
    lock.acquire()
    return lock


@dataclass
class _Offer:
    """One end of a message, which waits for the other."""

    action: Send | Recv
    delivery: Delivery | None
    done: bool = False
    woken: Lock = field(default_factory=_locked)


@dataclass
class _Road:
    """From one rank to another: what is sent and not received, and the other way round."""

    sent: deque[_Offer] = field(default_factory=deque)
    asked: deque[_Offer] = field(default_factory=deque)


class Rendezvous:
    """In the place of `Mailboxes`, in one process: one thread a rank.

    waits     a receive blocks where it stands in the lane, until its message is there; else it is
              posted there, and its message waited for where it is used
    patience  seconds after which a rank that still waits gives up: its message was lost

    >>> from penstock.stage.places import Cpu
    >>> ranks = Rendezvous([Cpu(), Cpu()], (0, 1), waits=False)
    >>> message = Message(0, 1, 0)  # of micro-batch 0, from stage 0 to stage 1
    >>> wait = ranks.end(1).recv(message)
    >>> ranks.end(0).send(message, Parcel(()))  # before the receive, it would block
    >>> wait()
    Parcel(tensors=(), layout=None, needs=(), shared=frozenset())
    """

    def __init__(
        self,
        places: Sequence[Place],
        placement: Sequence[int],
        *,
        waits: bool = True,
        patience: float = 60.0,
    ) -> None:
        self.places, self.placement = places, placement
        self.waits, self.patience = waits, patience
        self.stopped = False
        self._lock = Lock()
        self._roads: defaultdict[tuple[int, int], _Road] = defaultdict(_Road)
        self._waiting: dict[int, tuple[int, _Offer]] = {}  # by rank, for whom, and with what

    def end(self, rank: int) -> Meeting:
        """The rank's end."""
        return Meeting(self, rank)

    def stop(self) -> None:
        """Wake up everybody who waits; nobody waits again."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        self.stopped = True
        for _, offer in self._waiting.values():
            offer.woken.release()
        self._waiting.clear()

    # ---- what the ends ask for ------------------------------------------------------------

    def meet(self, rank: int, peer: int, mine: _Offer, waits: bool) -> None:
        """Meet the other end of the road, or wait for it: now, or with `wait`."""
        sends = isinstance(mine.action, Send)
        with self._lock:
            if self.stopped:
                raise Stopped
            road = self._roads[(rank, peer) if sends else (peer, rank)]
            others, own = (road.asked, road.sent) if sends else (road.sent, road.asked)
            if not others:
                own.append(mine)
                if waits:
                    self._begin_to_wait(rank, peer, mine)
            else:
                theirs = others.popleft()
                self._check_order(rank, peer, mine, theirs)
                mine.delivery = theirs.delivery = mine.delivery or theirs.delivery
                mine.done = theirs.done = True
                mine.woken.release()
                if peer in self._waiting and self._waiting[peer][1] is theirs:
                    del self._waiting[peer]
                theirs.woken.release()
        if waits:
            self._wait(rank, peer, mine)

    def wait(self, rank: int, peer: int, mine: _Offer) -> Delivery:
        """What was posted has come."""
        with self._lock:
            if not mine.done:
                if self.stopped:
                    raise Stopped
                self._begin_to_wait(rank, peer, mine)
        self._wait(rank, peer, mine)
        assert mine.delivery is not None
        return mine.delivery

    def _begin_to_wait(self, rank: int, peer: int, mine: _Offer) -> None:
        """Unless those whom it would wait for wait for it."""
        self._waiting[rank] = peer, mine
        chain, last = [rank], peer
        while last in self._waiting and last not in chain:
            chain.append(last)
            last = self._waiting[last][0]
        if last == rank:
            waits = "; ".join(self._told(each) for each in chain)
            self._stop()
            raise RunError(f"these ranks wait for each other, and would for ever: {waits}")

    def _wait(self, rank: int, peer: int, mine: _Offer) -> None:
        if not mine.woken.acquire(timeout=self.patience):
            with self._lock:
                self._stop()
            raise RunError(
                f"rank {rank} has waited {self.patience:g} s at {mine.action} for rank {peer}, "
                "which never came to the other end: the program has lost it, or rank "
                f"{peer} computes for longer than that; then give more patience"
            )
        if not mine.done:
            raise Stopped

    def _check_order(self, rank: int, peer: int, mine: _Offer, theirs: _Offer) -> None:
        if mine.action.message != theirs.action.message:
            self._stop()
            raise RunError(
                f"rank {rank} is at {mine.action} where rank {peer} is at {theirs.action}: between "
                "two ranks order alone tells messages apart, so both must have them in the same"
            )

    def _told(self, rank: int) -> str:
        peer, offer = self._waiting[rank]
        return f"rank {rank} at {offer.action} for rank {peer}"


class Meeting:
    """A rank's end of a rendezvous."""

    def __init__(self, meetings: Rendezvous, rank: int) -> None:
        self._all, self._rank = meetings, rank
        self._place = meetings.places[rank]

    def send(self, message: Message, parcel: Parcel) -> None:
        """Hand over, once the receiver is there."""
        receiver = self._all.placement[message.dst]
        delivery = carry(parcel, self._place, self._all.places[receiver])
        self._all.meet(self._rank, receiver, _Offer(Send(message), delivery), waits=True)

    def recv(self, message: Message) -> Callable[[], Parcel]:
        """Be there for the sender."""
        sender = self._all.placement[message.src]
        offer = _Offer(Recv(message), None)
        self._all.meet(self._rank, sender, offer, self._all.waits)
        if self._all.waits:
            return lambda: self._taken(offer)
        return lambda: self._all.wait(self._rank, sender, offer).taken(self._place)

    def _taken(self, offer: _Offer) -> Parcel:
        assert offer.delivery is not None
        return offer.delivery.taken(self._place)

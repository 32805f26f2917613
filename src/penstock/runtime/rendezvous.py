"""A transport without buffers, for tests: a send blocks until its receiver is there, as with NCCL.

Queues hide programs that would deadlock under NCCL. This transport shows them:

- A send blocks until the other rank receives, and the other way round.
- The order alone tells the messages between two ranks apart; there are no tags.
- Ranks that wait for each other in a circle get an error at once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock

from penstock.device.device import Device, InFlightPayload, transfer
from penstock.errors import RunError
from penstock.runtime.transport import Stopped
from penstock.schedules.ir import Message, Recv, Send
from penstock.stage.payload import Payload


@dataclass
class _PostedTransfer:
    """A send or a receive, with or without its counterpart on the other rank."""

    action: Send | Recv
    delivery: InFlightPayload | None
    is_matched: bool = False
    wakeup: Event = field(default_factory=Event)


class Rendezvous:
    """A replacement for `Mailboxes` in one process, with one thread per rank.

    Args:
        devices: The device of each rank.
        placement: The rank of each stage.
        blocking_recv: If True, a receive blocks at its place in the lane until its message is
            there. Otherwise it is posted there, and the rank waits where it uses the message.
        timeout: Seconds after which a waiting rank raises, because its message never came.

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
        # By sender and receiver. A queue holds either sends or receives: the second end of a
        # message takes out the first.
        self._queues: defaultdict[tuple[int, int], deque[_PostedTransfer]] = defaultdict(deque)
        # Each rank that waits, with the rank that it waits for and its send or receive.
        self._waiting: dict[int, tuple[int, _PostedTransfer]] = {}

    def endpoint(self, rank: int) -> RendezvousEndpoint:
        """Return the transport of a rank."""
        return RendezvousEndpoint(self, rank)

    def stop(self) -> None:
        """Wake every rank that waits, and let no rank wait again."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        self.stopped = True
        for _, posted in self._waiting.values():
            posted.wakeup.set()
        self._waiting.clear()

    # ---- matching sends and receives ------------------------------------------------------
    #
    # Whichever end comes first puts its `_PostedTransfer` into the queue. The second end takes it
    # out, hands the payload over and sets the `wakeup` events of both. `_lock` guards the queues
    # and `_waiting`; no rank waits while it holds `_lock`.

    def post(self, rank: int, peer: int, mine: _PostedTransfer, blocking: bool) -> None:
        """Match a send or receive with its other end, or queue it.

        With `blocking`, this waits for the other end; otherwise `wait` does.
        """
        pair = (rank, peer) if isinstance(mine.action, Send) else (peer, rank)
        with self._lock:
            if self.stopped:
                raise Stopped
            queue = self._queues[pair]
            if queue and type(queue[0].action) is not type(mine.action):
                theirs = queue.popleft()
                self._check_order(rank, peer, mine, theirs)
                mine.delivery = theirs.delivery = mine.delivery or theirs.delivery
                mine.is_matched = theirs.is_matched = True
                if peer in self._waiting and self._waiting[peer][1] is theirs:
                    del self._waiting[peer]
                mine.wakeup.set()
                theirs.wakeup.set()
            else:
                queue.append(mine)
                if blocking:
                    self._register_wait(rank, peer, mine)
        if blocking:
            self._wait(rank, peer, mine)

    def wait(self, rank: int, peer: int, mine: _PostedTransfer) -> InFlightPayload:
        """Wait until a posted receive has met its send. Return the payload, on its way."""
        with self._lock:
            if not mine.is_matched:
                if self.stopped:
                    raise Stopped
                self._register_wait(rank, peer, mine)
        self._wait(rank, peer, mine)
        assert mine.delivery is not None
        return mine.delivery

    def _register_wait(self, rank: int, peer: int, mine: _PostedTransfer) -> None:
        """Record that a rank waits for a peer. Raise if that closes a circle of waiting ranks."""
        self._waiting[rank] = peer, mine
        # A rank waits for one other rank at a time, so following the waits from `peer` either ends
        # at a rank that runs or comes back to `rank`.
        chain, last = [rank], peer
        while last in self._waiting and last not in chain:
            chain.append(last)
            last = self._waiting[last][0]
        if last == rank:
            waits = "; ".join(self._describe_wait(waiting_rank) for waiting_rank in chain)
            self._stop()
            raise RunError(
                f"these ranks wait for each other in a deadlock: {waits}. Check the program with "
                "penstock.verify."
            )

    def _wait(self, rank: int, peer: int, mine: _PostedTransfer) -> None:
        if not mine.wakeup.wait(self.timeout):
            with self._lock:
                self._stop()
            raise RunError(
                f"rank {rank} has waited {self.timeout:g} s at {mine.action} for rank {peer}. "
                f"Either the lane of rank {peer} lacks the other end of this message, or rank "
                f"{peer} computes for longer than that. In the second case, set a larger timeout."
            )
        if not mine.is_matched:
            raise Stopped

    def _check_order(
        self, rank: int, peer: int, mine: _PostedTransfer, theirs: _PostedTransfer
    ) -> None:
        if mine.action.message != theirs.action.message:
            self._stop()
            raise RunError(
                f"rank {rank} is at {mine.action} where rank {peer} is at {theirs.action}. Only "
                "their order tells the messages between two ranks apart, so both lanes must have "
                "these messages in the same order."
            )

    def _describe_wait(self, rank: int) -> str:
        peer, posted = self._waiting[rank]
        return f"rank {rank} at {posted.action} for rank {peer}"


class RendezvousEndpoint:
    """The transport of one rank over a `Rendezvous`."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self._rendezvous, self._rank = rendezvous, rank
        self._device = rendezvous.devices[rank]

    def send(self, message: Message, payload: Payload) -> None:
        """Send a payload, and wait until the receiver is there."""
        receiver = self._rendezvous.placement[message.dst]
        delivery = transfer(payload, self._device, self._rendezvous.devices[receiver])
        self._rendezvous.post(
            self._rank, receiver, _PostedTransfer(Send(message), delivery), blocking=True
        )

    def recv(self, message: Message) -> Callable[[], Payload]:
        """Post a receive. Return a function that waits for the payload and returns it."""
        sender = self._rendezvous.placement[message.src]
        posted = _PostedTransfer(Recv(message), None)
        self._rendezvous.post(self._rank, sender, posted, self._rendezvous.blocking_recv)
        return lambda: self._rendezvous.wait(self._rank, sender, posted).receive_on(self._device)

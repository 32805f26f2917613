"""A watch keeps the ranks of a pipe from waiting for one that failed, died, stalled or left.

2 processes:   rank 0   at 0F0   at 0F1   waiting for 1>0:0 of rank 1 ──────────┐
               rank 1   waiting  at 1F0 ╳ an error: published, all are woken ◄──┘ RemoteError
"""

from __future__ import annotations

import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from penstock.errors import PenstockError, RemoteError, RunError
from penstock.run.processes.cause import Cause
from penstock.run.processes.lookout import Lookout
from penstock.run.processes.signals import Signals
from penstock.run.processes.verdict import Mode, Patience, Peer

_TRANSPORT = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|pair closure", re.IGNORECASE
)


class Watch:
    """One rank's watch over a pipe: says what this rank does, and learns why all must stop.

    `store` is for this watch alone, with the same prefix on every rank; `host` is the rank whose
    process serves it, if it is one of these. `poison()` lets all that waits in the pipe's groups
    fail at once; it is called in another thread, and must not hold whatever holds the watch. This
    rank looks at those of its `circle` alone, which are all that it ever waits for; it hears of
    what any rank has found.

    A watch serves until the first fault: then it is closed, and has a `cause`. It closes, too,
    when nobody holds it any more, and when the interpreter ends.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        heartbeat: float = 10.0,
        poison: Callable[[], object] = lambda: None,
        host: int | None = None,
        circle: Sequence[int] = (),
    ) -> None:
        near = [other for other in circle or range(size) if other != rank]
        self._lookout = Lookout(store, rank, size, Patience(heartbeat), poison, host, near)
        self._finish = weakref.finalize(self, _leave, self._lookout)

    @property
    def cause(self) -> Cause | None:
        """Why all must stop, if they must."""
        return self._lookout.cause

    @property
    def closed(self) -> bool:
        """Is it over?"""
        return not self._finish.alive

    def at(self, what: object, patience: float = 1.0) -> None:
        """This rank computes that now, for so many heartbeats at most. Raises, if all must stop.

        It is made text only for signs.
        """
        lookout = self._lookout
        lookout.count += 1
        lookout.now = lookout.busy = (Mode.AT, what, None, patience)
        if lookout.cause is not None:
            raise lookout.cause.error()

    def waiting(self, what: object, peer: Peer = None) -> None:
        """This rank is about to wait for that, of one rank, some or all. Raises, if all must stop.

        Until it has `arrived`, a RuntimeError is taken for a lost connection.
        """
        lookout = self._lookout
        lookout.count += 1
        lookout.now = (Mode.WAITING, what, peer, lookout.busy[3])
        if lookout.cause is not None:
            raise lookout.cause.error()

    def arrived(self) -> None:
        """What this rank waited for is there: it computes again, what it was `at` before."""
        lookout = self._lookout
        lookout.count += 1
        lookout.now = lookout.busy

    def outside(self) -> None:
        """This rank is between steps."""
        lookout = self._lookout
        lookout.count += 1
        lookout.now = lookout.busy = (Mode.OUTSIDE, "", None, 1.0)

    def guarded(self, doing: str, patience: float = 1.0) -> Guard:
        """A context: what is raised in it becomes a RemoteError on every rank."""
        return Guard(self, self._lookout, doing, patience)

    def behind(self, lost: RuntimeError) -> RuntimeError:
        """Why a connection was lost, for a thread beside the watched one; if nobody knows, that."""
        cause = self._lookout.cause or self._lookout.wait_for_cause()
        return lost if cause is None else cause.error()

    def close(self) -> None:
        """Leave in order. No thread is left."""
        self._finish()


class Among:
    """A watch, for some of its ranks, who count themselves from 0: `ranks` says which is which."""

    def __init__(self, watch: Watch, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self.at, self.arrived, self._waiting = watch.at, watch.arrived, watch.waiting

    def waiting(self, what: object, peer: int | None = None) -> None:
        """As the watch's; without a peer, for all of them."""
        self._waiting(what, self._ranks if peer is None else self._ranks[peer])


class Guard:
    """A part of a program that all ranks leave together, or with the same error."""

    def __init__(self, watch: Watch, lookout: Lookout, doing: str, patience: float) -> None:
        self._watch, self._lookout = watch, lookout
        self._doing, self._patience = doing, patience
        self._signals = Signals(lookout.bell.fileno())
        self._outer = lookout.inside

    def __enter__(self) -> None:
        lookout = self._lookout
        if lookout.pid != os.getpid():
            raise RunError(
                "this pipe was called in another process than it was made in: a fork has no part "
                "in it; call it where it was made, or make one in each process"
            )
        if lookout.cause is not None:
            self._watch.close()
            raise lookout.cause.error()
        lookout.inside, lookout.label = threading.current_thread(), self._doing
        lookout.calls += self._outer is None
        self._signals.take()
        lookout.count += 1
        lookout.now = lookout.busy = (Mode.AT, "its beginning", None, self._patience)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        lookout = self._lookout
        if error is None:
            lookout.inside = self._outer
            self._signals.give_back(failed=False)
            return
        if isinstance(error, RemoteError) and self._watch.closed:  # raised by a guard in this one
            self._signals.give_back(failed=True)
            return
        was, lost = str(lookout.sign()), _is_transport(error, lookout)
        try:
            cause = lookout.cause or (lookout.wait_for_cause() if lost else None)
            cause = cause or lookout.tell_of(error, was)
            lookout.wait_until_heard()
        except BaseException as interrupt:  # Ctrl-C while this thread was in C: heard only now
            error = interrupt
            cause = lookout.tell_of(error, was)
        lookout.inside = None
        self._signals.give_back(failed=True)
        self._watch.close()
        if not isinstance(error, Exception):
            raise error
        remote = cause.error()
        remote.add_note(f"This is rank {lookout.rank} of {lookout.size}; it was {was}.")
        if lost and (cause.kind, cause.rank) != ("raised", lookout.rank):
            raise remote from None
        raise remote from (error.__cause__ if isinstance(error, RemoteError) else error)


def _is_transport(error: BaseException, lookout: Lookout) -> bool:
    """Was a connection lost? It may look like that by mistake: the error is told all the same."""
    if not isinstance(error, RuntimeError) or isinstance(error, PenstockError):
        return False
    waits = lookout.now[0] is Mode.WAITING
    return waits or isinstance(error, DistError) or bool(_TRANSPORT.search(str(error)))


def _leave(lookout: Lookout) -> None:
    """Nobody holds the watch, or the interpreter ends: perhaps by an error outside all guards."""
    if lookout.pid != os.getpid():
        return
    ends = not threading.main_thread().is_alive()
    error = getattr(sys, "last_value", None) if ends else None
    if error is not None and lookout.cause is None:
        lookout.tell_of(error, str(lookout.sign()))
        lookout.wait_until_heard()
    lookout.close()

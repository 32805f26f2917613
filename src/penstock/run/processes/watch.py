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
from penstock.run.processes.cause import Failure
from penstock.run.processes.lookout import HeartbeatMonitor
from penstock.run.processes.signals import SignalHandler
from penstock.run.processes.verdict import AwaitedRanks, RankState, Timeouts

_CONNECTION_ERROR = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|pair closure", re.IGNORECASE
)


class Watchdog:
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
        abort_groups: Callable[[], object] = lambda: None,
        host_rank: int | None = None,
        monitored_ranks: Sequence[int] = (),
    ) -> None:
        near = [other for other in monitored_ranks or range(size) if other != rank]
        self._monitor = HeartbeatMonitor(
            store, rank, size, Timeouts(heartbeat), abort_groups, host_rank, near
        )
        self._finalizer = weakref.finalize(self, _close_monitor, self._monitor)

    @property
    def failure(self) -> Failure | None:
        """Why all must stop, if they must."""
        return self._monitor.failure

    @property
    def closed(self) -> bool:
        """Is it over?"""
        return not self._finalizer.alive

    def mark_computing(self, description: object, timeout_factor: float = 1.0) -> None:
        """This rank computes that now, for so many heartbeats at most. Raises, if all must stop.

        It is made text only for signs.
        """
        lookout = self._monitor
        lookout.progress += 1
        lookout.activity = lookout.compute_activity = (
            RankState.COMPUTING,
            description,
            None,
            timeout_factor,
        )
        if lookout.failure is not None:
            raise lookout.failure.to_error()

    def mark_waiting(self, description: object, awaited_ranks: AwaitedRanks = None) -> None:
        """This rank is about to wait for that, of one rank, some or all. Raises, if all must stop.

        Until it has `arrived`, a RuntimeError is taken for a lost connection.
        """
        lookout = self._monitor
        lookout.progress += 1
        lookout.activity = (
            RankState.WAITING,
            description,
            awaited_ranks,
            lookout.compute_activity[3],
        )
        if lookout.failure is not None:
            raise lookout.failure.to_error()

    def mark_arrived(self) -> None:
        """What this rank waited for is there: it computes again, what it was `at` before."""
        lookout = self._monitor
        lookout.progress += 1
        lookout.activity = lookout.compute_activity

    def mark_outside_call(self) -> None:
        """This rank is between steps."""
        lookout = self._monitor
        lookout.progress += 1
        lookout.activity = lookout.compute_activity = (RankState.OUTSIDE_CALL, "", None, 1.0)

    def guarded(self, call_name: str, timeout_factor: float = 1.0) -> FailureGuard:
        """A context: what is raised in it becomes a RemoteError on every rank."""
        return FailureGuard(self, self._monitor, call_name, timeout_factor)

    def explain_lost_connection(self, error: RuntimeError) -> RuntimeError:
        """Why a connection was lost, for a thread beside the watched one; if nobody knows, that."""
        cause = self._monitor.failure or self._monitor.wait_for_failure()
        return error if cause is None else cause.to_error()

    def close(self) -> None:
        """Leave in order. No thread is left."""
        self._finalizer()


class SubgroupWatchdog:
    """A watch, for some of its ranks, who count themselves from 0: `ranks` says which is which."""

    def __init__(self, watchdog: Watchdog, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self.mark_computing, self.mark_arrived, self._mark_waiting = (
            watchdog.mark_computing,
            watchdog.mark_arrived,
            watchdog.mark_waiting,
        )

    def mark_waiting(self, description: object, peer: int | None = None) -> None:
        """As the watch's; without a peer, for all of them."""
        self._mark_waiting(description, self._ranks if peer is None else self._ranks[peer])


class FailureGuard:
    """A part of a program that all ranks leave together, or with the same error."""

    def __init__(
        self, watchdog: Watchdog, monitor: HeartbeatMonitor, call_name: str, timeout_factor: float
    ) -> None:
        self._watchdog, self._monitor = watchdog, monitor
        self._call_name, self._timeout_factor = call_name, timeout_factor
        self._signal_handler = SignalHandler(monitor.wakeup_sender.fileno())
        self._outer_thread = monitor.guarded_thread

    def __enter__(self) -> None:
        lookout = self._monitor
        if lookout.pid != os.getpid():
            raise RunError(
                "this pipe was called in another process than it was made in: a fork has no part "
                "in it; call it where it was made, or make one in each process"
            )
        if lookout.failure is not None:
            self._watchdog.close()
            raise lookout.failure.to_error()
        lookout.guarded_thread, lookout.call_name = threading.current_thread(), self._call_name
        lookout.call_count += self._outer_thread is None
        self._signal_handler.install()
        lookout.progress += 1
        lookout.activity = lookout.compute_activity = (
            RankState.COMPUTING,
            "its beginning",
            None,
            self._timeout_factor,
        )

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        error_traceback: TracebackType | None,
    ) -> None:
        lookout = self._monitor
        if error is None:
            lookout.guarded_thread = self._outer_thread
            self._signal_handler.uninstall(failed=False)
            return
        if (
            isinstance(error, RemoteError) and self._watchdog.closed
        ):  # raised by a guard in this one
            self._signal_handler.uninstall(failed=True)
            return
        was, lost = str(lookout.build_heartbeat()), _is_connection_error(error, lookout)
        try:
            cause = lookout.failure or (lookout.wait_for_failure() if lost else None)
            cause = cause or lookout.publish_exception(error, was)
            lookout.wait_for_acknowledgement()
        except BaseException as interrupt:  # Ctrl-C while this thread was in C: heard only now
            error = interrupt
            cause = lookout.publish_exception(error, was)
        lookout.guarded_thread = None
        self._signal_handler.uninstall(failed=True)
        self._watchdog.close()
        if not isinstance(error, Exception):
            raise error
        remote = cause.to_error()
        remote.add_note(f"This is rank {lookout.rank} of {lookout.size}; it was {was}.")
        if lost and (cause.kind, cause.rank) != ("raised", lookout.rank):
            raise remote from None
        raise remote from (error.__cause__ if isinstance(error, RemoteError) else error)


def _is_connection_error(error: BaseException, monitor: HeartbeatMonitor) -> bool:
    """Was a connection lost? It may look like that by mistake: the error is told all the same."""
    if not isinstance(error, RuntimeError) or isinstance(error, PenstockError):
        return False
    waits = monitor.activity[0] is RankState.WAITING
    return waits or isinstance(error, DistError) or bool(_CONNECTION_ERROR.search(str(error)))


def _close_monitor(monitor: HeartbeatMonitor) -> None:
    """Nobody holds the watch, or the interpreter ends: perhaps by an error outside all guards."""
    if monitor.pid != os.getpid():
        return
    ends = not threading.main_thread().is_alive()
    error = getattr(sys, "last_value", None) if ends else None
    if error is not None and monitor.failure is None:
        monitor.publish_exception(error, str(monitor.build_heartbeat()))
        monitor.wait_for_acknowledgement()
    monitor.close()

"""A watch keeps the ranks of a pipe from waiting for one that failed, died, stalled or left.

2 processes:   rank 0   at 0F0   at 0F1   waiting for 1>0:0 of rank 1 ──────────┐
               rank 1   waiting  at 1F0 ╳ an error: published, all are woken ◄──┘ RemoteError
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType

from torch.distributed import DistError, DistStoreError
from torch.distributed.distributed_c10d import Store

from penstock.errors import PenstockError, RemoteError, RunError
from penstock.runtime.distributed.failure import report as causes
from penstock.runtime.distributed.failure.detector import (
    AwaitedRanks,
    Heartbeat,
    HeartbeatTracker,
    RankState,
    Timeouts,
    diagnose,
)
from penstock.runtime.distributed.failure.report import Failure
from penstock.runtime.distributed.failure.signals import SignalHandler

# -------------------------------------------------------------------------------------------------
# The threads behind a `Watch`: one gives signs of life and looks at others', one listens.
#
# Through a store, with a connection for each thread: one that two share blocks both. Keys:
#
#     cause     why all stop, JSON; the first writer wins
#     wake/2    set when rank 2 should look at `cause`, or may stop listening
#     seen/2    rank 2 knows the cause
#     sign/2    the last sign of life of rank 2
# -------------------------------------------------------------------------------------------------

_MAIN_THREAD_GRACE = 2.0  # seconds for a main thread to come back, once it is known that all stop
_SIGINT_DELAY = 0.2  # for Python's own handler, which cannot run while a wait is in C
_SIGTERM_DELAY = 1.5  # a launcher ends all when one has died: the cause is soon known
_ACKNOWLEDGE_TIMEOUT = 3.0  # for the others to read the cause, before the store's host may go

# The fields of a sign that the watched thread writes.
Activity = tuple[RankState, object, AwaitedRanks, float]


class HeartbeatMonitor:
    """What the watching thread and the two behind it share."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeouts: Timeouts,
        abort_groups: Callable[[], object],
        host_rank: int | None,
        monitored_ranks: Sequence[int],
    ) -> None:
        self.rank, self.size, self.timeouts, self.host_rank = rank, size, timeouts, host_rank
        self._monitored_ranks = monitored_ranks  # the ranks that it looks at
        self.pid = os.getpid()
        # What the watched thread does now: it writes, the others read.
        self.progress, self.call_name, self.call_count = 0, "", 0
        self.activity: Activity = (RankState.OUTSIDE_CALL, "", None, 1.0)
        self.compute_activity: Activity = self.activity  # with what, when it does not wait
        self.guarded_thread: threading.Thread | None = None  # the thread that is in a guarded part
        self.failure: Failure | None = None
        self.failure_known, self._failure_acknowledged = threading.Event(), threading.Event()
        self._local_failure: Failure | None = None  # to be published
        self._connection_lost = self._closing = False
        self._started_ranks: set[int] = set()  # ranks that have given a sign
        self._signal_times: dict[int, float] = {}  # when each came
        self._failure_lock, self._failure_time = threading.Lock(), 0.0
        self._tracker = HeartbeatTracker(max_gap=2 * timeouts.interval)
        self._heartbeat_count, self._abort_groups = 0, abort_groups
        self._store = store  # its host's server lives as long as this
        self._wakeup_receiver, self.wakeup_sender = socket.socketpair()
        self._wakeup_receiver.setblocking(False)
        self.wakeup_sender.setblocking(False)
        stores = [store.clone() for _ in range(2)]  # type: ignore[attr-defined]
        stores[0].set_timeout(timedelta(seconds=max(timeouts.heartbeat, 1)))
        self._threads = [
            threading.Thread(target=target, args=(own,), name=f"penstock-{name}", daemon=True)
            for target, own, name in zip(
                (self._run_monitor, self._run_listener),
                stores,
                ("lookout", "listener"),
                strict=True,
            )
        ]
        for thread in self._threads:
            thread.start()

    # ---- for the thread that is watched ----------------------------------------------------

    def build_heartbeat(self) -> Heartbeat:
        """What it does now."""
        mode, what, peer, patience = self.activity
        return Heartbeat(
            self._heartbeat_count, self.progress, mode, self.call_name, str(what), peer, patience
        )

    def publish_exception(self, error: BaseException, doing: str) -> Failure:
        """Publish what was raised here, unless another rank was first; which cause it became."""
        self._local_failure = cause = causes.describe_exception(
            error, self.rank, self.call_name, doing, self.call_count
        )
        self.wake()
        self.failure_known.wait(self.timeouts.failure_wait)
        return self.failure or cause

    def wait_for_failure(self) -> Failure | None:
        """The one behind a lost connection, if any is found in time."""
        self._connection_lost = True
        self.wake()
        # While this process is held up, it cannot see who is quiet: that time does not count.
        until = self._tracker.observed_seconds + self.timeouts.failure_wait
        last = time.monotonic() + 4 * self.timeouts.failure_wait
        while self._tracker.observed_seconds < until and time.monotonic() < last:
            if self.failure_known.wait(self.timeouts.interval):
                break
        return self.failure

    def wait_for_acknowledgement(self) -> None:
        """By the others, if this process hosts the store; no longer than it stays for them."""
        self._failure_acknowledged.wait(_ACKNOWLEDGE_TIMEOUT + 0.5)

    def wake(self) -> None:
        """Have the lookout look now."""
        with suppress(OSError):
            self.wakeup_sender.send(b"\0")

    def close(self) -> None:
        """Say that this rank leaves, and end both threads."""
        self._closing = True
        self.wake()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=_MAIN_THREAD_GRACE)

    # ---- the lookout -----------------------------------------------------------------------

    def _run_monitor(self, store: Store) -> None:
        try:
            while not self._closing and self.failure is None:
                self._tick(store)
                self._sleep_until_wakeup()
        except RuntimeError:
            self._handle_lost_store()
        while not self._closing:
            if self._is_overdue():
                self._exit_process()
            self._sleep_until_wakeup()
        with suppress(RuntimeError):
            if self.failure is None:
                self.activity = RankState.LEFT, "", None, 1.0
                self._publish_heartbeat(store)
            store.set(f"wake/{self.rank}", "")
        self._wakeup_receiver.close()
        self.wakeup_sender.close()

    def _tick(self, store: Store) -> None:
        """One sign of life, and a look at the others', if this rank waits for one of them."""
        self._publish_heartbeat(store)
        found = self._local_failure or self._check_signals()
        if found is None and (self.activity[0] is RankState.WAITING or self._connection_lost):
            found = self._check_peers(store)
        if found is not None:
            self._publish_failure(store, found)

    def _publish_heartbeat(self, store: Store) -> None:
        self._heartbeat_count += 1
        store.set(f"sign/{self.rank}", self.build_heartbeat().to_json())

    def _publish_failure(self, store: Store, failure: Failure) -> None:
        store.compare_set("cause", "", failure.to_json())
        for rank in range(self.size):
            store.set(f"wake/{rank}", "")
        self.failure_known.wait(_MAIN_THREAD_GRACE)  # the listener reads it back

    def _check_peers(self, store: Store) -> Failure | None:
        """At the others: the cause, if one is to blame."""
        if store.check(["cause"]):  # its writer may have died before it could wake anybody
            return Failure.from_json(store.get("cause"))
        keys = {rank: f"sign/{rank}" for rank in self._monitored_ranks}
        self._started_ranks |= {
            r for r in keys.keys() - self._started_ranks if store.check([keys[r]])
        }
        texts = (
            store.multi_get([keys[rank] for rank in self._started_ranks])
            if self._started_ranks
            else []
        )
        signs = dict(zip(self._started_ranks, map(Heartbeat.from_json, texts), strict=True))
        signs = {rank: signs.get(rank, Heartbeat(0, 0, RankState.NOT_STARTED)) for rank in keys}
        signs[self.rank] = self.build_heartbeat()
        sights = self._tracker.update(signs, time.monotonic())
        return diagnose(self.rank, sights, self.timeouts, self._connection_lost)

    def _sleep_until_wakeup(self) -> None:
        """Sleep until the next beat, or the bell: Python rings it for signals, by their number."""
        hurry = self._signal_times or self.failure is not None
        pause = min(0.05, self.timeouts.interval) if hurry else self.timeouts.interval
        select.select([self._wakeup_receiver], [], [], pause)
        with suppress(BlockingIOError):
            for number in self._wakeup_receiver.recv(64):
                if number:
                    self._signal_times.setdefault(number, time.monotonic())

    def _check_signals(self) -> Failure | None:
        """A signal that came while the watched thread cannot hear it: it waits in C."""
        if self.guarded_thread is None:
            return None
        for number, pause in ((signal.SIGINT, _SIGINT_DELAY), (signal.SIGTERM, _SIGTERM_DELAY)):
            came = self._signal_times.get(number)
            if came is None or time.monotonic() - came < pause:
                continue
            # Another handler than Python's own may want to go on.
            if number == signal.SIGTERM or signal.getsignal(number) is signal.default_int_handler:
                name = signal.Signals(number).name
                return causes.describe_signal(self.rank, str(self.build_heartbeat()), name)
        return None

    # ---- the listener ----------------------------------------------------------------------

    def _run_listener(self, store: Store) -> None:
        try:
            self._wait_for_wake_key(store)
            if store.check(["cause"]):
                cause = Failure.from_json(store.get("cause"))
                self._wait_for_current_call(cause)
                self._record_failure(cause)
                store.set(f"seen/{self.rank}", "")
                self._wait_for_seen_keys(store)
        except RuntimeError:
            self._handle_lost_store()
        finally:
            self._failure_acknowledged.set()

    def _wait_for_wake_key(self, store: Store) -> None:
        while True:
            with suppress(DistStoreError):  # a day has passed
                store.wait([f"wake/{self.rank}"], timedelta(days=1))
                return

    def _wait_for_current_call(self, failure: Failure) -> None:
        """Who fails in a later call has come through this one: so can this rank, first."""
        until = time.monotonic() + _MAIN_THREAD_GRACE
        while (
            self.guarded_thread is not None
            and self.call_count < failure.call_number
            and not self._connection_lost
        ):
            if time.monotonic() > until:
                return
            time.sleep(0.005)

    def _wait_for_seen_keys(self, store: Store) -> None:
        """The store goes with its host: let everyone read the cause first."""
        cause = self.failure
        gone = {self.rank} if cause is None or cause.kind == "raised" else {self.rank, cause.rank}
        keys = [f"seen/{rank}" for rank in range(self.size) if rank not in gone]
        until = time.monotonic() + _ACKNOWLEDGE_TIMEOUT
        while self.host_rank == self.rank and keys and time.monotonic() < until:
            if store.check(keys):
                return
            time.sleep(0.01)

    # ---- both ------------------------------------------------------------------------------

    def _record_failure(self, failure: Failure) -> None:
        """The cause is known: wake the watched thread, whatever it waits for."""
        with self._failure_lock:
            if self.failure is not None:
                return
            self._failure_time = time.monotonic()
            self.failure = failure
        self.failure_known.set()
        others = failure.rank != self.rank and failure != causes.describe_lost_store(self.host_rank)
        if self.guarded_thread is None and others and not self._closing:
            # Its next step raises it; but a launcher may end this process before.
            _write_stderr(
                f"penstock: rank {self.rank} will stop at its next step: {failure.to_error()}"
            )
        with suppress(Exception):
            self._abort_groups()

    def _handle_lost_store(self) -> None:
        if not self._closing:
            self._record_failure(self._local_failure or causes.describe_lost_store(self.host_rank))
        self._failure_acknowledged.set()

    def _is_overdue(self) -> bool:
        """Does the watched thread not come back, though it should?"""
        cause = self.failure
        accused = cause is not None and cause.kind == "stalled" and cause.rank == self.rank
        grace = _MAIN_THREAD_GRACE
        if not accused and signal.SIGTERM not in self._signal_times:
            if self.guarded_thread is None:
                return False
            grace = max(self.timeouts.heartbeat, _MAIN_THREAD_GRACE)
        return time.monotonic() - self._failure_time > grace

    def _exit_process(self) -> None:
        """End the process, as nothing else can: the watched thread does not listen."""
        thread = self.guarded_thread or threading.main_thread()
        frame = sys._current_frames().get(thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        assert self.failure is not None
        _write_stderr(
            f"penstock: rank {self.rank} ends, as it does not come back from where it stands:\n"
            f"{stack}\n{self.failure.to_error()}"
        )
        os._exit(1)


def _write_stderr(text: str) -> None:
    with suppress(Exception):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


# -------------------------------------------------------------------------------------------------

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

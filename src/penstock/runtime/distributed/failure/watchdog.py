"""The watchdog: it keeps ranks from waiting for one that failed, died, stalled or left.

    rank 0   at 0F0   at 0F1   waiting for 1>0:0 from rank 1 ────────────────┐
    rank 1   waiting  at 1F0 ╳ exception: written to the store, all wake up ◄┘ RemoteError on both

Each process has four threads that matter here:

| thread   | does                                                                                 |
|----------|--------------------------------------------------------------------------------------|
| guarded  | makes the calls of the pipe, and says what it does with `mark_computing` and          |
|          | `mark_waiting`; raises RemoteError in the end                                        |
| monitor  | writes a heartbeat to the store at each interval; reads those of other ranks while   |
|          | the guarded thread waits; publishes a failure                                        |
| listener | blocks in the store until any rank publishes a failure, then aborts the groups so    |
|          | that the guarded thread wakes up                                                     |
| sentinel | does no I/O: finds that the store does not answer the monitor, and ends |
|          | the process if the guarded thread does not return after a failure                    |
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
from penstock.runtime import signals
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
from penstock.runtime.distributed.links import LINK_BACKENDS

# -------------------------------------------------------------------------------------------------
# The monitor and listener threads
#
# They talk through a TCP store. Each has a client of its own (`store.clone()`): a client that two
# threads share blocks both while one of them waits. Keys:
#
#     failure       the failure as JSON; compare_set, so the first writer wins
#     wake/2        set when rank 2 should read `failure`, or when its listener may end
#     seen/2        rank 2 has read the failure, or has left
#     heartbeat/2   the last heartbeat of rank 2
# -------------------------------------------------------------------------------------------------

# All times are in seconds.
_MAIN_THREAD_GRACE = 2.0  # for the guarded thread to return once a failure is known
# Python's own SIGINT handler gets this time. It cannot run while the main thread waits in C.
_SIGINT_DELAY = 0.2
# torchrun sends SIGTERM to all ranks when one has died. Within this time the death is found (see
# `Timeouts.after_lost_connection`), which explains more than the signal. Both are in observed time
# (see `HeartbeatTracker`): on a busy machine a delay in real time would be over first.
_SIGTERM_DELAY = 2.0
_SIGTERM_DELAY_BETWEEN_CALLS = 1.5  # the same between calls, where no step has to end
# The host of the store stays this long, so that the other ranks can read the failure.
_ACKNOWLEDGE_TIMEOUT = 10.0

# The fields of a heartbeat that the guarded thread sets: state, description, awaited ranks, and
# timeout factor. It replaces the whole tuple, so the monitor thread needs no lock to read it.
Activity = tuple[RankState, object, AwaitedRanks, float]


class HeartbeatMonitor:
    """The state that the guarded thread, the monitor and the listener of one process share."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeouts: Timeouts,
        abort_groups: Callable[[], object],
        host_rank: int | None,
        monitored_ranks: Sequence[int],
        may_wait_on_device: bool,
    ) -> None:
        self.rank, self.size, self.timeouts, self.host_rank = rank, size, timeouts, host_rank
        self._monitored_ranks, self._may_wait_on_device = monitored_ranks, may_wait_on_device
        self.pid = os.getpid()
        # The guarded thread writes these, the other threads read them.
        self.progress, self.call_name, self.call_count = 0, "", 0
        self.activity: Activity = (RankState.OUTSIDE_CALL, "", None, 1.0)
        self.compute_activity: Activity = self.activity  # the activity to return to after a wait
        self.guarded_thread: threading.Thread | None = None  # the thread that is inside a guard
        self.failure: Failure | None = None
        self.failure_known, self._failure_acknowledged = threading.Event(), threading.Event()
        self._local_failure: Failure | None = None  # the monitor publishes it at its next tick
        self._connection_lost = self._closing = False
        self._contact_lost = False  # the store has not answered for a heartbeat
        self._tick_count, self._is_in_tick = 0, False
        self._pending_tick, self._tick_seconds = 0, 0.0  # the sentinel's own notes about ticks
        self.is_raising = False  # the main thread has stopped, and is about to report the failure
        self._started_ranks: set[int] = set()  # ranks that have sent a heartbeat
        self._heartbeats: dict[int, Heartbeat] = {}  # the last one of each of them
        self._signal_times: dict[int, float] = {}  # by signal number, see `_read_clock`
        self._failure_lock, self._failure_time = threading.Lock(), 0.0
        self._tracker = HeartbeatTracker(max_gap=2 * timeouts.interval)
        self._heartbeat_count, self._abort_groups = 0, abort_groups
        self._store = store  # on the host this object is the server: keep it alive
        self._wakeup_receiver, self._wakeup_sender = socket.socketpair()
        self._wakeup_receiver.setblocking(False)
        self._wakeup_sender.setblocking(False)
        stores = [store.clone() for _ in range(2)]  # type: ignore[attr-defined]
        targets = {"monitor": self._run_monitor, "listener": self._run_listener}
        self._threads = [
            threading.Thread(target=target, args=(client,), name=f"penstock-{name}", daemon=True)
            for (name, target), client in zip(targets.items(), stores, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        signals.watch(self)

    @property
    def is_in_call(self) -> bool:
        """Whether a thread is inside a call of the pipe."""
        return self.guarded_thread is not None

    @property
    def _is_told_to_end(self) -> bool:
        """Whether SIGTERM has arrived and ends this process. After a preemption it saves first."""
        return signal.SIGTERM in self._signal_times and signals.get_preemption_limit() is None

    # ---- called by the guarded thread ------------------------------------------------------

    def build_heartbeat(self) -> Heartbeat:
        """Return a heartbeat with the current activity of the guarded thread."""
        state, description, awaited, factor = self.activity
        counters = self._heartbeat_count, self.progress
        return Heartbeat(*counters, state, self.call_name, str(description), awaited, factor)

    def publish_exception(self, error: BaseException, doing: str) -> Failure:
        """Publish an exception of this rank. Return the failure that all ranks raise.

        That is another one if another rank has published before.
        """
        self._local_failure = failure = causes.describe_exception(
            error, self.rank, self.call_name, doing, self.call_count
        ).shorten()
        self.wake()
        self.failure_known.wait(self.timeouts.failure_wait)
        return self.failure or failure

    def wait_for_failure(self) -> Failure | None:
        """Return the failure behind a lost connection, or None if none is found in time."""
        self._connection_lost = True
        self.wake()
        # The deadline is in observed time: while this process is suspended it cannot see which
        # ranks are silent. The second deadline, in real time, is a backstop. It is longer than the
        # time after which a store that does not answer is given up (see `check_deadlines`).
        observed_deadline = self._tracker.observed_seconds + self.timeouts.failure_wait
        deadline = time.monotonic() + 4 * self.timeouts.failure_wait
        while self._tracker.observed_seconds < observed_deadline and time.monotonic() < deadline:
            if self.failure_known.wait(self.timeouts.interval):
                break
        return self.failure

    def wait_for_acknowledgement(self) -> None:
        """Wait until the other ranks have read the failure, if this process hosts the store."""
        if self.failure is not None:
            self._failure_acknowledged.wait(_ACKNOWLEDGE_TIMEOUT + 0.5)

    def forget_sigint(self) -> None:
        """Forget a SIGINT that the user's own handler has dealt with in a call."""
        self._signal_times.pop(signal.SIGINT, None)

    def wake(self) -> None:
        """Wake the monitor thread, so that it acts now instead of at the next interval."""
        with suppress(OSError):
            self._wakeup_sender.send(b"\0")

    def close(self) -> None:
        """Announce that this rank leaves, and end both threads."""
        self._closing = True
        self.wake()
        signals.unwatch(self, failed=self.failure is not None)
        # A thread that waits for a store out of reach does not end.
        deadline = time.monotonic() + (0.1 if self._contact_lost else _MAIN_THREAD_GRACE)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=max(0.0, deadline - time.monotonic()))

    # ---- the monitor thread ----------------------------------------------------------------

    def _run_monitor(self, store: Store) -> None:
        try:
            while not self._closing and self.failure is None:
                self._is_in_tick = True
                self._tick(store)
                self._is_in_tick = False
                self._tick_count += 1
                self._sleep_until_wakeup()
        except RuntimeError:
            self._is_in_tick = False
            self._handle_lost_store()
        while not self._closing:  # a failure is known: the guarded thread closes the watchdog
            self._sleep_until_wakeup()
        with suppress(RuntimeError):
            if self.failure is None:
                self.activity = RankState.LEFT, "", None, 1.0
                self._publish_heartbeat(store)
                store.set(f"seen/{self.rank}", "")  # nobody has to wait for this rank any more
            store.set(f"wake/{self.rank}", "")
        self._wakeup_receiver.close()
        self._wakeup_sender.close()

    def _tick(self, store: Store) -> None:
        """Publish a heartbeat. Check the heartbeats of others if this rank waits, and signals.

        Every tick asks the store for something. `set` alone has no answer, so it would not tell
        whether the store is still there.
        """
        self._publish_heartbeat(store)
        # The writer may have died before it set the wake keys.
        failure = _read_failure(store) if store.check(["failure"]) else self._local_failure
        state = self.activity[0]
        may_wait = state is RankState.WAITING or (
            self._may_wait_on_device and state is RankState.COMPUTING
        )
        # A lost connection and SIGTERM are symptoms: another rank may have died, even if this one
        # does not wait for it.
        has_symptom = self._connection_lost or self._is_told_to_end
        if failure is None and (may_wait or has_symptom):
            failure = self._check_peers(store, has_symptom)
        failure = failure or self._check_signals()
        if failure is not None:
            self._publish_failure(store, failure)

    def _publish_heartbeat(self, store: Store) -> None:
        self._heartbeat_count += 1
        store.set(f"heartbeat/{self.rank}", self.build_heartbeat().to_json())

    def _publish_failure(self, store: Store, failure: Failure) -> None:
        store.compare_set("failure", "", failure.to_json())  # keeps a failure that is there
        for rank in range(self.size):
            store.set(f"wake/{rank}", "")
        self.failure_known.wait(_MAIN_THREAD_GRACE)  # the listener reads it back

    def _check_peers(self, store: Store, has_symptom: bool) -> Failure | None:
        """Read the heartbeats of the monitored ranks. Return a failure if there is one."""
        # `get` blocks until a key exists, so ask only for ranks that have sent a heartbeat.
        keys = {rank: f"heartbeat/{rank}" for rank in self._monitored_ranks}
        self._started_ranks |= {
            r for r in keys.keys() - self._started_ranks if store.check([keys[r]])
        }
        heartbeats = dict.fromkeys(keys, Heartbeat(0, 0, RankState.NOT_STARTED))
        if self._started_ranks:
            texts = store.multi_get([keys[rank] for rank in self._started_ranks])
            for rank, text in zip(self._started_ranks, texts, strict=True):
                with suppress(ValueError, TypeError):  # another program has written to this key
                    self._heartbeats[rank] = Heartbeat.from_json(text)
            heartbeats.update(self._heartbeats)
        heartbeats[self.rank] = self.build_heartbeat()
        statuses = self._tracker.update(heartbeats, time.monotonic())
        return diagnose(self.rank, statuses, self.timeouts, has_symptom, self._may_wait_on_device)

    def _sleep_until_wakeup(self) -> None:
        """Sleep until the next interval, or until `wake` is called."""
        is_urgent = self._signal_times or self._connection_lost or self.failure is not None
        pause = min(0.05, self.timeouts.interval) if is_urgent else self.timeouts.interval
        select.select([self._wakeup_receiver], [], [], pause)
        with suppress(BlockingIOError):
            self._wakeup_receiver.recv(64)

    def _read_clock(self, signal_number: int) -> float:
        """Return the time that the delay of a signal is measured in."""
        is_sigterm = signal_number == signal.SIGTERM and signals.get_preemption_limit() is None
        return self._tracker.observed_seconds if is_sigterm else time.monotonic()

    def _check_signals(self) -> Failure | None:
        """Return the failure of a signal that the guarded thread cannot handle: it waits in C.

        A handler of the user's own is respected: the rank may want to continue after the signal.
        """
        for number, signal_time in list(self._signal_times.items()):
            seconds = self._read_clock(number) - signal_time
            if number == signal.SIGINT:
                is_due = (
                    self.is_in_call
                    and seconds > _SIGINT_DELAY
                    and signal.getsignal(number) is signal.default_int_handler
                )
            else:
                delay = _SIGTERM_DELAY if self.is_in_call else _SIGTERM_DELAY_BETWEEN_CALLS
                limit = signals.get_preemption_limit()
                is_due = seconds > (delay if limit is None else limit) and signals.owns_sigterm()
            if is_due:
                name = signal.Signals(number).name
                return causes.describe_signal(
                    self.rank, str(self.build_heartbeat()), name, signals.get_preemption_limit()
                )
        return None

    # ---- the listener thread ---------------------------------------------------------------

    def _run_listener(self, store: Store) -> None:
        try:
            self._wait_for_wake_key(store)
            # Without a failure this rank is closing, or another program has set the key.
            while not (is_known := store.check(["failure"])) and not self._closing:
                time.sleep(self.timeouts.interval)
            if is_known:
                failure = _read_failure(store)
                self._wait_for_current_call(failure)
                self._record_failure(failure)
                store.set(f"seen/{self.rank}", "")
                self._wait_for_seen_keys(store)
        except RuntimeError:
            self._handle_lost_store()
        finally:
            self._failure_acknowledged.set()

    def _wait_for_wake_key(self, store: Store) -> None:
        while True:
            with suppress(DistStoreError):  # the timeout of one day: wait again
                store.wait([f"wake/{self.rank}"], timedelta(days=1))
                return

    def _wait_for_current_call(self, failure: Failure) -> None:
        """Let this rank finish its current call if another rank failed in a later call.

        That rank has finished the current call, so all of its messages are there. Without this a
        step could succeed on one rank and fail on another.
        """
        deadline = time.monotonic() + max(self.timeouts.heartbeat, _MAIN_THREAD_GRACE)
        while (
            self.guarded_thread is not None
            and self.call_count < failure.call_number
            and not self._connection_lost
        ):
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)

    def _wait_for_seen_keys(self, store: Store) -> None:
        """Wait on the host of the store until all other ranks have read the failure.

        The store ends with the process of its host, and that may exit right after the error.
        """
        failure = self.failure
        excluded: set[int | None] = {self.rank}
        if failure is not None and failure.kind not in ("raised", "stalled"):
            excluded.add(failure.rank)  # the failed rank cannot answer
        keys = [f"seen/{rank}" for rank in range(self.size) if rank not in excluded]
        deadline = time.monotonic() + _ACKNOWLEDGE_TIMEOUT
        while self.host_rank == self.rank and keys and time.monotonic() < deadline:
            if store.check(keys):
                return
            time.sleep(0.01)

    # ---- the sentinel ----------------------------------------------------------------------

    def receive_signal(self, number: int) -> None:
        """Note a signal that this process has received, unless the user's own code handles it."""
        if (number == signal.SIGTERM and signals.owns_sigterm()) or (
            number == signal.SIGINT and self.is_in_call
        ):
            self._signal_times.setdefault(number, self._read_clock(number))
            self.wake()

    def check_deadlines(self, seconds: float) -> None:
        """Find out whether the store answers the monitor, and whether the guarded thread returns.

        `seconds` have passed since the last look. This thread does no I/O: a store that does not
        answer holds up every thread that asks it, for as long as the operating system likes.
        """
        if self._is_in_tick and self._pending_tick == self._tick_count:
            self._tick_seconds += seconds
        else:
            self._pending_tick, self._tick_seconds = self._tick_count, 0.0
        # After a lost connection something has failed already: the store may be a part of it.
        limit = self.timeouts.silence
        if self._connection_lost:
            limit = min(limit, self.timeouts.failure_wait)
        if self.failure is None and not self._contact_lost and self._tick_seconds > limit:
            self._contact_lost = True
            self._failure_acknowledged.set()
            host = causes.describe_store_host(self._store, self.host_rank)
            lost = causes.describe_unreachable_store(host, self.host_rank, self._tick_seconds)
            # Aborting a group may block.
            threading.Thread(
                target=self._record_failure,
                args=(self._local_failure or lost,),
                name="penstock-abort",
                daemon=True,
            ).start()
        elif self._is_overdue():
            self._exit_process()

    def wait_until_told(self, timeout: float) -> None:
        """Wait until all ranks know why this process ends."""
        self.is_raising = True
        if not self._closing and self.failure_known.wait(timeout):
            self.wait_for_acknowledgement()

    # ---- all threads -----------------------------------------------------------------------

    def _record_failure(self, failure: Failure) -> None:
        """Store the failure, and abort the groups so that the guarded thread stops waiting."""
        # Several threads may get here at once: the listener with a failure from the store, the
        # monitor with a lost store. The first one counts.
        with self._failure_lock:
            if self.failure is not None:
                return
            self._failure_time = time.monotonic()
            self.failure = failure
        # At once, and before the others exit: a launcher may then end this process, too.
        if (failure.kind, failure.rank) == ("stalled", self.rank):
            _write_stderr(f"penstock: rank {self.rank} is stuck here:\n{self._format_stack()}")
        self.failure_known.set()
        is_remote = failure.rank != self.rank and failure != causes.describe_lost_store(
            self.host_rank
        )
        if not self.is_in_call and is_remote and not self._closing:
            # Between calls no thread is there to raise it. The next call does, but a launcher may
            # end this process before, so print it now.
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
        """Return whether the guarded thread should have returned by now.

        A rank that is itself the cause, or that received SIGTERM, gets a short grace. Any other
        rank gets one heartbeat. Outside a call there is no limit, or half a heartbeat if the store
        is out of reach. A thread that is about to raise the failure has returned; it may still wait
        for the other ranks to read it.
        """
        failure = self.failure
        if failure is None or self.is_raising or self._closing:
            return False
        is_cause = failure.kind in ("stalled", "interrupted") and failure.rank == self.rank
        grace = _MAIN_THREAD_GRACE
        if not is_cause and not self._is_told_to_end:
            if not self.is_in_call and not self._contact_lost:
                return False
            grace = max(self.timeouts.heartbeat / (1 if self.is_in_call else 2), grace)
        return time.monotonic() - self._failure_time > grace

    def _format_stack(self) -> str:
        """Return the stack of the guarded thread, or of the main thread between calls."""
        thread = self.guarded_thread or threading.main_thread()
        frame = sys._current_frames().get(thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def _exit_process(self) -> None:
        """Print the stack of the stuck thread and end the process.

        Python cannot interrupt a thread that is stuck in C, and `sys.exit` in this thread would end
        this thread only. So only `os._exit` is left.
        """
        assert self.failure is not None
        _write_stderr(
            f"penstock: rank {self.rank} exits, because its thread is stuck here:\n"
            f"{self._format_stack()}\n{self.failure.to_error()}"
        )
        os._exit(1)


def _read_failure(store: Store) -> Failure:
    """Return the failure in the store. It is known to be there."""
    text = store.get("failure")
    try:
        return Failure.from_json(text)
    except (ValueError, TypeError, KeyError, AttributeError):
        return causes.describe_unreadable_report(text)


def _write_stderr(text: str) -> None:
    with suppress(Exception):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


# -------------------------------------------------------------------------------------------------
# The watchdog of the guarded thread
# -------------------------------------------------------------------------------------------------

# gloo raises a plain RuntimeError for a lost connection (PyTorch 2.13: "[.../gloo/transport/tcp/
# pair.cc:553] Connection closed by peer"), both when an operation is posted and when it is waited
# for. NCCL and TCPStore raise subclasses of DistError. `_is_connection_error` therefore decides in
# this order:
#
# 1. Inside a wait of ours (`mark_waiting`), any RuntimeError is a lost connection.
# 2. A DistError is a lost connection.
# 3. Otherwise the text decides. Two cases are left: a send or receive of ours that is posted while
#    the rank computes, and a gloo collective inside a layer (DDP, FSDP, tensor parallelism). There
#    a RuntimeError of gloo and a RuntimeError of the user's code differ in nothing but the text.
#
# A transport error is only a symptom, so the rank waits a moment for the cause (`wait_for_failure`)
# before it publishes anything. If a new PyTorch changes the text, case 3 takes the error for an
# exception of the layer and publishes it at once: all ranks still stop with one RemoteError, but it
# may name a rank that lost a connection instead of the rank that died. A test of the watchdog
# compares this pattern with the text of an aborted group, and fails then. If the text of a layer's
# own error matches by chance, the report is the right one, only later by `Timeouts.failure_wait`.
_BACKEND_NAMES = "|".join(backend.name for backend in LINK_BACKENDS)
_CONNECTION_ERROR = re.compile(
    rf"{_BACKEND_NAMES}|connection (closed|reset|refused)|broken pipe|pair closure", re.IGNORECASE
)


class Watchdog:
    """The watchdog of one rank: publishes what this rank does, and learns why all must stop.

    It serves until the first failure. After that it is closed, and `failure` says why. It also
    closes when it is garbage collected and when the interpreter ends.

    Args:
        store: A TCP store for this watchdog alone, with the same prefix on every rank.
        rank: The rank of this process among all ranks of all replicas.
        size: The number of these ranks.
        heartbeat: Seconds without heartbeats or progress after which a rank has failed.
        abort_groups: Makes all pending operations in the groups of the pipe fail. Another thread
            calls it. It must not refer to an object that refers to the watchdog, or the watchdog
            would never be garbage collected.
        host_rank: The rank that serves the store. None if another process does.
        monitored_ranks: The ranks whose heartbeats this rank reads: all that it ever waits for.
            Empty means all ranks. It still hears of failures that other ranks find.
        may_wait_on_device: Whether the GPU waits for messages by itself (NCCL), so that this rank
            may wait for others while it computes.
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
        may_wait_on_device: bool = False,
    ) -> None:
        other_ranks = [other for other in monitored_ranks or range(size) if other != rank]
        limits = Timeouts(heartbeat)
        self._monitor = HeartbeatMonitor(
            store, rank, size, limits, abort_groups, host_rank, other_ranks, may_wait_on_device
        )
        # The threads refer to the monitor and not to this object, so that it can be collected.
        self._finalizer = weakref.finalize(self, _close_monitor, self._monitor)

    @property
    def failure(self) -> Failure | None:
        """The failure that stops all ranks, or None."""
        return self._monitor.failure

    @property
    def closed(self) -> bool:
        """Whether the watchdog has ended, after a failure or `close`."""
        return not self._finalizer.alive

    def mark_computing(self, description: object, timeout_factor: float = 1.0) -> None:
        """Record that this rank computes, and raise RemoteError if a failure is known.

        It may take `timeout_factor` heartbeats. The monitor calls `str(description)` only when it
        writes a heartbeat, so this call is cheap.
        """
        monitor = self._monitor
        monitor.progress += 1
        activity = RankState.COMPUTING, description, None, timeout_factor
        monitor.activity = monitor.compute_activity = activity
        if monitor.failure is not None:
            raise monitor.failure.to_error()

    def mark_waiting(self, description: object, awaited_ranks: AwaitedRanks = None) -> None:
        """Record that this rank is about to wait, and raise RemoteError if a failure is known.

        Until `mark_arrived`, any RuntimeError counts as a lost connection.
        """
        monitor = self._monitor
        monitor.progress += 1
        factor = monitor.compute_activity[3]
        monitor.activity = RankState.WAITING, description, awaited_ranks, factor
        if monitor.failure is not None:
            raise monitor.failure.to_error()

    def mark_arrived(self) -> None:
        """Record that the wait is over. The rank returns to its activity before the wait."""
        monitor = self._monitor
        monitor.progress += 1
        monitor.activity = monitor.compute_activity

    def mark_outside_call(self) -> None:
        """Record that this rank is between calls."""
        monitor = self._monitor
        monitor.progress += 1
        monitor.activity = monitor.compute_activity = (RankState.OUTSIDE_CALL, "", None, 1.0)

    def guarded(self, call_name: str, timeout_factor: float = 1.0) -> FailureGuard:
        """Return a context manager. An exception inside becomes a RemoteError on every rank."""
        return FailureGuard(self, self._monitor, call_name, timeout_factor)

    def explain_lost_connection(self, error: RuntimeError) -> RuntimeError:
        """Return the failure behind a lost connection as an error, or the error itself.

        Threads other than the guarded one call this, for example a background save.
        """
        failure = self._monitor.failure or self._monitor.wait_for_failure()
        return error if failure is None else failure.to_error()

    def close(self) -> None:
        """Announce that this rank leaves, and end both threads."""
        self._finalizer()


class SubgroupWatchdog:
    """A view of a watchdog for a subgroup, whose members are numbered from 0.

    `ranks[i]` is the rank of member i in the watchdog.
    """

    def __init__(self, watchdog: Watchdog, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self.mark_computing, self.mark_arrived = watchdog.mark_computing, watchdog.mark_arrived
        self._mark_waiting = watchdog.mark_waiting

    def mark_waiting(self, description: object, peer: int | None = None) -> None:
        """Record that this rank is about to wait for a member, or for all of the subgroup."""
        self._mark_waiting(description, self._ranks if peer is None else self._ranks[peer])


class FailureGuard:
    """A context manager that all ranks leave normally, or with the same RemoteError.

    On an exception, `__exit__` finds the failure that all ranks raise:

        failure known already           another rank was first: raise its failure
        transport error                 a symptom: wait for the cause (`wait_for_failure`)
        any other, or no cause found    publish this exception

    Then it closes the watchdog. Ctrl-C and SystemExit are raised as they are, after publishing.
    """

    def __init__(
        self, watchdog: Watchdog, monitor: HeartbeatMonitor, call_name: str, timeout_factor: float
    ) -> None:
        self._watchdog, self._monitor = watchdog, monitor
        self._call_name, self._timeout_factor = call_name, timeout_factor
        self._outer_thread = monitor.guarded_thread

    def __enter__(self) -> None:
        monitor = self._monitor
        if monitor.pid != os.getpid():
            raise RunError(
                "this pipe was called in a process that did not create it, and a forked process "
                "cannot take part in it. Call it in the process that created it, or create one "
                "pipe in each process."
            )
        if monitor.failure is not None:
            self._watchdog.close()
            raise monitor.failure.to_error()
        monitor.guarded_thread, monitor.call_name = threading.current_thread(), self._call_name
        monitor.call_count += self._outer_thread is None
        signals.install()
        monitor.progress += 1
        activity = RankState.COMPUTING, "its beginning", None, self._timeout_factor
        monitor.activity = monitor.compute_activity = activity

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        error_traceback: TracebackType | None,
    ) -> None:
        monitor = self._monitor
        if error is None:
            monitor.guarded_thread = self._outer_thread
            if self._outer_thread is None:
                self._watchdog.mark_outside_call()
                monitor.forget_sigint()
                signals.deliver_held_sigterm()
            return
        # A guard inside this one has raised it and closed the watchdog.
        if isinstance(error, RemoteError) and self._watchdog.closed:
            return
        activity, is_lost = str(monitor.build_heartbeat()), _is_connection_error(error, monitor)
        monitor.is_raising = True
        try:
            failure = monitor.failure or (monitor.wait_for_failure() if is_lost else None)
            failure = failure or monitor.publish_exception(error, activity)
            monitor.wait_for_acknowledgement()
        # Ctrl-C while this thread was in C: Python raises KeyboardInterrupt only now.
        except BaseException as interrupt:
            error = interrupt
            failure = monitor.publish_exception(error, activity)
        monitor.guarded_thread = None
        self._watchdog.close()
        if not isinstance(error, Exception):
            raise error
        remote = failure.to_error()
        remote.add_note(f"This is rank {monitor.rank} of {monitor.size}; it was {activity}.")
        # A transport error explains nothing once the cause is known: do not chain it.
        if is_lost and (failure.kind, failure.rank) != ("raised", monitor.rank):
            raise remote from None
        raise remote from (error.__cause__ if isinstance(error, RemoteError) else _wrap_stop(error))


def _wrap_stop(error: Exception) -> Exception:
    """Return the error, or a RuntimeError from it if it is a StopIteration.

    Python's context managers drop a RuntimeError that has a StopIteration as its direct cause, and
    raise the StopIteration in its place.
    """
    if not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError("a layer, the loss or a hook raised StopIteration")
    wrapped.__cause__ = error
    return wrapped


def _is_connection_error(error: BaseException, monitor: HeartbeatMonitor) -> bool:
    """Return whether an error is a symptom of a lost connection. See `_CONNECTION_ERROR`."""
    if not isinstance(error, RuntimeError) or isinstance(error, PenstockError):
        return False
    is_waiting = monitor.activity[0] is RankState.WAITING
    return is_waiting or isinstance(error, DistError) or bool(_CONNECTION_ERROR.search(str(error)))


def _close_monitor(monitor: HeartbeatMonitor) -> None:
    """Close the monitor of a watchdog that was garbage collected, or at interpreter exit.

    If the program ends with an exception outside of all guards, that is published first. Otherwise
    the other ranks would only hear that this rank has left.
    """
    if monitor.pid != os.getpid():
        return
    is_exiting = not threading.main_thread().is_alive()
    error = getattr(sys, "last_value", None) if is_exiting else None
    if error is not None and monitor.failure is None:
        monitor.publish_exception(error, str(monitor.build_heartbeat()))
        monitor.wait_for_acknowledgement()
    monitor.close()

"""SIGINT and SIGTERM of a process that is a rank, and the thread that nothing can hold up.

Python runs signal handlers in the main thread between two bytecodes. While the main thread is in a
gloo `wait()`, in C, no handler runs. So `signal.set_wakeup_fd` makes Python's C-level handler write
the signal number to a pipe, which the sentinel reads.

The sentinel is one thread per process for all watchdogs. It does no I/O except on that pipe, so
it runs while a thread of a watchdog waits for a store that does not answer:

    signal ──► wakeup pipe   ──► sentinel ──► receive_signal(number)  of each watchdog
                                     └──────► check_deadlines(seconds) of each watchdog

A handler of the user's own, for SIGTERM or SIGINT, is left alone, and so are its signals. Without
one, SIGTERM is received by `_on_sigterm`:

| while                          | SIGTERM                                                       |
|--------------------------------|---------------------------------------------------------------|
| a call of a pipe runs          | is held back until the call ends; the watchdog gives it       |
|                                | seconds, then it tells the other ranks                        |
| no call runs                   | is told to the other ranks, then it ends the process          |
| the process ends with an error | ends the process after a grace period                         |
| a pipe saves on preemption     | is remembered; the next call of the pipe saves and exits      |
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Protocol

from penstock.errors import RunError

# Seconds for a failing process to report its error after SIGTERM. torchrun sends SIGKILL after 30.
_SIGTERM_GRACE = 15.0
# Seconds in which the other ranks hear of a SIGTERM that arrives between calls.
_DELIVERY_TIMEOUT = 6.0
_INTERVAL = 0.1  # seconds between two looks of the sentinel

PREEMPTED_EXIT_CODE = 128 + signal.SIGTERM


class Watched(Protocol):
    """A watchdog, as the sentinel sees it."""

    @property
    def is_in_call(self) -> bool:
        """Whether a thread is inside a call of the pipe."""

    def receive_signal(self, number: int) -> None:
        """Note a signal that this process has received. Do not block."""

    def check_deadlines(self, seconds: float) -> None:
        """Look whether another thread is overdue, `seconds` after the last look. Do not block."""

    def wait_until_told(self, timeout: float) -> None:
        """Wait until the other ranks know why this process ends."""


class Sentinel:
    """The thread of a process that reads signals, and watches the threads of all watchdogs."""

    def __init__(self) -> None:
        # Reentrant: garbage collection may close a watchdog in any thread, at any line.
        self._lock = threading.RLock()
        self._watched: list[Watched] = []
        self._thread: threading.Thread | None = None
        self._receiver, self.wakeup_fd = os.pipe()  # open as long as the process
        for fd in (self._receiver, self.wakeup_fd):
            os.set_blocking(fd, False)

    @property
    def watched(self) -> list[Watched]:
        """The open watchdogs."""
        return list(self._watched)

    def add(self, watched: Watched) -> None:
        """Start to watch."""
        with self._lock:
            self._watched.append(watched)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="penstock-sentinel", daemon=True
                )
                self._thread.start()

    def close_in_child(self) -> None:
        """Close what a forked process has inherited."""
        os.close(self._receiver)
        os.close(self.wakeup_fd)

    def remove(self, watched: Watched) -> None:
        """Stop to watch. The thread ends with the last one."""
        with self._lock, suppress(ValueError):
            self._watched.remove(watched)
        with suppress(OSError):
            os.write(self.wakeup_fd, b"\0")

    def _run(self) -> None:
        last_look = time.monotonic()
        while True:
            select.select([self._receiver], [], [], _INTERVAL)
            numbers = b""
            with suppress(BlockingIOError):
                numbers = os.read(self._receiver, 64)
            with self._lock:
                if not self._watched:
                    self._thread = None
                    return
            # If the process was suspended, the others may have done their part meanwhile.
            now = time.monotonic()
            seconds, last_look = min(now - last_look, 2 * _INTERVAL), now
            for watched in self.watched:
                for number in filter(None, numbers):
                    watched.receive_signal(number)
                watched.check_deadlines(seconds)


class _Signals:
    """The state of this process: its handlers, and the signals that it has received."""

    def __init__(self) -> None:
        self.sentinel = Sentinel()
        self.sigterm_received = False
        # Seconds from SIGTERM to the end of the process, if a pipe saves on preemption.
        self.preemption_limit: float | None = None
        self.exit_timer: threading.Timer | None = None


_signals: _Signals | None = None


def _get_signals() -> _Signals:
    global _signals
    if _signals is None:
        _signals = _Signals()
    return _signals


def watch(watched: Watched) -> None:
    """Let the sentinel watch, and receive signals from now on."""
    _get_signals().sentinel.add(watched)
    install()


def unwatch(watched: Watched, failed: bool) -> None:
    """Undo `watch`. With the last watchdog, signals have their default effect again.

    After a failure SIGTERM ends the process after a grace period instead of at once: torchrun sends
    it to all processes as soon as one has ended, before the others have reported the cause.
    """
    signals = _get_signals()
    signals.sentinel.remove(watched)
    if signals.sentinel.watched or threading.current_thread() is not threading.main_thread():
        return
    _clear_wakeup_fd(signals)
    if owns_sigterm() and signals.preemption_limit is None:
        signal.signal(signal.SIGTERM, _exit_delayed if failed else signal.SIG_DFL)
        deliver_held_sigterm()


def install() -> None:
    """Receive signals, unless this is not the main thread or other code receives them already."""
    if threading.current_thread() is not threading.main_thread():
        return
    fd = _get_signals().sentinel.wakeup_fd
    previous = signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    if previous not in (-1, fd):  # other code has set one
        signal.set_wakeup_fd(previous, warn_on_full_buffer=False)
    elif signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _exit_delayed):
        signal.signal(signal.SIGTERM, _on_sigterm)


def owns_sigterm() -> bool:
    """Return whether SIGTERM is received here, and not by a handler of the user's own."""
    return signal.getsignal(signal.SIGTERM) is _on_sigterm


def deliver_held_sigterm() -> None:
    """Deliver a SIGTERM that was held back while a call ran."""
    signals = _get_signals()
    if signals.sigterm_received and signals.preemption_limit is None:
        signals.sigterm_received = False
        os.kill(os.getpid(), signal.SIGTERM)


# -------------------------------------------------------------------------------------------------
# Preemption
# -------------------------------------------------------------------------------------------------


def expect_preemption(limit: float) -> None:
    """Let SIGTERM set `is_preempted` instead of ending the process before `limit` seconds."""
    install()
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and _is_main_thread():
        signal.signal(signal.SIGTERM, _on_sigterm)
    if not owns_sigterm():
        raise RunError(
            "save_on_preemption needs SIGTERM, but this process has a handler of its own for it, "
            "or this is not the main thread. Call save_on_preemption in the main thread and remove "
            "the handler, or call pipe.save in your own loop once your handler has run."
        )
    _get_signals().preemption_limit = limit


def get_preemption_limit() -> float | None:
    """Return the seconds that a preempted process has, or None if no pipe saves on preemption."""
    return None if _signals is None else _signals.preemption_limit


def is_preempted() -> bool:
    """Return whether SIGTERM has arrived in a process that saves on preemption."""
    return (
        _signals is not None and _signals.preemption_limit is not None and _signals.sigterm_received
    )


def end_preemption() -> None:
    """Undo `expect_preemption`: the checkpoint is written, and the process may end."""
    signals = _get_signals()
    signals.preemption_limit, signals.sigterm_received = None, False
    if signals.exit_timer is not None:
        signals.exit_timer.cancel()
        signals.exit_timer = None
    if _is_main_thread() and owns_sigterm() and not signals.sentinel.watched:
        _clear_wakeup_fd(signals)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# -------------------------------------------------------------------------------------------------
# Handlers, which run in the main thread
# -------------------------------------------------------------------------------------------------


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    signals = _get_signals()
    signals.sigterm_received = True
    watched = signals.sentinel.watched
    if signals.preemption_limit is not None:
        # Without a watchdog nobody else ends a process that does not come to its next call.
        if not watched and signals.exit_timer is None:
            signals.exit_timer = _exit_after(signals.preemption_limit, PREEMPTED_EXIT_CODE)
        return
    if any(watchdog.is_in_call for watchdog in watched):
        return  # `deliver_held_sigterm` follows
    for watchdog in watched:
        watchdog.receive_signal(number)
    for watchdog in watched:
        watchdog.wait_until_told(_DELIVERY_TIMEOUT)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _exit_delayed(number: int, frame: FrameType | None) -> None:
    _exit_after(_SIGTERM_GRACE, 128 + number)


def _exit_after(seconds: float, code: int) -> threading.Timer:
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.name, timer.daemon = "penstock-end", True
    timer.start()
    return timer


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _clear_wakeup_fd(signals: _Signals) -> None:
    previous = signal.set_wakeup_fd(-1)
    if previous not in (-1, signals.sentinel.wakeup_fd):
        signal.set_wakeup_fd(previous, warn_on_full_buffer=False)


# -------------------------------------------------------------------------------------------------
# Forked processes, for example workers of a DataLoader
#
# A forked process inherits the handlers and the wakeup pipe, and its parent would take the child's
# signals for its own. Signals are blocked until the child has let go of both.
# -------------------------------------------------------------------------------------------------

_BLOCKED = (signal.SIGTERM, signal.SIGINT)
_masks = threading.local()  # the signal mask of a thread that forks


def _block_before_fork() -> None:
    _masks.previous = None
    if _signals is not None:
        _masks.previous = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)


def _unblock_after_fork() -> None:
    if _masks.previous is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.previous)


def _forget_in_child() -> None:
    global _signals
    if _signals is not None:
        if _is_main_thread():
            _clear_wakeup_fd(_signals)
            if signal.getsignal(signal.SIGTERM) in (_on_sigterm, _exit_delayed):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _signals.sentinel.close_in_child()
        _signals = None
    _unblock_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_block_before_fork,
        after_in_parent=_unblock_after_fork,
        after_in_child=_forget_in_child,
    )

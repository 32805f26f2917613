"""Signals while a rank is in a step: heard even while the main thread waits in C."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

_SIGTERM_GRACE = 5.0  # seconds that a process has to say why it fails, after it was told to end


class SignalHandler:
    """Rings a bell for each signal, and keeps SIGTERM from ending a process that fails.

    Only in the main thread, only what nobody else has taken, and only between `take` and
    `give_back`. A launcher sends SIGTERM to all as soon as one process ends: without this, the
    others would die before they can say why.
    """

    def __init__(self, wakeup_fd: int) -> None:
        self._wakeup_fd, self._owns_wakeup_fd, self._owns_sigterm, self._sigterm_received = (
            wakeup_fd,
            False,
            False,
            False,
        )

    def install(self) -> None:
        """From now on."""
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
        self._owns_wakeup_fd = previous == -1
        if not self._owns_wakeup_fd:
            signal.set_wakeup_fd(previous, warn_on_full_buffer=False)
        elif signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _exit_delayed):
            signal.signal(signal.SIGTERM, self._on_sigterm)
            self._owns_sigterm = True

    def uninstall(self, failed: bool) -> None:
        """No longer; after a failure, SIGTERM ends the process a little later than at once."""
        if self._owns_wakeup_fd:
            signal.set_wakeup_fd(-1)
            self._owns_wakeup_fd = False
        if self._owns_sigterm:
            signal.signal(signal.SIGTERM, _exit_delayed if failed else signal.SIG_DFL)
            self._owns_sigterm = False
        if self._sigterm_received:
            os.kill(os.getpid(), signal.SIGTERM)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """The bell has rung for the lookout, which publishes it if nothing else explains it."""
        self._sigterm_received = True


def _exit_delayed(number: int, frame: FrameType | None) -> None:
    def exit_process() -> None:
        time.sleep(_SIGTERM_GRACE)
        os._exit(128 + number)

    threading.Thread(target=exit_process, name="penstock-end", daemon=True).start()

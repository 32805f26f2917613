"""SIGINT and SIGTERM while a rank is in a call.

Python runs signal handlers in the main thread between two bytecodes. While the main thread is in a
gloo `wait()`, in C, no handler runs. So `signal.set_wakeup_fd` makes Python's C-level handler write
the signal number to a socket, and the monitor thread of the watchdog reads it there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

# Seconds for a failing process to report its error after SIGTERM. torchrun sends SIGKILL after 30.
_SIGTERM_GRACE = 15.0


class SignalHandler:
    """Forwards signals to the watchdog, and delays SIGTERM while a process fails.

    torchrun sends SIGTERM to all processes as soon as one has ended. Without the delay the others
    would die before they can report the cause.

    It acts only between `install` and `uninstall` and in the main thread. It leaves alone a wakeup
    fd or a SIGTERM handler that other code has set.
    """

    def __init__(self, wakeup_fd: int) -> None:
        self._wakeup_fd = wakeup_fd
        self._owns_wakeup_fd = self._owns_sigterm = self._sigterm_received = False

    def install(self) -> None:
        """Start to forward signals and to hold back SIGTERM."""
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
        self._owns_wakeup_fd = previous == -1  # -1: no other code has set one
        if not self._owns_wakeup_fd:
            signal.set_wakeup_fd(previous, warn_on_full_buffer=False)
        elif signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _exit_delayed):
            signal.signal(signal.SIGTERM, self._on_sigterm)
            self._owns_sigterm = True

    def uninstall(self, failed: bool) -> None:
        """Restore the default handling, and deliver a SIGTERM that was held back.

        After a failure SIGTERM ends the process after a grace period instead of at once.
        """
        if self._owns_wakeup_fd:
            signal.set_wakeup_fd(-1)
            self._owns_wakeup_fd = False
        if self._owns_sigterm:
            signal.signal(signal.SIGTERM, _exit_delayed if failed else signal.SIG_DFL)
            self._owns_sigterm = False
        if self._sigterm_received:
            os.kill(os.getpid(), signal.SIGTERM)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal. The monitor thread has read it too, and may publish it."""
        self._sigterm_received = True


def _exit_delayed(number: int, frame: FrameType | None) -> None:
    def exit_process() -> None:
        time.sleep(_SIGTERM_GRACE)
        os._exit(128 + number)

    threading.Thread(target=exit_process, name="penstock-end", daemon=True).start()

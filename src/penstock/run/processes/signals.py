"""Signals while a rank is in a step: heard even while the main thread waits in C."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

_LATE = 5.0  # seconds that a process has to say why it fails, after it was told to end


class Signals:
    """Rings a bell for each signal, and keeps SIGTERM from ending a process that fails.

    Only in the main thread, only what nobody else has taken, and only between `take` and
    `give_back`. A launcher sends SIGTERM to all as soon as one process ends: without this, the
    others would die before they can say why.
    """

    def __init__(self, bell: int) -> None:
        self._bell, self._ours, self._term, self._came = bell, False, False, False

    def take(self) -> None:
        """From now on."""
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
        self._ours = previous == -1
        if not self._ours:
            signal.set_wakeup_fd(previous, warn_on_full_buffer=False)
        elif signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _end_late):
            signal.signal(signal.SIGTERM, self._heard)
            self._term = True

    def give_back(self, failed: bool) -> None:
        """No longer; after a failure, SIGTERM ends the process a little later than at once."""
        if self._ours:
            signal.set_wakeup_fd(-1)
            self._ours = False
        if self._term:
            signal.signal(signal.SIGTERM, _end_late if failed else signal.SIG_DFL)
            self._term = False
        if self._came:
            os.kill(os.getpid(), signal.SIGTERM)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        """The bell has rung for the lookout, which publishes it if nothing else explains it."""
        self._came = True


def _end_late(number: int, frame: FrameType | None) -> None:
    def end() -> None:
        time.sleep(_LATE)
        os._exit(128 + number)

    threading.Thread(target=end, name="penstock-end", daemon=True).start()

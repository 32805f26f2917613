"""A save that is under way, and the one that a pipe has to wait for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Thread

_log = logging.getLogger("penstock")


class SaveHandle:
    """A save on its way to the disk, or there. It counts when `wait` has returned."""

    def __init__(self, path: Path, write: Callable[[], None], background: bool) -> None:
        self.path = path
        self._write = write
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="penstock saving") if background else None
        if self._thread is not None:
            self._thread.start()
        else:
            write()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error
            _log.error("penstock: a save in the background failed: %s", error)

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Until it is on the disk; gives the path, or raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self.path


class PendingSave:
    """One pipe's last save, if it is in the background. A copy of the pipe has its own."""

    def __init__(self) -> None:
        self.handle: SaveHandle | None = None

    def wait(self) -> None:
        """For the save that is under way; raises what went wrong with it."""
        last, self.handle = self.handle, None
        if last is not None:
            last.wait()

    def __reduce__(self) -> tuple[type[PendingSave], tuple[()]]:
        return PendingSave, ()

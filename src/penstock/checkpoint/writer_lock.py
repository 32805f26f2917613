"""The lock of a folder: one process at a time saves to it.

A writer creates a file with its own name, `.penstock-writer-<token>`, and then looks for the files
of others. Two writers cannot miss each other, because each creates its file before it looks:

    no other file               the lock is held, until the file is removed
    a live writer's file        the lock is refused; if both have just come, the lower token stays
    a dead writer's file        it is removed: its lock is taken over

A writer on this machine is alive if a process has its number and was started at the same time. A
writer touches its file every `BEAT_SECONDS`. So one on another machine is alive if its file is
touched while others look at it, and dead if that was `SILENT_SECONDS` ago, by the clock of the file
system, or if another writer has watched it for that long. Until either is known, others wait.

A writer that was only held up, and finds that its file is gone, has lost the lock. It looks right
before it commits a save and before it removes one, so it does neither.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple
from uuid import uuid4

from penstock.checkpoint.manifest import Writer, write_file_synced
from penstock.errors import CheckpointError

_log = logging.getLogger("penstock")

BEAT_SECONDS, SILENT_SECONDS = 5.0, 60.0
_ARRIVAL_SECONDS = 2.0  # how long a writer waits for another that came at the same time to leave
_LOCK_FILE = re.compile(r"\.penstock-writer-[0-9a-f]{32}")


def identify_writer(token: str | None = None) -> Writer:
    """Return this process as a writer, under a token or a new one."""
    pid = os.getpid()
    return Writer(
        socket.gethostname(), _get_machine(), pid, _get_start_time(pid) or "", token or uuid4().hex
    )


@dataclass(frozen=True)
class WriterLock:
    """A lock that this process holds. A thread touches its file until it is released."""

    path: Path
    _released: Event

    def check_held(self) -> None:
        """Raise if another process has taken the lock over."""
        if not self.path.exists():
            raise CheckpointError(
                f"this process was not heard of for {SILENT_SECONDS:g} s while it saved to "
                f"'{self.path.parent}', and another process has taken over the folder. The save "
                "was given up; the checkpoints of the other process are intact."
            )

    def release(self) -> None:
        """Let others save to the folder."""
        self._released.set()
        self.path.unlink(missing_ok=True)


def acquire_lock(folder: Path, writer: Writer) -> WriterLock:
    """Return the lock of a folder.

    Raises:
        CheckpointError: If another process, or another pipe of this one, is saving to the folder.
    """
    path = folder / f".penstock-writer-{writer.token}"
    deadline, is_told = time.monotonic() + _ARRIVAL_SECONDS, False
    first_seen: dict[str, tuple[float, float]] = {}  # when each was touched, and seen by our clock
    try:
        path.unlink(missing_ok=True)  # an earlier save of this pipe could not remove it
        write_file_synced(path, json.dumps(asdict(writer)).encode())
        while others := _find_writers(folder, path):
            for name, other in others.items():
                touched, seen_at = first_seen.setdefault(name, (other.touched, time.monotonic()))
                was_touched, watched = other.touched != touched, time.monotonic() - seen_at
                if not other.is_local and not was_touched and watched >= SILENT_SECONDS:
                    # The clock of the file system was set back: the file is dated in the future.
                    (folder / name).unlink(missing_ok=True)
                may_leave = name > path.name and time.monotonic() < deadline
                if (other.is_local or was_touched) and not may_leave:
                    raise CheckpointError(
                        f"{other.writer or 'another process'} is saving to '{folder}', and two "
                        "writers would remove each other's checkpoints. Stop one of them, or save "
                        "to another folder."
                    )
            if time.monotonic() >= deadline and not is_told:
                is_told, other_writer = True, next(iter(others.values())).writer
                _log.warning(
                    "penstock: %s was saving to '%s'. Waiting until it is known to be alive or "
                    "dead, for at most %g s.",
                    other_writer or "a process",
                    folder,
                    SILENT_SECONDS,
                )
            time.sleep(0.05)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    released = Event()
    Thread(
        target=_touch_until, args=(path, released), name="penstock saving: lock", daemon=True
    ).start()
    return WriterLock(path, released)


def _touch_until(path: Path, released: Event) -> None:
    while not released.wait(BEAT_SECONDS):
        try:
            os.utime(path)
        except OSError:
            return  # another process has taken over; `check_held` says so


class _OtherWriter(NamedTuple):
    """A writer that is alive, if it `is_local`, or may be."""

    writer: Writer | None
    is_local: bool
    touched: float


def _find_writers(folder: Path, own: Path) -> dict[str, _OtherWriter]:
    """Return the other writers by the names of their files. Remove the files of dead ones."""
    os.utime(own)
    now = own.stat().st_mtime  # by the clock that also dates the files of the others
    others: dict[str, _OtherWriter] = {}
    for name in os.listdir(folder):
        if not _LOCK_FILE.fullmatch(name) or name == own.name:
            continue
        path = folder / name
        try:
            touched = path.stat().st_mtime
            text = path.read_text()
        except FileNotFoundError:
            continue  # it has left
        try:
            writer = Writer(**json.loads(text))
        except (ValueError, TypeError):
            writer = None  # it is being written, or its writer died while it wrote it
        is_local = writer is not None and writer.machine == _get_machine() and os.name == "posix"
        if _has_ended(writer) if writer and is_local else now - touched >= SILENT_SECONDS:
            path.unlink(missing_ok=True)
        else:
            others[name] = _OtherWriter(writer, is_local, touched)
    return others


def _has_ended(writer: Writer) -> bool:
    """Return whether a process of this machine has ended."""
    start_time = _get_start_time(writer.pid)
    return start_time is None or start_time != writer.started


@cache
def _get_machine() -> str:
    """Return a name for the processes that share process numbers: a machine, or a container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _get_start_time(pid: int) -> str | None:
    """Return when a process was started, as text, or None if there is no such process.

    The text is empty where the system does not tell.
    """
    try:
        # The second field is the name of the program, in brackets, and may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]  # Z, X: it has ended
    except (OSError, IndexError):
        if os.path.exists("/proc/self/stat"):
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        return ""
    return ""

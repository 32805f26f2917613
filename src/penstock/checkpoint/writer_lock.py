"""The lock of a folder: one process at a time saves to it.

A writer creates a file with its own name, `.penstock-writer-<token>`, and then looks for the files
of others. Two writers cannot miss each other, because each creates its file before it looks:

    no other file               the lock is held, until the file is removed
    a live writer's file        the lock is refused; if both have just come, the lower token stays
    a dead writer's file        it is removed: its lock is taken over

A writer is dead

    on this machine     if no process has its number, or one that was started at another time
    on another          if it has not touched its file for `SILENT_SECONDS`; it does so every
                        `BEAT_SECONDS`, and the file system's own clock measures the time

A writer that was only held up, and finds that its file is gone, has lost the lock. It looks right
before it commits a save and before it removes one, so it does neither.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from threading import Event, Thread
from uuid import uuid4

from penstock.checkpoint.manifest import Writer, write_file_synced
from penstock.errors import CheckpointError

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
    write_file_synced(path, json.dumps(asdict(writer)).encode())
    deadline = time.monotonic() + _ARRIVAL_SECONDS
    try:
        while others := _find_live_writers(folder, path):
            name, other = min(others.items())
            if name < path.name or time.monotonic() > deadline:
                raise CheckpointError(
                    f"{other or 'another process'} is saving to '{folder}', and two writers would "
                    "remove each other's checkpoints. Stop one of them, or save to another folder."
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


def _find_live_writers(folder: Path, own: Path) -> dict[str, Writer | None]:
    """Return the other writers by the names of their files. Remove the files of dead ones."""
    os.utime(own)
    now = own.stat().st_mtime  # by the clock that also dates the files of the others
    live: dict[str, Writer | None] = {}
    for name in os.listdir(folder):
        if not _LOCK_FILE.fullmatch(name) or name == own.name:
            continue
        path = folder / name
        try:
            age = now - path.stat().st_mtime
            text = path.read_text()
        except FileNotFoundError:
            continue  # it has left
        try:
            writer = Writer(**json.loads(text))
        except (ValueError, TypeError):
            writer = None  # it is being written, or its writer died while it wrote it
        if is_alive(writer, age):
            live[name] = writer
        else:
            path.unlink(missing_ok=True)
    return live


def is_alive(writer: Writer | None, age: float) -> bool:
    """Return whether a writer may still be running. `age` is the age of its file, in seconds."""
    if writer is not None and writer.machine == _get_machine() and os.name == "posix":
        start_time = _get_start_time(writer.pid)
        return start_time is not None and start_time == writer.started
    return age < SILENT_SECONDS


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

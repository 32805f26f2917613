"""Sockets of process groups, and pipes between ranks, which a forked process closes.

A killed rank is noticed at once because its connections close. A process that the rank has forked,
such as a worker of a `DataLoader`, inherits them and keeps them open, so the others would wait for
a heartbeat. gloo does not tell its descriptors: the sockets that appear while a group is opened are
taken. The inode tells whether a descriptor still means the same socket or pipe later.

Where there is no /proc, forked processes keep them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

_DESCRIPTORS = "/proc/self/fd"

_inherited: dict[int, str] = {}  # descriptor: "socket:[inode]" or "pipe:[inode]"
# Held while descriptors are added. A list of the dict's items is no snapshot: garbage collection
# may run in between, and let another thread go on.
_lock = threading.Lock()


@contextmanager
def close_sockets_in_children() -> Iterator[None]:
    """Let processes that are forked later close the sockets that are opened in this context."""
    before = _find_sockets()
    yield
    _remember(fd for fd, name in _find_sockets().items() if before.get(fd) != name)


def close_in_children(descriptors: Iterable[int]) -> None:
    """Let processes that are forked later close these descriptors."""
    _remember(descriptors)


def _remember(descriptors: Iterable[int]) -> None:
    with _lock:
        for fd, name in list(_inherited.items()):
            if _read_name(fd) != name:  # closed since
                del _inherited[fd]
        _inherited.update({fd: name for fd in descriptors if (name := _read_name(fd))})


def _find_sockets() -> dict[int, str]:
    descriptors: list[int] = []
    with suppress(OSError):
        descriptors = list(map(int, os.listdir(_DESCRIPTORS)))
    names = {fd: _read_name(fd) for fd in descriptors}
    return {fd: name for fd, name in names.items() if name.startswith("socket:")}


def _read_name(descriptor: int) -> str:
    """Return what a descriptor means, or "" if it is closed."""
    try:
        return os.readlink(f"{_DESCRIPTORS}/{descriptor}")
    except OSError:
        return ""


def _close_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that the child does not have may have held it
    for fd, name in _inherited.items():
        if _read_name(fd) == name:
            os.close(fd)
    _inherited.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)

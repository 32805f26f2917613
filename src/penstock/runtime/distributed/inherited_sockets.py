"""Sockets of process groups, which a forked process closes.

A killed rank is noticed at once because its connections close. A process that the rank has forked,
such as a worker of a `DataLoader`, inherits the sockets of gloo and keeps them open, so the others
would wait for a heartbeat. gloo does not tell its descriptors: those that appear while a group is
opened are taken. The inode tells whether a descriptor still means the same socket later.

Where there is no /proc, forked processes keep the sockets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_DESCRIPTORS = "/proc/self/fd"

_sockets: dict[int, str] = {}  # descriptor: "socket:[inode]"


@contextmanager
def close_sockets_in_children() -> Iterator[None]:
    """Let processes that are forked later close the sockets that are opened in this context."""
    before = _find_sockets()
    yield
    after = _find_sockets()
    opened = {fd: name for fd, name in after.items() if before.get(fd) != name}
    still_open = {fd: name for fd, name in _sockets.items() if after.get(fd) == name}
    _sockets.clear()
    _sockets.update(still_open | opened)


def _find_sockets() -> dict[int, str]:
    sockets = {}
    with suppress(OSError):
        for entry in os.listdir(_DESCRIPTORS):
            with suppress(OSError):  # the descriptor of the listing itself
                name = os.readlink(f"{_DESCRIPTORS}/{entry}")
                if name.startswith("socket:"):
                    sockets[int(entry)] = name
    return sockets


def _close_in_child() -> None:
    inherited = _find_sockets() if _sockets else {}
    for fd, name in _sockets.items():
        if inherited.get(fd) == name:
            os.close(fd)
    _sockets.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)

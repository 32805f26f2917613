"""Is this forward one that will be repeated, or the repetition? For layers that ask."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _InThisThread(threading.local):
    def __init__(self) -> None:
        self.checkpointing = False
        self.recomputing = False


_here = _InThisThread()


def is_checkpointing() -> bool:
    """In a layer: will this forward be recomputed for its backward?"""
    return _here.checkpointing


def is_recomputing() -> bool:
    """In a layer: is this the recomputation of an earlier forward?"""
    return _here.recomputing


@contextmanager
def checkpointing() -> Iterator[None]:
    """Tell the layers that this forward will be recomputed."""
    _here.checkpointing = True
    try:
        yield
    finally:
        _here.checkpointing = False


@contextmanager
def recomputing() -> Iterator[None]:
    """Tell the layers that this is a recomputation."""
    _here.recomputing = True
    try:
        yield
    finally:
        _here.recomputing = False

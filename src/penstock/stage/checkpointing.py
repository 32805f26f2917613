"""Is this forward one that will be repeated, or the repetition? For layers that ask."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _RecomputeState(threading.local):
    def __init__(self) -> None:
        self.checkpointing = False
        self.recomputing = False


_thread_state = _RecomputeState()


def is_checkpointing() -> bool:
    """In a layer: will this forward be recomputed for its backward?"""
    return _thread_state.checkpointing


def is_recomputing() -> bool:
    """In a layer: is this the recomputation of an earlier forward?"""
    return _thread_state.recomputing


@contextmanager
def mark_checkpointing() -> Iterator[None]:
    """Tell the layers that this forward will be recomputed."""
    _thread_state.checkpointing = True
    try:
        yield
    finally:
        _thread_state.checkpointing = False


@contextmanager
def mark_recomputing() -> Iterator[None]:
    """Tell the layers that this is a recomputation."""
    _thread_state.recomputing = True
    try:
        yield
    finally:
        _thread_state.recomputing = False

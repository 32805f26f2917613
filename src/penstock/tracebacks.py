"""Tracebacks without the frames of Penstock itself.

A step runs a layer through some twenty functions of Penstock, in a thread of its own. An error in
the layer has nothing to do with them. So the public entry points (`Pipe`, `pipe.step`, `pipe(x)`,
`loss.backward()`, `penstock.split`, ...) take them out of the traceback:

    frame                                              shown
    the user's script, its layers and loss functions   yes
    functions of PyTorch below the last of Penstock    yes: the layer or the loss called them
    Penstock                                           no
    PyTorch and the standard library in between        no: they lead from Penstock to Penstock

An error that begins in Penstock, is not one of its own, such as a KeyError, and has no hint, is a
bug: it keeps all frames. So does everything after `full_tracebacks(True)`, or with
PENSTOCK_TRACEBACK=1 in the environment. Causes and contexts stay linked, and are folded, too.

Nothing here runs unless there is an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

from penstock.errors import PenstockError
from penstock.vocabulary import explain_refused_call

P = ParamSpec("P")
R = TypeVar("R")

FULL_TRACEBACKS_VARIABLE = "PENSTOCK_TRACEBACK"

_PACKAGE_FOLDER = str(Path(__file__).parent) + os.sep
_PLUMBING = frozenset({"torch", *sys.stdlib_module_names})
_NOTE_START = "Frames of Penstock that are not shown: "
_HINT_ATTRIBUTE = "penstock_hint"

# A list, so that `full_tracebacks` need not rebind a global name.
_shows_all_frames = [bool(os.environ.get(FULL_TRACEBACKS_VARIABLE))]


def full_tracebacks(enabled: bool = True) -> None:
    """Show the frames of Penstock in the tracebacks of errors, or leave them out again.

    By default, the traceback of an error in a layer or a loss function leads from the call of the
    pipe straight to that function. PENSTOCK_TRACEBACK=1 in the environment shows all frames, too.

    Args:
        enabled: Whether all frames are shown.

    >>> import penstock
    >>> penstock.full_tracebacks(True)
    >>> penstock.full_tracebacks(False)
    """
    _shows_all_frames[0] = bool(enabled)


def entry_point(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose errors have no frames of Penstock in their traceback.

    If the arguments do not fit, the error suggests those that the function has.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            # Python refuses a call before the function begins, so there is no frame of it.
            if isinstance(error, TypeError) and error.__traceback__.tb_next is None:  # type: ignore[union-attr]
                add_hint(error, explain_refused_call(function, kwargs))
            fold_frames(error)
            raise

    return call


def add_hint(error: BaseException, hint: str) -> None:
    """Add a note to an error that says which mistake it looks like, and what to do.

    The cause is then known, so that `fold_frames` does not take the error for a bug of Penstock.
    """
    if not has_hint(error):  # the call of a pipe in a layer has added one
        setattr(error, _HINT_ATTRIBUTE, hint)
        error.add_note(hint)


def has_hint(error: BaseException) -> bool:
    """Return whether an error has a note that says which mistake it looks like."""
    return hasattr(error, _HINT_ATTRIBUTE)


def fold_frames(error: BaseException) -> None:
    """Take the frames of Penstock out of the traceback of an error and of its causes.

    Call it in an `except` block that ends with a bare `raise`, which does not add the frame of the
    block again.
    """
    if _shows_all_frames[0]:
        return
    visited: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        current = todo.pop()
        if current is None or id(current) in visited:
            continue
        visited.add(id(current))
        todo += [current.__cause__, current.__context__]
        entries = _list_entries(current.__traceback__)
        shown_entries = _select_entries(current, entries)
        if len(shown_entries) == len(entries):
            continue
        current.__traceback__ = _build_traceback(shown_entries)
        if current is error and shown_entries and not isinstance(error, PenstockError):
            _add_note(error, len(entries) - len(shown_entries))


def _list_entries(traceback: TracebackType | None) -> list[TracebackType]:
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    return entries


def _select_entries(error: BaseException, entries: list[TracebackType]) -> list[TracebackType]:
    """Return the entries of a traceback that are shown."""
    ours = [index for index, entry in enumerate(entries) if _is_of_penstock(entry.tb_frame)]
    if not ours:
        return entries
    last = ours[-1]
    is_expected = isinstance(error, PenstockError) or has_hint(error)
    if last == len(entries) - 1 and not is_expected:
        return entries
    before = (entry for index, entry in enumerate(entries[:last]) if index not in ours)
    shown_before = [entry for entry in before if not _is_plumbing(entry.tb_frame)]
    after = entries[last + 1 :]
    # A mode that Penstock has put around an operation of the user's code passes it on to PyTorch.
    if shown_before and all(_is_plumbing(entry.tb_frame) for entry in after):
        after = []
    return [*shown_before, *after]


def _is_of_penstock(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE_FOLDER)


def _is_plumbing(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _PLUMBING


def _build_traceback(entries: list[TracebackType]) -> TracebackType | None:
    """Return a new traceback. The entries themselves may belong to other errors, too."""
    traceback = None
    for entry in reversed(entries):
        traceback = TracebackType(traceback, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return traceback


def _add_note(error: BaseException, hidden: int) -> None:
    notes = getattr(error, "__notes__", [])
    if not any(note.startswith(_NOTE_START) for note in notes):
        error.add_note(f"{_NOTE_START}{hidden}. penstock.full_tracebacks(True) shows them.")

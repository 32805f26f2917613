"""The display in notebooks and terminals: values as HTML, progress, and lines of text.

`render_html` is what `_repr_html_` of a schedule, a timeline or a plan returns. These values are in
folders below `draw`, which draws them: `draw/notebook.py` registers a function for each of them.

How progress is shown depends on where it is shown:

    a notebook                        a bar in the output of the cell, replaced as it grows
    a terminal, with tqdm imported    a bar of tqdm, which knows how to share the lines with others
    another terminal                  one line, written over and over and removed at the end
    anywhere else, such as a log      nothing
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import singledispatch
from html import escape
from math import isfinite
from time import monotonic
from typing import IO, Any, Protocol

# Called with what is being done, and the fraction that is done.
Progress = Callable[[str, float], None]

_REDRAW_SECONDS = 0.1


@singledispatch
def render_html(value: object) -> str | None:
    """Return a value as HTML for a notebook, or None, for which a notebook shows its `repr`."""
    return None


# ---- progress ------------------------------------------------------------------------------------


class ProgressView(Protocol):
    """The interface of a place where progress is shown."""

    def show(self, what: str, fraction: float) -> None:
        """Show what is being done, and the fraction that is done."""

    def close(self) -> None:
        """Remove what was shown, or show that it is complete."""


@contextmanager
def shown_progress(progress: Progress | bool | None) -> Iterator[Progress | None]:
    """Yield the function to report progress to: the caller's own, or for True one that shows it."""
    view = _choose_view() if progress is True else None
    if view is None:
        yield progress if callable(progress) else None
        return
    last_shown = -_REDRAW_SECONDS

    def report(what: str, fraction: float) -> None:
        nonlocal last_shown
        if monotonic() - last_shown >= _REDRAW_SECONDS:
            view.show(what, min(max(fraction, 0.0), 1.0) if isfinite(fraction) else 0.0)
            last_shown = monotonic()

    try:
        yield report
    finally:
        view.close()


def _choose_view() -> ProgressView | None:
    if is_notebook():
        return NotebookProgress()
    if not sys.stderr.isatty():
        return None
    # Whoever has imported tqdm may have a bar on the screen, which a line of ours would tear apart.
    return TqdmProgress() if "tqdm" in sys.modules else LineProgress()


def is_notebook() -> bool:
    """Return whether this is the kernel of a notebook."""
    # IPython is not imported here: in a kernel it is already there.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookProgress:
    """A bar in the output of a cell. It needs no widgets."""

    def __init__(self) -> None:
        from IPython.display import display

        self._display: Any = display
        self._handle: Any = None

    def show(self, what: str, fraction: float) -> None:
        """Draw the bar, or replace the one that is there."""
        page = (
            f"<div><progress max='1' value='{fraction:.4f}'></progress> "
            f"{fraction:.0%} {escape(what)}</div>"
        )
        self._put({"text/html": page, "text/plain": f"{fraction:.0%} {what}"})

    def close(self) -> None:
        """Replace the bar by nothing: the result says what was done."""
        if self._handle is not None:
            self._put({"text/html": "", "text/plain": ""})

    def _put(self, content: dict[str, str]) -> None:
        if self._handle is None:
            self._handle = self._display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


class TqdmProgress:
    """A bar of tqdm, below those that are there."""

    def __init__(self) -> None:
        from tqdm import tqdm

        layout = "{percentage:3.0f}%|{bar:20}| {desc}"
        self._bar = tqdm(total=1.0, leave=False, file=sys.stderr, bar_format=layout)

    def show(self, what: str, fraction: float) -> None:
        """Move the bar."""
        self._bar.n = fraction
        self._bar.set_description_str(what)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


class LineProgress:
    """A line of a terminal that is written over and over."""

    def show(self, what: str, fraction: float) -> None:
        """Write the line over the one that is there."""
        done = round(20 * fraction)
        sys.stderr.write(f"\r{fraction:4.0%} {'█' * done}{'·' * (20 - done)} {what}\x1b[K")
        sys.stderr.flush()

    def close(self) -> None:
        """Remove the line."""
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def write_line(text: str, file: IO[str] | None = None) -> None:
    """Write a line to standard output or to a file, above the bars of tqdm if there are any."""
    file = sys.stdout if file is None else file
    tqdm = sys.modules.get("tqdm")
    if tqdm is not None and not is_notebook():
        tqdm.tqdm.write(text, file=file)
    else:
        file.write(f"{text}\n")
        file.flush()

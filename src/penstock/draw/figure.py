"""The figure of a picture. It needs matplotlib, so it is imported only where one is drawn."""

from __future__ import annotations

from contextlib import AbstractContextManager
from io import StringIO
from os import PathLike
from typing import IO, Any

from matplotlib import style
from matplotlib.figure import Figure

from penstock.draw.style import MATPLOTLIB_STYLE

_DOTS_PER_INCH = 160


def applied_style() -> AbstractContextManager[None]:
    """Return a context with the style of all pictures, whatever the user's own settings are."""
    return style.context(MATPLOTLIB_STYLE, after_reset=True)


class PictureFigure(Figure):
    """A figure that notebooks show as SVG, and that is not one of pyplot's.

    A notebook shows all open figures of pyplot after a cell, and the value of the last line. A
    figure that were both would be shown twice.
    """

    def save(self, file: str | PathLike[str] | IO[Any], file_format: str) -> None:
        """Write the figure to an SVG or PNG file, without a date and a program version."""
        is_svg = file_format == "svg"
        unstamped = {"Date": None, "Creator": None} if is_svg else {"Software": None}
        self.savefig(file, format=file_format, dpi=_DOTS_PER_INCH, metadata=unstamped)

    def _repr_svg_(self) -> str:
        text = StringIO()
        with applied_style():
            self.save(text, "svg")
        return text.getvalue()

"""What pictures are drawn on: their style, and the file that they become."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.draw.palette import DARK, FAINT, GRID
from penstock.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")

# Laid over matplotlib's defaults, so that the user's own settings do not change the bytes.
MATPLOTLIB_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "svg.fonttype": "none",
    "svg.hashsalt": "penstock",
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": GRID,
    "axes.labelcolor": FAINT,
    "axes.labelsize": 9,
    "xtick.color": GRID,
    "xtick.labelcolor": FAINT,
    "xtick.labelsize": 8,
    "ytick.labelcolor": DARK,
    "ytick.labelsize": 8,
    "ytick.left": False,
}
LEGEND_STYLE: dict[str, Any] = {
    "loc": "center left",
    "fontsize": 8,
    "labelcolor": DARK,
    "frameon": False,
    "borderpad": 0,
    "borderaxespad": 0,
    "handlelength": 1.1,
    "handleheight": 0.8,
    "columnspacing": 1.4,
}


def check_suffix(path: Path) -> str:
    """Of a file that can be drawn."""
    kind = path.suffix.lower()
    if kind not in SUFFIXES:
        raise ArgumentError(
            f"'{path.name}' has no suffix that can be drawn: end it in {' or '.join(SUFFIXES)}"
        )
    return kind


def save_figure(figure: Figure, path: Path, suffix: str) -> None:
    """Write it, with nothing in it that is another in the next run."""
    unstamped = {"Date": None, "Creator": None} if suffix == ".svg" else {"Software": None}
    figure.savefig(path, format=suffix[1:], dpi=160, metadata=unstamped)

"""The parts that all drawings share: colours, names, captions, messages and the file format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import TextIOBase
from os import PathLike
from pathlib import Path
from statistics import median
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ArgumentError, MissingExtra, PenstockTypeError
from penstock.schedules.ir import Compute, Message, Op, Schedule, consumes, produces
from penstock.schedules.simulator import Span
from penstock.schedules.timeline import Timeline
from penstock.text_format import choose_time_unit, format_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---- colours ------------------------------------------------------------------------------

# The colours of a rank's first, third, ... stage and of its second, fourth, ... one. They are
# chosen so that any two ops stay apart (CIELAB distance over 15) for each kind of colour blindness.
SHADES: dict[Op, tuple[str, str]] = {
    Op.F: ("#2f5cb8", "#8fc6f7"),
    Op.B: ("#37803a", "#97c47c"),
    Op.I: ("#2aa596", "#c2f3d8"),
    Op.W: ("#f09a13", "#fccb72"),
    Op.R: ("#8569a0", "#d3c6d6"),
}

# The colours of everything but actions: idle time, lines, small print, print, filled curves.
IDLE, GRID, FAINT, DARK, FILL = "#eef0f3", "#c9ced6", "#5b6472", "#1d2430", "#b9c3d3"


def stage_colours(schedule: Schedule) -> dict[tuple[Op, int], str]:
    """Return the colour of each op of each stage."""
    owned = [0] * schedule.ranks
    colours: dict[tuple[Op, int], str] = {}
    for stage, rank in enumerate(schedule.placement):
        for op, shades in SHADES.items():
            colours[op, stage] = shades[owned[rank] % 2]
        owned[rank] += 1
    return colours


def contrasting_ink(colour: str) -> str:
    """Return black or white, whichever reads better on the colour."""
    rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
    # Relative luminance as in WCAG 2; at 0.18 black and white contrast alike.
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else "#ffffff"


# ---- words --------------------------------------------------------------------------------


def format_caption(timeline: Timeline, format_size: Callable[[float], str] = format_number) -> str:
    """Return the caption: makespan, bubble and peak memory.

    Args:
        timeline: The timeline.
        format_size: A function that writes a size of activations: micro-batches by default.
    """
    makespan = choose_time_unit(timeline.makespan).format(timeline.makespan)
    peaks = [format_size(peak) for peak in timeline.peak]
    peak = format_size(max(timeline.peak, default=0.0))
    if len(set(peaks)) > 1 and len(peaks) <= 16:
        separator = ", " if any(" " in text for text in peaks) else " "
        peak += f" ({separator.join(peaks)})"
    elif len(set(peaks)) == 1 and len(peaks) > 1:
        peak += " on every rank"
    return f"makespan {makespan}, bubble {timeline.bubble:.1%}, peak {peak}"


# ---- facts about a timeline ---------------------------------------------------------------


def shift_to_zero(timeline: Timeline) -> Timeline:
    """Return the timeline with its times counted from its start."""
    zero = timeline.start
    if zero == 0:
        return timeline
    spans = (span._replace(start=span.start - zero, end=span.end - zero) for span in timeline.spans)
    return replace(timeline, spans=tuple(spans))


def has_shared_ranks(schedule: Schedule) -> bool:
    """Return True if any rank owns more than one stage."""
    return len(set(schedule.placement)) < schedule.stages


def shortest_drawn_action(timeline: Timeline) -> float:
    """Return the length of the shortest action that a drawing has to make legible.

    A few very short actions, as in a measured run, must not stretch the whole drawing. So actions
    under an eighth of the median do not count.
    """
    lengths = [span.end - span.start for lane in timeline.computes for span in lane]
    lengths = [length for length in lengths if length > 0]
    usual = median(lengths) if lengths else 1.0
    return min((length for length in lengths if length >= usual / 8), default=usual)


class SentMessage(NamedTuple):
    """A message between ranks, the span that made it and the span that used it."""

    message: Message
    producer: Span
    consumer: Span


def find_sent_messages(timeline: Timeline) -> Iterator[SentMessage]:
    """Yield every message between ranks, in the order in which they were used."""
    graph = timeline.program.graph
    computes = [(s, s.action) for s in timeline.spans if isinstance(s.action, Compute)]
    producers = {message: span for span, action in computes for message in produces(action, graph)}
    for consumer, action in computes:
        for message in consumes(action, graph):
            producer = producers.get(message, consumer)
            if producer.rank != consumer.rank:
                yield SentMessage(message, producer, consumer)


# -------------------------------------------------------------------------------------------------
# The matplotlib style of all pictures, and the file format. Equal input gives equal bytes, so that
# pictures can be kept under version control and compared in tests.
# -------------------------------------------------------------------------------------------------

SUFFIXES = (".svg", ".png")

# Applied on top of matplotlib's defaults, so that the user's own settings do not change the bytes.
# The hash salt makes the ids in an SVG reproducible.
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


TextFile = str | PathLike[str] | IO[str]  # a file to write text to: its path, or an open file
# A file to draw into: its path, an open file, or None for no file.
PictureFile = str | PathLike[str] | IO[Any] | None


@contextmanager
def write_figure(
    file: PictureFile, width: float, height: float, file_format: str | None = None
) -> Iterator[Figure]:
    """Yield a figure of this size in inches, and write it to an SVG or PNG file afterwards.

    The file has no date and no program version, so that equal figures are equal files. pyplot does
    not know the figure: it keeps no reference, and a notebook does not show the figure by itself.
    """
    file_format = _choose_format(file, file_format)
    try:
        import matplotlib  # noqa: F401 (the message is about this one)

        from penstock.draw.figure import PictureFigure, applied_style
    except ImportError:
        raise MissingExtra("matplotlib", "draw", "a picture") from None
    with applied_style():
        figure = PictureFigure(figsize=(width, height))
        yield figure
        if file is not None:
            figure.save(file, file_format)


def _choose_format(file: PictureFile, file_format: str | None) -> str:
    """Return "svg" or "png": as asked for, by the suffix of a path, or by the kind of a file."""
    is_path, is_text = isinstance(file, str | PathLike), isinstance(file, TextIOBase)
    if not (is_path or file is None or hasattr(file, "write")):
        raise PenstockTypeError(
            f"cannot draw into a {type(file).__name__}: pass a path, an open file, or None."
        )
    name = Path(file).name if isinstance(file, str | PathLike) else getattr(file, "name", None)
    suffix = Path(name).suffix.lower() if isinstance(name, str) else ""
    if file_format is None and suffix not in SUFFIXES:
        if is_path:
            raise ArgumentError(
                f"cannot draw into '{name}': the file name must end in {' or '.join(SUFFIXES)}"
            )
        suffix = ".svg" if is_text else ".png"
    chosen = suffix[1:] if file_format is None else file_format
    if f".{chosen}" not in SUFFIXES:
        raise ArgumentError(f"format must be 'svg' or 'png', not {file_format!r}")
    if chosen == "png" and is_text:
        raise ArgumentError("a PNG cannot be written to a text file: open it with 'wb', or use SVG")
    return chosen


def write_text(file: TextFile, text: str) -> None:
    """Write a text to a file, in UTF-8 if it is given by its path."""
    if isinstance(file, str | PathLike):
        Path(file).write_text(text, encoding="utf-8")
    else:
        file.write(text)

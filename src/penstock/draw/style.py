"""What the drawings share, so that they agree: colours, words, the caption, who told whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ArgumentError
from penstock.schedules.ir import Compute, Message, Op, Schedule, consumes, produces
from penstock.schedules.simulator import Span
from penstock.schedules.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---- colours ------------------------------------------------------------------------------

# For a rank's first, third, ... stage and for its second, fourth, ... one. Chosen so that any two
# ops stay apart (CIELAB distance over 15) for each kind of colour-blind eyes.
SHADES: dict[Op, tuple[str, str]] = {
    Op.F: ("#2f5cb8", "#8fc6f7"),
    Op.B: ("#37803a", "#97c47c"),
    Op.I: ("#2aa596", "#c2f3d8"),
    Op.W: ("#f09a13", "#fccb72"),
    Op.R: ("#8569a0", "#d3c6d6"),
}

# What is not an action: idle time, lines, small print, print, filled curves.
IDLE, GRID, FAINT, DARK, FILL = "#eef0f3", "#c9ced6", "#5b6472", "#1d2430", "#b9c3d3"


def stage_colours(schedule: Schedule) -> dict[tuple[Op, int], str]:
    """The colour of each op of each stage."""
    owned = [0] * schedule.ranks
    found: dict[tuple[Op, int], str] = {}
    for stage, rank in enumerate(schedule.placement):
        for op, shades in SHADES.items():
            found[op, stage] = shades[owned[rank] % 2]
        owned[rank] += 1
    return found


def contrasting_ink(colour: str) -> str:
    """Black or white, whichever reads better on the colour."""
    rgb = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
    # Relative luminance as in WCAG 2; at 0.18 black and white contrast alike.
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else "#ffffff"


# ---- words --------------------------------------------------------------------------------

OP_NAMES: dict[Op, str] = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
    Op.R: "recompute",
}


def format_number(value: float) -> str:
    """Four digits, and a prefix for what is large.

    >>> format_number(21.0), format_number(1 / 3), format_number(2_500_000_000)
    ('21', '0.3333', '2.5G')
    """
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(factor, 9999.5):
            return f"{value / factor:.4g}{prefix}"
    return f"{value:.4g}"


class TimeUnit(NamedTuple):
    """What time is counted in: how many of them are a second, and their name."""

    per_second: float
    name: str

    def format(self, seconds: float) -> str:
        """So many seconds, in this unit.

        >>> choose_time_unit(0.25).format(0.0125), choose_time_unit(21.0).format(9.0)
        ('12.5 ms', '9')
        """
        return f"{format_number(seconds * self.per_second)} {self.name}".rstrip()


def choose_time_unit(makespan: float) -> TimeUnit:
    """The unit for a timeline: a second has no name, as on paper it may stand for anything."""
    if makespan >= 1 or makespan == 0:
        return TimeUnit(1.0, "")
    return TimeUnit(1e3, "ms") if makespan >= 1e-3 else TimeUnit(1e6, "µs")


def format_caption(timeline: Timeline) -> str:
    """The three numbers that people compare schedules by."""
    makespan = choose_time_unit(timeline.makespan).format(timeline.makespan)
    peaks = [format_number(peak) for peak in timeline.peak]
    peak = format_number(max(timeline.peak, default=0.0))
    if len(set(peaks)) > 1 and len(peaks) <= 16:
        peak += f" ({' '.join(peaks)})"
    elif len(set(peaks)) == 1 and len(peaks) > 1:
        peak += " on every rank"
    return f"makespan {makespan}, bubble {timeline.bubble:.1%}, peak {peak}"


# ---- readings -----------------------------------------------------------------------------


def shift_to_zero(timeline: Timeline) -> Timeline:
    """The same, with time counted from its start."""
    zero = timeline.start
    if zero == 0:
        return timeline
    spans = (span._replace(start=span.start - zero, end=span.end - zero) for span in timeline.spans)
    return replace(timeline, spans=tuple(spans))


def has_shared_ranks(schedule: Schedule) -> bool:
    """Does any rank own more than one stage?"""
    return len(set(schedule.placement)) < schedule.stages


def shortest_drawn_action(timeline: Timeline) -> float:
    """The shortest action that a drawing has to make legible.

    A few specks, as in a measured run, must not stretch all the rest: what is under an eighth of
    the median does not count.
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
    """Every message between ranks, in the order in which they were used."""
    graph = timeline.program.graph
    computes = [(s, s.action) for s in timeline.spans if isinstance(s.action, Compute)]
    makers = {message: span for span, action in computes for message in produces(action, graph)}
    for user, action in computes:
        for message in consumes(action, graph):
            maker = makers.get(message, user)
            if maker.rank != user.rank:
                yield SentMessage(message, maker, user)


# -------------------------------------------------------------------------------------------------
# What pictures are drawn on: their style, and the file that they become.
# -------------------------------------------------------------------------------------------------

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

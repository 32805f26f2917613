"""What the drawings share, so that they agree: colours, words, the caption, who told whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from penstock.ir import Compute, Message, Op, Schedule, consumes, produces
from penstock.play import Span
from penstock.timeline import Timeline

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

    >>> number(21.0), number(1 / 3), number(2_500_000_000)
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

        >>> unit(0.25).said(0.0125), unit(21.0).said(9.0)
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

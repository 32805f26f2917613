"""A timeline as text: ranks down, time across. Stable to the character, so that tests assert it.

rank 0  F0 F1 ······B0─── F2 B1─── ···B2───
rank 1  ···F0 B0─── F1 B1─── F2 B2─── ······
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import ceil, floor, remainder
from typing import NamedTuple

from penstock.draw.style import (
    choose_time_unit,
    contrasting_ink,
    format_caption,
    has_shared_ranks,
    shift_to_zero,
    shortest_drawn_action,
    stage_colours,
)
from penstock.errors import ArgumentError, MissingExtra
from penstock.schedules.ir import Compute
from penstock.schedules.timeline import Timeline

MAX_BANDS = 6
MIN_BAND_WIDTH = 24  # columns of a band
IDLE_CHARACTER = "·"

# Writes a piece of a box, given the action it belongs to.
Paint = Callable[[str, Compute], str]


class _Box(NamedTuple):
    """An action in the columns from `start` up to `end`."""

    start: int
    end: int
    action: Compute
    label: str

    def render(self, start: int, end: int) -> str:
        """The part from `start` up to `end`: label, a line for as long as it lasts, a blank.

        A label that is cut short would name another micro-batch. So it stands in the first part
        that holds all of it, and where none does, the op stands alone.
        """
        inside = end - start - (end == self.end)
        unnamed = start - self.start < len(self.label)
        fits = unnamed and len(self.label) <= inside
        name = self.label if fits else self.action.op.value if start == self.start else ""
        return f"{name:─<{inside}} "[: end - start]


def text(timeline: Timeline, width: int = 120, color: bool = False) -> str:
    """Draw a timeline in rows of at most `width` characters; `color` adds ANSI colours.

    A box holds op and micro-batch, and the stage too where a rank owns several. What is too wide
    is folded into bands, each under the time at which it starts.

    >>> from penstock import lower, schedules, simulate
    >>> schedule = schedules.one_f_one_b(ranks=2, chunks=2)
    >>> print(text(simulate(lower(schedule))))
    rank 0  F0 F1 ······B0─── ···B1───
    rank 1  ···F0 B0─── F1 B1─── ······
    makespan 9, bubble 33.3%, peak 2 (2 1)
    """
    digits = len(str(timeline.ranks - 1))
    heads = [f"rank {rank:<{digits}}  " for rank in range(timeline.ranks)]
    margin = len("rank   ") + digits
    if width < margin + MIN_BAND_WIDTH:
        raise ArgumentError(
            f"width is {width}, too narrow to draw in: give at least {margin + MIN_BAND_WIDTH}"
        )
    timeline = shift_to_zero(timeline)
    grid = _choose_grid(timeline)
    lanes = _build_boxes(timeline, grid)
    columns = max((lane[-1].end for lane in lanes if lane), default=0)
    cuts = _choose_band_edges(lanes, columns, width - margin, grid.quantum_columns)
    paint = _painter(timeline) if color else _plain
    lines: list[str] = []
    for left, right in pairwise(cuts):
        if columns > cuts[1]:
            lines.append(
                f"{'':{margin}}t = {choose_time_unit(timeline.makespan).format(left / grid.scale)}"
            )
        for head, lane in zip(heads, lanes, strict=True):
            lines.append((head + _render_row(lane, left, right, paint)).rstrip())
    left_out = (columns - cuts[-1]) / grid.scale
    hidden = sum(map(len, timeline.computes)) - sum(map(len, lanes))
    return "\n".join([*lines, *_footer_lines(timeline, left_out, hidden)])


def _footer_lines(timeline: Timeline, left_out: float, hidden: int) -> Iterator[str]:
    """The lines under the rows."""
    if left_out:
        said = choose_time_unit(timeline.makespan).format
        share = f"{said(left_out)} of {said(timeline.makespan)}"
        yield f"the last {share} is left out: give a larger width, or save a picture"
    if hidden:
        yield f"{hidden} {'actions are' if hidden > 1 else 'action is'} too short to draw"
    yield format_caption(timeline)


# ---- from seconds to columns --------------------------------------------------------------


class _Grid(NamedTuple):
    """`scale` columns a second; time goes in steps of `step` columns."""

    scale: float
    quantum_columns: int

    def column(self, seconds: float) -> int:
        # Halves always up, so that equal lengths are equally wide.
        return floor(seconds * self.scale + 0.5 + 1e-6)


def _action_label(action: Compute, with_stage: bool) -> str:
    return str(action) if with_stage else f"{action.op.value}{action.microbatch}"


def _choose_grid(timeline: Timeline) -> _Grid:
    """Such that each box holds its label, with whole columns for each quantum of time if any."""
    full = has_shared_ranks(timeline.program.schedule)
    least = shortest_drawn_action(timeline)
    scale = 1 / least
    for lane in timeline.computes:
        for span in lane:
            assert isinstance(span.action, Compute)
            seconds = span.end - span.start
            if seconds >= least:
                scale = max(scale, (len(_action_label(span.action, full)) + 1) / seconds)
    quantum = _find_quantum(timeline, least)
    if not quantum:
        return _Grid(scale, quantum_columns=1)
    step = ceil(scale * quantum - 1e-6)
    return _Grid(step / quantum, step)


def _find_quantum(timeline: Timeline, least: float) -> float:
    """What every start and end is a multiple of; 0 if that is next to nothing."""
    quantum = least
    for lane in timeline.computes:
        for span in lane:
            for time in (span.start, span.end):
                rest = abs(remainder(time, quantum))
                while rest > 1e-6 * least:
                    quantum, rest = rest, abs(remainder(quantum, rest))
                if quantum < least / 8.5:
                    return 0.0
    return quantum


def _build_boxes(timeline: Timeline, grid: _Grid) -> list[list[_Box]]:
    """The boxes of each rank, in order and side by side; what has no width is not among them."""
    full = has_shared_ranks(timeline.program.schedule)
    lanes: list[list[_Box]] = []
    for spans in timeline.computes:
        boxes: list[_Box] = []
        free = 0
        for span in spans:
            assert isinstance(span.action, Compute)
            start = max(free, grid.column(span.start))
            end = grid.column(span.end)
            if end > start:
                boxes.append(_Box(start, end, span.action, _action_label(span.action, full)))
                free = end
        lanes.append(boxes)
    return lanes


# ---- from columns to lines ----------------------------------------------------------------


def _choose_band_edges(
    lanes: Sequence[Sequence[_Box]], columns: int, band_width: int, quantum_columns: int
) -> list[int]:
    """Where the bands begin and end: where they tear the fewest boxes, and labels least of all."""
    drawn = min(columns, MAX_BANDS * band_width)
    harm = [0] * (drawn + 1)
    for lane in lanes:
        for box in lane:
            for column in range(box.start + 1, min(box.end, drawn + 1)):
                harm[column] += 1 if column - box.start >= len(box.label) else 1000
    cuts = [0]
    while cuts[-1] + band_width < columns and len(cuts) <= MAX_BANDS:
        last = cuts[-1] + band_width
        last -= last % quantum_columns
        cuts.append(
            min(range(last, last - band_width // 3, -quantum_columns), key=harm.__getitem__)
        )
    return cuts if len(cuts) > MAX_BANDS else [*cuts, columns]


def _render_row(lane: Sequence[_Box], left: int, right: int, paint: Paint) -> str:
    """One rank's columns from `left` up to `right`."""
    pieces = []
    at = left
    for box in lane:
        start, end = max(left, box.start), min(right, box.end)
        if start < end:
            pieces.append(IDLE_CHARACTER * (start - at))
            pieces.append(paint(box.render(start, end), box.action))
            at = end
    return "".join([*pieces, IDLE_CHARACTER * (right - at)])


def _plain(piece: str, action: Compute) -> str:
    return piece


def _painter(timeline: Timeline) -> Paint:
    """Paint boxes in the colours of the palette, which then need no line to show their length."""
    try:
        from rich.color import ColorSystem
        from rich.style import Style
    except ImportError:
        raise MissingExtra("rich", "cli", "text in colour") from None
    styles = {
        key: Style(color=contrasting_ink(colour), bgcolor=colour)
        for key, colour in stage_colours(timeline.program.schedule).items()
    }

    def paint(piece: str, action: Compute) -> str:
        style = styles[action.op, action.stage]
        body = piece.removesuffix(" ")
        shown = style.render(body.replace("─", " "), color_system=ColorSystem.TRUECOLOR)
        return shown + piece[len(body) :]

    return paint

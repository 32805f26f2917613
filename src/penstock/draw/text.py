"""Draw a timeline as text: ranks down, time across. Tests compare it character by character.

rank 0  F0 F1 ······B0─── F2 B1─── ···B2───
rank 1  ···F0 B0─── F1 B1─── F2 B2─── ······
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import ceil, floor, remainder
from typing import NamedTuple

from penstock.draw.style import (
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
from penstock.text_format import choose_time_unit

MAX_BANDS = 6
MIN_BAND_WIDTH = 24  # columns
IDLE_CHARACTER = "·"

# A function that adds colour to a piece of a box, given the action it belongs to.
Paint = Callable[[str, Compute], str]


class _Box(NamedTuple):
    """The box of an action, in the columns from `start` up to `end`."""

    start: int
    end: int
    action: Compute
    label: str

    def render(self, start: int, end: int) -> str:
        """Return the part from `start` up to `end`: the label, a line to the end, a blank.

        A label that is cut short would name another micro-batch. So it goes into the first part
        that has room for all of it. If no part has room, only the op is written.
        """
        inside = end - start - (end == self.end)
        unnamed = start - self.start < len(self.label)
        fits = unnamed and len(self.label) <= inside
        name = self.label if fits else self.action.op.value if start == self.start else ""
        return f"{name:─<{inside}} "[: end - start]


def text(timeline: Timeline, width: int = 120, color: bool = False) -> str:
    """Return a timeline drawn as text.

    A box shows the op and the micro-batch, and also the stage if a rank owns several. A timeline
    that is too wide is folded into bands, each with the time at which it starts.

    Args:
        timeline: The timeline, simulated or measured.
        width: The largest number of characters in a row.
        color: Whether to add ANSI colours.

    Returns:
        The rows, and a caption with makespan, bubble and peak memory.

    Raises:
        ArgumentError: The width is too small.
        MissingExtra: `color` is True and rich is not installed.

    Example:
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
    """Yield the lines under the rows."""
    if left_out:
        format_time = choose_time_unit(timeline.makespan).format
        share = f"{format_time(left_out)} of {format_time(timeline.makespan)}"
        yield f"the last {share} is left out: give a larger width, or save a picture"
    if hidden:
        yield f"{hidden} {'actions are' if hidden > 1 else 'action is'} too short to draw"
    yield format_caption(timeline)


# ---- from seconds to columns --------------------------------------------------------------
#
# In most simulated timelines all times are multiples of one quantum, such as 1 or 0.5 seconds. Then
# the quantum gets a whole number of columns, so that equal actions are equally wide on all ranks.
# In a measured timeline there is no such quantum, and times are rounded to columns.


class _Grid(NamedTuple):
    """The grid of columns: `scale` columns per second, in steps of `quantum_columns`."""

    scale: float
    quantum_columns: int

    def column(self, seconds: float) -> int:
        # Halves always round up (`round` would go to even numbers), so that equal lengths are
        # equally wide. The small number absorbs float errors just below a half.
        return floor(seconds * self.scale + 0.5 + 1e-6)


def _action_label(action: Compute, with_stage: bool) -> str:
    return str(action) if with_stage else f"{action.op.value}{action.microbatch}"


def _choose_grid(timeline: Timeline) -> _Grid:
    """Return a grid on which each box has room for its label and a blank."""
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
    """Return the greatest common divisor of `least` and all times, or 0 if it is too small.

    This is Euclid's algorithm on floats, with a tolerance.
    """
    quantum = least
    for lane in timeline.computes:
        for span in lane:
            for time in (span.start, span.end):
                residue = abs(remainder(time, quantum))
                while residue > 1e-6 * least:
                    quantum, residue = residue, abs(remainder(quantum, residue))
                if quantum < least / 8.5:
                    return 0.0
    return quantum


def _build_boxes(timeline: Timeline, grid: _Grid) -> list[list[_Box]]:
    """Return the boxes of each rank, in order and side by side, without those of no width."""
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
    """Return the columns at which the bands begin and end.

    Within the last third of the possible width, a band ends where it cuts the fewest boxes.
    Cutting through a label counts a thousand times as much.
    """
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
    """Return the columns of one rank from `left` up to `right`."""
    pieces = []
    column = left
    for box in lane:
        start, end = max(left, box.start), min(right, box.end)
        if start < end:
            pieces.append(IDLE_CHARACTER * (start - column))
            pieces.append(paint(box.render(start, end), box.action))
            column = end
    return "".join([*pieces, IDLE_CHARACTER * (right - column)])


def _plain(piece: str, action: Compute) -> str:
    return piece


def _painter(timeline: Timeline) -> Paint:
    """Return a function that paints boxes in the colours of the palette.

    A coloured box does not need the line that shows its length.
    """
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

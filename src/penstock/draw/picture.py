"""A timeline as a picture, as in the papers: ranks down, time across, and below it what is alive.

All boxes of one colour are one path, not one artist each, so large pipelines stay quick and small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log2
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.draw import palette
from penstock.draw.palette import DARK, FAINT, FILL, IDLE, Delivery
from penstock.draw.paper import LEGEND, STYLE, save, suffix_of
from penstock.errors import MissingExtra
from penstock.ir import Compute, Op
from penstock.play import Span
from penstock.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path as Outline

HALF = 0.43  # of a row's height, from its middle to the edge of its boxes
DIGIT = 0.64 / 72  # inches that a digit is wide, for each point of the font's size

Point = tuple[float, float]  # time, height in ranks
Rect = tuple[float, float, int]  # from, until, rank


def picture(
    timeline: Timeline,
    path: str | PathLike[str],
    *,
    skips: bool = False,
    memory: bool = True,
    title: str | None = None,
) -> None:
    """Draw a timeline into an SVG or PNG file, by the suffix of `path`.

    `skips` draws the messages between stages that are no neighbours. `memory` adds the panel of
    live activations: a strip a rank, all to one scale, with the rank's peak at the right.
    """
    path = Path(path)
    kind = suffix_of(path)
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "draw", "a picture") from None
    timeline = palette.from_zero(timeline)
    sheet = _sheet(timeline, memory, title)
    with style.context(STYLE, after_reset=True):
        figure = Figure(figsize=(sheet.width, sheet.height))
        _header(figure, sheet, timeline, title)
        _legend(figure, sheet, timeline, skips)
        lowest = _axes(figure, sheet, sheet.top, sheet.lanes)
        _lanes(lowest, sheet, timeline, skips)
        if memory:
            lowest = _axes(figure, sheet, sheet.top + sheet.lanes + sheet.gap, sheet.memory)
            _memory(lowest, sheet, timeline)
        unit = palette.unit(timeline.makespan)
        lowest.set_xlabel(f"time ({unit.name})" if unit.name else "time")
        save(figure, path, kind)


# ---- the sheet ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sheet:
    """Where things go, in inches; `second` is how wide a second is. The font is in points."""

    second: float
    plot: float
    row: float
    strip: float
    top: float
    lanes: float
    memory: float
    font: float
    left: float = 0.75
    right: float = 0.55
    gap: float = 0.55
    foot: float = 0.55

    @property
    def width(self) -> float:
        return self.left + self.plot + self.right

    @property
    def height(self) -> float:
        panel = self.gap + self.memory if self.memory else 0.0
        return self.top + self.lanes + panel + self.foot


def _sheet(timeline: Timeline, memory: bool, title: str | None) -> _Sheet:
    ranks = max(timeline.ranks, 1)
    makespan, shortest = timeline.makespan or 1.0, palette.shortest(timeline)
    plot = min(14.5, max(6.5, 0.26 * makespan / shortest))
    row, strip = min(0.36, 9 / ranks), min(max(0.36, 1 / ranks), 6 / ranks)
    fitting = (plot / makespan * shortest - 0.04) / (DIGIT * _digits(timeline))
    return _Sheet(
        second=plot / makespan,
        plot=plot,
        row=row,
        strip=strip,
        top=0.7 if title is None else 1.0,
        lanes=row * ranks,
        memory=strip * ranks if memory else 0.0,
        font=min(8.5, 30 * row, max(5.0, fitting)),
    )


def _digits(timeline: Timeline) -> int:
    """Of the largest micro-batch."""
    return len(str(max(timeline.program.schedule.chunks - 1, 0)))


def _axes(figure: Figure, sheet: _Sheet, top: float, height: float) -> Axes:
    """A panel that starts `top` inches below the sheet's upper edge."""
    low = sheet.height - top - height
    across = (sheet.left / sheet.width, sheet.plot / sheet.width)
    return figure.add_axes((across[0], low / sheet.height, across[1], height / sheet.height))


def _frame(axes: Axes, timeline: Timeline, label: str, row: float) -> None:
    """The scales of a panel with a row of so many inches for each rank."""
    axes.set_xlim(0, timeline.makespan or 1)
    unit = palette.unit(timeline.makespan)
    if unit.name:
        axes.xaxis.set_major_formatter(lambda time, _: palette.number(time * unit.a_second))
    axes.set_ylim(max(timeline.ranks, 1) - 0.5, -0.5)
    axes.set_ylabel(label)
    every = 2 ** ceil(log2(max(0.15 / row, 1)))
    axes.set_yticks(range(0, timeline.ranks, every))


def _header(figure: Figure, sheet: _Sheet, timeline: Timeline, title: str | None) -> None:
    left = sheet.left / sheet.width
    if title is not None:
        figure.text(left, 1 - 0.3 / sheet.height, title, size=12, weight="bold", color=DARK)
    below = 1 - (sheet.top - 0.45) / sheet.height
    figure.text(left, below, palette.caption(timeline), size=9, color=FAINT)


def _legend(figure: Figure, sheet: _Sheet, timeline: Timeline, skips: bool) -> None:
    """Only what is in the picture."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    schedule = timeline.program.schedule
    used = {span.action.op for span in _visible(timeline) if isinstance(span.action, Compute)}
    ops = [op for op in Op if op in used]
    entries: dict[str, Any] = {palette.WORDS[op]: Patch(color=palette.SHADES[op][0]) for op in ops}
    if palette.crowded(schedule) and ops:
        shades = tuple(Patch(color=shade) for shade in palette.SHADES[ops[0]])
        entries["a rank's stages, alternating"] = shades
    if schedule.overlaps:
        entries["may overlap"] = Patch(facecolor="none", edgecolor=DARK)
    if skips and any(dst - src > 1 for src, dst in timeline.program.graph.edges):
        entries["skip (gradients fainter)"] = Line2D([], [], color=DARK, linewidth=1)
    figure.legend(
        entries.values(),
        entries.keys(),
        bbox_to_anchor=(sheet.left / sheet.width, 1 - (sheet.top - 0.2) / sheet.height),
        ncols=max(len(entries), 1),
        handletextpad=0.5,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        **LEGEND,
    )


# ---- the lanes ----------------------------------------------------------------------------


def _visible(timeline: Timeline) -> Iterator[Span]:
    """Those that have a width."""
    return (span for lane in timeline.computes for span in lane if span.end > span.start)


def _paint(axes: Axes, outline: Outline, fill: str, edge: str, width: float, alpha: float) -> None:
    from matplotlib.patches import PathPatch

    patch = PathPatch(outline, facecolor=fill, edgecolor=edge, linewidth=width, alpha=alpha)
    # Not add_patch, which looks at each corner to find limits that _frame sets anyway.
    axes.add_artist(patch)


def _paint_boxes(axes: Axes, rects: Iterable[Rect], fill: str, edge: str, width: float) -> None:
    """Many boxes as one path."""
    from matplotlib.path import Path as Outline

    corners: list[Point] = []
    for left, right, rank in rects:
        low, high = rank - HALF, rank + HALF
        corners += [(left, low), (right, low), (right, high), (left, high), (left, low)]
    box = [Outline.MOVETO, *3 * [Outline.LINETO], Outline.CLOSEPOLY]
    if corners:
        _paint(axes, Outline(corners, box * (len(corners) // 5)), fill, edge, width, alpha=1.0)


def _lanes(axes: Axes, sheet: _Sheet, timeline: Timeline, skips: bool) -> None:
    _frame(axes, timeline, "rank", sheet.row)
    rows = [(0.0, timeline.makespan, rank) for rank in range(timeline.ranks)]
    _paint_boxes(axes, rows, IDLE, "none", 0.0)
    colours = palette.colours(timeline.program.schedule)
    groups: dict[str, list[Span]] = {}
    for span in _visible(timeline):
        assert isinstance(span.action, Compute)
        groups.setdefault(colours[span.action.op, span.action.stage], []).append(span)
    # An edge around boxes of a pixel or two would leave nothing of them.
    edge = 0.7 if palette.shortest(timeline) * sheet.second > 0.055 else 0.0
    for colour, spans in sorted(groups.items()):
        rects = [(span.start, span.end, span.rank) for span in spans]
        _paint_boxes(axes, rects, colour, "white", edge)
        _write_numbers(axes, sheet, timeline, spans, palette.ink(colour))
    _paint_overlaps(axes, timeline)
    if skips:
        _paint_skips(axes, sheet, timeline)


def _write_numbers(
    axes: Axes, sheet: _Sheet, timeline: Timeline, spans: Sequence[Span], colour: str
) -> None:
    """The micro-batch, in each box that would hold even the longest number."""
    room = DIGIT * sheet.font * _digits(timeline)
    look = {"size": sheet.font, "color": colour, "ha": "center", "va": "center_baseline"}
    for span in spans:
        assert isinstance(span.action, Compute)
        if (span.end - span.start) * sheet.second >= room and sheet.font >= 4:
            middle = (span.start + span.end) / 2
            axes.text(middle, span.rank, str(span.action.microbatch), look)


def _paint_overlaps(axes: Axes, timeline: Timeline) -> None:
    """One outline around each two actions that may run at the same time."""
    spans = {span.action: span for lane in timeline.computes for span in lane}
    rects: list[Rect] = []
    for pair in timeline.program.schedule.overlaps:
        if pair[0] in spans and pair[1] in spans:
            one, two = (spans[action] for action in pair)
            rects.append((min(one.start, two.start), max(one.end, two.end), one.rank))
    _paint_boxes(axes, sorted(rects), "none", DARK, 1.1)


def _paint_skips(axes: Axes, sheet: _Sheet, timeline: Timeline) -> None:
    """Messages between stages that are no neighbours: activations over fainter gradients."""
    from matplotlib.path import Path as Outline

    skips = [d for d in palette.deliveries(timeline) if abs(d.message.dst - d.message.src) > 1]
    for forward, strength in ((False, 0.4), (True, 1.0)):
        arcs = [_arc(sheet, d) for d in skips if (d.message.src < d.message.dst) == forward]
        if arcs:
            bezier = [Outline.MOVETO, *3 * [Outline.CURVE4]]
            outline = Outline([point for arc in arcs for point in arc], bezier * len(arcs))
            _paint(axes, outline, "none", "white", 2.6, 0.6 * strength)
            _paint(axes, outline, "none", DARK, 1.0, strength)
            times, heights = zip(*(arc[-1] for arc in arcs), strict=True)
            axes.plot(times, heights, ">", color=DARK, ms=4.5, mew=0, alpha=strength)


def _arc(sheet: _Sheet, delivery: Delivery) -> list[Point]:
    """From corner to corner. It leaves and arrives between the rows, where it hides no number."""
    _, maker, user = delivery
    # Between neighbours that would be a flat line, so there it keeps closer to the middle.
    half = 0.46 if abs(maker.rank - user.rank) > 1 else 0.2
    half = half if maker.rank < user.rank else -half
    near, far = maker.rank + half, user.rank - half
    start, end = maker.end, user.start
    bend = max((end - start) / 2, 0.12 / sheet.second)
    return [(start, near), (start + bend, near), (end - bend, far), (end, far)]


# ---- the memory panel ---------------------------------------------------------------------


def _memory(axes: Axes, sheet: _Sheet, timeline: Timeline) -> None:
    from matplotlib.path import Path as Outline

    _frame(axes, timeline, "live activations", sheet.strip)
    scale = 2 * HALF / (max(timeline.peak, default=0.0) or 1.0)
    dip = 0.03 / sheet.second
    curves = [Outline(_curve(timeline, rank, scale, dip)) for rank in range(timeline.ranks)]
    if curves:
        width = min(0.7, 2 * sheet.strip)
        _paint(axes, Outline.make_compound_path(*curves), FILL, FAINT, width, alpha=1.0)
    beside = axes.get_yaxis_transform()
    axes.text(1.01, 1 + 0.08 / sheet.memory, "peak", transform=axes.transAxes, size=8, color=FAINT)
    for rank in axes.get_yticks():
        peak = palette.number(timeline.peak[round(rank)])
        axes.text(1.01, rank, peak, transform=beside, size=8, color=DARK, va="center_baseline")


def _curve(timeline: Timeline, rank: int, scale: float, dip: float) -> list[Point]:
    """The corners of one rank's strip, without the dips between actions, as far as too narrow."""
    floor = level = rank + HALF
    corners = [(0.0, floor)]
    # A dict keeps the last size of each moment, the one that stays.
    points = list(dict(timeline.memory(rank)).items())
    for at, (time, size) in enumerate(points):
        later, after = points[min(at + 1, len(points) - 1)]
        if later - time < dip and after > size:
            continue
        before, level = level, floor - size * scale
        if level != before:
            corners += [(time, before), (time, level)]
    return [*corners, (timeline.makespan, level), (timeline.makespan, floor)]

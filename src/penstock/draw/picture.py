"""Draw a timeline as a picture, as in the papers: ranks down, time across, and memory below.

All boxes of one colour are one path instead of one matplotlib artist each. This keeps the pictures
of large pipelines fast to draw and small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import TYPE_CHECKING, Any

from penstock.draw import style
from penstock.draw.style import DARK, FAINT, FILL, IDLE, LEGEND_STYLE, PictureFile, SentMessage
from penstock.schedules.ir import OP_RULES, Compute, Op
from penstock.schedules.simulator import Span
from penstock.schedules.timeline import Timeline
from penstock.text_format import choose_time_unit, format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path as Outline

HALF_BOX_HEIGHT = 0.43  # from the middle of a row to the edge of its boxes; a row has height 1
DIGIT_WIDTH = 0.64 / 72  # the width of a digit in inches, per point of font size

Point = tuple[float, float]  # (time, height in ranks)
Rect = tuple[float, float, int]  # (start, end, rank)


def picture(
    timeline: Timeline,
    path: PictureFile = None,
    *,
    skips: bool = False,
    memory: bool = True,
    title: str | None = None,
    format: str | None = None,
) -> Figure:
    """Draw a timeline as a picture, into an SVG or PNG file or for a notebook.

    Args:
        timeline: The timeline, simulated or measured.
        path: The file to write: a path that ends in .svg or .png, or a file that is open for
            writing. None only returns the figure.
        skips: Whether to draw the messages between stages that are not neighbours.
        memory: Whether to add the panel of live activations: one strip per rank, all to one scale,
            with the rank's peak at the right.
        title: A title above the picture.
        format: "svg" or "png". By default the suffix decides; for an open file without a name, a
            binary one is PNG and a text file SVG.

    Returns:
        The figure of matplotlib. It is not one of pyplot's, so a notebook shows it once.

    Raises:
        ArgumentError: The format is neither SVG nor PNG.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> from penstock import draw, lower, schedules, simulate
        >>> timeline = simulate(lower(schedules.one_f_one_b(ranks=4, chunks=8)))
        >>> figure = draw.picture(timeline, "1f1b.svg")  # doctest: +SKIP
    """
    timeline = style.shift_to_zero(timeline)
    sheet = layout_timeline(timeline, memory, title)
    with style.write_figure(path, sheet.width, sheet.height, format) as figure:
        _draw_header(figure, sheet, timeline, title)
        draw_legend(figure, sheet, timeline, skips)
        lowest = add_panel(figure, sheet, sheet.top, sheet.lanes_height)
        draw_lanes(lowest, sheet, timeline, skips)
        if memory:
            lowest = add_panel(
                figure, sheet, sheet.top + sheet.lanes_height + sheet.gap, sheet.memory_height
            )
            _draw_memory(lowest, sheet, timeline)
        unit = choose_time_unit(timeline.makespan)
        lowest.set_xlabel(f"time ({unit.name})" if unit.name else "time")
    return figure


# ---- the layout ---------------------------------------------------------------------------


@dataclass(frozen=True)
class TimelineLayout:
    """The sizes and positions of the parts of a picture, in inches. The font size is in points."""

    inches_per_second: float
    plot_width: float
    row_height: float
    strip_height: float
    top: float
    lanes_height: float
    memory_height: float
    font_size: float
    left: float = 0.75
    right: float = 0.55
    gap: float = 0.55
    bottom: float = 0.55

    @property
    def width(self) -> float:
        """The width of the whole figure."""
        return self.left + self.plot_width + self.right

    @property
    def height(self) -> float:
        """The height of the whole figure."""
        panel = self.gap + self.memory_height if self.memory_height else 0.0
        return self.top + self.lanes_height + panel + self.bottom


def layout_timeline(timeline: Timeline, memory: bool, title: str | None) -> TimelineLayout:
    """Return the layout of a picture: larger for long timelines, lower rows for many ranks."""
    ranks = max(timeline.ranks, 1)
    makespan, shortest = timeline.makespan or 1.0, style.shortest_drawn_action(timeline)
    plot = min(14.5, max(6.5, 0.26 * makespan / shortest))
    row, strip = min(0.36, 9 / ranks), min(max(0.36, 1 / ranks), 6 / ranks)
    fitting = (plot / makespan * shortest - 0.04) / (DIGIT_WIDTH * _max_digits(timeline))
    return TimelineLayout(
        inches_per_second=plot / makespan,
        plot_width=plot,
        row_height=row,
        strip_height=strip,
        top=0.7 if title is None else 1.0,
        lanes_height=row * ranks,
        memory_height=strip * ranks if memory else 0.0,
        font_size=min(8.5, 30 * row, max(5.0, fitting)),
    )


def _max_digits(timeline: Timeline) -> int:
    """Return the number of digits of the largest micro-batch."""
    return len(str(max(timeline.program.schedule.chunks - 1, 0)))


def add_panel(figure: Figure, layout: TimelineLayout, top: float, height: float) -> Axes:
    """Return new axes that start `top` inches below the upper edge of the figure."""
    low = layout.height - top - height
    across = (layout.left / layout.width, layout.plot_width / layout.width)
    return figure.add_axes((across[0], low / layout.height, across[1], height / layout.height))


def _set_scales(axes: Axes, timeline: Timeline, label: str, row_height: float) -> None:
    """Set the scales of a panel that has a row of `row_height` inches for each rank."""
    axes.set_xlim(0, timeline.makespan or 1)
    unit = choose_time_unit(timeline.makespan)
    if unit.name:
        axes.xaxis.set_major_formatter(lambda time, _: format_number(time * unit.per_second))
    axes.set_ylim(max(timeline.ranks, 1) - 0.5, -0.5)
    axes.set_ylabel(label)
    # A label needs 0.15 inches. With lower rows, only every second, fourth, ... rank has one.
    every = 2 ** ceil(log2(max(0.15 / row_height, 1)))
    axes.set_yticks(range(0, timeline.ranks, every))


def _draw_header(
    figure: Figure, layout: TimelineLayout, timeline: Timeline, title: str | None
) -> None:
    left = layout.left / layout.width
    if title is not None:
        figure.text(left, 1 - 0.3 / layout.height, title, size=12, weight="bold", color=DARK)
    below = 1 - (layout.top - 0.45) / layout.height
    figure.text(left, below, style.format_caption(timeline), size=9, color=FAINT)


def draw_legend(figure: Figure, layout: TimelineLayout, timeline: Timeline, skips: bool) -> None:
    """Draw the legend, with entries only for what the picture shows."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    schedule = timeline.program.schedule
    used = {span.action.op for span in _visible_spans(timeline) if isinstance(span.action, Compute)}
    ops = [op for op in Op if op in used]
    entries: dict[str, Any] = {OP_RULES[op].name: Patch(color=style.SHADES[op][0]) for op in ops}
    if style.has_shared_ranks(schedule) and ops:
        shades = tuple(Patch(color=shade) for shade in style.SHADES[ops[0]])
        entries["a rank's stages, alternating"] = shades
    if schedule.overlaps:
        entries["may overlap"] = Patch(facecolor="none", edgecolor=DARK)
    if skips and any(dst - src > 1 for src, dst in timeline.program.graph.edges):
        entries["skip (gradients fainter)"] = Line2D([], [], color=DARK, linewidth=1)
    figure.legend(
        entries.values(),
        entries.keys(),
        bbox_to_anchor=(layout.left / layout.width, 1 - (layout.top - 0.2) / layout.height),
        ncols=max(len(entries), 1),
        handletextpad=0.5,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        **LEGEND_STYLE,
    )


# ---- the lanes ----------------------------------------------------------------------------


def _visible_spans(timeline: Timeline) -> Iterator[Span]:
    """Return the compute spans that have a width."""
    return (span for lane in timeline.computes for span in lane if span.end > span.start)


def _draw_path(
    axes: Axes, outline: Outline, fill: str, edge: str, width: float, alpha: float
) -> None:
    from matplotlib.patches import PathPatch

    patch = PathPatch(outline, facecolor=fill, edgecolor=edge, linewidth=width, alpha=alpha)
    # `add_patch` would visit each corner to find the data limits, which `_set_scales` sets anyway.
    axes.add_artist(patch)


def _draw_boxes(axes: Axes, rects: Iterable[Rect], fill: str, edge: str, width: float) -> None:
    """Draw many boxes as one path."""
    from matplotlib.path import Path as Outline

    corners: list[Point] = []
    for left, right, rank in rects:
        low, high = rank - HALF_BOX_HEIGHT, rank + HALF_BOX_HEIGHT
        corners += [(left, low), (right, low), (right, high), (left, high), (left, low)]
    box = [Outline.MOVETO, *3 * [Outline.LINETO], Outline.CLOSEPOLY]
    if corners:
        _draw_path(axes, Outline(corners, box * (len(corners) // 5)), fill, edge, width, alpha=1.0)


def draw_lanes(axes: Axes, layout: TimelineLayout, timeline: Timeline, skips: bool) -> None:
    """Draw the actions of all ranks, with the numbers of their micro-batches."""
    _set_scales(axes, timeline, "rank", layout.row_height)
    rows = [(0.0, timeline.makespan, rank) for rank in range(timeline.ranks)]
    _draw_boxes(axes, rows, IDLE, "none", 0.0)
    colours = style.stage_colours(timeline.program.schedule)
    groups: dict[str, list[Span]] = {}
    for span in _visible_spans(timeline):
        assert isinstance(span.action, Compute)
        groups.setdefault(colours[span.action.op, span.action.stage], []).append(span)
    # A white edge around boxes that are one or two pixels wide would hide them.
    edge = 0.7 if style.shortest_drawn_action(timeline) * layout.inches_per_second > 0.055 else 0.0
    for colour, spans in sorted(groups.items()):
        rects = [(span.start, span.end, span.rank) for span in spans]
        _draw_boxes(axes, rects, colour, "white", edge)
        _draw_microbatch_numbers(axes, layout, timeline, spans, style.contrasting_ink(colour))
    _draw_overlaps(axes, timeline)
    if skips:
        _draw_skips(axes, layout, timeline)


def _draw_microbatch_numbers(
    axes: Axes, layout: TimelineLayout, timeline: Timeline, spans: Sequence[Span], colour: str
) -> None:
    """Write the micro-batch into each box that has room for the longest number."""
    room = DIGIT_WIDTH * layout.font_size * _max_digits(timeline)
    look = {"size": layout.font_size, "color": colour, "ha": "center", "va": "center_baseline"}
    for span in spans:
        assert isinstance(span.action, Compute)
        if (span.end - span.start) * layout.inches_per_second >= room and layout.font_size >= 4:
            middle = (span.start + span.end) / 2
            axes.text(middle, span.rank, str(span.action.microbatch), look)


def _draw_overlaps(axes: Axes, timeline: Timeline) -> None:
    """Draw one outline around each two actions that may run at the same time."""
    spans = {span.action: span for lane in timeline.computes for span in lane}
    rects: list[Rect] = []
    for pair in timeline.program.schedule.overlaps:
        if pair[0] in spans and pair[1] in spans:
            left, right = (spans[action] for action in pair)
            rects.append((min(left.start, right.start), max(left.end, right.end), left.rank))
    _draw_boxes(axes, sorted(rects), "none", DARK, 1.1)


def _draw_skips(axes: Axes, layout: TimelineLayout, timeline: Timeline) -> None:
    """Draw the messages between stages that are not neighbours. Gradients are fainter."""
    from matplotlib.path import Path as Outline

    skips = [
        d for d in style.find_sent_messages(timeline) if abs(d.message.dst - d.message.src) > 1
    ]
    for forward, strength in ((False, 0.4), (True, 1.0)):
        arcs = [_skip_curve(layout, d) for d in skips if (d.message.src < d.message.dst) == forward]
        if arcs:
            bezier = [Outline.MOVETO, *3 * [Outline.CURVE4]]
            outline = Outline([point for arc in arcs for point in arc], bezier * len(arcs))
            # A wide white line below the thin dark one keeps it readable on top of the boxes.
            _draw_path(axes, outline, "none", "white", 2.6, 0.6 * strength)
            _draw_path(axes, outline, "none", DARK, 1.0, strength)
            times, heights = zip(*(arc[-1] for arc in arcs), strict=True)
            axes.plot(times, heights, ">", color=DARK, ms=4.5, mew=0, alpha=strength)


def _skip_curve(layout: TimelineLayout, sent: SentMessage) -> list[Point]:
    """Return the Bezier points of a skip, from the corner of one box to the corner of another.

    It leaves and arrives between the rows, where it does not hide a number.
    """
    _, producer, consumer = sent
    # Between neighbouring ranks that would be a flat line, so there it is closer to the middle.
    half = 0.46 if abs(producer.rank - consumer.rank) > 1 else 0.2
    half = half if producer.rank < consumer.rank else -half
    near, far = producer.rank + half, consumer.rank - half
    start, end = producer.end, consumer.start
    bend = max((end - start) / 2, 0.12 / layout.inches_per_second)
    return [(start, near), (start + bend, near), (end - bend, far), (end, far)]


# ---- the memory panel ---------------------------------------------------------------------


def _draw_memory(axes: Axes, layout: TimelineLayout, timeline: Timeline) -> None:
    from matplotlib.path import Path as Outline

    _set_scales(axes, timeline, "live activations", layout.strip_height)
    scale = 2 * HALF_BOX_HEIGHT / (max(timeline.peak, default=0.0) or 1.0)
    dip = 0.03 / layout.inches_per_second
    curves = [Outline(_memory_curve(timeline, rank, scale, dip)) for rank in range(timeline.ranks)]
    if curves:
        width = min(0.7, 2 * layout.strip_height)
        _draw_path(axes, Outline.make_compound_path(*curves), FILL, FAINT, width, alpha=1.0)
    beside = axes.get_yaxis_transform()
    axes.text(
        1.01, 1 + 0.08 / layout.memory_height, "peak", transform=axes.transAxes, size=8, color=FAINT
    )
    for rank in axes.get_yticks():
        peak = format_number(timeline.peak[round(rank)])
        axes.text(1.01, rank, peak, transform=beside, size=8, color=DARK, va="center_baseline")


def _memory_curve(timeline: Timeline, rank: int, scale: float, min_gap: float) -> list[Point]:
    """Return the corners of one rank's memory curve, without dips narrower than `min_gap`.

    Between a backward and the next forward the memory dips for a moment. Drawn, such dips would be
    a dark line each.
    """
    floor = level = rank + HALF_BOX_HEIGHT
    corners = [(0.0, floor)]
    # A dict keeps the last size of each moment, the one that stays.
    points = list(dict(timeline.memory(rank)).items())
    for index, (time, size) in enumerate(points):
        later, after = points[min(index + 1, len(points) - 1)]
        if later - time < min_gap and after > size:
            continue
        before, level = level, floor - size * scale
        if level != before:
            corners += [(time, before), (time, level)]
    return [*corners, (timeline.makespan, level), (timeline.makespan, floor)]

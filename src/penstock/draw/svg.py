"""Draw timelines and plots as SVG text, without matplotlib.

`picture` makes the pictures of the docs. This module is for where matplotlib is not: in a browser,
and in HTML pages that carry their pictures with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from penstock.draw import style
from penstock.draw.style import DARK, FAINT, FILL, GRID, IDLE
from penstock.model_summary import ModelSummary
from penstock.schedules.ir import OP_RULES, Compute, Op
from penstock.schedules.timeline import Timeline
from penstock.text_format import choose_time_unit, format_bytes, format_count, format_number

LEFT, TOP, RIGHT = 64, 58, 64  # margins in pixels
FONT = "font-family='system-ui, -apple-system, Segoe UI, sans-serif'"


def timeline_svg(
    timeline: Timeline,
    title: str = "",
    width: int = 1120,
    format_size: Callable[[float], str] = format_number,
) -> str:
    """Return a timeline as the text of an SVG picture: its lanes, and the live activations.

    Args:
        timeline: The timeline, simulated or measured.
        title: A title above the picture.
        width: The width in pixels.
        format_size: A function that writes a size of activations: micro-batches by default.

    Returns:
        One `<svg>` element.

    Example:
        >>> from penstock import lower, schedules, simulate
        >>> timeline_svg(simulate(lower(schedules.gpipe(ranks=2, chunks=2))))[:4]
        '<svg'
    """
    timeline = style.shift_to_zero(timeline)
    ranks = max(timeline.ranks, 1)
    row = max(1.5, min(26.0, 720 / ranks))
    strip = max(1.0, min(22.0, 400 / ranks))
    scale = (width - LEFT - RIGHT) / (timeline.makespan or 1.0)
    memory_top = TOP + row * ranks + 40
    height = memory_top + strip * ranks + 34
    parts = [
        *_open(width, height),
        _text(LEFT, 18, title, DARK, "font-size='15' font-weight='600'"),
        _text(LEFT, 36, style.format_caption(timeline, format_size), FAINT),
        *_legend(timeline),
        *_lanes(timeline, row, scale),
        *_memory(timeline, memory_top, strip, scale, format_size),
        *_axis(timeline, height - 30, scale),
        "</svg>",
    ]
    return "\n".join(parts)


def _text(x: float, y: float, text: str, colour: str, more: str = "") -> str:
    return f"<text x='{x:.2f}' y='{y:.2f}' fill='{colour}' {more}>{escape(text)}</text>"


def _legend(timeline: Timeline) -> Iterator[str]:
    used = {
        s.action.op for lane in timeline.computes for s in lane if isinstance(s.action, Compute)
    }
    x = float(LEFT)
    for op in (op for op in Op if op in used):
        name = OP_RULES[op].name
        yield f"<rect x='{x}' y='43' width='11' height='9' fill='{style.SHADES[op][0]}'/>"
        yield _text(x + 15, 51, name, DARK)
        x += 32 + 6.2 * len(name)


def _lanes(timeline: Timeline, row: float, scale: float) -> Iterator[str]:
    colours = style.stage_colours(timeline.program.schedule)
    boxes: dict[str, list[str]] = {}
    numbers: list[str] = []
    size = min(11.0, row * 0.5)
    for rank, lane in enumerate(timeline.computes):
        top = TOP + rank * row
        yield _box(LEFT, top, timeline.makespan * scale, row * 0.9, IDLE)
        for span in lane:
            assert isinstance(span.action, Compute)
            colour = colours[span.action.op, span.action.stage]
            x, wide = LEFT + span.start * scale, (span.end - span.start) * scale
            path = f"M{x:.2f} {top:.2f}h{wide:.2f}v{row * 0.9:.2f}h-{wide:.2f}z"
            boxes.setdefault(colour, []).append(path)
            label = str(span.action.microbatch)
            if size >= 5 and wide > 0.62 * size * len(label) + 2:
                ink = style.contrasting_ink(colour)
                look = f"text-anchor='middle' font-size='{size:.1f}'"
                numbers.append(
                    _text(x + wide / 2, top + row * 0.45 + size * 0.35, label, ink, look)
                )
    edge = style.shortest_drawn_action(timeline) * scale > 4
    for colour, paths in sorted(boxes.items()):
        stroke = "stroke='white' stroke-width='0.8'" if edge else ""
        yield f"<path d='{''.join(paths)}' fill='{colour}' {stroke}/>"
    yield from numbers
    yield from _rank_labels(timeline.ranks, TOP, row)


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f"<rect x='{x:.2f}' y='{y:.2f}' width='{width:.2f}' height='{height:.2f}' fill='{colour}'/>"
    )


def _rank_labels(ranks: int, top: float, row: float) -> Iterator[str]:
    every = max(1, round(12 / row))
    for rank in range(0, ranks, every):
        y = top + rank * row + row * 0.45 + 4
        yield _text(LEFT - 8, y, f"rank {rank}", DARK, "text-anchor='end'")


def _memory(
    timeline: Timeline,
    top: float,
    strip: float,
    scale: float,
    format_size: Callable[[float], str],
) -> Iterator[str]:
    yield _text(LEFT, top - 8, "live activations", FAINT)
    yield _text(LEFT + timeline.makespan * scale + 8, top - 8, "peak", FAINT)
    most = max(timeline.peak, default=0.0) or 1.0
    every = max(1, round(12 / strip))
    for rank in range(timeline.ranks):
        base = top + (rank + 1) * strip - 1
        path, level = [f"M{LEFT} {base:.2f}"], base
        for time, size in dict(timeline.memory(rank)).items():
            x, new = LEFT + time * scale, base - size / most * strip * 0.88
            path.append(f"L{x:.2f} {level:.2f}L{x:.2f} {new:.2f}")
            level = new
        right = LEFT + timeline.makespan * scale
        path.append(f"L{right:.2f} {level:.2f}L{right:.2f} {base:.2f}z")
        yield f"<path d='{''.join(path)}' fill='{FILL}' stroke='{FAINT}' stroke-width='0.5'/>"
        if rank % every == 0:
            yield _text(right + 8, base - 2, format_size(timeline.peak[rank]), DARK)
    yield from _rank_labels(timeline.ranks, top, strip)


def _axis(timeline: Timeline, y: float, scale: float) -> Iterator[str]:
    unit, right = choose_time_unit(timeline.makespan), LEFT + timeline.makespan * scale
    yield f"<line x1='{LEFT}' y1='{y:.2f}' x2='{right:.2f}' y2='{y:.2f}' stroke='{GRID}'/>"
    for share in range(5):
        time = timeline.makespan * share / 4
        yield _text(LEFT + time * scale, y + 14, unit.format(time), FAINT, "text-anchor='middle'")


# ---- memory -------------------------------------------------------------------------------


def memory_svg(
    forecast: Timeline, measured: Sequence[Sequence[tuple[float, float]]], width: int = 900
) -> str:
    """Return the measured memory of all ranks over the forecast, as the text of an SVG picture.

    Args:
        forecast: The simulated timeline, with activations in bytes.
        measured: The curve of each rank, as pairs (time, bytes), by the times of the forecast.
        width: The width in pixels.
    """
    strip, top, right = max(4.0, min(40.0, 600 / max(forecast.ranks, 1))), 30, 150
    height = top + strip * forecast.ranks + 10
    scale = (width - LEFT - right) / (forecast.makespan or 1.0)
    peaks = [max((size for _, size in curve), default=0.0) for curve in measured]
    most = max([*peaks, *forecast.peak, 1.0])
    line, edge = style.SHADES[Op.F][0], LEFT + forecast.makespan * scale
    parts = [
        *_open(width, height),
        f"<rect x='{LEFT}' y='8' width='11' height='9' fill='{line}'/>",
        _text(LEFT + 15, 16, "measured", DARK),
        f"<rect x='{LEFT + 84}' y='8' width='11' height='9' fill='{FILL}'/>",
        _text(LEFT + 99, 16, "forecast", DARK),
        _text(edge + 8, 22, "peak", FAINT),
        _text(edge + 78, 22, "forecast", FAINT),
    ]
    every = max(1, round(12 / strip))
    for rank in range(forecast.ranks):
        base = top + (rank + 1) * strip - 2
        parts.append(_box(LEFT, base - strip * 0.9, edge - LEFT, strip * 0.9, IDLE))
        for curve, closed in ((forecast.memory(rank), True), (measured[rank], False)):
            path, level = [f"M{LEFT} {base:.2f}"], base
            for time, size in dict(curve).items():
                x = LEFT + (time - forecast.start) * scale
                new = base - size / most * strip * 0.88
                path.append(f"L{x:.2f} {level:.2f}L{x:.2f} {new:.2f}")
                level = new
            path.append(f"L{edge:.2f} {level:.2f}" + (f"L{edge:.2f} {base:.2f}z" if closed else ""))
            look = f"fill='{FILL}'" if closed else f"fill='none' stroke='{line}' stroke-width='1.6'"
            parts.append(f"<path d='{''.join(path)}' {look}/>")
        if rank % every == 0:
            middle = base - strip * 0.45 + 4
            parts.append(_text(edge + 8, middle, format_bytes(peaks[rank]), DARK))
            parts.append(_text(edge + 78, middle, format_bytes(forecast.peak[rank]), FAINT))
    return "\n".join([*parts, *_rank_labels(forecast.ranks, top, strip), "</svg>"])


def _open(width: float, height: float) -> list[str]:
    """Return the start of a picture with a white background."""
    return [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}' "
        f"viewBox='0 0 {width:.0f} {height:.0f}' {FONT} font-size='11'>",
        f"<rect width='{width:.0f}' height='{height:.0f}' fill='white'/>",
    ]


# ---- models -------------------------------------------------------------------------------


def model_svg(outline: ModelSummary, width: int = 900) -> str:
    """Return a model that was cut into stages as the text of an SVG picture: a bar for each unit.

    `draw.chain` also draws the values that cross the cuts. It needs matplotlib.

    Args:
        outline: The summary of the model and its cuts.
        width: The width in pixels.
    """
    bars, top = 90.0, 40
    pitch = min(60.0, (width - 2 * 12) / max(len(outline.units), 1))
    letters = max((len(unit.name) for unit in outline.units), default=0)
    names = min(letters, 26) * 5.4 + 8 if pitch >= 9 else 0.0
    height, wide = top + bars + names + 12, 24 + pitch * len(outline.units)
    costs = [outline.unit_costs(unit) for unit in outline.units]
    most = max(map(sum, costs), default=0.0) or 1.0
    parts, start = _open(max(wide, 320.0), height), 12.0
    for stage, count in enumerate(outline.counts):
        if stage % 2 == 0:
            parts.append(_box(start, 4, pitch * count, height - 8, IDLE))
        words = [f"stage {stage}", format_count(outline.stage_parameter_counts[stage])]
        for row, words_of_row in enumerate(words if pitch * count >= 58 else [str(stage)]):
            look = "text-anchor='middle'" + (" font-weight='600'" if row == 0 else "")
            colour = FAINT if row else DARK
            parts.append(
                _text(start + pitch * count / 2, 18 + 14 * row, words_of_row, colour, look)
            )
        start += pitch * count
    for index, (unit, cost) in enumerate(zip(outline.units, costs, strict=True)):
        x, y = 12 + pitch * index, top + bars
        for op, load in zip((Op.F, Op.I, Op.W), cost, strict=False):
            high = max(load / most * (bars - 4), 0.8)
            y -= high
            shade = style.SHADES[op][unit.stage % 2]
            parts.append(_box(x + pitch * 0.08, y, pitch * 0.84, high, shade))
        if names:
            name = unit.name if len(unit.name) <= 26 else "…" + unit.name[-25:]
            place = f"translate({x + pitch / 2 + 3:.1f} {top + bars + 5:.1f}) rotate(90)"
            size = min(9.0, pitch * 0.7)
            parts.append(
                f"<text transform='{place}' fill='{DARK}' font-size='{size:.1f}'>"
                f"{escape(name)}</text>"
            )
    return "\n".join([*parts, "</svg>"])


# ---- points -------------------------------------------------------------------------------


class PlotPoint(NamedTuple):
    """A named point of a plot."""

    name: str
    x: float
    y: float


def scatter_svg(points: Sequence[PlotPoint], x_label: str, y_label: str) -> str:
    """Return a plot of named points as the text of an SVG picture.

    Args:
        points: The points. `y` is a fraction, written in percent.
        x_label: The name of the horizontal axis.
        y_label: The name of the vertical axis.
    """
    width, height, left, bottom = 900, 380, 56, 40
    right = max([p.x for p in points], default=1.0) * 1.15 or 1.0
    top = max([p.y for p in points], default=1.0) * 1.15 or 1.0
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='0 0 {width} {height}' {FONT} font-size='11'>",
        f"<path d='M{left} 10V{height - bottom}H{width - 10}' fill='none' stroke='{GRID}'/>",
        _text(width - 12, height - 8, x_label, FAINT, "text-anchor='end'"),
        _text(left + 8, 18, y_label, FAINT),
    ]
    for share in (0.25, 0.5, 0.75, 1.0):
        x, y = left + share * (width - left - 10), height - bottom - share * (height - bottom - 20)
        end = "end" if share == 1.0 else "middle"
        parts.append(
            _text(x, height - bottom + 14, f"{share * right:.3g}", FAINT, f"text-anchor='{end}'")
        )
        parts.append(_text(left - 6, y + 4, f"{share * top:.0%}", FAINT, "text-anchor='end'"))
    places = [
        (
            point.name,
            left + point.x / right * (width - left - 10),
            height - bottom - point.y / top * (height - bottom - 20),
        )
        for point in sorted(points, key=lambda p: (p.y, p.x))
    ]
    occupied = [(x - 5, x + 5, y - 5, y + 5) for _, x, y in places]
    for name, x, y in places:
        label_x, label_y = _free_spot(x, y, 6.4 * len(name), occupied)
        parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{style.SHADES[Op.F][0]}'/>")
        parts.append(_text(label_x, label_y, name, DARK))
    return "\n".join([*parts, "</svg>"])


def _free_spot(
    x: float, y: float, width: float, occupied: list[tuple[float, float, float, float]]
) -> tuple[float, float]:
    """Return where the label of a point covers nothing, and remember it in `occupied`.

    It goes to the right of the point, to its left, above or below, and further up if need be.
    """
    spots = [
        (x + 8, y + 4),
        (x - 8 - width, y + 4),
        (x - width / 2, y - 9),
        (x - width / 2, y + 16),
    ]
    spots += [(x - width / 2, y - 9 - 12 * row) for row in range(1, 20)]
    for left, base in spots:
        box = left, left + width, base - 9, base + 2
        if not any(
            box[0] < other[1] and other[0] < box[1] and box[2] < other[3] and other[2] < box[3]
            for other in occupied
        ):
            break
    occupied.append(box)
    return left, base

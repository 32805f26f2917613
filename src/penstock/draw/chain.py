"""A cut model as a picture: its units in a chain, the cuts, and what goes across them.

A bar is a unit, as high as it is costly. Above the bars, each value that crosses a cut goes from
the unit that made it to the one that uses it; the shorter its way, the lower it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.draw import palette
from penstock.draw.arcs import Arc, arcs_of, lanes_for, short
from penstock.draw.palette import DARK, FAINT, GRID, IDLE, SHADES
from penstock.draw.paper import STYLE, save, suffix_of
from penstock.errors import MissingExtra
from penstock.ir import Op
from penstock.outline import Outline, Piece, numbers_said, seconds_said

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OPS = (Op.F, Op.I, Op.W)
BARS = 1.3  # inches that the highest is high
LETTER = 0.58 / 72  # inches that a letter is wide, for each point of the font's size
SIZE = 7.0  # of most letters, in points


def chain(outline: Outline, path: str | PathLike[str], *, title: str | None = None) -> None:
    """Draw it into an SVG or PNG file, by the suffix of `path`."""
    path = Path(path)
    kind = suffix_of(path)
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "draw", "a picture") from None
    arcs = list(arcs_of(outline))
    sheet = _sheet(outline, arcs)
    with style.context(STYLE, after_reset=True):
        figure = Figure(figsize=(sheet.width, sheet.height))
        _header(figure, sheet, outline, title)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, sheet.width)
        axes.set_ylim(0, sheet.height)
        axes.axis("off")
        _stages(axes, sheet, outline)
        tops = _bars(axes, sheet, outline)
        _names(axes, sheet, outline)
        ports = _ports(arcs, sheet)
        for at, arc in enumerate(arcs):
            _draw_arc(axes, sheet, arc, at, (ports[at, arc.start], ports[at, arc.end]), tops)
        save(figure, path, kind)


# ---- the sheet ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sheet:
    """Where things go, in inches from the lower left."""

    pitch: float  # from unit to unit
    units: int
    names: float  # the height of the longest name
    lanes: tuple[int, ...]  # of each arc
    step: float  # from lane to lane
    left: float
    right: float

    @property
    def width(self) -> float:
        return max(self.left + self.pitch * self.units + self.right, 5.2)

    @property
    def base(self) -> float:
        return 0.2 + self.names

    @property
    def sky(self) -> float:
        """Where the arcs begin."""
        return self.base + BARS + 0.22

    @property
    def roof(self) -> float:
        return self.sky + self.step * (max(self.lanes, default=0) + 1) + 0.02

    @property
    def height(self) -> float:
        return self.roof + 1.25

    def middle(self, unit: int) -> float:
        return self.left + self.pitch * (unit + 0.5)


def _sheet(outline: Outline, arcs: Sequence[Arc]) -> _Sheet:
    units = max(len(outline.pieces), 1)
    pitch = min(0.62, max(13.2 / units, 0.05))
    longest = max((len(short(piece.name)) for piece in outline.pieces), default=0)
    names = longest * LETTER * SIZE + 0.1 if _named(pitch) else 0.1
    bare = _Sheet(pitch, units, names, (), 0.0, 0.3, 0.3)
    reach = [_reach(bare, arc) for arc in arcs]
    left = 0.3 - min((low for low, _ in reach), default=0.3) + 0.1
    ends = 0.3 + pitch * units
    right = max((high for _, high in reach), default=ends) - ends + 0.1
    lanes = lanes_for(reach)
    step = min(0.25, 4.5 / (max(lanes, default=0) + 1))
    return _Sheet(pitch, units, names, lanes, step, max(0.3, left), max(0.3, right))


def _named(pitch: float) -> bool:
    """Is there room for a name under each unit?"""
    return pitch >= 0.11


def _reach(sheet: _Sheet, arc: Arc) -> tuple[float, float]:
    """From where to where an arc runs, its label included."""
    start, end = sheet.middle(arc.start), sheet.middle(arc.end)
    half = len(arc.label) * LETTER * SIZE / 2 + 0.06
    return min(start, (start + end) / 2 - half), max(end, (start + end) / 2 + half)


# ---- what goes across ---------------------------------------------------------------------


def _ports(arcs: Sequence[Arc], sheet: _Sheet) -> dict[tuple[int, int], float]:
    """Where each arc touches its two units: so that those of one unit do not cross.

    What comes is on the left, the highest rightmost; what goes is on the right, the highest first.
    """
    touching: dict[int, list[tuple[int, int]]] = {}
    for at, arc in enumerate(arcs):
        touching.setdefault(arc.end, []).append((sheet.lanes[at], at))
        touching.setdefault(arc.start, []).append((2 * len(arcs) - sheet.lanes[at], at))
    found = {}
    for unit, those in touching.items():
        room = 0.64 * sheet.pitch
        gap = min(room / max(len(those) - 1, 1), 0.1)
        for turn, (_, at) in enumerate(sorted(those)):
            found[at, unit] = sheet.middle(unit) + gap * (turn - (len(those) - 1) / 2)
    return found


def _draw_arc(
    axes: Axes, sheet: _Sheet, arc: Arc, at: int, ends: tuple[float, float], tops: Sequence[float]
) -> None:
    """Up, across and down again, with round corners."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outlined

    start, end = ends
    across = sheet.sky + sheet.step * sheet.lanes[at]
    low, high = tops[arc.start] + 0.04, tops[arc.end] + 0.06
    bend = min(0.09, (end - start) / 2, across - low, across - high)
    corners = [
        (start, low), (start, across - bend), (start, across), (start + bend, across),
        (end - bend, across), (end, across), (end, across - bend), (end, high),
    ]  # fmt: skip
    line, curve = Outlined.LINETO, Outlined.CURVE3
    codes = [Outlined.MOVETO, line, curve, curve, line, curve, curve, line]
    colour = SHADES[Op.R][0] if arc.tie else DARK if arc.skip else FAINT
    look: dict[str, Any] = {"facecolor": "none", "edgecolor": colour}
    look["linewidth"] = 1.3 if arc.skip else 1.0
    look["linestyle"] = (0, (1, 1.5)) if arc.tie else "-"
    axes.add_artist(PathPatch(Outlined(corners, codes), **look))
    if not arc.tie:
        axes.plot([end], [high], "v", color=colour, ms=4, mew=0)
    axes.text(
        (start + end) / 2,
        across + 0.035,
        arc.label,
        size=min(SIZE, 72 * sheet.step * 0.62),
        color=colour if arc.tie else DARK,
        ha="center",
        va="bottom",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6},
    )


# ---- units and stages ---------------------------------------------------------------------


def _bars(axes: Axes, sheet: _Sheet, outline: Outline) -> list[float]:
    """The units; gives where each ends above."""
    most = max((sum(_loads(outline, piece)) for piece in outline.pieces), default=0.0) or 1.0
    inner = sheet.pitch * (0.84 if sheet.pitch > 0.2 else 0.9)
    tops = []
    for at, piece in enumerate(outline.pieces):
        top = sheet.base
        loads = _loads(outline, piece)
        least = max(0.05 - BARS * sum(loads) / most, 0.0)  # so that each is seen
        for op, load in zip(OPS, loads, strict=False):
            height = BARS * load / most + least
            least = 0.0
            axes.bar(
                [sheet.middle(at)],
                [height],
                inner,
                bottom=top,
                color=SHADES[op][piece.stage % 2],
                edgecolor="white",
                linewidth=0.5 if sheet.pitch > 0.1 else 0.0,
            )
            top += height
        tops.append(top)
    return tops


def _loads(outline: Outline, piece: Piece) -> tuple[float, ...]:
    if outline.measured and piece.seconds is not None:
        return piece.seconds
    return (float(piece.size),)


def _names(axes: Axes, sheet: _Sheet, outline: Outline) -> None:
    ends = sheet.left, sheet.left + sheet.pitch * sheet.units
    axes.plot(ends, [sheet.base] * 2, color=GRID, linewidth=1.0, solid_capstyle="round")
    if not _named(sheet.pitch):
        return
    look = {"size": min(SIZE, 48 * sheet.pitch), "rotation": 90, "ha": "center", "va": "top"}
    for at, piece in enumerate(outline.pieces):
        axes.text(sheet.middle(at), sheet.base - 0.07, short(piece.name), look, color=DARK)


def _stages(axes: Axes, sheet: _Sheet, outline: Outline) -> None:
    """A band for each, with its name on top, and a line at each cut."""
    at = 0
    for stage, count in enumerate(outline.counts):
        left, width = sheet.left + sheet.pitch * at, sheet.pitch * count
        at += count
        top = sheet.roof + 0.52
        if stage % 2 == 0:
            axes.bar([left], [top - 0.1], width, bottom=0.1, color=IDLE, align="edge", zorder=0)
        if stage:
            axes.plot([left] * 2, [0.1, sheet.sky], "--", color=FAINT, linewidth=0.9, zorder=1)
            axes.plot([left] * 2, [sheet.sky, top], "--", color=GRID, linewidth=0.9, zorder=1)
        lines = _of_stage(outline, stage)
        fitting = [line for line in lines if len(line) * LETTER * 8 <= width]
        if not fitting:
            fitting = [str(stage)]
        for row, line in enumerate(fitting):
            axes.text(
                left + width / 2,
                top - 0.06 - 0.145 * row,
                line,
                size=8,
                weight="normal" if row else "bold",
                color=FAINT if row else DARK,
                ha="center",
                va="top",
            )


def _of_stage(outline: Outline, stage: int) -> list[str]:
    lines = [f"stage {stage}", numbers_said(outline.parameters[stage])]
    if outline.measured:
        lines.append(seconds_said(outline.load(stage)))
    return lines


def _header(figure: Figure, sheet: _Sheet, outline: Outline, title: str | None) -> None:
    from matplotlib.patches import Patch

    left, top = 0.3 / sheet.width, sheet.height
    head = title or f"{outline.model} in {outline.stages} stages"
    figure.text(left, 1 - 0.32 / top, head, size=12, weight="bold", color=DARK)
    what = "as high as its F, I and W take" if outline.measured else "as high as its parameters"
    said = f"{numbers_said(outline.total)} parameters; a bar is a unit, {what}"
    figure.text(left, 1 - 0.53 / top, said, size=8.5, color=FAINT)
    if outline.measured:
        figure.legend(
            handles=[Patch(color=SHADES[op][0], label=palette.WORDS[op]) for op in OPS],
            loc="upper right",
            bbox_to_anchor=(1 - 0.2 / sheet.width, 1 - 0.14 / top),
            ncols=3,
            fontsize=7.5,
            labelcolor=DARK,
            frameon=False,
            handlelength=1.1,
            handleheight=0.8,
            columnspacing=1.2,
        )

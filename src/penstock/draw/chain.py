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
from penstock.draw.arcs import Arc, assign_arc_levels, build_arcs, shorten_name
from penstock.draw.palette import DARK, FAINT, GRID, IDLE, SHADES
from penstock.draw.paper import MATPLOTLIB_STYLE, check_suffix, save_figure
from penstock.errors import MissingExtra
from penstock.ir import Op
from penstock.outline import ModelSummary, UnitSummary, format_count, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OPS = (Op.F, Op.I, Op.W)
MAX_BAR_HEIGHT = 1.3  # inches that the highest is high
LETTER_WIDTH = 0.58 / 72  # inches that a letter is wide, for each point of the font's size
FONT_SIZE = 7.0  # of most letters, in points


def chain(outline: ModelSummary, path: str | PathLike[str], *, title: str | None = None) -> None:
    """Draw it into an SVG or PNG file, by the suffix of `path`."""
    path = Path(path)
    kind = check_suffix(path)
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "draw", "a picture") from None
    arcs = list(build_arcs(outline))
    sheet = _layout_model(outline, arcs)
    with style.context(MATPLOTLIB_STYLE, after_reset=True):
        figure = Figure(figsize=(sheet.width, sheet.height))
        _draw_header(figure, sheet, outline, title)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, sheet.width)
        axes.set_ylim(0, sheet.height)
        axes.axis("off")
        _draw_stages(axes, sheet, outline)
        tops = _draw_bars(axes, sheet, outline)
        _draw_names(axes, sheet, outline)
        ports = _arc_endpoints(arcs, sheet)
        for at, arc in enumerate(arcs):
            _draw_arc(axes, sheet, arc, at, (ports[at, arc.start], ports[at, arc.end]), tops)
        save_figure(figure, path, kind)


# ---- the sheet ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _ModelLayout:
    """Where things go, in inches from the lower left."""

    pitch: float  # from unit to unit
    units: int
    names_height: float  # the height of the longest name
    arc_levels: tuple[int, ...]  # of each arc
    level_height: float  # from lane to lane
    left: float
    right: float

    @property
    def width(self) -> float:
        return max(self.left + self.pitch * self.units + self.right, 5.2)

    @property
    def bars_bottom(self) -> float:
        return 0.2 + self.names_height

    @property
    def arcs_bottom(self) -> float:
        """Where the arcs begin."""
        return self.bars_bottom + MAX_BAR_HEIGHT + 0.22

    @property
    def arcs_top(self) -> float:
        return self.arcs_bottom + self.level_height * (max(self.arc_levels, default=0) + 1) + 0.02

    @property
    def height(self) -> float:
        return self.arcs_top + 1.25

    def unit_center(self, unit: int) -> float:
        return self.left + self.pitch * (unit + 0.5)


def _layout_model(outline: ModelSummary, arcs: Sequence[Arc]) -> _ModelLayout:
    units = max(len(outline.units), 1)
    pitch = min(0.62, max(13.2 / units, 0.05))
    longest = max((len(shorten_name(piece.name)) for piece in outline.units), default=0)
    names = longest * LETTER_WIDTH * FONT_SIZE + 0.1 if _has_room_for_names(pitch) else 0.1
    bare = _ModelLayout(pitch, units, names, (), 0.0, 0.3, 0.3)
    reach = [_arc_extent(bare, arc) for arc in arcs]
    left = 0.3 - min((low for low, _ in reach), default=0.3) + 0.1
    ends = 0.3 + pitch * units
    right = max((high for _, high in reach), default=ends) - ends + 0.1
    lanes = assign_arc_levels(reach)
    step = min(0.25, 4.5 / (max(lanes, default=0) + 1))
    return _ModelLayout(pitch, units, names, lanes, step, max(0.3, left), max(0.3, right))


def _has_room_for_names(pitch: float) -> bool:
    """Is there room for a name under each unit?"""
    return pitch >= 0.11


def _arc_extent(layout: _ModelLayout, arc: Arc) -> tuple[float, float]:
    """From where to where an arc runs, its label included."""
    start, end = layout.unit_center(arc.start), layout.unit_center(arc.end)
    half = len(arc.label) * LETTER_WIDTH * FONT_SIZE / 2 + 0.06
    return min(start, (start + end) / 2 - half), max(end, (start + end) / 2 + half)


# ---- what goes across ---------------------------------------------------------------------


def _arc_endpoints(arcs: Sequence[Arc], layout: _ModelLayout) -> dict[tuple[int, int], float]:
    """Where each arc touches its two units: so that those of one unit do not cross.

    What comes is on the left, the highest rightmost; what goes is on the right, the highest first.
    """
    touching: dict[int, list[tuple[int, int]]] = {}
    for at, arc in enumerate(arcs):
        touching.setdefault(arc.end, []).append((layout.arc_levels[at], at))
        touching.setdefault(arc.start, []).append((2 * len(arcs) - layout.arc_levels[at], at))
    found = {}
    for unit, those in touching.items():
        room = 0.64 * layout.pitch
        gap = min(room / max(len(those) - 1, 1), 0.1)
        for turn, (_, at) in enumerate(sorted(those)):
            found[at, unit] = layout.unit_center(unit) + gap * (turn - (len(those) - 1) / 2)
    return found


def _draw_arc(
    axes: Axes,
    layout: _ModelLayout,
    arc: Arc,
    index: int,
    ends: tuple[float, float],
    tops: Sequence[float],
) -> None:
    """Up, across and down again, with round corners."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outlined

    start, end = ends
    across = layout.arcs_bottom + layout.level_height * layout.arc_levels[index]
    low, high = tops[arc.start] + 0.04, tops[arc.end] + 0.06
    bend = min(0.09, (end - start) / 2, across - low, across - high)
    corners = [
        (start, low), (start, across - bend), (start, across), (start + bend, across),
        (end - bend, across), (end, across), (end, across - bend), (end, high),
    ]  # fmt: skip
    line, curve = Outlined.LINETO, Outlined.CURVE3
    codes = [Outlined.MOVETO, line, curve, curve, line, curve, curve, line]
    colour = SHADES[Op.R][0] if arc.is_tie else DARK if arc.is_skip else FAINT
    look: dict[str, Any] = {"facecolor": "none", "edgecolor": colour}
    look["linewidth"] = 1.3 if arc.is_skip else 1.0
    look["linestyle"] = (0, (1, 1.5)) if arc.is_tie else "-"
    axes.add_artist(PathPatch(Outlined(corners, codes), **look))
    if not arc.is_tie:
        axes.plot([end], [high], "v", color=colour, ms=4, mew=0)
    axes.text(
        (start + end) / 2,
        across + 0.035,
        arc.label,
        size=min(FONT_SIZE, 72 * layout.level_height * 0.62),
        color=colour if arc.is_tie else DARK,
        ha="center",
        va="bottom",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6},
    )


# ---- units and stages ---------------------------------------------------------------------


def _draw_bars(axes: Axes, layout: _ModelLayout, outline: ModelSummary) -> list[float]:
    """The units; gives where each ends above."""
    most = max((sum(_unit_costs(outline, piece)) for piece in outline.units), default=0.0) or 1.0
    inner = layout.pitch * (0.84 if layout.pitch > 0.2 else 0.9)
    tops = []
    for at, piece in enumerate(outline.units):
        top = layout.bars_bottom
        loads = _unit_costs(outline, piece)
        least = max(0.05 - MAX_BAR_HEIGHT * sum(loads) / most, 0.0)  # so that each is seen
        for op, load in zip(OPS, loads, strict=False):
            height = MAX_BAR_HEIGHT * load / most + least
            least = 0.0
            axes.bar(
                [layout.unit_center(at)],
                [height],
                inner,
                bottom=top,
                color=SHADES[op][piece.stage % 2],
                edgecolor="white",
                linewidth=0.5 if layout.pitch > 0.1 else 0.0,
            )
            top += height
        tops.append(top)
    return tops


def _unit_costs(outline: ModelSummary, piece: UnitSummary) -> tuple[float, ...]:
    if outline.is_measured and piece.seconds is not None:
        return piece.seconds
    return (float(piece.parameter_bytes),)


def _draw_names(axes: Axes, layout: _ModelLayout, outline: ModelSummary) -> None:
    ends = layout.left, layout.left + layout.pitch * layout.units
    axes.plot(ends, [layout.bars_bottom] * 2, color=GRID, linewidth=1.0, solid_capstyle="round")
    if not _has_room_for_names(layout.pitch):
        return
    look = {"size": min(FONT_SIZE, 48 * layout.pitch), "rotation": 90, "ha": "center", "va": "top"}
    for at, piece in enumerate(outline.units):
        axes.text(
            layout.unit_center(at),
            layout.bars_bottom - 0.07,
            shorten_name(piece.name),
            look,
            color=DARK,
        )


def _draw_stages(axes: Axes, layout: _ModelLayout, outline: ModelSummary) -> None:
    """A band for each, with its name on top, and a line at each cut."""
    at = 0
    for stage, count in enumerate(outline.counts):
        left, width = layout.left + layout.pitch * at, layout.pitch * count
        at += count
        top = layout.arcs_top + 0.52
        if stage % 2 == 0:
            axes.bar([left], [top - 0.1], width, bottom=0.1, color=IDLE, align="edge", zorder=0)
        if stage:
            axes.plot(
                [left] * 2, [0.1, layout.arcs_bottom], "--", color=FAINT, linewidth=0.9, zorder=1
            )
            axes.plot(
                [left] * 2, [layout.arcs_bottom, top], "--", color=GRID, linewidth=0.9, zorder=1
            )
        lines = _stage_label_lines(outline, stage)
        fitting = [line for line in lines if len(line) * LETTER_WIDTH * 8 <= width]
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


def _stage_label_lines(outline: ModelSummary, stage: int) -> list[str]:
    lines = [f"stage {stage}", format_count(outline.stage_parameter_counts[stage])]
    if outline.is_measured:
        lines.append(format_seconds(outline.stage_load(stage)))
    return lines


def _draw_header(
    figure: Figure, layout: _ModelLayout, outline: ModelSummary, title: str | None
) -> None:
    from matplotlib.patches import Patch

    left, top = 0.3 / layout.width, layout.height
    head = title or f"{outline.model_name} in {outline.num_stages} stages"
    figure.text(left, 1 - 0.32 / top, head, size=12, weight="bold", color=DARK)
    what = "as high as its F, I and W take" if outline.is_measured else "as high as its parameters"
    said = f"{format_count(outline.total_parameters)} parameters; a bar is a unit, {what}"
    figure.text(left, 1 - 0.53 / top, said, size=8.5, color=FAINT)
    if outline.is_measured:
        figure.legend(
            handles=[Patch(color=SHADES[op][0], label=palette.OP_NAMES[op]) for op in OPS],
            loc="upper right",
            bbox_to_anchor=(1 - 0.2 / layout.width, 1 - 0.14 / top),
            ncols=3,
            fontsize=7.5,
            labelcolor=DARK,
            frameon=False,
            handlelength=1.1,
            handleheight=0.8,
            columnspacing=1.2,
        )

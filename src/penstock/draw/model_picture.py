"""Draw a model that was cut into stages: its units, the cuts, and the values that cross them.

A bar is a unit. Its height shows its cost. Above the bars, an arc for each value that crosses a cut
leads from the unit that makes it to the unit that uses it. Shorter arcs run lower.

    arcs       the transfers between stages, grouped and labelled, each on a level of its own
    layout     the positions of all parts
    drawing    stages, bars, names, arcs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.draw.style import DARK, FAINT, GRID, IDLE, SHADES, PictureFile, write_figure
from penstock.model_summary import ModelSummary, Transfer
from penstock.schedules.ir import OP_RULES, Op
from penstock.text_format import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# -------------------------------------------------------------------------------------------------
# Arcs: the values that cross a cut and the parameters that stages share, as lines to draw.
# -------------------------------------------------------------------------------------------------

MAX_ARCS = 14  # with more arcs, all values between the same two stages share one arc
MAX_NAME_LENGTH = 34  # letters; a longer name is shortened


@dataclass(frozen=True)
class Arc:
    """A line above the units, from one unit to another.

    `is_skip` marks a value that does not go to the next stage, `is_tie` a parameter that both units
    share.
    """

    start: int
    end: int
    label: str
    is_skip: bool
    is_tie: bool = False


def build_arcs(outline: ModelSummary) -> Iterator[Arc]:
    """Yield one arc for all values that go from one unit to another.

    If these would be too many, yield one arc for each pair of stages.
    """
    groups: dict[tuple[int, ...], list[Transfer]] = {}
    for flow in outline.transfers:
        groups.setdefault((flow.src, flow.dst, flow.producer, flow.consumer), []).append(flow)
    if len(groups) > MAX_ARCS:
        groups = {}
        for flow in outline.transfers:
            groups.setdefault((flow.src, flow.dst), []).append(flow)
    for flows in groups.values():
        sample = flows[0]
        start = max(flow.producer for flow in flows)
        end = min(flow.consumer for flow in flows)
        yield Arc(start, end, _arc_label(flows, len(groups) > MAX_ARCS), sample.is_skip)
    yield from _build_tie_arcs(outline)


def _build_tie_arcs(outline: ModelSummary) -> Iterator[Arc]:
    """Yield one arc from the first unit with a shared parameter to each other unit with it."""
    ties: dict[tuple[int, int], list[str]] = {}
    for shared in outline.shared_parameters:
        first_unit, *others = (
            _find_unit_with_parameter(outline, stage, shared.names) for stage in shared.stages
        )
        for unit in others:
            ties.setdefault((first_unit, unit), []).append(shared.names[0])
    for (first_unit, unit), names in ties.items():
        label = shorten_name(names[0]) if len(names) == 1 else f"{len(names)} parameters"
        yield Arc(first_unit, unit, f"shared: {label}", is_skip=False, is_tie=True)


def _arc_label(flows: Sequence[Transfer], crowded: bool) -> str:
    sizes = [flow.nbytes for flow in flows]
    size_label = [] if None in sizes else [format_bytes(sum(size or 0 for size in sizes))]
    name = shorten_name(flows[0].name) if len(flows) == 1 else f"{len(flows)} values"
    if crowded and size_label and not flows[0].is_skip:
        return size_label[0]
    return ", ".join([name, *size_label])


def _find_unit_with_parameter(outline: ModelSummary, stage: int, names: Sequence[str]) -> int:
    """Return the unit of a stage that has a parameter.

    A parameter of a module around the units is in no unit. Then return the stage's first unit.
    """
    candidates = [unit for unit, piece in enumerate(outline.units) if piece.stage == stage]
    for unit in candidates:
        if any(name.startswith(f"{outline.units[unit].name}.") for name in names):
            return unit
    return candidates[0]


def shorten_name(name: str) -> str:
    """Return a name, or the end of it if it is long."""
    return name if len(name) <= MAX_NAME_LENGTH else "…" + name[1 - MAX_NAME_LENGTH :]


def assign_arc_levels(extents: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Return a level for each arc, so that no two on one level overlap.

    The shortest arcs are placed first and lowest. Each later arc then goes down from the top as far
    as nothing is in its way, so that it never runs below a shorter arc that it spans.
    """
    occupied: list[list[tuple[float, float]]] = []  # the extents on each level
    levels = [0] * len(extents)
    for arc in sorted(range(len(extents)), key=lambda i: extents[i][1] - extents[i][0]):
        low, high = extents[arc]
        free = len(occupied)
        while free and all(high <= a or b <= low for a, b in occupied[free - 1]):
            free -= 1
        if free == len(occupied):
            occupied.append([])
        occupied[free].append((low, high))
        levels[arc] = free
    return tuple(levels)


# -------------------------------------------------------------------------------------------------
# The picture.
# -------------------------------------------------------------------------------------------------

OPS = (Op.F, Op.I, Op.W)
MAX_BAR_HEIGHT = 1.3  # the height of the highest bar, in inches
LETTER_WIDTH = 0.58 / 72  # the width of a letter in inches, per point of font size
FONT_SIZE = 7.0  # the size of most letters, in points


def chain(
    outline: ModelSummary,
    path: PictureFile = None,
    *,
    title: str | None = None,
    format: str | None = None,
) -> Figure:
    """Draw a model that was cut into stages: its units, the cuts, and what crosses them.

    Args:
        outline: The summary of the model, its cuts and its transfers.
        path: The file to write: a path that ends in .svg or .png, or a file that is open for
            writing. None only returns the figure.
        title: A title above the picture; by default the model's name and its number of stages.
        format: "svg" or "png". By default the suffix decides; for an open file without a name, a
            binary one is PNG and a text file SVG.

    Returns:
        The figure of matplotlib. It is not one of pyplot's, so a notebook shows it once.

    Raises:
        ArgumentError: The format is neither SVG nor PNG.
        MissingExtra: matplotlib is not installed.
    """
    arcs = list(build_arcs(outline))
    sheet = _layout_model(outline, arcs)
    with write_figure(path, sheet.width, sheet.height, format) as figure:
        _draw_header(figure, sheet, outline, title)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, sheet.width)
        axes.set_ylim(0, sheet.height)
        axes.axis("off")
        _draw_stages(axes, sheet, outline)
        tops = _draw_bars(axes, sheet, outline)
        _draw_names(axes, sheet, outline)
        ports = _arc_endpoints(arcs, sheet)
        for index, arc in enumerate(arcs):
            _draw_arc(
                axes, sheet, arc, index, (ports[index, arc.start], ports[index, arc.end]), tops
            )
    return figure


# ---- the layout ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _ModelLayout:
    """The positions of all parts, in inches from the lower left corner.

    pitch         the distance from unit to unit
    units         the number of units
    names_height  the height of the longest name, which is written upwards
    arc_levels    the level of each arc
    level_height  the distance from level to level
    left, right   the margins
    """

    pitch: float
    units: int
    names_height: float
    arc_levels: tuple[int, ...]
    level_height: float
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
        """The height of the lowest level of arcs."""
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
    # A first layout without arcs shows how far the arcs and their labels reach. The margins and
    # the levels follow from that.
    bare = _ModelLayout(pitch, units, names, (), 0.0, 0.3, 0.3)
    reach = [_arc_extent(bare, arc) for arc in arcs]
    left = 0.3 - min((low for low, _ in reach), default=0.3) + 0.1
    ends = 0.3 + pitch * units
    right = max((high for _, high in reach), default=ends) - ends + 0.1
    lanes = assign_arc_levels(reach)
    step = min(0.25, 4.5 / (max(lanes, default=0) + 1))
    return _ModelLayout(pitch, units, names, lanes, step, max(0.3, left), max(0.3, right))


def _has_room_for_names(pitch: float) -> bool:
    """Return True if there is room for a name under each unit."""
    return pitch >= 0.11


def _arc_extent(layout: _ModelLayout, arc: Arc) -> tuple[float, float]:
    """Return the left and right end of an arc, including its label."""
    start, end = layout.unit_center(arc.start), layout.unit_center(arc.end)
    half = len(arc.label) * LETTER_WIDTH * FONT_SIZE / 2 + 0.06
    return min(start, (start + end) / 2 - half), max(end, (start + end) / 2 + half)


# ---- arcs ---------------------------------------------------------------------------------


def _arc_endpoints(arcs: Sequence[Arc], layout: _ModelLayout) -> dict[tuple[int, int], float]:
    """Return the position at which each arc touches each of its two units.

    The arcs of one unit must not cross. So incoming arcs are on the left, the highest rightmost,
    and outgoing arcs are on the right, the highest leftmost.
    """
    touching: dict[int, list[tuple[int, int]]] = {}
    for index, arc in enumerate(arcs):
        touching.setdefault(arc.end, []).append((layout.arc_levels[index], index))
        touching.setdefault(arc.start, []).append((2 * len(arcs) - layout.arc_levels[index], index))
    endpoints = {}
    for unit, unit_arcs in touching.items():
        room = 0.64 * layout.pitch
        gap = min(room / max(len(unit_arcs) - 1, 1), 0.1)
        for turn, (_, index) in enumerate(sorted(unit_arcs)):
            endpoints[index, unit] = layout.unit_center(unit) + gap * (
                turn - (len(unit_arcs) - 1) / 2
            )
    return endpoints


def _draw_arc(
    axes: Axes,
    layout: _ModelLayout,
    arc: Arc,
    index: int,
    ends: tuple[float, float],
    tops: Sequence[float],
) -> None:
    """Draw an arc up, across and down again, with round corners."""
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
    """Draw a bar for each unit and return the height of its upper end."""
    most = max((sum(outline.unit_costs(piece)) for piece in outline.units), default=0.0) or 1.0
    inner = layout.pitch * (0.84 if layout.pitch > 0.2 else 0.9)
    tops = []
    for index, piece in enumerate(outline.units):
        top = layout.bars_bottom
        loads = outline.unit_costs(piece)
        # A unit that costs almost nothing still gets a visible bar.
        least = max(0.05 - MAX_BAR_HEIGHT * sum(loads) / most, 0.0)
        for op, load in zip(OPS, loads, strict=False):
            height = MAX_BAR_HEIGHT * load / most + least
            least = 0.0
            axes.bar(
                [layout.unit_center(index)],
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


def _draw_names(axes: Axes, layout: _ModelLayout, outline: ModelSummary) -> None:
    ends = layout.left, layout.left + layout.pitch * layout.units
    axes.plot(ends, [layout.bars_bottom] * 2, color=GRID, linewidth=1.0, solid_capstyle="round")
    if not _has_room_for_names(layout.pitch):
        return
    look = {"size": min(FONT_SIZE, 48 * layout.pitch), "rotation": 90, "ha": "center", "va": "top"}
    for index, piece in enumerate(outline.units):
        position = layout.unit_center(index), layout.bars_bottom - 0.07
        axes.text(*position, shorten_name(piece.name), look, color=DARK)


def _draw_stages(axes: Axes, layout: _ModelLayout, outline: ModelSummary) -> None:
    """Draw a band for each stage, with its name on top, and a line at each cut."""
    start = 0
    for stage, count in enumerate(outline.counts):
        left, width = layout.left + layout.pitch * start, layout.pitch * count
        start += count
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
    note = f"{format_count(outline.total_parameters)} parameters; a bar is a unit, {what}"
    figure.text(left, 1 - 0.53 / top, note, size=8.5, color=FAINT)
    if outline.is_measured:
        figure.legend(
            handles=[Patch(color=SHADES[op][0], label=OP_RULES[op].name) for op in OPS],
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

"""Draw a plan: the cut above, the forecast timeline in the middle, memory against the cap below."""

from __future__ import annotations

from dataclasses import replace
from math import isinf
from typing import TYPE_CHECKING

from penstock.draw import style
from penstock.draw.picture import add_panel, draw_lanes, draw_legend, layout_timeline
from penstock.draw.style import DARK, FAINT, FILL, IDLE, SHADES, PictureFile
from penstock.planning.plan import Plan
from penstock.schedules.ir import Op
from penstock.text_format import choose_time_unit, format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CUT_HEIGHT, GAP, MEMORY_ROW = 0.9, 0.5, 0.26  # inches


def plan(
    plan: Plan, path: PictureFile = None, *, title: str | None = None, format: str | None = None
) -> Figure:
    """Draw a plan: its cut, the forecast timeline, and memory against the cap.

    Args:
        plan: The plan.
        path: The file to write: a path that ends in .svg or .png, or a file that is open for
            writing. None only returns the figure.
        title: A title above the picture; by default the choice in one line.
        format: "svg" or "png". By default the suffix decides; for an open file without a name, a
            binary one is PNG and a text file SVG.

    Returns:
        The figure of matplotlib. It is not one of pyplot's, so a notebook shows it once.

    Raises:
        ArgumentError: The format is neither SVG nor PNG.
        MissingExtra: matplotlib is not installed.
    """
    timeline = plan.timeline
    title = plan.describe_choice() if title is None else title
    memory_height = min(MEMORY_ROW, 5 / plan.ranks) * plan.ranks
    sheet = layout_timeline(timeline, memory=False, title=title)
    # The cut stands between the legend and the lanes, so it makes the top of the figure higher.
    sheet = replace(sheet, gap=GAP + 0.15, memory_height=memory_height, right=1.5)
    lanes_top = sheet.top + CUT_HEIGHT + GAP
    whole = replace(sheet, top=lanes_top)
    with style.write_figure(path, whole.width, whole.height, format) as figure:
        left = whole.left / whole.width
        figure.text(left, 1 - 0.3 / whole.height, title, size=12, weight="bold", color=DARK)
        caption = style.format_caption(timeline)
        figure.text(left, 1 - 0.55 / whole.height, caption, size=9, color=FAINT)
        draw_legend(figure, replace(whole, top=lanes_top), timeline, skips=False)
        _draw_cut(add_panel(figure, whole, sheet.top - 0.1, CUT_HEIGHT - 0.1), plan)
        lanes = add_panel(figure, whole, lanes_top, whole.lanes_height)
        draw_lanes(lanes, whole, timeline, skips=False)
        unit = choose_time_unit(timeline.makespan)
        lanes.set_xlabel(f"time ({unit.name})" if unit.name else "time")
        memory_top = lanes_top + whole.lanes_height + whole.gap
        _draw_memory(add_panel(figure, whole, memory_top, memory_height), plan)
    return figure


def _draw_cut(axes: Axes, plan: Plan) -> None:
    """Draw each stage as a bar as wide as its seconds, with its units, rank and recomputation."""
    cost = plan.costs.cost
    left = 0.0
    for stage, names in enumerate(plan.stage_units):
        width = cost.F[stage] + cost.I[stage] + cost.W[stage]
        shade = SHADES[Op.F][stage % 2]
        axes.barh(0, width, left=left, height=0.8, color=shade, edgecolor="white")
        words = f"{len(names)}" + ("R" if plan.recompute[stage] else "")
        ink = style.contrasting_ink(shade)
        axes.text(left + width / 2, 0, words, ha="center", va="center", size=7, color=ink)
        axes.text(
            left + width / 2, 0.62, str(plan.placement[stage]), ha="center", size=7, color=FAINT
        )
        left += width
    axes.set_xlim(0, left or 1.0)
    axes.set_ylim(-0.45, 1.0)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.set_ylabel("cut")
    axes.text(
        1.01,
        0.1,
        "above: rank\ninside: units\nR: recomputed",
        transform=axes.transAxes,
        size=7,
        color=FAINT,
    )
    axes.set_xlabel(f"stages by their seconds, {format_seconds(left)} a micro-batch", size=8)


def _draw_memory(axes: Axes, plan: Plan) -> None:
    """Draw the peak of each rank, what is there anyway, and the cap."""
    peaks, resident = plan.forecast.peak, plan.forecast.resident
    finite_caps = [cap for cap in plan.memory if not isinf(cap)]
    ranks = range(plan.ranks)
    axes.barh(ranks, peaks, height=0.75, color=SHADES[Op.F][1])
    axes.barh(ranks, resident, height=0.75, color=FILL)
    for rank, cap in enumerate(plan.memory):
        if not isinf(cap):
            axes.plot([cap, cap], [rank - 0.45, rank + 0.45], color=DARK, linewidth=1.5)
    axes.set_facecolor(IDLE)
    axes.set_xlim(0, 1.02 * max([*peaks, *finite_caps, 1.0]))
    axes.set_ylim(plan.ranks - 0.5, -0.5)
    axes.set_ylabel("rank")
    axes.set_yticks(list(ranks)[:: max(1, plan.ranks // 16)])
    axes.xaxis.set_major_formatter(lambda size, _: format_bytes(size))
    axes.set_xlabel("memory: parameters and state, activations at the peak, and the cap")
    for rank in axes.get_yticks():
        axes.text(
            1.01,
            rank,
            format_bytes(peaks[round(rank)]),
            transform=axes.get_yaxis_transform(),
            size=8,
            color=DARK,
            va="center_baseline",
        )

"""Draw the measured memory of a step over the forecast: one strip per rank, all to one scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.draw.style import (
    DARK,
    FAINT,
    FILL,
    IDLE,
    LEGEND_STYLE,
    SHADES,
    PictureFile,
    write_figure,
)
from penstock.schedules.ir import Op
from penstock.schedules.timeline import Timeline
from penstock.text_format import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = Sequence[tuple[float, float]]  # (time, bytes that are alive from then on)

LINE_COLOUR = SHADES[Op.F][0]
LEFT, RIGHT, FOOT, PLOT = 0.75, 1.7, 0.55, 6.5  # inches
PEAK_HEIGHT = 0.9  # the height of the highest curve, as a fraction of its strip


def memory(
    forecast: Timeline,
    measured: Sequence[Curve],
    path: PictureFile = None,
    *,
    title: str | None = None,
    format: str | None = None,
) -> Figure:
    """Draw the measured memory of all ranks over the forecast.

    Args:
        forecast: The simulated timeline.
        measured: The curve of each rank, as pairs (time, bytes), by the times of the forecast.
        path: The file to write: a path that ends in .svg or .png, or a file that is open for
            writing. None only returns the figure.
        title: A title above the picture.
        format: "svg" or "png". By default the suffix decides; for an open file without a name, a
            binary one is PNG and a text file SVG.

    Returns:
        The figure of matplotlib. It is not one of pyplot's, so a notebook shows it once.

    Raises:
        ArgumentError: The format is neither SVG nor PNG.
        MissingExtra: matplotlib is not installed.
    """
    ranks = max(forecast.ranks, 1)
    top, strip = (0.5 if title is None else 0.8), min(0.6, 8 / ranks)
    width, height = LEFT + PLOT + RIGHT, top + strip * ranks + FOOT
    peaks = [max((size for _, size in curve), default=0.0) for curve in measured]
    with write_figure(path, width, height, format) as figure:
        if title is not None:
            left = LEFT / width
            figure.text(left, 1 - 0.3 / height, title, size=12, weight="bold", color=DARK)
        _draw_legend(figure, LEFT / width, 1 - (top - 0.2) / height)
        axes = figure.add_axes((LEFT / width, FOOT / height, PLOT / width, strip * ranks / height))
        _draw_curves(axes, forecast, measured, max([*peaks, *forecast.peak, 1.0]))
        _draw_peaks(axes, forecast, peaks, strip * ranks)
    return figure


def _draw_legend(figure: Figure, left: float, top: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure.legend(
        [Line2D([], [], color=LINE_COLOUR, linewidth=1.4), Patch(color=FILL)],
        ["measured", "forecast"],
        bbox_to_anchor=(left, top),
        ncols=2,
        **LEGEND_STYLE,
    )


def _draw_curves(
    axes: Axes, forecast: Timeline, measured: Sequence[Curve], max_size: float
) -> None:
    """Draw the forecast as a filled curve and the measurement as a line over it."""
    start, end = forecast.start, forecast.start + (forecast.makespan or 1.0)
    axes.set_xlim(0, end - start)
    axes.set_ylim(max(forecast.ranks, 1) - 0.5, -0.5)
    axes.set_ylabel("rank")
    axes.set_yticks(range(forecast.ranks))
    axes.set_xlabel("time, if all actions take the same")
    for rank, curve in enumerate(measured):
        floor = rank + 0.45  # the lower edge of the strip; the y axis points down
        axes.axhspan(floor, floor - PEAK_HEIGHT, facecolor=IDLE)
        for points, line in ((forecast.memory(rank), False), (curve, True)):
            # A dict keeps the last size of each moment, which is the one that stays.
            size_by_time = dict(points)
            times = [*(time - start for time in size_by_time), end - start]
            sizes = [*size_by_time.values(), 0.0]
            heights = [floor - PEAK_HEIGHT * size / max_size for size in sizes]
            if line:
                heights[-1] = heights[-2] if len(heights) > 1 else floor
                axes.step(times, heights, where="post", color=LINE_COLOUR, linewidth=1.4)
            else:
                axes.fill_between(times, heights, floor, step="post", facecolor=FILL, linewidth=0)


def _draw_peaks(axes: Axes, forecast: Timeline, peaks: Sequence[float], height: float) -> None:
    """Write the measured and the forecast peak at the right of each strip."""
    look = {"transform": axes.get_yaxis_transform(), "size": 8, "va": "center"}
    above = 1 + 0.08 / height
    axes.text(1.01, above, "peak", transform=axes.transAxes, size=8, color=FAINT)
    axes.text(1.13, above, "forecast", transform=axes.transAxes, size=8, color=FAINT)
    for rank, (peak, forecast_peak) in enumerate(zip(peaks, forecast.peak, strict=True)):
        axes.text(1.01, rank, format_bytes(peak), look, color=DARK)
        axes.text(1.13, rank, format_bytes(forecast_peak), look, color=FAINT)

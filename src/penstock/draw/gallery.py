"""The gallery: a page with the picture of every schedule, its numbers, source and use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from penstock.draw.picture import picture
from penstock.schedules import FAMILIES, fit, make, vee
from penstock.schedules.lowering import lower
from penstock.schedules.timeline import Timeline, simulate


class Exhibit(NamedTuple):
    """One schedule of the gallery.

    Attributes:
        name: The name that `schedule=` takes.
        function: The name of the function in `penstock.schedules`.
        use: When to use it.
        source: The paper or library that it comes from.
        timeline: The simulated timeline that is drawn.
    """

    name: str
    function: str
    use: str
    source: str
    timeline: Timeline

    @property
    def figures(self) -> str:
        """The bubble and the peak memory, in words."""
        peak = max(self.timeline.peak)
        unit = "micro-batch" if peak == 1 else "micro-batches"
        return f"bubble {self.timeline.bubble:.1%}, peak {peak:g} {unit}"


def exhibits(ranks: int = 4, chunks: int = 8) -> Iterator[Exhibit]:
    """Yield an exhibit for every named schedule, then one for `fit` on a V with 1F1B's memory.

    Args:
        ranks: The number of ranks of each schedule.
        chunks: The number of micro-batches.

    Yields:
        The exhibits, in the order of `schedules.FAMILIES`.

    Example:
        >>> print(next(exhibits(ranks=2, chunks=2)).figures)
        bubble 50.0%, peak 1 micro-batch
    """
    for name, family in FAMILIES.items():
        timeline = simulate(lower(make(name, ranks, chunks)))
        yield Exhibit(name, family.build.__name__, family.use, family.source, timeline)
    yield Exhibit(
        name="fit",
        function="fit",
        use="Made to measure: it takes the costs of each stage, the time of a message and a memory "
        "cap, and is never worse than the named schedules of its placement under the same cap.",
        source="list scheduling",
        timeline=simulate(lower(fit(vee(ranks), chunks, memory=ranks))),
    )


def write_gallery(directory: str | PathLike[str], shown: Iterable[Exhibit]) -> None:
    """Write a picture of each exhibit, and the page `index.md`.

    Args:
        directory: The folder to write to. It is created if it does not exist.
        shown: The exhibits, such as `exhibits()`.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    page = [
        "# Gallery",
        "",
        "This page shows every schedule, with F = I = W = 1 for all stages of a rank together, and",
        "free messages. Each row is a rank, and time runs from left to right. The number in a box",
        "is the micro-batch, and the lighter shade marks the second stage of a rank. The plot",
        "below shows the activations alive on each rank. `penstock gallery` draws each picture",
        "from the schedule that it simulates. `penstock studio` shows them in a browser, where you",
        "can change sizes and costs and move actions.",
        "",
    ]
    for exhibit in shown:
        picture(exhibit.timeline, folder / f"{exhibit.name}.svg", title=exhibit.name)
        schedule = exhibit.timeline.program.schedule
        page += [
            f"## {exhibit.name}",
            "",
            f"![{exhibit.name}]({exhibit.name}.svg)",
            "",
            exhibit.use,
            "",
            f"*{schedule.ranks} ranks, {schedule.chunks} micro-batches: {exhibit.figures}. "
            f"In Python: `schedules.{exhibit.function}`. Source: {exhibit.source}.*",
            "",
        ]
    (folder / "index.md").write_text("\n".join(page))

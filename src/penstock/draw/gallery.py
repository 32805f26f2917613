"""The gallery: every schedule's picture, with its numbers, its source and when to use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.draw.picture import picture
from penstock.lower import lower
from penstock.schedules import FAMILIES, Family, fit, make, vee
from penstock.timeline import Timeline, simulate


class Exhibit(NamedTuple):
    """One schedule of the gallery."""

    name: str
    family: Family
    timeline: Timeline

    @property
    def figures(self) -> str:
        """Bubble and peak, in words."""
        peak = max(self.timeline.peak)
        return f"bubble {self.timeline.bubble:.1%}, peak {peak:g} micro-batches"


_FIT = Family(
    build=fit,
    peak=lambda p, m, v: p,
    use="Made to measure: takes the costs of each stage, the time of a message and a memory cap, "
    "and is never worse than the named schedules of its placement.",
    source="list scheduling",
    stages_per_rank=2,
)


def exhibits(ranks: int, chunks: int) -> Iterator[Exhibit]:
    """Every named schedule, then `fit` on a V with the memory of 1F1B."""
    for name, family in FAMILIES.items():
        yield Exhibit(name, family, simulate(lower(make(name, ranks, chunks))))
    yield Exhibit("fit", _FIT, simulate(lower(fit(vee(ranks), chunks, memory=ranks))))


def write_gallery(directory: Path, ranks: int = 4, chunks: int = 8) -> Iterator[Exhibit]:
    """Write a picture for each schedule and `index.md`; yield each exhibit as it is done."""
    directory.mkdir(parents=True, exist_ok=True)
    page = [
        "# Gallery",
        "",
        f"Every schedule on {ranks} ranks with {chunks} micro-batches, F = I = W = 1 for a rank's",
        "whole share, messages free. Ranks down, time across; the number in a box is the",
        "micro-batch, the lighter shade is a rank's second stage. Below: what is alive on each",
        "rank. The pictures are drawn by `penstock demo`, and each comes from the value that runs.",
        "",
    ]
    for exhibit in exhibits(ranks, chunks):
        picture(exhibit.timeline, directory / f"{exhibit.name}.svg", title=exhibit.name)
        page += [
            f"## {exhibit.name}",
            "",
            f"![{exhibit.name}]({exhibit.name}.svg)",
            "",
            f"{exhibit.family.use}",
            "",
            f"*{exhibit.figures}. Source: {exhibit.family.source}.*",
            "",
        ]
        yield exhibit
    (directory / "index.md").write_text("\n".join(page))

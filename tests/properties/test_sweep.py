"""Every family at many sizes is complete, does not deadlock, and keeps its claimed memory.

Sizes are some of ranks 1-8 and chunks 1-17 (`make fuzz` takes all of them), and stages per rank 1-4
where a family supports that. Random skips and random recomputation are added where every two of
these three numbers occur together.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from penstock import StageGraph, lower, recompute, schedules, simulate, verify

VARIANTS = [
    (name, v)
    for name, family in schedules.FAMILIES.items()
    for v in (range(1, 5) if family.free else [family.stages_per_rank])
]


RANKS = (1, 2, 3, 4, 8)
CHUNKS = (1, 2, 3, 4, 5, 7, 8, 12, 17)


def in_turn(name: str, v: int, ranks: int, chunks: int) -> bool:
    """Choose sizes that cover every two of the three numbers; always true if `v` is fixed."""
    return not schedules.FAMILIES[name].free or v == 1 + (ranks + chunks) % 4


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "v"), VARIANTS)
def test_every_family_and_size_is_sound_with_the_claimed_peak(
    name: str, v: int, ranks: int
) -> None:
    check_family(name, v, ranks, CHUNKS)


def check_family(name: str, v: int, ranks: int, sizes: Iterable[int]) -> None:
    for chunks in sizes:
        schedule = schedules.make(name, ranks, chunks, v)
        claim = schedules.FAMILIES[name].peak(ranks, chunks, v)
        assert verify(schedule, memory=claim) == (), chunks
        if not in_turn(name, v, ranks, chunks):
            continue

        draw = random.Random(f"{name} {v} {ranks} {chunks}")
        stages = ranks * v
        pairs = [(a, b) for a in range(stages) for b in range(a + 1, stages)]
        graph = StageGraph.chain(stages, draw.sample(pairs, min(len(pairs), draw.randrange(4))))
        again = {
            (stage, i) for stage in range(stages) for i in range(chunks) if draw.random() < 0.5
        }
        harder = recompute(schedule, lambda stage, i, again=again: (stage, i) in again)  # type: ignore[misc]
        assert verify(harder, graph, memory=claim) == (), (chunks, graph.edges)


@pytest.mark.parametrize(("name", "v"), [x for x in VARIANTS if x[0] != "forward-only"])
def test_claimed_peak_is_reached_with_enough_microbatches(name: str, v: int) -> None:
    for ranks in RANKS:
        chunks = 4 * ranks
        timeline = simulate(lower(schedules.make(name, ranks, chunks, v)))
        assert max(timeline.peak) == pytest.approx(schedules.FAMILIES[name].peak(ranks, chunks, v))

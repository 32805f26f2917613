"""Every family at every size: whole, free of deadlocks under rendezvous, memory as claimed.

Ranks 1-8, chunks 1-17, stages a rank 1-4 where that has a meaning; and once more with random skips
and random recomputation, where every two of these three numbers meet.
"""

from __future__ import annotations

import random

import pytest

from penstock import StageGraph, lower, recompute, schedules, simulate, verify

VARIANTS = [
    (name, v)
    for name, family in schedules.FAMILIES.items()
    for v in (range(1, 5) if family.free else [family.stages_per_rank])
]


def in_turn(name: str, v: int, ranks: int, chunks: int) -> bool:
    """For any two of the three numbers, some third; always, where `v` is not free."""
    return not schedules.FAMILIES[name].free or v == 1 + (ranks + chunks) % 4


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize(("name", "v"), VARIANTS)
def test_every_size(name: str, v: int, ranks: int) -> None:
    for chunks in range(1, 18):
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
def test_the_claimed_peak_is_met_once_there_are_enough_micro_batches(name: str, v: int) -> None:
    for ranks in range(1, 9):
        chunks = 4 * ranks
        timeline = simulate(lower(schedules.make(name, ranks, chunks, v)))
        assert max(timeline.peak) == pytest.approx(schedules.FAMILIES[name].peak(ranks, chunks, v))

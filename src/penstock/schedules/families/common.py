"""The parts that families of schedules share: placements, checks of sizes, lanes cut to a size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.errors import ArgumentError
from penstock.schedules.ir import Compute, Schedule

Placement = tuple[int, ...]


def check_sizes(ranks: int, chunks: int, stages_per_rank: int = 1) -> None:
    """Raise unless all sizes are at least 1.

    Args:
        ranks: The number of ranks.
        chunks: The number of micro-batches.
        stages_per_rank: The number of stages of each rank.
    """
    sizes = {"ranks": ranks, "chunks": chunks, "stages_per_rank": stages_per_rank}
    wrong = [f"{name}={value}" for name, value in sizes.items() if value < 1]
    if wrong:
        raise ArgumentError(f"{', '.join(wrong)}: each of these must be at least 1")


def loop(ranks: int, stages_per_rank: int) -> Placement:
    """Return the placement whose stages go round the ranks: 0 1 2 0 1 2.

    Args:
        ranks: The number of ranks.
        stages_per_rank: The number of stages of each rank.
    """
    return tuple(range(ranks)) * stages_per_rank


def vee(ranks: int) -> Placement:
    """Return the placement of two stages per rank, down and up again: 0 1 2 2 1 0.

    Args:
        ranks: The number of ranks.
    """
    return (*range(ranks), *reversed(range(ranks)))


def group_stages(placement: Sequence[int], ranks: int | None = None) -> list[list[int]]:
    """Return the stages of each rank.

    Args:
        placement: The rank of each stage.
        ranks: The number of ranks, if some may have no stage.

    >>> group_stages((0, 1, 1, 0))
    [[0, 3], [1, 2]]
    """
    stages: list[list[int]] = [[] for _ in range(ranks or max(placement) + 1)]
    for stage, rank in enumerate(placement):
        stages[rank].append(stage)
    return stages


def schedule_from_lanes(
    placement: Placement, chunks: int, lanes: Iterable[Iterable[Compute]]
) -> Schedule:
    """Return the schedule of the first `chunks` micro-batches of these lanes.

    Micro-batches do not depend on each other, so a sound schedule stays sound when some are left
    out. Families that need whole rounds are built for the next whole round and then cut here.
    """
    cut_lanes = (tuple(action for action in lane if action.microbatch < chunks) for lane in lanes)
    return Schedule(placement, chunks, tuple(cut_lanes))

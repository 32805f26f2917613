"""All forwards, then all backwards: GPipe, which can run behind `loss.backward()`, and plain cases.

2 ranks, 2 micro-batches, one column an action; naive and gpipe:

0F0         0B0 0F1         0B1        0F0 0F1         0B1 0B0
    1F0 1B0         1F1 1B1                1F0 1F1 1B1 1B0
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedules.families.common import check_sizes, loop, schedule_from_lanes
from penstock.schedules.ir import Compute, Op, Schedule


def naive(ranks: int, chunks: int, stages_per_rank: int = 1) -> Schedule:
    """Return the schedule of one micro-batch at a time: one rank works, the others wait.

    Args:
        ranks: The number of ranks.
        chunks: The number of micro-batches.
        stages_per_rank: The number of stages of each rank.
    """
    check_sizes(ranks, chunks, stages_per_rank)
    placement = loop(ranks, stages_per_rank)
    lanes: list[list[Compute]] = [[] for _ in range(ranks)]
    for microbatch in range(chunks):
        for stage, rank in enumerate(placement):
            lanes[rank].append(Compute(Op.F, stage, microbatch))
        for stage, rank in reversed(list(enumerate(placement))):
            lanes[rank].append(Compute(Op.B, stage, microbatch))
    return schedule_from_lanes(placement, chunks, lanes)


def gpipe(ranks: int, chunks: int) -> Schedule:
    """Return GPipe: all forwards, then all backwards, last micro-batch first.

    Args:
        ranks: The number of ranks.
        chunks: The number of micro-batches.
    """
    return looped_bfs(ranks, chunks, 1)


def looped_bfs(ranks: int, chunks: int, stages_per_rank: int = 2) -> Schedule:
    """Return GPipe with several stages per rank: all micro-batches pass a stage, then the next.

    Args:
        ranks: The number of ranks.
        chunks: The number of micro-batches.
        stages_per_rank: The number of stages of each rank.
    """
    forward = forward_only(ranks, chunks, stages_per_rank)
    lanes = []
    for lane in forward.lanes:
        backward = [Compute(Op.B, stage, microbatch) for _, stage, microbatch in reversed(lane)]
        lanes.append([*lane, *backward])
    return schedule_from_lanes(forward.placement, chunks, lanes)


def clocked(placement: Sequence[int], chunks: int) -> Schedule:
    """Return GPipe over any placement: at tick t stage s computes micro-batch t - s, then back.

    Args:
        placement: The rank of each stage.
        chunks: The number of micro-batches.

    >>> for lane in clocked((0, 1, 0), chunks=2).lanes:
    ...     print(*lane)
    0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0
    1F0 1F1 1B1 1B0
    """
    ranks, stages = len(set(placement)), len(placement)
    check_sizes(ranks, chunks)
    cells = [
        (stage, tick - stage)
        for tick in range(stages + chunks - 1)
        for stage in range(stages)
        if 0 <= tick - stage < chunks
    ]
    lanes: list[list[Compute]] = [[] for _ in range(ranks)]
    for stage, microbatch in cells:
        lanes[placement[stage]].append(Compute(Op.F, stage, microbatch))
    for stage, microbatch in reversed(cells):
        lanes[placement[stage]].append(Compute(Op.B, stage, microbatch))
    return schedule_from_lanes(tuple(placement), chunks, lanes)


def forward_only(ranks: int, chunks: int, stages_per_rank: int = 1) -> Schedule:
    """Return the schedule for inference, without backwards.

    Args:
        ranks: The number of ranks.
        chunks: The number of micro-batches.
        stages_per_rank: The number of stages of each rank.
    """
    check_sizes(ranks, chunks, stages_per_rank)
    placement = loop(ranks, stages_per_rank)
    lanes = [
        [
            Compute(Op.F, stage, i)
            for stage in range(rank, len(placement), ranks)
            for i in range(chunks)
        ]
        for rank in range(ranks)
    ]
    return schedule_from_lanes(placement, chunks, lanes)

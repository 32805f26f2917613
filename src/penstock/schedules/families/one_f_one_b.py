"""One forward, one backward: as soon as a micro-batch is through, its backward makes room.

1f1b, 2 ranks, 3 micro-batches, one column an action:

0F0 0F1     0B0 0F2 0B1     0B2
    1F0 1B0 1F1 1B1 1F2 1B2
"""

from __future__ import annotations

from penstock.schedules.families.common import check_sizes, loop, one_f_one_b_lanes
from penstock.schedules.ir import Op, Schedule


def one_f_one_b(ranks: int, chunks: int) -> Schedule:
    """Return 1F1B: GPipe's bubble with the activations of at most `ranks` micro-batches."""
    check_sizes(ranks, chunks)
    return Schedule(
        loop(ranks, 1), chunks, one_f_one_b_lanes(ranks, chunks, 1, hops=1, backward=Op.B)
    )


def eager_one_f_one_b(ranks: int, chunks: int) -> Schedule:
    """Return 1F1B that runs further ahead, so that messages have a whole turn to travel."""
    check_sizes(ranks, chunks)
    return Schedule(
        loop(ranks, 1), chunks, one_f_one_b_lanes(ranks, chunks, 1, hops=2, backward=Op.B)
    )


def interleaved(ranks: int, chunks: int, stages_per_rank: int = 2) -> Schedule:
    """Return 1F1B with several stages per rank, so that the pipeline fills in shorter steps.

    Micro-batches go in rounds of `ranks`: each round visits a rank's stages one after another.
    """
    check_sizes(ranks, chunks, stages_per_rank)
    hops = 1 if stages_per_rank == 1 else 2
    lanes = one_f_one_b_lanes(ranks, chunks, stages_per_rank, hops, backward=Op.B)
    return Schedule(loop(ranks, stages_per_rank), chunks, lanes)

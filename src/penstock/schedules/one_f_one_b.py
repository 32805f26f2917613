"""One forward, one backward: as soon as a micro-batch is through, its backward makes room.

1f1b, 2 ranks, 3 micro-batches          how far forwards run ahead of backwards on rank r:
0F0 0F1     0B0 0F2     0B1     0B2     1f1b                               p - r - 1
    1F0 1B0     1F1 1B1 1F2 1B2         eager-1f1b                      2 (p - r - 1)
                                        interleaved      (v - 1) p  +   2 (p - r - 1)
"""

from __future__ import annotations

from penstock.ir import Op, Schedule
from penstock.schedules.parts import assemble, check, loop, one_each, rounds


def one_f_one_b(ranks: int, chunks: int) -> Schedule:
    """GPipe's bubble with the activations of at most `ranks` micro-batches."""
    return interleaved(ranks, chunks, 1)


def eager_one_f_one_b(ranks: int, chunks: int) -> Schedule:
    """1F1B that runs further ahead, so that messages have a whole turn to travel."""
    check(ranks, chunks)
    cells = [[(rank, i) for i in range(chunks)] for rank in range(ranks)]
    lanes = [one_each(row, row, 2 * (ranks - r - 1), Op.B) for r, row in enumerate(cells)]
    return assemble(loop(ranks, 1), chunks, lanes)


def interleaved(ranks: int, chunks: int, stages_per_rank: int = 2) -> Schedule:
    """1F1B with several stages a rank, so that the pipeline fills in shorter steps.

    Micro-batches go in rounds of `ranks`: each round visits a rank's stages one after another.
    """
    check(ranks, chunks, stages_per_rank)
    lanes = []
    for rank in range(ranks):
        forwards, backwards = rounds(rank, ranks, chunks, stages_per_rank)
        hops = 1 if stages_per_rank == 1 else 2
        ahead = (stages_per_rank - 1) * ranks + hops * (ranks - rank - 1)
        lanes.append(one_each(forwards, backwards, ahead, Op.B))
    return assemble(loop(ranks, stages_per_rank), chunks, lanes)

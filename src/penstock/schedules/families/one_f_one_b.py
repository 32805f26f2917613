"""One forward, one backward: as soon as a micro-batch is through, its backward makes room.

1f1b, 2 ranks, 3 micro-batches, one column an action:

0F0 0F1     0B0 0F2 0B1     0B2
    1F0 1B0 1F1 1B1 1F2 1B2

The zero-bubble schedules split the backward into I, which other stages wait for, and W, which can
wait. Their order of F and I is that of 1F1B (zb-h2: eager 1F1B; interleaved-zb: interleaved,
running less far ahead) with I in place of B. The Ws fill the holes. On rank r they may lag behind
the Is by r (zb-h2: by 2 r), so that every rank holds the same memory.

zb-h1, 2 ranks, 3 micro-batches:

0F0 0F1     0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedules.families.common import check_sizes, loop, schedule_from_lanes
from penstock.schedules.ir import Compute, Op, Schedule
from penstock.schedules.list_scheduler import insert_weight_grads, when_lagging

Cell = tuple[int, int]  # a stage and a micro-batch


def one_f_one_b(ranks: int, chunks: int) -> Schedule:
    """Return 1F1B: GPipe's bubble with the activations of at most `ranks` micro-batches.

    Args:
        ranks: The number of ranks.
        chunks: The number of micro-batches.
    """
    return _run_ahead(ranks, chunks, 1, hops=1)


def eager_one_f_one_b(ranks: int, chunks: int) -> Schedule:
    """Return 1F1B that runs further ahead, so that messages have a whole turn to travel.

    Args:
        ranks: The number of ranks.
        chunks: The number of micro-batches.
    """
    return _run_ahead(ranks, chunks, 1, hops=2)


def interleaved(ranks: int, chunks: int, stages_per_rank: int = 2) -> Schedule:
    """Return 1F1B with several stages per rank, so that the pipeline fills in shorter steps.

    Micro-batches go in rounds of `ranks`: each round visits a rank's stages one after another.

    Args:
        ranks: The number of ranks.
        chunks: The number of micro-batches.
        stages_per_rank: The number of stages of each rank.
    """
    return _run_ahead(ranks, chunks, stages_per_rank, hops=1 if stages_per_rank == 1 else 2)


def zb_h1(ranks: int, chunks: int) -> Schedule:
    """Return ZB-H1: 1F1B's memory, a third of its bubble.

    Args:
        ranks: The number of ranks.
        chunks: The number of micro-batches.
    """
    return interleaved_zb(ranks, chunks, 1)


def zb_h2(ranks: int, chunks: int) -> Schedule:
    """Return ZB-H2: nearly twice the memory, for no bubble but the skew between ranks.

    Args:
        ranks: The number of ranks.
        chunks: The number of micro-batches.
    """
    order = _run_ahead(ranks, chunks, 1, hops=2, backward=Op.I)
    return insert_weight_grads(order, when_lagging(lambda rank: 2 * rank))


def interleaved_zb(ranks: int, chunks: int, stages_per_rank: int = 2) -> Schedule:
    """Return interleaved with the Ws in the holes, running less far ahead: 1F1B's memory.

    Args:
        ranks: The number of ranks.
        chunks: The number of micro-batches.
        stages_per_rank: The number of stages of each rank.
    """
    order = _run_ahead(ranks, chunks, stages_per_rank, hops=1, backward=Op.I)
    return insert_weight_grads(order, when_lagging(lambda rank: rank))


# ---- lanes of a loop ----------------------------------------------------------------------


def _run_ahead(
    ranks: int, chunks: int, stages_per_rank: int, hops: int, backward: Op = Op.B
) -> Schedule:
    """Return 1F1B over a loop of p ranks with v stages each.

    On rank r the forwards run ahead of the backwards by (v - 1) p + hops (p - r - 1). A micro-batch
    comes back sooner to a later rank. With `hops` 1 it comes back just in time for its backward.
    With 2, its messages have a turn of their own to travel.
    """
    check_sizes(ranks, chunks, stages_per_rank)
    lanes = []
    for rank in range(ranks):
        forwards, backwards = _cell_order(rank, ranks, chunks, stages_per_rank)
        ahead = (stages_per_rank - 1) * ranks + hops * (ranks - rank - 1)
        lanes.append(alternate_forward_backward(forwards, backwards, ahead, backward))
    return schedule_from_lanes(loop(ranks, stages_per_rank), chunks, lanes)


def alternate_forward_backward(
    forwards: Sequence[Cell], backwards: Sequence[Cell], ahead: int, backward: Op
) -> list[Compute]:
    """Return a lane: `ahead` forwards, then forward and backward in turn, then only backwards."""
    lane = [Compute(Op.F, *cell) for cell in forwards[:ahead]]
    for turn, cell in enumerate(backwards):
        if ahead + turn < len(forwards):
            lane.append(Compute(Op.F, *forwards[ahead + turn]))
        lane.append(Compute(backward, *cell))
    return lane


def _cell_order(
    rank: int, ranks: int, chunks: int, stages_per_rank: int
) -> tuple[list[Cell], list[Cell]]:
    """Return the order in which a rank of a loop runs its cells, forward and backward.

    The order consists of rounds of `ranks` micro-batches, or of one micro-batch if each rank has a
    single stage. A round goes through all stages of the rank: first to last in the forward, last
    to first in the backward.
    """
    size = ranks if stages_per_rank > 1 else 1
    owned = range(rank, ranks * stages_per_rank, ranks)
    starts = range(0, chunks, size)
    forwards = [(s, i) for start in starts for s in owned for i in range(start, start + size)]
    backwards = [
        (s, i) for start in starts for s in reversed(owned) for i in range(start, start + size)
    ]
    return forwards, backwards

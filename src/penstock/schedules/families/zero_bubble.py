"""Zero bubble: split the backward into I, which other stages wait for, and W, which can wait.

The order of F and I is that of 1F1B (zb-h2: eager 1F1B; interleaved-zb: interleaved, running less
far ahead) with I in place of B. The Ws fill the holes. On rank r they may lag behind the Is by
r (zb-h2: by 2 r), so that every rank holds the same memory.

zb-h1, 2 ranks, 3 micro-batches:

0F0 0F1     0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
"""

from __future__ import annotations

from penstock.schedules.families.common import check_sizes, loop, one_f_one_b_lanes
from penstock.schedules.ir import Op, Schedule
from penstock.schedules.list_scheduler import insert_weight_grads, when_lagging


def zb_h1(ranks: int, chunks: int) -> Schedule:
    """Return ZB-H1: 1F1B's memory, a third of its bubble."""
    return interleaved_zb(ranks, chunks, 1)


def zb_h2(ranks: int, chunks: int) -> Schedule:
    """Return ZB-H2: nearly twice the memory, for no bubble but the skew between ranks."""
    check_sizes(ranks, chunks)
    orders = one_f_one_b_lanes(ranks, chunks, 1, hops=2, backward=Op.I)
    return insert_weight_grads(loop(ranks, 1), chunks, orders, when_lagging(lambda rank: 2 * rank))


def interleaved_zb(ranks: int, chunks: int, stages_per_rank: int = 2) -> Schedule:
    """Return interleaved with the Ws in the holes, running less far ahead: 1F1B's memory."""
    check_sizes(ranks, chunks, stages_per_rank)
    orders = one_f_one_b_lanes(ranks, chunks, stages_per_rank, hops=1, backward=Op.I)
    return insert_weight_grads(
        loop(ranks, stages_per_rank), chunks, orders, when_lagging(lambda rank: rank)
    )

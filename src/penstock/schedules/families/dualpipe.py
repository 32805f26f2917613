"""DualPipeV: forwards and backwards in pairs that may run at the same time.

While one of a pair computes, the messages of the other travel. The pairs are neighbours in a
lane; `Schedule.overlaps` names them.

2 ranks, 4 micro-batches, pairs joined by +:

0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3+3B1 3F2+0B0 3B2 3F3+0B1 3B3 0I2 0W2 0I3 0W3
1F0 2F0 1F1 2F1 1F2 2B0 2F2+1B0 1F3+2B1 2F3+1B1 2B2 1B2 2I3 1I3 2W3 1W3
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from penstock.schedules.families.common import (
    check_sizes,
    lane_from_letters,
    schedule_from_lanes,
    vee,
)
from penstock.schedules.ir import Compute, Op, Schedule


def dualpipe_v(ranks: int, chunks: int) -> Schedule:
    """Return DualPipeV: messages overlap with compute; half a micro-batch more memory than 1F1B.

    f b are a rank's first stage, F B its second. In the middle each rank pairs a forward of one
    with a backward of the other. The first backwards and the last are split, to fill holes. Filling
    both directions takes two micro-batches per rank, so a shorter schedule is cut from that one.
    """
    check_sizes(ranks, chunks)
    whole = max(chunks, 2 * ranks)
    lanes = []
    pairs: set[tuple[Compute, Compute]] = set()
    for rank in range(ranks):
        ahead = ranks - rank - 1
        filling = "f" * (2 * ahead) + "fF" * (rank + 1) + "IwF" * ahead
        paired = "fBFb" * (whole - 2 * ranks + rank + 1) + "BFb" * ahead
        last = "Bb" * (rank + 1)
        draining = last[: rank + 1] + last[rank + 1 :].translate(_SPLIT) + "wi" * ahead
        lane = lane_from_letters(filling + paired + draining + "w" * (rank + 1), rank, ranks)
        lanes.append(lane)
        # On the last rank the first forward of the middle is ready before its backward: no pair.
        start = len(filling) + (2 if ahead == 0 else 0)
        middle = lane[start : len(filling) + len(paired)]
        pairs |= {(a, b) for a, b in pairwise(middle) if (a.op, b.op) == (Op.F, Op.B)}
    overlaps = frozenset((a, b) for a, b in pairs if max(a.microbatch, b.microbatch) < chunks)
    return replace(schedule_from_lanes(vee(ranks), chunks, lanes), overlaps=overlaps)


_SPLIT = str.maketrans("Bb", "Ii")

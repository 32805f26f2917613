"""DualPipeV: forwards and backwards in pairs that may run at the same time.

While one of a pair computes, the messages of the other travel. The pairs are neighbours in a
lane; `Schedule.overlaps` names them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from penstock.ir import Compute, Op, Schedule
from penstock.schedules.parts import assemble, check, spell, vee


def dualpipe_v(ranks: int, chunks: int) -> Schedule:
    """Overlaps messages with compute; half a micro-batch more memory than 1F1B.

    In the middle each rank alternates a forward of one stage with a backward of the other. The
    last backwards are split, and their Ws fill the end.
    """
    check(ranks, chunks)
    whole = max(chunks, 2 * ranks)
    lanes = []
    pairs: set[tuple[Compute, Compute]] = set()
    for rank in range(ranks):
        ahead = ranks - rank - 1
        filling = "f" * (2 * ahead) + "fF" * (rank + 1) + "IwF" * ahead
        paired = "fBFb" * (whole - 2 * ranks + rank + 1) + "BFb" * ahead
        last = "Bb" * (rank + 1)
        draining = last[: rank + 1] + last[rank + 1 :].translate(_SPLIT) + "wi" * ahead
        lane = spell(filling + paired + draining + "w" * (rank + 1), rank, ranks)
        lanes.append(lane)
        # Where the fill runs straight into the first pair, waiting for both would cost time.
        first = len(filling) + (2 if ahead == 0 else 0)
        middle = lane[first : len(filling) + len(paired)]
        pairs |= {(a, b) for a, b in pairwise(middle) if (a.op, b.op) == (Op.F, Op.B)}
    kept = frozenset((a, b) for a, b in pairs if max(a.microbatch, b.microbatch) < chunks)
    return replace(assemble(vee(ranks), chunks, lanes), overlaps=kept)


_SPLIT = str.maketrans("Bb", "Ii")

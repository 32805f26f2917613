"""Two stages per rank, down and up again: the first rank also holds the last stage.

Activations that live long and ones that live short then share a rank. So every rank needs the
same memory, and the pattern of one micro-batch, repeated, decides how much.

zb-v, 2 ranks, 4 micro-batches (the first half of it):

0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 ...
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 ...

DualPipeV puts forwards and backwards in pairs that may run at the same time. While one of a pair
computes, the messages of the other travel. The pairs are neighbours in a lane; `Schedule.overlaps`
names them.

dualpipe-v, 2 ranks, 4 micro-batches, pairs joined by +:

0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3+3B1 3F2+0B0 3B2 3F3+0B1 3B3 0I2 0W2 0I3 0W3
1F0 2F0 1F1 2F1 1F2 2B0 2F2+1B0 1F3+2B1 2F3+1B1 2B2 1B2 2I3 1I3 2W3 1W3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

from penstock.schedules.families.common import check_sizes, schedule_from_lanes, vee
from penstock.schedules.ir import Compute, Op, Schedule
from penstock.schedules.list_scheduler import insert_weight_grads, never, when_full


def zb_v(ranks: int, chunks: int) -> Schedule:
    """Return ZB-V: no bubble but the skew between ranks, with 1F1B's memory.

    f i are a rank's first stage, F I its second. The first rank alone starts 2 p - 1 micro-batches
    before one comes back, so a schedule with fewer is cut from one with as many.

    Args:
        ranks: The number of ranks.
        chunks: The number of micro-batches.
    """
    check_sizes(ranks, chunks)
    whole = max(chunks, 2 * ranks - 1)
    orders = []
    for rank in range(ranks):
        below = ranks - rank  # the number of ranks from this one on
        down = "f" * (2 * below - 1)  # until the first micro-batch comes up again
        turn = "Ff" * rank + "FI" * below  # until its gradient comes up
        steady = "fiFI" * (whole - ranks - below + 1)  # while there are new micro-batches
        drain = "iFI" * (below - 1) + "iI" * rank + "i" * below
        orders.append(lane_from_letters(down + turn + steady + drain, rank, ranks, chunks))
    order = schedule_from_lanes(vee(ranks), chunks, orders)
    return insert_weight_grads(order, when_full, memory=ranks)


def dualpipe_v(ranks: int, chunks: int) -> Schedule:
    """Return DualPipeV: messages overlap with compute; half a micro-batch more memory than 1F1B.

    f b are a rank's first stage, F B its second. In the middle each rank pairs a forward of one
    with a backward of the other. The first backwards and the last are split, to fill holes. Filling
    both directions takes two micro-batches per rank, so a shorter schedule is cut from that one.

    Args:
        ranks: The number of ranks.
        chunks: The number of micro-batches.
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
        letters = filling + paired + draining + "w" * (rank + 1)
        lane = list(_read_letters(letters, rank, ranks, chunks))
        lanes.append([action for _, action in lane])
        # On the last rank the first forward of the middle is ready before its backward: no pair.
        middle = range(len(filling) + (2 if ahead == 0 else 0), len(filling) + len(paired))
        pairs |= {
            (a, b)
            for (index, a), (next_index, b) in pairwise(lane)
            if a.op is Op.F and b.op is Op.B and next_index == index + 1
            if index in middle and next_index in middle
        }
    return replace(schedule_from_lanes(vee(ranks), chunks, lanes), overlaps=frozenset(pairs))


_SPLIT = str.maketrans("Bb", "Ii")


def lane_from_letters(
    letters: str, rank: int, ranks: int, chunks: float = float("inf")
) -> list[Compute]:
    """Return a lane of a V that is written in letters, with its first micro-batches only.

    The letters f i b w are actions of the rank's first stage, F I B W those of its second. Each
    letter takes the next micro-batch of its kind. A w or W takes the oldest W that is pending.

    >>> " ".join(map(str, lane_from_letters("fFBb fFIi ww", rank=0, ranks=1)))
    '0F0 1F0 1B0 0B0 0F1 1F1 1I1 0I1 1W1 0W1'
    """
    return [action for _, action in _read_letters(letters.replace(" ", ""), rank, ranks, chunks)]


def _read_letters(
    letters: str, rank: int, ranks: int, chunks: float
) -> Iterator[tuple[int, Compute]]:
    """Yield the actions of the first micro-batches, each with the index of its letter.

    A thousand ranks have millions of letters, most of them for micro-batches that are cut off.
    """
    # Of each letter: its op, its stage, and which count numbers its micro-batches.
    kinds = {
        letter: (Op(letter.upper()), stage, 2 * second + (letter in "fF"))
        for second, (four, stage) in enumerate((("fibw", rank), ("FIBW", 2 * ranks - 1 - rank)))
        for letter in four
    }
    counts = [0] * 4
    pending: deque[tuple[int, int]] = deque()  # the cells whose Is have run, but not their Ws
    for index, letter in enumerate(letters):
        op, stage, kind = kinds[letter]
        if op is Op.W:
            stage, microbatch = pending.popleft()
        else:
            microbatch = counts[kind]
            counts[kind] = microbatch + 1
            if op is Op.I:
                pending.append((stage, microbatch))
        if microbatch < chunks:
            yield index, Compute(op, stage, microbatch)


def v_half(ranks: int, chunks: int) -> Schedule:
    """Return V-Half: half of 1F1B's memory, less than half of its bubble (if chunks >= ranks).

    Args:
        ranks: The number of ranks.
        chunks: The number of micro-batches.
    """
    return _repeat(ranks, chunks, hops=(1, 2, 1, 2), memory=(ranks + 2) // 2)


def v_min(ranks: int, chunks: int) -> Schedule:
    """Return V-Min: a third of 1F1B's memory, two thirds of its bubble.

    Args:
        ranks: The number of ranks.
        chunks: The number of micro-batches.
    """
    return _repeat(ranks, chunks, hops=(1, 1, 1, 1), memory=(ranks + 4) // 3)


# ---- one micro-batch's path, repeated -----------------------------------------------------
#
# One micro-batch runs f down the ranks, F up, I down, i up. It takes `hops` units of time from rank
# to rank on each of the four legs, and some units at each of the three turns between them. A rank's
# work on it is six units (f F I i and two Ws), so the next micro-batch follows six units later, and
# no two of a rank's f F I i may be equal modulo six. The sooner it is back, the less stays alive.
#
#     rank 0   f           F I           i       the turns: at the last rank from f to F,
#     rank 1     f       F     I       i         at rank 0 from F to I,
#     rank 2       f   F         I   i           at the last rank from I to i

_PERIOD = 6
_Times = tuple[int, int, int, int]  # the times of f, F, I and i on one rank


def _repeat(ranks: int, chunks: int, hops: _Times, memory: float) -> Schedule:
    """Return the schedule in which every micro-batch takes the same path, six units apart."""
    check_sizes(ranks, chunks)
    orders = []
    for rank, (f, F, I, i) in enumerate(_find_path(ranks, hops)):
        last = 2 * ranks - 1 - rank
        starts = {(Op.F, rank): f, (Op.F, last): F, (Op.I, last): I, (Op.I, rank): i}
        turns = [
            (_PERIOD * k + start, Compute(op, stage, k))
            for (op, stage), start in starts.items()
            for k in range(chunks)
        ]
        orders.append(tuple(action for _, action in sorted(turns)))
    return insert_weight_grads(Schedule(vee(ranks), chunks, tuple(orders)), never, memory)


def _find_path(ranks: int, hops: _Times) -> list[_Times]:
    """Return the times of the best path on each rank.

    Among the paths without clashes, the best one keeps the least alive. Among those, it is the one
    that turns fastest at rank 0.
    """
    down, up, down_again, up_again = hops
    best: tuple[tuple[int, int, int], list[_Times]] | None = None
    for low, top, low_again in product(range(1, _PERIOD + 1), repeat=3):
        F = (ranks - 1) * down + low
        I = F + (ranks - 1) * up + top
        i = I + (ranks - 1) * down_again + low_again
        path = []
        for r in range(ranks):
            left = ranks - 1 - r
            path.append((r * down, F + left * up, I + r * down_again, i + left * up_again))
        if any(len({time % _PERIOD for time in times}) < 4 for times in path):
            continue
        score = max(map(_peak_live, path)), top, low + top + low_again
        if best is None or score < best[0]:
            best = score, path
    assert best is not None, "some turns are free of clashes for every number of ranks"
    return best[1]


def _peak_live(times: _Times) -> int:
    """Return the most activations that a rank keeps alive, once the pattern repeats."""
    f, F, I, i = times
    holes = set(range(_PERIOD)) - {time % _PERIOD for time in times}
    lives = []
    # Each W takes the first free unit after its I.
    for born, backward in ((F, I), (f, i)):
        weight = next(t for t in range(backward + 1, backward + 13) if t % _PERIOD in holes)
        holes.discard(weight % _PERIOD)
        lives.append((born, weight + 1))
    return max(
        sum((now - born) // _PERIOD - (now - dead) // _PERIOD for born, dead in lives)
        for now in range(_PERIOD)
    )

"""The parts that families of schedules share: placements, checks of sizes, common phases."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from penstock.errors import ArgumentError
from penstock.schedules.ir import Compute, Op, Schedule

Placement = tuple[int, ...]
Cell = tuple[int, int]  # a stage and a micro-batch


def check_sizes(ranks: int, chunks: int, stages_per_rank: int = 1) -> None:
    """Raise unless all sizes are at least 1."""
    sizes = {"ranks": ranks, "chunks": chunks, "stages_per_rank": stages_per_rank}
    wrong = [f"{name}={value}" for name, value in sizes.items() if value < 1]
    if wrong:
        raise ArgumentError(f"{', '.join(wrong)}: each of these must be at least 1")


def loop(ranks: int, stages_per_rank: int) -> Placement:
    """Return the placement whose stages go round the ranks: 0 1 2 0 1 2."""
    return tuple(range(ranks)) * stages_per_rank


def vee(ranks: int) -> Placement:
    """Return the placement of two stages per rank, down and up again: 0 1 2 2 1 0."""
    return (*range(ranks), *reversed(range(ranks)))


def schedule_from_lanes(
    placement: Placement, chunks: int, lanes: Iterable[Iterable[Compute]]
) -> Schedule:
    """Return the schedule of the first `chunks` micro-batches of these lanes.

    Micro-batches do not depend on each other, so a sound schedule stays sound when some are left
    out. Families that need whole rounds are built for the next whole round and then cut here.
    """
    cut_lanes = (tuple(action for action in lane if action.microbatch < chunks) for lane in lanes)
    return Schedule(placement, chunks, tuple(cut_lanes))


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


def one_f_one_b_lanes(
    ranks: int, chunks: int, stages_per_rank: int, hops: int, backward: Op
) -> tuple[tuple[Compute, ...], ...]:
    """Return 1F1B lanes over a loop of p ranks with v stages each.

    On rank r the forwards run ahead of the backwards by (v - 1) p + hops (p - r - 1). A micro-batch
    comes back sooner to a later rank. With `hops` 1 it comes back just in time for its backward.
    With 2, its messages have a turn of their own to travel.
    """
    lanes = []
    for rank in range(ranks):
        forwards, backwards = cell_order(rank, ranks, chunks, stages_per_rank)
        ahead = (stages_per_rank - 1) * ranks + hops * (ranks - rank - 1)
        lanes.append(alternate_forward_backward(forwards, backwards, ahead, backward))
    return schedule_from_lanes(loop(ranks, stages_per_rank), chunks, lanes).lanes


def cell_order(
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


def lane_from_letters(letters: str, rank: int, ranks: int) -> list[Compute]:
    """Return a lane of a V that is written in letters.

    The letters f i b w are actions of the rank's first stage, F I B W those of its second. Each
    letter takes the next micro-batch of its kind. A w or W takes the oldest W that is pending.

    >>> " ".join(map(str, lane_from_letters("fFBb fFIi ww", rank=0, ranks=1)))
    '0F0 1F0 1B0 0B0 0F1 1F1 1I1 0I1 1W1 0W1'
    """
    lane: list[Compute] = []
    pending: deque[Compute] = deque()  # the Ws whose Is have run
    done: Counter[tuple[int, bool]] = Counter()
    for letter in letters.replace(" ", ""):
        op = Op(letter.upper())
        if op is Op.W:
            lane.append(pending.popleft())
            continue
        stage = 2 * ranks - 1 - rank if letter.isupper() else rank
        action = Compute(op, stage, done[stage, op is Op.F])
        done[stage, op is Op.F] += 1
        lane.append(action)
        pending += [action._replace(op=Op.W)] if op is Op.I else []
    return lane

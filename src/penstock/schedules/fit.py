"""A schedule made to measure: for these costs, under this memory cap.

Many ways to choose what a rank does next are tried, each a list scheduling of the whole step, and
the quickest result wins. Some follow the order of a named schedule of the same placement and only
place the Ws anew; others choose the order too. None is best everywhere, none costs much to try.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.cost import Cost
from penstock.errors import ArgumentError
from penstock.ir import Compute, Op, Schedule, StageGraph
from penstock.schedules.dualpipe import dualpipe_v
from penstock.schedules.listing import Bench, Choice, behind, follow, never, run, when_full
from penstock.schedules.one_f_one_b import eager_one_f_one_b, interleaved
from penstock.schedules.parts import Placement, check, loop, vee
from penstock.schedules.vee import v_half, v_min, zb_v
from penstock.schedules.zero_bubble import interleaved_zb


def fit(
    placement: Placement,
    chunks: int,
    cost: Cost | None = None,
    memory: float | Sequence[float] | None = None,
    graph: StageGraph | None = None,
) -> Schedule:
    """The quickest schedule found for `placement` under `memory`.

    `memory` caps the live activations of every rank, or of each rank; by default it is 1F1B's,
    as many micro-batches as there are ranks.

    >>> from penstock import lower, simulate
    >>> schedule = fit(placement=(0, 1, 1, 0), chunks=4, memory=1.5)
    >>> simulate(lower(schedule)).peak
    (1.5, 1.5)
    """
    check(max(placement) + 1, chunks)
    cost = cost or Cost.even(placement)
    graph = graph or StageGraph.chain(len(placement))
    caps = _caps(placement, cost, memory)
    goal = lower_bound(placement, chunks, cost)
    best = float("inf")
    lanes: list[list[Compute]] = []
    for choose, pace in _choices(placement, chunks, cost):
        bench = Bench(placement, chunks, cost, caps, graph, pace)
        end = run(bench, choose, until=best)
        if end < best and bench.is_complete():
            best, lanes = end, bench.lanes
        if best <= goal * (1 + 1e-12):
            break
    return Schedule(placement, chunks, tuple(map(tuple, lanes)))


def lower_bound(placement: Placement, chunks: int, cost: Cost) -> float:
    """No schedule of a chain of stages is quicker than this, whatever memory it has.

    A rank can start when the first micro-batch reaches it, and then has all its work to do; and
    one micro-batch has to go all the way down and up again.
    """
    stages = range(len(placement))
    arrival, clock = [0.0] * len(placement), 0.0
    for stage in stages:
        hop = stage > 0 and placement[stage] != placement[stage - 1]
        clock += cost.send if hop else 0.0
        arrival[stage] = clock
        clock += cost.F[stage]
    work = [chunks * (cost.F[s] + cost.I[s] + cost.W[s]) for s in stages]
    busiest = max(
        min(arrival[s] for s in stages if placement[s] == rank)
        + sum(work[s] for s in stages if placement[s] == rank)
        for rank in set(placement)
    )
    return max(busiest, clock + (clock - sum(cost.F)) + sum(cost.I) + cost.W[0])


def _caps(placement: Placement, cost: Cost, memory: float | Sequence[float] | None) -> list[float]:
    ranks = max(placement) + 1
    shares = [0.0] * ranks
    for stage, rank in enumerate(placement):
        shares[rank] += cost.activation[stage]
    if memory is None:
        return [ranks * share for share in shares]
    caps = list(memory) if isinstance(memory, Sequence) else [memory] * ranks
    if len(caps) != ranks:
        raise ArgumentError(
            f"memory has {len(caps)} entries for {ranks} ranks: give one, or one a rank"
        )
    short = [r for r in range(ranks) if caps[r] < shares[r] - 1e-9]
    if short:
        listed = ", ".join(f"rank {r}: {caps[r]:g} < {shares[r]:g}" for r in short)
        raise ArgumentError(
            f"no schedule fits this memory, as one micro-batch alone needs more ({listed}): "
            f"give each rank at least its share, {max(shares):g} for all"
        )
    return caps


# ---- ways to choose -----------------------------------------------------------------------


class Policy(NamedTuple):
    """One way to choose an order.

    `pace` 1 starts micro-batches as far apart as the busiest rank needs for one of them; 0 starts
    them as soon as memory allows, which is better where memory is plenty.
    """

    pace: float
    prefer: str  # "F", "I", "turns" (F after I, I after F), or "either"
    deepest_first: bool = False  # or the oldest micro-batch first
    weights_when_full: bool = False  # or only when there is nothing else


POLICIES = tuple(
    Policy(pace, prefer, deepest, full)
    for pace in (0.0, 1.0, 0.9, 0.8)
    for deepest in (False, True)
    for full in (False, True)
    for prefer in ("turns", "F", "I", "either")
)


def _choices(placement: Placement, chunks: int, cost: Cost) -> Iterator[tuple[Choice, float]]:
    """Each way to choose, with the time between the starts of two micro-batches."""
    for schedule in _relatives(placement, chunks):
        order = [
            [a._replace(op=Op.I) if a.op is Op.B else a for a in lane if a.op is not Op.W]
            for lane in schedule.lanes
        ]
        for due in (never, when_full, behind(lambda rank: rank)):
            yield follow(order, due), 0.0
    loads = [0.0] * len(placement)
    for stage, rank in enumerate(placement):
        loads[rank] += cost.F[stage] + cost.I[stage] + cost.W[stage]
    for policy in POLICIES:
        yield _by_policy(policy), policy.pace * max(loads)


def _relatives(placement: Placement, chunks: int) -> Iterator[Schedule]:
    """Named schedules of the same placement, whose order is worth a try."""
    ranks = max(placement) + 1
    per_rank = len(placement) // ranks
    if placement == vee(ranks):
        for family in (zb_v, v_half, v_min, dualpipe_v):
            yield family(ranks, chunks)
    if placement == loop(ranks, per_rank):
        yield interleaved_zb(ranks, chunks, per_rank)
        yield interleaved(ranks, chunks, per_rank)
        if per_rank == 1:
            yield eager_one_f_one_b(ranks, chunks)


def _by_policy(policy: Policy) -> Choice:
    def choose(bench: Bench, rank: int, options: list[Compute]) -> Compute | None:
        preferred = _preferred(policy, bench.lanes[rank])
        weights = -1 if policy.weights_when_full and when_full(bench, rank) else 2

        def key(action: Compute) -> tuple[int, int, int]:
            op, stage, microbatch = action
            turn = weights if op is Op.W else int(op not in preferred)
            return (
                (turn, -stage, microbatch) if policy.deepest_first else (turn, microbatch, -stage)
            )

        fitting = (a for a in options if a.op is not Op.F or bench.is_safe(rank, a))
        return min(fitting, key=key, default=None)

    return choose


def _preferred(policy: Policy, lane: list[Compute]) -> str:
    if policy.prefer == "either":
        return "FI"
    if policy.prefer != "turns":
        return policy.prefer
    last = next((action.op for action in reversed(lane) if action.op is not Op.W), Op.I)
    return "I" if last is Op.F else "F"

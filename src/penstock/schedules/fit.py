"""A schedule made to measure: for these costs, under this memory cap.

Many ways to choose what a rank does next are tried, each a list scheduling of the whole step, and
the quickest result wins. Some follow the order of a named schedule of the same placement and only
place the Ws anew; others choose the order too. None is best everywhere, none costs much to try.
Small repairs to the winner come last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from penstock.cost import Cost
from penstock.errors import ArgumentError
from penstock.ir import Compute, Op, Schedule, StageGraph
from penstock.play import play
from penstock.schedules.dualpipe import dualpipe_v
from penstock.schedules.listing import Bench, Choice, behind, follow, never, run, when_full
from penstock.schedules.one_f_one_b import eager_one_f_one_b, interleaved
from penstock.schedules.parts import Placement, check, loop, vee
from penstock.schedules.polish import polish
from penstock.schedules.vee import v_half, v_min, zb_v
from penstock.schedules.zero_bubble import interleaved_zb


def fit(
    placement: Placement,
    chunks: int,
    cost: Cost | None = None,
    memory: float | Sequence[float] | None = None,
    graph: StageGraph | None = None,
    effort: int = 400_000,
) -> Schedule:
    """The quickest schedule found for `placement` under `memory`.

    `memory` caps the live activations of every rank, or of each rank; by default it is 1F1B's,
    as many micro-batches as there are ranks. `effort` bounds the work: how many actions may be
    placed in all attempts together. It takes seconds at most, and ends early at the lower bound.

    >>> from penstock import lower, simulate
    >>> schedule = fit(placement=(0, 1, 1, 0), chunks=4, memory=1.5)
    >>> simulate(lower(schedule)).peak
    (1.5, 1.5)
    """
    check(max(placement) + 1, chunks)
    cost = cost or Cost.even(placement)
    graph = graph or StageGraph.chain(len(placement))
    caps = _caps(placement, cost, memory)
    goal = lower_bound(placement, chunks, cost) * (1 + 1e-12)
    size = 3 * len(placement) * chunks
    best, schedule = float("inf"), None
    for way in _ways(placement, chunks, cost):
        found = way.make(placement, chunks, caps, graph)
        end = max(s.end for s in play(found, graph, cost)) if found else float("inf")
        if end < best:
            best, schedule = end, found
        effort -= size
        if schedule and (best <= goal or effort <= 0):
            return schedule
    assert schedule, "some way that looks out for memory always ends"
    return polish(schedule, graph, cost, caps, swaps=min(200, effort // size))


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
    busiest = max(
        min(arrival[s] for s in stages if placement[s] == rank) + chunks * load
        for rank, load in enumerate(_loads(placement, cost))
    )
    messages = clock - sum(cost.F)
    return max(busiest, clock + messages + sum(cost.I) + cost.W[0])


def _loads(placement: Placement, cost: Cost) -> list[float]:
    """The time that one micro-batch takes each rank."""
    loads = [0.0] * (max(placement) + 1)
    for stage, rank in enumerate(placement):
        loads[rank] += cost.F[stage] + cost.I[stage] + cost.W[stage]
    return loads


def _caps(placement: Placement, cost: Cost, memory: float | Sequence[float] | None) -> list[float]:
    ranks = max(placement) + 1
    shares = [0.0] * ranks
    for stage, rank in enumerate(placement):
        shares[rank] += cost.activation[stage]
    if memory is None:
        return [ranks * share for share in shares]
    caps = list(memory) if isinstance(memory, Sequence) else [memory] * ranks
    if len(caps) != ranks:
        raise ArgumentError(f"memory has {len(caps)} entries for {ranks} ranks: one, or one a rank")
    short = [
        f"rank {rank}: {cap:g} < {share:g}"
        for rank, (cap, share) in enumerate(zip(caps, shares, strict=True))
        if not cap >= share - 1e-9
    ]
    if short:
        raise ArgumentError(
            f"no schedule fits this memory, as one micro-batch alone needs more "
            f"({', '.join(short)}): give each rank at least its share, {max(shares):g} for all"
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
    deepest_first: bool  # or the oldest micro-batch first
    weights_when_full: bool  # or only when there is nothing else


POLICIES = (
    *(
        Policy(0.0, *rest)
        for rest in product(("turns", "F", "I", "either"), (False, True), (False, True))
    ),
    *(Policy(pace, "F", deepest, False) for pace in (0.8, 0.9) for deepest in (False, True)),
)


class _Way(NamedTuple):
    """A way to choose, and the costs to plan with: an order made for others may still be best."""

    choose: Choice
    cost: Cost
    pace: float = 0.0
    patience: float = 0.0

    def make(
        self, placement: Placement, chunks: int, caps: Sequence[float], graph: StageGraph
    ) -> Schedule | None:
        """The schedule, unless this way gets stuck under the caps."""
        bench = Bench(placement, chunks, self.cost, caps, graph, self.pace)
        run(bench, self.choose, self.patience)
        if not bench.is_complete():
            return None
        return Schedule(placement, chunks, tuple(map(tuple, bench.lanes)))


def _ways(placement: Placement, chunks: int, cost: Cost) -> Iterator[_Way]:
    even = replace(Cost.even(placement), activation=cost.activation)
    plans = [cost] if cost == even else [cost, even]
    for schedule, plan in product(_relatives(placement, chunks), plans):
        order = [
            [a._replace(op=Op.I) if a.op is Op.B else a for a in lane if a.op is not Op.W]
            for lane in schedule.lanes
        ]
        for due in (never, when_full, behind(lambda rank: rank)):
            yield _Way(follow(order, due), plan)
    for policy, plan in product(POLICIES, plans):
        pace = policy.pace * max(_loads(placement, plan))
        yield _Way(_by_policy(policy), plan, pace)
        if plan is cost:
            yield _Way(_by_policy(policy), plan, pace, patience=sum(plan.F) / len(placement) / 4)


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
        weights = -1 if policy.weights_when_full and bench.is_full(rank) else 2

        def key(action: Compute) -> tuple[int, int, int]:
            op, stage, microbatch = action
            turn = weights if op is Op.W else int(op not in preferred)
            return (
                (turn, -stage, microbatch) if policy.deepest_first else (turn, microbatch, -stage)
            )

        fitting = [a for a in options if a.op is not Op.F or bench.is_safe(rank, a)]
        return min(fitting, key=key, default=None)

    return choose


def _preferred(policy: Policy, lane: list[Compute]) -> str:
    if policy.prefer == "either":
        return "FI"
    if policy.prefer != "turns":
        return policy.prefer
    last = next((action.op for action in reversed(lane) if action.op is not Op.W), Op.I)
    return "I" if last is Op.F else "F"

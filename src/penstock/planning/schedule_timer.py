"""Time one schedule under many costs.

A search tries one schedule with thousands of cuts. The order of its actions stays the same, so it
is taken from the simulator once; after that, one pass over the actions gives the seconds for any
costs. Memory is compiled in the same way: what a lane holds at its fullest moments, as numbers of
micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations

from penstock.planning.stage_costs import StageCosts
from penstock.schedules.bound import Objective
from penstock.schedules.cost import Cost, exceeds
from penstock.schedules.ir import Compute, Op, Schedule, StageGraph, consumes, produces
from penstock.schedules.lowering import recompute
from penstock.schedules.simulator import play

_OPS = tuple(Op)

# Micro-batches of each stage of a rank at one moment:
#   waiting   between F and R, or until the backward if nothing is recomputed
#   active    from R to the end of the backward or input gradient
#   deferred  between I and W
_Moment = tuple[tuple[int, int, int], ...]


class ScheduleTimer:
    """A schedule, compiled to be timed under many costs, with any stages recomputed."""

    def __init__(self, name: str, schedule: Schedule, graph: StageGraph) -> None:
        self.name, self.schedule = name, schedule
        self.stages_by_rank = [
            [stage for stage, owner in enumerate(schedule.placement) if owner == rank]
            for rank in range(schedule.ranks)
        ]
        # Every cell gets an R. It takes no time where nothing is recomputed.
        full = recompute(schedule, lambda stage, microbatch: True)
        self._links: dict[tuple[int, int], int] = {}
        # Of each action: (op and stage as one index, rank, [(earlier action, link)]). Actions of
        # the same lane run in order, so only messages between ranks have to be listed.
        self._actions: list[tuple[int, int, tuple[tuple[int, int], ...]]] = []
        producers: dict[object, int] = {}
        stages, placement = schedule.stages, schedule.placement
        for index, span in enumerate(play(full, graph, Cost.even(placement))):
            assert isinstance(span.action, Compute)
            op, stage, _ = span.action
            sources = tuple(
                (producers[m], self._links.setdefault((m.src, m.dst), len(self._links)))
                for m in consumes(span.action, graph)
                if placement[m.src] != placement[m.dst]
            )
            self._actions.append((_OPS.index(op) * stages + stage, span.rank, sources))
            producers.update(dict.fromkeys(produces(span.action, graph), index))
        self._moments = [
            _fullest_moments(lane, stages)
            for lane, stages in zip(full.lanes, self.stages_by_rank, strict=True)
        ]

    @property
    def size(self) -> int:
        """The number of actions, a measure of the work to time it."""
        return len(self._actions)

    def seconds(
        self, costs: StageCosts, recomputed: Sequence[bool], objective: Objective = "makespan"
    ) -> float:
        """Return the seconds of a step, if these stages are recomputed."""
        cost = costs.cost
        again = [
            seconds if flag else 0.0
            for seconds, flag in zip(cost.R or cost.F, recomputed, strict=True)
        ]
        columns = {Op.F: cost.F, Op.I: cost.I, Op.W: cost.W, Op.R: again}
        columns[Op.B] = tuple(map(sum, zip(cost.I, cost.W, strict=True)))
        durations = list(chain.from_iterable(columns[op] for op in _OPS))
        delays = [cost.send_seconds(src, dst) for src, dst in self._links]
        clock = [0.0] * self.schedule.ranks
        first_starts: list[float | None] = [None] * self.schedule.ranks
        ends: list[float] = []
        for kind, rank, sources in self._actions:
            start = clock[rank]
            for source, link in sources:
                arrival = ends[source] + delays[link]
                if arrival > start:
                    start = arrival
            if first_starts[rank] is None:
                first_starts[rank] = start
            clock[rank] = end = start + durations[kind]
            ends.append(end)
        if objective == "makespan":
            return max(clock)
        return max(end - (start or 0.0) for end, start in zip(clock, first_starts, strict=True))

    def peak(self, rank: int, costs: StageCosts, recomputed: Sequence[bool]) -> float:
        """Return the most bytes of activations that are alive on a rank."""
        cost, stages = costs.cost, self.stages_by_rank[rank]
        sizes = [
            (
                cost.stage_input[stage] if recomputed[stage] else cost.activation[stage],
                cost.activation[stage],
                cost.kept_sizes[stage],
            )
            for stage in stages
        ]
        return max(
            sum(
                waiting * before + active * whole + deferred * after_input_grad
                for (waiting, active, deferred), (before, whole, after_input_grad) in zip(
                    moment, sizes, strict=True
                )
            )
            for moment in self._moments[rank]
        )

    def fitting_recomputations(
        self, rank: int, costs: StageCosts, cap: float
    ) -> list[tuple[int, ...]]:
        """Return the smallest sets of stages of a rank to recompute so that it keeps to its cap.

        Recomputing more never makes the same schedule faster, so larger sets are left out.
        """
        smallest: list[tuple[int, ...]] = []
        for stages in _subsets(self.stages_by_rank[rank]):
            if not any(set(smaller) <= set(stages) for smaller in smallest):
                flags = [stage in stages for stage in range(self.schedule.stages)]
                if not exceeds(self.peak(rank, costs, flags), cap):
                    smallest.append(stages)
        return smallest


def _subsets(stages: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all subsets, the smallest first."""
    return chain.from_iterable(combinations(stages, size) for size in range(len(stages) + 1))


def _fullest_moments(lane: Sequence[Compute], stages: Sequence[int]) -> list[_Moment]:
    """Return the moments of a lane that no other moment exceeds in everything that it holds."""
    place = {stage: index for index, stage in enumerate(stages)}
    alive = [[0, 0, 0] for _ in stages]
    split = {(a.stage, a.microbatch) for a in lane if a.op is Op.W}
    moments: set[_Moment] = set()
    for op, stage, microbatch in lane:
        counts = alive[place[stage]]
        if op is Op.F:
            counts[0] += 1
        elif op is Op.R:
            counts[0] -= 1
            counts[1] += 1
        if op in (Op.F, Op.R):
            moments.add(tuple((a, b, c) for a, b, c in alive))
        if op in (Op.I, Op.B):
            counts[1] -= 1
            counts[2] += (stage, microbatch) in split
        elif op is Op.W:
            counts[2] -= 1
    flat = {moment: tuple(chain.from_iterable(moment)) for moment in moments}
    return [
        moment
        for moment, numbers in flat.items()
        if not any(
            other != numbers and all(a >= b for a, b in zip(other, numbers, strict=True))
            for other in flat.values()
        )
    ]

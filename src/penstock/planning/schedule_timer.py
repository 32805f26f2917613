"""Time one schedule under many costs.

A search tries one schedule with thousands of cuts. The order of its actions stays the same, so it
is compiled once; after that, one pass over the actions gives the seconds for any costs. Memory is
compiled in the same way: what a lane holds at its fullest moments, as numbers of micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations
from math import inf
from typing import NamedTuple

from penstock.planning.profile import DeviceProfile
from penstock.planning.stage_costs import StageCosts
from penstock.schedules.bound import Objective
from penstock.schedules.cost import exceeds
from penstock.schedules.families.common import group_stages
from penstock.schedules.ir import OP_RULES, Compute, Op, Schedule, StageGraph, consumes, produces
from penstock.schedules.lowering import recompute
from penstock.schedules.simulator import paused_garbage_collection
from penstock.schedules.verify import require_sound

_OPS = tuple(Op)
_COMPARED_MOMENTS = 100  # of one rank: each is compared with each other
_TOLERANCE = 1e-9  # of the makespan: shorter gaps between actions are rounding errors

# Micro-batches of each stage of a rank at one moment:
#   waiting   between F and R, or until the backward if nothing is recomputed
#   active    from R to the end of the backward or input gradient
#   deferred  between I and W
_Moment = tuple[tuple[int, int, int], ...]


class _Action(NamedTuple):
    """An action of a compiled schedule.

    Actions of one lane run in order, so only messages between ranks have to be listed: the action
    that sends (-1 if there is none) and the link that the message takes. Few actions need several.
    """

    kind: int  # op and stage as one index
    rank: int
    source: int
    link: int
    more: tuple[tuple[int, int], ...]


class ScheduleTimer:
    """A schedule, compiled to be timed under many costs, with any stages recomputed."""

    @paused_garbage_collection()
    def __init__(self, name: str, schedule: Schedule, graph: StageGraph) -> None:
        self.name, self.schedule = name, schedule
        self.stages_by_rank = group_stages(schedule.placement)
        # Every cell gets an R. It takes no time where nothing is recomputed.
        full = recompute(schedule, lambda stage, microbatch: True)
        self._links: list[tuple[int, int]] = []
        self._actions = self._compile(full, graph)
        self._counts = Counter(action.kind for action in self._actions)
        self._moments = [
            _fullest_moments(lane, stages)
            for lane, stages in zip(full.lanes, self.stages_by_rank, strict=True)
        ]

    def _compile(self, schedule: Schedule, graph: StageGraph) -> list[_Action]:
        """Return all actions in an order in which each comes after those that it waits for.

        Each rank goes on along its lane until it needs a message that is not there yet; the action
        that sends it puts the rank back to work. Micro-batches are all alike, so what an action
        needs is looked up by op and stage.
        """
        links: dict[tuple[int, int], int] = {}
        # By link, and then by micro-batch: the action that has sent the message, or -1.
        senders: list[list[int]] = []

        def number(src: int, dst: int) -> int:
            if (src, dst) not in links:
                links[src, dst] = len(links)
                senders.append([-1] * schedule.chunks)
            return links[src, dst]

        rules: dict[tuple[Op, int], tuple[int, list[int], list[int]]] = {}
        for stage, op in ((s, op) for s in range(schedule.stages) for op in _OPS):
            action = Compute(op, stage, 0)
            needs, makes = (
                [number(m.src, m.dst) for m in messages if schedule.crosses(m)]
                for messages in (consumes(action, graph), produces(action, graph))
            )
            rules[op, stage] = _OPS.index(op) * schedule.stages + stage, needs, makes
        self._links = list(links)
        actions: list[_Action] = []
        positions = [0] * schedule.ranks
        waiting: dict[tuple[int, int], int] = {}  # a link and a micro-batch: the rank that waits
        ready = list(range(schedule.ranks))
        while ready:
            rank = ready.pop()
            lane = schedule.lanes[rank]
            for position in range(positions[rank], len(lane)):
                op, stage, microbatch = lane[position]
                kind, needs, makes = rules[op, stage]
                missing = [link for link in needs if senders[link][microbatch] < 0]
                if missing:
                    positions[rank] = position
                    waiting[missing[0], microbatch] = rank
                    break
                sources = [(senders[link][microbatch], link) for link in needs]
                source, more = (sources[0], tuple(sources[1:])) if sources else ((-1, 0), ())
                for link in makes:
                    senders[link][microbatch] = len(actions)
                    if waiting and (link, microbatch) in waiting:
                        ready.append(waiting.pop((link, microbatch)))
                actions.append(_Action(kind, rank, *source, more))
        if waiting:
            require_sound(schedule, graph)  # says which ranks wait for each other
        return actions

    def _durations(self, costs: StageCosts, recomputed: Sequence[bool]) -> list[float]:
        """Return the seconds of each op and stage, in the order of `_Action.kind`."""
        cost = costs.cost
        again = [
            seconds if flag else 0.0
            for seconds, flag in zip(cost.R or cost.F, recomputed, strict=True)
        ]
        columns = {"F": cost.F, "I": cost.I, "W": cost.W, "R": again}
        by_op = ([columns[name] for name in OP_RULES[op].cost] for op in _OPS)
        return [sum(parts) for parts_by_op in by_op for parts in zip(*parts_by_op, strict=True)]

    def _delays(self, costs: StageCosts) -> list[float]:
        """Return the seconds of a message over each link."""
        return [costs.cost.send_seconds(src, dst) for src, dst in self._links]

    def _ends(
        self, durations: Sequence[float], delays: Sequence[float], limit: float = inf
    ) -> list[float]:
        """Return when each action ends, or an empty list if that is known to exceed a limit."""
        clock = [0.0] * self.schedule.ranks
        # How long each rank may still be idle. What it has to do is known from the beginning.
        spare = [limit] * self.schedule.ranks
        if limit < inf:
            for kind, count in self._counts.items():
                rank = self.schedule.placement[kind % self.schedule.stages]
                spare[rank] -= count * durations[kind]
        ends: list[float] = []
        for kind, rank, source, link, more in self._actions:
            start = clock[rank]
            if source >= 0:
                arrival = ends[source] + delays[link]
                if arrival > start:
                    start = arrival
                for source, link in more:
                    arrival = ends[source] + delays[link]
                    if arrival > start:
                        start = arrival
                if start > clock[rank]:
                    spare[rank] -= start - clock[rank]
                    if spare[rank] < 0.0:
                        return []
            clock[rank] = end = start + durations[kind]
            ends.append(end)
        return ends

    def seconds(
        self,
        costs: StageCosts,
        recomputed: Sequence[bool],
        objective: Objective = "makespan",
        limit: float = inf,
    ) -> float:
        """Return the seconds of a step, if these stages are recomputed.

        A step that takes longer than `limit` may be given up: then the result is infinite.
        """
        durations = self._durations(costs, recomputed)
        # The idle time before the first action of a rank is no part of the period.
        limit = limit * (1 + _TOLERANCE) if objective == "makespan" else inf
        ends = self._ends(durations, self._delays(costs), limit)
        if not ends:
            return inf
        return max(ends) if objective == "makespan" else self._period(durations, ends)

    def _period(self, durations: Sequence[float], ends: Sequence[float]) -> float:
        first_starts: dict[int, float] = {}
        last_ends: dict[int, float] = {}
        for action, end in zip(self._actions, ends, strict=True):
            if action.rank not in first_starts:
                first_starts[action.rank] = end - durations[action.kind]
            last_ends[action.rank] = end
        return max(last_ends[rank] - first_starts[rank] for rank in first_starts)

    def forecast(
        self, costs: StageCosts, recomputed: Sequence[bool]
    ) -> tuple[float, float, dict[str, float]]:
        """Return the seconds of a step, its period, and the idle share of all time by cause.

        The causes are "fill" before the first action of a rank, "drain" after its last one, and
        between two actions "messages" and "waits": a gap that ends with a message counts as
        "messages" from the end of the action that sends it on, and as "waits" before.
        """
        durations, delays = self._durations(costs, recomputed), self._delays(costs)
        ends = self._ends(durations, delays)
        makespan, ranks = max(ends), self.schedule.ranks
        slack = _TOLERANCE * makespan
        seconds = dict.fromkeys(("fill", "drain", "messages", "waits"), 0.0)
        clock: list[float | None] = [None] * ranks
        for (kind, rank, source, link, more), end in zip(self._actions, ends, strict=True):
            start, before = end - durations[kind], clock[rank]
            clock[rank] = end
            if before is None:
                seconds["fill"] += start
            elif (gap := start - before) > slack:
                in_flight = max(
                    min(gap, start - ends[sender])
                    for sender, used_link in ((source, link), *more)
                    if ends[sender] + delays[used_link] >= start - slack
                )
                seconds["messages"] += in_flight
                seconds["waits"] += gap - in_flight
        seconds["drain"] = sum(makespan - (end or 0.0) for end in clock)
        total = ranks * makespan
        bubble = {cause: value / total if total else 0.0 for cause, value in seconds.items()}
        return makespan, self._period(durations, ends), bubble

    def speed_up(
        self, costs: StageCosts, recomputed: Sequence[bool], devices: Sequence[DeviceProfile]
    ) -> StageCosts:
        """Return the costs in this schedule, in which ranks are idle now and then.

        The costs that a search compares are those while all ranks are busy. An idle rank leaves
        more of what they share to the others: see `DeviceProfile.idle_gain`.
        """
        if not any(device.idle_gain for device in devices):
            return costs
        idle = sum(self.forecast(costs, recomputed)[2].values())
        factors = [1 / (1 + idle * devices[rank].idle_gain) for rank in self.schedule.placement]
        cost = costs.cost

        def scale(seconds: Sequence[float]) -> tuple[float, ...]:
            return tuple(a * b for a, b in zip(seconds, factors, strict=True)) if seconds else ()

        faster = replace(cost, F=scale(cost.F), I=scale(cost.I), W=scale(cost.W), R=scale(cost.R))
        return replace(costs, cost=faster)

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
        flags = [False] * self.schedule.stages
        for stages in _subsets(self.stages_by_rank[rank]):
            if not any(set(smaller) <= set(stages) for smaller in smallest):
                for stage in self.stages_by_rank[rank]:
                    flags[stage] = stage in stages
                if not exceeds(self.peak(rank, costs, flags), cap):
                    smallest.append(stages)
        return smallest


def _subsets(stages: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all subsets, the smallest first."""
    return chain.from_iterable(combinations(stages, size) for size in range(len(stages) + 1))


def _fullest_moments(lane: Sequence[Compute], stages: Sequence[int]) -> list[_Moment]:
    """Return the moments of a lane that no other moment exceeds in everything that it holds.

    Memory grows with every F and R and shrinks with all other actions, so only the moments before
    it starts to shrink count.
    """
    place = {stage: index for index, stage in enumerate(stages)}
    alive = [[0, 0, 0] for _ in stages]
    split = {(stage, microbatch) for op, stage, microbatch in lane if op is Op.W}
    moments: set[_Moment] = set()
    grows = False
    for op, stage, microbatch in lane:
        counts = alive[place[stage]]
        if op is Op.F:
            counts[0] += 1
            grows = True
            continue
        if op is Op.R:
            counts[0] -= 1
            counts[1] += 1
            grows = True
            continue
        if grows:
            moments.add(tuple((a, b, c) for a, b, c in alive))
            grows = False
        if op is Op.W:
            counts[2] -= 1
        else:
            counts[1] -= 1
            counts[2] += (stage, microbatch) in split
    return _remove_exceeded(moments)


def _remove_exceeded(moments: set[_Moment]) -> list[_Moment]:
    """Return the moments without most of those that need less than another, whatever sizes are.

    The bytes of a moment are a weighted sum of its numbers. So of moments in equal distances on a
    line, such as (1, 9), (2, 8) and (3, 7), only the two ends can need most: a rank with thousands
    of micro-batches has few moments left.
    """
    ends: list[tuple[int, ...]] = []
    for numbers in sorted(tuple(chain.from_iterable(moment)) for moment in moments):
        if len(ends) > 1 and all(
            a + c == 2 * b for a, b, c in zip(*ends[-2:], numbers, strict=True)
        ):
            ends.pop()
        ends.append(numbers)
    if len(ends) <= _COMPARED_MOMENTS:
        ends = [
            numbers
            for numbers in ends
            if not any(
                other != numbers and all(a >= b for a, b in zip(other, numbers, strict=True))
                for other in ends
            )
        ]
    return [tuple(zip(*[iter(numbers)] * 3, strict=True)) for numbers in ends]

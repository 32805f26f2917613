"""List scheduling: whenever a rank is free, it picks one of the actions that it could start.

A `Bench` is a half-made schedule: what every rank has done, holds and could start. Backwards
are split into I and W here. `fill` weaves the Ws into lanes whose order of F and I is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from penstock.cost import Cost
from penstock.ir import Compute, Op, Schedule, StageGraph, consumes, follows, produces
from penstock.schedules.parts import Placement

_OPS = (Op.F, Op.I, Op.W)
_HAIR = 1e-9  # memory sizes are sums of fractions


class Bench:
    """The state of one run of list scheduling, under a memory cap for each rank."""

    def __init__(
        self,
        placement: Placement,
        chunks: int,
        cost: Cost,
        memory: Sequence[float],
        graph: StageGraph,
        pace: float = 0.0,
    ) -> None:
        self.placement, self.chunks, self.cost, self.memory = placement, chunks, cost, memory
        ranks = range(max(placement) + 1)
        self.owned = [[s for s, owner in enumerate(placement) if owner == r] for r in ranks]
        self.lanes: list[list[Compute]] = [[] for _ in ranks]
        self.free = [0.0 for _ in ranks]
        self.live = [0.0 for _ in ranks]
        self.pending = [0 for _ in ranks]  # Ws that could run
        self.oldest = [0 for _ in ranks]  # the first micro-batch that still needs the rank
        self._held = [[0.0] * chunks for _ in ranks]
        self._done = {(op, stage): 0 for op in _OPS for stage in range(len(placement))}
        self._enables, self._needs = _dependencies(len(placement), graph)
        self._got = {node: [0] * chunks for node in self._done}
        self._latest = {node: [0.0] * chunks for node in self._done}
        self._ready: dict[tuple[Op, int], list[float]] = {
            node: [] if self._needs[node] else [i * pace for i in range(chunks)]
            for node in self._done
        }
        self.events = [
            (time, placement[stage]) for (_, stage), at in self._ready.items() for time in at
        ]
        heapify(self.events)

    def options(self, rank: int, now: float) -> list[Compute]:
        """What the rank could start now, as far as inputs go: each stage's next F, I and W."""
        found = []
        for stage in self.owned[rank]:
            for op in _OPS:
                node = op, stage
                microbatch = self._done[node]
                ready = self._ready[node]
                if microbatch < len(ready) and ready[microbatch] <= now:
                    found.append(Compute(op, stage, microbatch))
        return found

    def ready_at(self, action: Compute) -> float:
        """When the inputs of one of the `options` are there."""
        return self._ready[action.op, action.stage][action.microbatch]

    def has_room(self, rank: int, stage: int) -> bool:
        """May the stage's activations come on top of what is alive?"""
        size = self.cost.activation[stage]
        return self.live[rank] + size <= self.memory[rank] + _HAIR

    def is_safe(self, rank: int, action: Compute) -> bool:
        """After this F, can every micro-batch still finish on the rank, oldest first?

        It can if, with all older ones gone, what it and the younger ones hold plus what it has
        yet to take fits. (The banker's rule; without it the young ones starve the old.)
        """
        size = self.cost.activation
        alive = self.live[rank] + size[action.stage]
        for microbatch in range(self.oldest[rank], self.chunks):
            mine = microbatch == action.microbatch
            ahead = [
                stage
                for stage in self.owned[rank]
                if self._done[Op.F, stage] <= microbatch and not (mine and stage == action.stage)
            ]
            if alive + sum(size[stage] for stage in ahead) > self.memory[rank] + _HAIR:
                return False
            if len(ahead) == len(self.owned[rank]):
                return True
            alive -= self._held[rank][microbatch] + (size[action.stage] if mine else 0.0)
        return True

    def is_complete(self) -> bool:
        """Has everything been done?"""
        return all(done == self.chunks for done in self._done.values())

    def start(self, action: Compute, now: float) -> None:
        """Let the action's rank do it, and tell whom it enables."""
        op, stage, microbatch = action
        rank = self.placement[stage]
        end = self.free[rank] = now + self.cost.seconds(action)
        self.lanes[rank].append(action)
        self._done[op, stage] += 1
        self.pending[rank] += (op is Op.I) - (op is Op.W)
        if op is not Op.I:
            change = self.cost.activation[stage] * (1 if op is Op.F else -1)
            self.live[rank] += change
            self._held[rank][microbatch] += change
        while self.oldest[rank] < self.chunks and all(
            self._done[Op.W, s] > self.oldest[rank] for s in self.owned[rank]
        ):
            self.oldest[rank] += 1
        heappush(self.events, (end, rank))
        for node in self._enables[op, stage]:
            other = self.placement[node[1]]
            self._arrive(node, microbatch, end + (self.cost.send if other != rank else 0.0))

    def _arrive(self, node: tuple[Op, int], microbatch: int, time: float) -> None:
        latest = self._latest[node]
        latest[microbatch] = max(latest[microbatch], time)
        self._got[node][microbatch] += 1
        if self._got[node][microbatch] == self._needs[node]:
            self._ready[node].append(latest[microbatch])
            heappush(self.events, (latest[microbatch], self.placement[node[1]]))


def _dependencies(
    stages: int, graph: StageGraph
) -> tuple[dict[tuple[Op, int], list[tuple[Op, int]]], dict[tuple[Op, int], int]]:
    """By the one rule: whom each op of a stage enables, and how many each waits for."""
    nodes = [Compute(op, stage, 0) for op in _OPS for stage in range(stages)]
    makers = {message: node for node in nodes for message in produces(node, graph)}
    enables: dict[tuple[Op, int], list[tuple[Op, int]]] = {node[:2]: [] for node in nodes}
    needs = {}
    for node in nodes:
        sources = [makers[message] for message in consumes(node, graph)]
        sources += [earlier for earlier in follows(node) if earlier.op is not Op.R]
        needs[node[:2]] = len(sources)
        for source in sources:
            enables[source[:2]].append(node[:2])
    return enables, needs


# Which of these options does the rank take now? None: it waits.
Choice = Callable[[Bench, int, list[Compute]], Compute | None]


def run(bench: Bench, choose: Choice, patience: float = 0.0, until: float = float("inf")) -> float:
    """Run the bench until nothing can start, or something would end after `until`.

    A rank rather waits up to `patience` for what it would choose then than start something else
    now. The result is when the last action ends.
    """
    end = 0.0
    while bench.events:
        now, rank = heappop(bench.events)
        if bench.free[rank] > now:
            continue
        options = bench.options(rank, now + patience)
        action = choose(bench, rank, options) if options else None
        if action is not None and bench.ready_at(action) <= now:
            bench.start(action, now)
            end = max(end, bench.free[rank])
            if end > until:
                break
    return end


# Do Ws go before the next F or I now?
Due = Callable[[Bench, int], bool]


def never(bench: Bench, rank: int) -> bool:
    """Ws wait until the rank has nothing else to do, or no room."""
    return False


def when_full(bench: Bench, rank: int) -> bool:
    """Ws run as soon as there is no room for another F."""
    return not any(bench.has_room(rank, stage) for stage in bench.owned[rank])


def behind(lag: Callable[[int], int]) -> Due:
    """At most `lag(rank)` Ws are put off."""
    return lambda bench, rank: bench.pending[rank] > lag(rank)


def follow(orders: Sequence[Sequence[Compute]], due: Due) -> Choice:
    """Take F and I in this order; a W when it is due, or when its rank would otherwise wait."""
    steps = [0] * len(orders)

    def choose(bench: Bench, rank: int, options: list[Compute]) -> Compute | None:
        weight = next((action for action in options if action.op is Op.W), None)
        if weight and due(bench, rank):
            return weight
        head = orders[rank][steps[rank]] if steps[rank] < len(orders[rank]) else None
        if head in options and (head.op is Op.I or bench.has_room(rank, head.stage)):
            steps[rank] += 1
            return head
        return weight

    return choose


def fill(
    placement: Placement,
    chunks: int,
    orders: Sequence[Sequence[Compute]],
    due: Due,
    memory: float = float("inf"),
) -> Schedule:
    """Weave the Ws into lanes of F and I, at unit costs, under a memory cap for every rank."""
    caps = [memory] * len(orders)
    chain = StageGraph.chain(len(placement))
    bench = Bench(placement, chunks, Cost.even(placement), caps, chain)
    run(bench, follow(orders, due))
    return Schedule(placement, chunks, tuple(map(tuple, bench.lanes)))

"""List scheduling: whenever a rank is free, it picks one of the actions that it could start.

A `Bench` is a half-made schedule: what every rank has done, holds and could start. Backwards
are split into I and W here. `fill` weaves the Ws into lanes whose order of F and I is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from penstock.cost import Cost, exceeds
from penstock.ir import Compute, Op, Schedule, StageGraph, consumes, follows, produces
from penstock.schedules.parts import Placement

_OPS = (Op.F, Op.I, Op.W)


class _Node:
    """One op of one stage: it takes the micro-batches in order."""

    def __init__(self, op: Op, stage: int, rank: int, chunks: int) -> None:
        self.op, self.stage, self.rank = op, stage, rank
        self.done = 0  # micro-batches
        self.ready: list[float] = []  # when each one's inputs are there
        self.needs = 0  # inputs of each
        self.enables: list[_Node] = []
        self._got = [0] * chunks
        self._latest = [0.0] * chunks

    def arrive(self, microbatch: int, time: float) -> bool:
        """One more input is there at `time`; is it the last?"""
        self._latest[microbatch] = max(self._latest[microbatch], time)
        self._got[microbatch] += 1
        if self._got[microbatch] < self.needs:
            return False
        self.ready.append(self._latest[microbatch])
        return True


class Bench:
    """The state of one run of list scheduling, under a memory cap for each rank.

    Micro-batches are there every `pace` seconds, or all at once.
    """

    def __init__(
        self,
        placement: Placement,
        chunks: int,
        cost: Cost,
        memory: Sequence[float],
        graph: StageGraph,
        pace: float = 0.0,
    ) -> None:
        self.chunks, self.cost, self.memory = chunks, cost, memory
        ranks = range(max(placement) + 1)
        self.lanes: list[list[Compute]] = [[] for _ in ranks]
        self.free = [0.0 for _ in ranks]
        self.live = [0.0 for _ in ranks]
        self.turns = [0 for _ in ranks]  # Fs and Is done
        self.pending = [0 for _ in ranks]  # Ws that could run
        self._held = [[0.0] * chunks for _ in ranks]
        self._oldest = [0 for _ in ranks]  # the first micro-batch that still needs the rank
        self._nodes = _connect(placement, chunks, graph)
        self._owned = [[n for n in self._nodes.values() if n.rank == rank] for rank in ranks]
        self._forwards = [[n for n in nodes if n.op is Op.F] for nodes in self._owned]
        self._weights = [[n for n in nodes if n.op is Op.W] for nodes in self._owned]
        self.events: list[tuple[float, int]] = []
        for node in self._nodes.values():
            if not node.needs:
                node.ready = [microbatch * pace for microbatch in range(chunks)]
                self.events += [(time, node.rank) for time in node.ready]
        heapify(self.events)

    def options(self, rank: int, now: float) -> list[Compute]:
        """What the rank could start by `now`, as far as inputs go: each stage's next F, I and W."""
        return [
            Compute(node.op, node.stage, node.done)
            for node in self._owned[rank]
            if node.done < len(node.ready) and node.ready[node.done] <= now
        ]

    def ready_at(self, action: Compute) -> float:
        """When the inputs of one of the `options` are there."""
        return self._nodes[action.op, action.stage].ready[action.microbatch]

    def has_room(self, rank: int, stage: int) -> bool:
        """May the stage's activations come on top of what is alive?"""
        return not exceeds(self.live[rank] + self.cost.activation[stage], self.memory[rank])

    def is_full(self, rank: int) -> bool:
        """Is there no room for any F?"""
        return not any(self.has_room(rank, node.stage) for node in self._forwards[rank])

    def is_safe(self, rank: int, action: Compute) -> bool:
        """After this F, can every micro-batch still finish on the rank, oldest first?

        It can if, with all older ones gone, what it and the younger ones hold plus what it has
        yet to take fits. (The banker's rule; without it the young ones starve the old.)
        """
        size, cap = self.cost.activation, self.memory[rank]
        alive = self.live[rank] + size[action.stage]
        for microbatch in range(self._oldest[rank], self.chunks):
            mine = microbatch == action.microbatch
            ahead = [
                node.stage
                for node in self._forwards[rank]
                if node.done <= microbatch and not (mine and node.stage == action.stage)
            ]
            if exceeds(alive + sum([size[stage] for stage in ahead]), cap):
                return False
            if len(ahead) == len(self._forwards[rank]):
                return True
            alive -= self._held[rank][microbatch] + (size[action.stage] if mine else 0.0)
        return True

    def is_complete(self) -> bool:
        """Has everything been done?"""
        return all(node.done == self.chunks for node in self._nodes.values())

    def start(self, action: Compute, now: float) -> None:
        """Let the action's rank do it, and tell whom it enables."""
        op, stage, microbatch = action
        node = self._nodes[op, stage]
        rank = node.rank
        end = self.free[rank] = now + self.cost.seconds(action)
        self.lanes[rank].append(action)
        node.done += 1
        self._account(rank, action)
        heappush(self.events, (end, rank))
        for other in node.enables:
            if other.arrive(microbatch, end + (self.cost.send if other.rank != rank else 0.0)):
                heappush(self.events, (other.ready[-1], other.rank))

    def _account(self, rank: int, action: Compute) -> None:
        op, stage, microbatch = action
        self.turns[rank] += op is not Op.W
        if op is Op.I:
            self.pending[rank] += 1
            return
        change = self.cost.activation[stage]
        if op is Op.W:
            self.pending[rank] -= 1
            change = -change
        self.live[rank] += change
        self._held[rank][microbatch] += change
        while self._oldest[rank] < min(node.done for node in self._weights[rank]):
            self._oldest[rank] += 1


def _connect(placement: Placement, chunks: int, graph: StageGraph) -> dict[tuple[Op, int], _Node]:
    """The nodes, each knowing how many inputs it has and whom it enables: by the one rule."""
    nodes = {
        (op, stage): _Node(op, stage, rank, chunks)
        for stage, rank in enumerate(placement)
        for op in _OPS
    }
    actions = [Compute(op, stage, 0) for op, stage in nodes]
    makers = {message: action for action in actions for message in produces(action, graph)}
    for action in actions:
        sources = [makers[message] for message in consumes(action, graph)]
        sources += [earlier for earlier in follows(action) if earlier.op is not Op.R]
        node = nodes[action.op, action.stage]
        node.needs = len(sources)
        for source in sources:
            nodes[source.op, source.stage].enables.append(node)
    return nodes


# Which of these options does the rank take now? None: it waits.
Choice = Callable[[Bench, int, list[Compute]], Compute | None]


def run(bench: Bench, choose: Choice, patience: float = 0.0) -> None:
    """Run the bench until nothing can start.

    A rank rather waits up to `patience` for what it would choose then than start something else
    now.
    """
    while bench.events:
        now, rank = heappop(bench.events)
        if bench.free[rank] > now:
            continue
        options = bench.options(rank, now + patience)
        action = choose(bench, rank, options) if options else None
        if action is not None and bench.ready_at(action) <= now:
            bench.start(action, now)


# Do Ws go before the next F or I now?
Due = Callable[[Bench, int], bool]


def never(bench: Bench, rank: int) -> bool:
    """Ws wait until the rank has nothing else to do, or no room."""
    return False


def when_full(bench: Bench, rank: int) -> bool:
    """Ws run as soon as there is no room for another F."""
    return bench.is_full(rank)


def behind(lag: Callable[[int], int]) -> Due:
    """At most `lag(rank)` Ws are put off."""
    return lambda bench, rank: bench.pending[rank] > lag(rank)


def follow(orders: Sequence[Sequence[Compute]], due: Due) -> Choice:
    """Take F and I in this order; a W when it is due, or when its rank would otherwise wait."""

    def choose(bench: Bench, rank: int, options: list[Compute]) -> Compute | None:
        weight = next((action for action in options if action.op is Op.W), None)
        if weight and due(bench, rank):
            return weight
        head = next(iter(orders[rank][bench.turns[rank] : bench.turns[rank] + 1]), None)
        if head in options and (head.op is Op.I or bench.has_room(rank, head.stage)):
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
    assert bench.is_complete(), "each F and I takes micro-batches in order, and fits under the cap"
    return Schedule(placement, chunks, tuple(map(tuple, bench.lanes)))

"""List scheduling: whenever a rank is free, it picks one of the actions that it could start.

A `Bench` is a half-made schedule: what every rank has done, holds and could start. Backwards
are split into I and W here. `fill` weaves the Ws into lanes whose order of F and I is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from penstock.schedules.cost import Cost, exceeds
from penstock.schedules.families.common import Placement
from penstock.schedules.ir import Compute, Op, Schedule, StageGraph, consumes, follows, produces

_OPS = (Op.F, Op.I, Op.W)


class _OpQueue:
    """One op of one stage: it takes the micro-batches in order."""

    def __init__(self, op: Op, stage: int, rank: int, chunks: int) -> None:
        self.op, self.stage, self.rank = op, stage, rank
        self.done = 0  # micro-batches
        self.ready_times: list[float] = []  # when each one's inputs are there
        self.input_count = 0  # inputs of each
        self.dependents: list[_OpQueue] = []
        self._arrived_inputs = [0] * chunks
        self._latest_arrival = [0.0] * chunks

    def add_input(self, microbatch: int, time: float) -> bool:
        """One more input is there at `time`; is it the last?"""
        self._latest_arrival[microbatch] = max(self._latest_arrival[microbatch], time)
        self._arrived_inputs[microbatch] += 1
        if self._arrived_inputs[microbatch] < self.input_count:
            return False
        self.ready_times.append(self._latest_arrival[microbatch])
        return True


class SchedulerState:
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
        self.free_at = [0.0 for _ in ranks]
        self.live = [0.0 for _ in ranks]
        self.ordered_actions_done = [0 for _ in ranks]  # Fs and Is done
        self.pending_weight_grads = [0 for _ in ranks]  # Ws that could run
        self._live_by_microbatch = [[0.0] * chunks for _ in ranks]
        self._oldest_unfinished = [
            0 for _ in ranks
        ]  # the first micro-batch that still needs the rank
        self._queues = _build_queues(placement, chunks, graph)
        self._queues_by_rank = [
            [n for n in self._queues.values() if n.rank == rank] for rank in ranks
        ]
        self._forward_queues = [
            [n for n in nodes if n.op is Op.F] for nodes in self._queues_by_rank
        ]
        self._weight_grad_queues = [
            [n for n in nodes if n.op is Op.W] for nodes in self._queues_by_rank
        ]
        self.events: list[tuple[float, int]] = []
        for node in self._queues.values():
            if not node.input_count:
                node.ready_times = [microbatch * pace for microbatch in range(chunks)]
                self.events += [(time, node.rank) for time in node.ready_times]
        heapify(self.events)

    def startable_actions(self, rank: int, now: float) -> list[Compute]:
        """What the rank could start by `now`, as far as inputs go: each stage's next F, I and W."""
        return [
            Compute(node.op, node.stage, node.done)
            for node in self._queues_by_rank[rank]
            if node.done < len(node.ready_times) and node.ready_times[node.done] <= now
        ]

    def ready_at(self, action: Compute) -> float:
        """When the inputs of one of the `options` are there."""
        return self._queues[action.op, action.stage].ready_times[action.microbatch]

    def has_room(self, rank: int, stage: int) -> bool:
        """May the stage's activations come on top of what is alive?"""
        return not exceeds(self.live[rank] + self.cost.activation[stage], self.memory[rank])

    def is_full(self, rank: int) -> bool:
        """Is there no room for any F?"""
        return not any(self.has_room(rank, node.stage) for node in self._forward_queues[rank])

    def is_safe(self, rank: int, action: Compute) -> bool:
        """After this F, can every micro-batch still finish on the rank, oldest first?

        It can if, with all older ones gone, what it and the younger ones hold plus what it has
        yet to take fits. (The banker's rule; without it the young ones starve the old.)
        """
        size, cap = self.cost.activation, self.memory[rank]
        alive = self.live[rank] + size[action.stage]
        for microbatch in range(self._oldest_unfinished[rank], self.chunks):
            mine = microbatch == action.microbatch
            ahead = [
                node.stage
                for node in self._forward_queues[rank]
                if node.done <= microbatch and not (mine and node.stage == action.stage)
            ]
            if exceeds(alive + sum([size[stage] for stage in ahead]), cap):
                return False
            if len(ahead) == len(self._forward_queues[rank]):
                return True
            alive -= self._live_by_microbatch[rank][microbatch] + (
                size[action.stage] if mine else 0.0
            )
        return True

    def is_complete(self) -> bool:
        """Has everything been done?"""
        return all(node.done == self.chunks for node in self._queues.values())

    def start(self, action: Compute, now: float) -> None:
        """Let the action's rank do it, and tell whom it enables."""
        op, stage, microbatch = action
        node = self._queues[op, stage]
        rank = node.rank
        end = self.free_at[rank] = now + self.cost.seconds(action)
        self.lanes[rank].append(action)
        node.done += 1
        self._update_memory(rank, action)
        heappush(self.events, (end, rank))
        for other in node.dependents:
            if other.add_input(microbatch, end + (self.cost.send if other.rank != rank else 0.0)):
                heappush(self.events, (other.ready_times[-1], other.rank))

    def _update_memory(self, rank: int, action: Compute) -> None:
        op, stage, microbatch = action
        self.ordered_actions_done[rank] += op is not Op.W
        if op is Op.I:
            self.pending_weight_grads[rank] += 1
            return
        change = self.cost.activation[stage]
        if op is Op.W:
            self.pending_weight_grads[rank] -= 1
            change = -change
        self.live[rank] += change
        self._live_by_microbatch[rank][microbatch] += change
        while self._oldest_unfinished[rank] < min(
            node.done for node in self._weight_grad_queues[rank]
        ):
            self._oldest_unfinished[rank] += 1


def _build_queues(
    placement: Placement, chunks: int, graph: StageGraph
) -> dict[tuple[Op, int], _OpQueue]:
    """The nodes, each knowing how many inputs it has and whom it enables: by the one rule."""
    nodes = {
        (op, stage): _OpQueue(op, stage, rank, chunks)
        for stage, rank in enumerate(placement)
        for op in _OPS
    }
    actions = [Compute(op, stage, 0) for op, stage in nodes]
    makers = {message: action for action in actions for message in produces(action, graph)}
    for action in actions:
        sources = [makers[message] for message in consumes(action, graph)]
        sources += [earlier for earlier in follows(action) if earlier.op is not Op.R]
        node = nodes[action.op, action.stage]
        node.input_count = len(sources)
        for source in sources:
            nodes[source.op, source.stage].dependents.append(node)
    return nodes


# Which of these options does the rank take now? None: it waits.
ActionChooser = Callable[[SchedulerState, int, list[Compute]], Compute | None]


def run_list_scheduler(state: SchedulerState, choose: ActionChooser, patience: float = 0.0) -> None:
    """Run the bench until nothing can start.

    A rank rather waits up to `patience` for what it would choose then than start something else
    now.
    """
    while state.events:
        now, rank = heappop(state.events)
        if state.free_at[rank] > now:
            continue
        options = state.startable_actions(rank, now + patience)
        action = choose(state, rank, options) if options else None
        if action is not None and state.ready_at(action) <= now:
            state.start(action, now)


# Do Ws go before the next F or I now?
WeightGradRule = Callable[[SchedulerState, int], bool]


def never(state: SchedulerState, rank: int) -> bool:
    """Ws wait until the rank has nothing else to do, or no room."""
    return False


def when_full(state: SchedulerState, rank: int) -> bool:
    """Ws run as soon as there is no room for another F."""
    return state.is_full(rank)


def when_lagging(lag: Callable[[int], int]) -> WeightGradRule:
    """At most `lag(rank)` Ws are put off."""
    return lambda bench, rank: bench.pending_weight_grads[rank] > lag(rank)


def follow_order(orders: Sequence[Sequence[Compute]], due: WeightGradRule) -> ActionChooser:
    """Take F and I in this order; a W when it is due, or when its rank would otherwise wait."""

    def choose(state: SchedulerState, rank: int, options: list[Compute]) -> Compute | None:
        weight = next((action for action in options if action.op is Op.W), None)
        if weight and due(state, rank):
            return weight
        head = next(
            iter(
                orders[rank][
                    state.ordered_actions_done[rank] : state.ordered_actions_done[rank] + 1
                ]
            ),
            None,
        )
        if head in options and (head.op is Op.I or state.has_room(rank, head.stage)):
            return head
        return weight

    return choose


def insert_weight_grads(
    placement: Placement,
    chunks: int,
    orders: Sequence[Sequence[Compute]],
    due: WeightGradRule,
    memory: float = float("inf"),
) -> Schedule:
    """Weave the Ws into lanes of F and I, at unit costs, under a memory cap for every rank."""
    caps = [memory] * len(orders)
    chain = StageGraph.chain(len(placement))
    bench = SchedulerState(placement, chunks, Cost.even(placement), caps, chain)
    run_list_scheduler(bench, follow_order(orders, due))
    assert bench.is_complete(), "each F and I takes micro-batches in order, and fits under the cap"
    return Schedule(placement, chunks, tuple(map(tuple, bench.lanes)))

"""List scheduling: whenever a rank is free, it picks one of the actions that it could start.

`SchedulerState` is a schedule under construction: what every rank has done, what it holds in memory
and what it could start. Backwards are always split into I and W here. `run_list_scheduler` runs the
loop with any rule for the choice. `insert_weight_grads` uses it to place the Ws in lanes whose
order of F and I is given.

This is the scheduler for the named schedules and for the strategies of `fit`, which are Python
functions. `priority_scheduler` is for searches that make hundreds of schedules of one pipeline: its
rules are numbers only, so it is quicker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from penstock.schedules.cost import Cost, exceeds
from penstock.schedules.families.common import Placement
from penstock.schedules.ir import Compute, Op, Schedule, StageGraph, consumes, follows, produces

_OPS = (Op.F, Op.I, Op.W)


class _OpQueue:
    """One op of one stage, which takes the micro-batches in order."""

    def __init__(self, op: Op, stage: int, rank: int, chunks: int, cost: Cost) -> None:
        self.op, self.stage, self.rank = op, stage, rank
        self.done = 0  # how many micro-batches are done
        self.ready_times: list[float] = []  # when all inputs of each micro-batch are there
        self.input_count = 0  # how many inputs each micro-batch has
        self.dependents: list[tuple[_OpQueue, float]] = []  # with the seconds of the message
        self.seconds = cost.seconds(Compute(op, stage, 0))
        # Activations live from F to W. An I frees what its W does not need.
        whole, remaining = cost.activation[stage], cost.kept_sizes[stage]
        self.memory_change = {Op.F: whole, Op.I: remaining - whole, Op.W: -remaining}[op]
        self._arrived_inputs = [0] * chunks
        self._latest_arrival = [0.0] * chunks

    def add_input(self, microbatch: int, time: float) -> bool:
        """Record an input that arrives at `time`. Return True if it was the last one missing."""
        if time > self._latest_arrival[microbatch]:
            self._latest_arrival[microbatch] = time
        self._arrived_inputs[microbatch] += 1
        if self._arrived_inputs[microbatch] < self.input_count:
            return False
        self.ready_times.append(self._latest_arrival[microbatch])
        return True


class SchedulerState:
    """The state of one run of list scheduling, under a memory cap for each rank.

    A new micro-batch becomes available every `pace` seconds, or all at once if `pace` is 0. The
    heap `events` has pairs (time, rank): moments at which a rank may be able to start something.
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
        self.ordered_actions_done = [0 for _ in ranks]  # how many Fs and Is are done
        self.pending_weight_grads = [0 for _ in ranks]  # how many Ws could run
        self._live_by_microbatch = [[0.0] * chunks for _ in ranks]
        # The first micro-batch that still needs the rank.
        self._oldest_unfinished = [0 for _ in ranks]
        self._queues = _build_queues(placement, chunks, cost, graph)
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
        """Return the actions whose inputs are there by `now`: at most one F, I and W per stage."""
        return [
            Compute(node.op, node.stage, node.done)
            for node in self._queues_by_rank[rank]
            if node.done < len(node.ready_times) and node.ready_times[node.done] <= now
        ]

    def ready_at(self, action: Compute) -> float:
        """Return when the inputs of a startable action are there."""
        return self._queues[action.op, action.stage].ready_times[action.microbatch]

    def has_room(self, rank: int, stage: int) -> bool:
        """Return True if the activations of one more micro-batch of the stage fit."""
        return not exceeds(self.live[rank] + self.cost.activation[stage], self.memory[rank])

    def is_full(self, rank: int) -> bool:
        """Return True if there is no room for any F of the rank."""
        return not any(self.has_room(rank, node.stage) for node in self._forward_queues[rank])

    def is_safe(self, rank: int, action: Compute) -> bool:
        """Return True if, after this F, every micro-batch can still finish on the rank.

        This is the banker's algorithm. Micro-batches finish in order, oldest first. For each one,
        assume that all older ones are gone. What is alive then, plus what this one has yet to
        allocate, must fit. Without this rule young micro-batches fill the memory that an old one
        needs for its next stage, and the rank is stuck.
        """
        size, nodes = self.cost.activation, self._forward_queues[rank]
        alive = self.live[rank] + size[action.stage]
        if exceeds(alive, self.memory[rank]):
            return False
        held, oldest = self._live_by_microbatch[rank], self._oldest_unfinished[rank]
        done = [node.done + (node.stage == action.stage) for node in nodes]
        # Micro-batches with the same Fs ahead need the same, and the oldest of them finds least
        # room. So it is enough to check the first one that each F has not reached.
        for microbatch in done:
            if microbatch < self.chunks:
                gone = sum(held[oldest:microbatch])
                gone += size[action.stage] if action.microbatch < microbatch else 0.0
                ahead = sum(
                    size[node.stage]
                    for node, reached in zip(nodes, done, strict=True)
                    if reached <= microbatch
                )
                if exceeds(alive - gone + ahead, self.memory[rank]):
                    return False
        return True

    def is_complete(self) -> bool:
        """Return True if every action has been done."""
        return all(node.done == self.chunks for node in self._queues.values())

    def start(self, action: Compute, now: float) -> None:
        """Run an action on its rank, and pass its result to the actions that wait for it."""
        op, stage, microbatch = action
        node = self._queues[op, stage]
        rank = node.rank
        end = self.free_at[rank] = now + node.seconds
        self.lanes[rank].append(action)
        node.done += 1
        self.live[rank] += node.memory_change
        self._live_by_microbatch[rank][microbatch] += node.memory_change
        if op is Op.W:
            self.pending_weight_grads[rank] -= 1
            weights_done = [queue.done for queue in self._weight_grad_queues[rank]]
            self._oldest_unfinished[rank] = min(weights_done)
        else:
            self.ordered_actions_done[rank] += 1
            self.pending_weight_grads[rank] += op is Op.I
        heappush(self.events, (end, rank))
        for other, delay in node.dependents:
            if other.add_input(microbatch, end + delay):
                heappush(self.events, (other.ready_times[-1], other.rank))


def _build_queues(
    placement: Placement, chunks: int, cost: Cost, graph: StageGraph
) -> dict[tuple[Op, int], _OpQueue]:
    """Return a queue for each op and stage, linked by the rule of `ir` (what needs what)."""
    nodes = {
        (op, stage): _OpQueue(op, stage, rank, chunks, cost)
        for stage, rank in enumerate(placement)
        for op in _OPS
    }
    actions = [Compute(op, stage, 0) for op, stage in nodes]
    producers = {message: action for action in actions for message in produces(action, graph)}
    for action in actions:
        sources = [producers[message] for message in consumes(action, graph)]
        sources += [earlier for earlier in follows(action) if earlier.op in _OPS]
        node = nodes[action.op, action.stage]
        node.input_count = len(sources)
        for source in sources:
            crosses = placement[source.stage] != node.rank
            delay = cost.send_seconds(source.stage, node.stage) if crosses else 0.0
            nodes[source.op, source.stage].dependents.append((node, delay))
    return nodes


# A rule that picks one of the startable actions of a rank, or None to wait.
ActionChooser = Callable[[SchedulerState, int, list[Compute]], Compute | None]


def run_list_scheduler(state: SchedulerState, choose: ActionChooser, patience: float = 0.0) -> None:
    """Run until nothing can start any more.

    With `patience`, a rank also considers actions that become possible within so many seconds. If
    it chooses one of those, it waits for it instead of starting something else now.
    """
    while state.events:
        now, rank = heappop(state.events)
        if state.free_at[rank] > now:
            continue
        options = state.startable_actions(rank, now + patience)
        action = choose(state, rank, options) if options else None
        # An action that is not ready yet starts later: its inputs make another event.
        if action is not None and state.ready_at(action) <= now:
            state.start(action, now)


# A rule that says whether Ws go before the next F or I of a rank now.
WeightGradRule = Callable[[SchedulerState, int], bool]


def never(state: SchedulerState, rank: int) -> bool:
    """Run Ws only when the rank has nothing else to do, or no room (a `WeightGradRule`)."""
    return False


def when_full(state: SchedulerState, rank: int) -> bool:
    """Run Ws as soon as there is no room for another F (a `WeightGradRule`)."""
    return state.is_full(rank)


def when_lagging(lag: Callable[[int], int]) -> WeightGradRule:
    """Return the rule that postpones at most `lag(rank)` Ws."""
    return lambda state, rank: state.pending_weight_grads[rank] > lag(rank)


def follow_order(orders: Sequence[Sequence[Compute]], due: WeightGradRule) -> ActionChooser:
    """Return the chooser that takes F and I in a given order.

    A W runs when it is due, or when its rank would otherwise wait.
    """

    def choose(state: SchedulerState, rank: int, options: list[Compute]) -> Compute | None:
        weight = next((action for action in options if action.op is Op.W), None)
        if weight and due(state, rank):
            return weight
        done = state.ordered_actions_done[rank]
        head = orders[rank][done] if done < len(orders[rank]) else None
        if head in options and (head.op is Op.I or state.has_room(rank, head.stage)):
            return head
        return weight

    return choose


def insert_weight_grads(
    order: Schedule, due: WeightGradRule, memory: float = float("inf")
) -> Schedule:
    """Return a schedule of F and I with the Ws added, under a memory cap for every rank.

    Every rank's F, I and W take one second each.
    """
    placement, chain = order.placement, StageGraph.chain(order.stages)
    caps = [memory] * order.ranks
    state = SchedulerState(placement, order.chunks, Cost.even(placement), caps, chain)
    run_list_scheduler(state, follow_order(order.lanes, due))
    assert state.is_complete(), "each F and I takes micro-batches in order, and fits under the cap"
    return Schedule(placement, order.chunks, tuple(map(tuple, state.lanes)))

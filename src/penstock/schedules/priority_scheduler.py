"""List scheduling by numbers: quick enough to be run hundreds of times for one schedule.

`list_scheduler` asks a Python function for every choice. Here the choice is fixed: of the actions
that a rank could start, the one with the smallest priority number starts, and a few numbers say
when the rank rather waits. A `Pipeline` is compiled once for that. Its queues are numbered: F of
all stages, then I of all stages, then W of all stages. Each queue takes the micro-batches in order.

    schedule_by_priority   F, I and W by their priority numbers
    refill_weight_grads    F and I in the order of a given schedule, W placed anew
    time_orders            F, I and W in given orders

All return the start of every action, as `starts[queue][microbatch]`, or None if they get stuck.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from penstock.schedules.bound import Objective
from penstock.schedules.cost import Cost
from penstock.schedules.families.common import Placement
from penstock.schedules.ir import Compute, Op, Schedule, StageGraph, consumes, follows, produces
from penstock.schedules.simulator import Span

_OPS = (Op.F, Op.I, Op.W)
_ROUNDING = 1 + 1e-9  # caps may be exceeded by the rounding errors of a sum

Starts = list[list[float]]
Orders = Sequence[Sequence[int]]  # the queues of each rank, in the order of its actions


class Pipeline:
    """The sizes, costs and caps of a schedule, as lists by the number of a queue or rank."""

    def __init__(
        self,
        placement: Placement,
        chunks: int,
        cost: Cost,
        caps: Sequence[float],
        graph: StageGraph,
    ) -> None:
        self.placement, self.chunks, self.cost, self.graph = placement, chunks, cost, graph
        self.stages, self.ranks = len(placement), max(placement) + 1
        self.queues = 3 * self.stages
        self.caps = [cap * _ROUNDING for cap in caps]
        self.rank = [*placement] * 3
        self.seconds = [*cost.F, *cost.I, *cost.W]
        # F allocates at its start; I and W free at their ends.
        self.allocated = [*cost.activation] + [0.0] * (2 * self.stages)
        self.freed = [0.0] * self.stages
        self.freed += [a - b for a, b in zip(cost.activation, cost.kept_sizes, strict=True)]
        self.freed += cost.kept_sizes
        self.queues_by_rank = [
            [queue for queue in range(self.queues) if self.rank[queue] == rank]
            for rank in range(self.ranks)
        ]
        # Of each queue: [(another queue, seconds of the message)].
        self.inputs: list[list[tuple[int, float]]] = [[] for _ in range(self.queues)]
        self.outputs: list[list[tuple[int, float]]] = [[] for _ in range(self.queues)]
        self._link_queues()
        # The work of each rank on one micro-batch, and that of the busiest one.
        self.loads = [
            sum(self.seconds[queue] for queue in queues) for queues in self.queues_by_rank
        ]
        self.period = max(self.loads)
        self.work = chunks * self.period

    @property
    def actions(self) -> int:
        """The number of actions of a schedule."""
        return self.queues * self.chunks

    def with_chunks(self, chunks: int) -> Pipeline:
        """Return the same pipeline with another number of micro-batches."""
        caps = [cap / _ROUNDING for cap in self.caps]
        return Pipeline(self.placement, chunks, self.cost, caps, self.graph)

    def _link_queues(self) -> None:
        actions = [Compute(op, stage, 0) for op in _OPS for stage in range(self.stages)]
        numbers = {action: number for number, action in enumerate(actions)}
        producers = {m: action for action in actions for m in produces(action, self.graph)}
        for action in actions:
            sources = [(earlier, 0.0) for earlier in follows(action) if earlier in numbers]
            for message in consumes(action, self.graph):
                crosses = self.placement[message.src] != self.placement[message.dst]
                delay = self.cost.send_seconds(message.src, message.dst) if crosses else 0.0
                sources.append((producers[message], delay))
            for source, delay in sources:
                self.inputs[numbers[action]].append((numbers[source], delay))
                self.outputs[numbers[source]].append((numbers[action], delay))

    def spans(self, starts: Starts) -> list[Span]:
        """Return the spans of all actions, each with its index in its lane."""
        result = []
        for rank, queues in enumerate(self.queues_by_rank):
            lane = sorted(
                (start, queue, microbatch)
                for queue in queues
                for microbatch, start in enumerate(starts[queue])
            )
            for index, (start, queue, microbatch) in enumerate(lane):
                action = Compute(_OPS[queue // self.stages], queue % self.stages, microbatch)
                result.append(Span(rank, index, action, start, start + self.seconds[queue]))
        return result

    def schedule(self, starts: Starts) -> Schedule:
        """Return the schedule with these starts."""
        lanes: list[list[Compute]] = [[] for _ in range(self.ranks)]
        for span in self.spans(starts):
            assert isinstance(span.action, Compute)
            lanes[span.rank].append(span.action)
        return Schedule(self.placement, self.chunks, tuple(map(tuple, lanes)))

    def orders(self, schedule: Schedule) -> list[list[int]]:
        """Return the orders of a schedule of F, I and W."""
        return [
            [_OPS.index(action.op) * self.stages + action.stage for action in lane]
            for lane in schedule.lanes
        ]

    def orders_by_start(self, starts: Starts, with_weight_grads: bool = True) -> list[list[int]]:
        """Return the orders of a schedule that is given by its starts."""
        queues = (3 if with_weight_grads else 2) * self.stages
        return [
            [q for _, q in sorted((t, q) for q in mine if q < queues for t in starts[q])]
            for mine in self.queues_by_rank
        ]

    def measure(self, starts: Starts, objective: Objective) -> float:
        """Return the makespan of a schedule, or its period: see `fit`."""
        begin, end = [inf] * self.ranks, [0.0] * self.ranks
        for queue, rank in enumerate(self.rank):
            begin[rank] = min(begin[rank], starts[queue][0])
            end[rank] = max(end[rank], starts[queue][-1] + self.seconds[queue])
        if objective == "makespan":
            return max(end)
        return max(b - a for a, b in zip(begin, end, strict=True))

    def idle_seconds(self, starts: Starts) -> list[float]:
        """Return how long each rank is idle between its first and its last action."""
        result = []
        for queues in self.queues_by_rank:
            begin = min(starts[queue][0] for queue in queues)
            end = max(starts[queue][-1] + self.seconds[queue] for queue in queues)
            work = self.chunks * sum(self.seconds[queue] for queue in queues)
            result.append(end - begin - work)
        return result


def schedule_by_priority(
    pipeline: Pipeline,
    priorities: Sequence[Sequence[float]],
    patience: float,
    drain_patience: float,
    allowances: Sequence[float] | None,
    handicaps: Sequence[float],
    limits: Sequence[int] | None,
    idle_limits: Sequence[float] | None = None,
) -> Starts | None:
    """Schedule each action as soon as its rank has nothing more urgent to do.

    An F starts only if it is safe (see `SchedulerState.is_safe`): every micro-batch must be able to
    finish on the rank with the memory that is left.

    Args:
        pipeline: The pipeline.
        priorities: The priority number of each action, by queue and micro-batch.
        patience: A rank waits for a more urgent action that comes within so many seconds.
        drain_patience: The same after the last F of the rank, if it has only Ws to start.
        allowances: How long each rank may be idle in all before it prefers a W to waiting. None: as
            long as the rank that has been idle longest so far, less its handicap.
        handicaps: Seconds by which each rank is expected to be idle later than the others.
        limits: The most micro-batches of each stage between their F and I, or None.
        idle_limits: How long each rank may be idle in all. The attempt ends with None as soon as
            one is idle for longer.
    """
    chunks, stages, seconds, rank_of = (
        pipeline.chunks,
        pipeline.stages,
        pipeline.seconds,
        pipeline.rank,
    )
    caps, allocated, freed = pipeline.caps, pipeline.allocated, pipeline.freed
    outputs, queues_by_rank = pipeline.outputs, pipeline.queues_by_rank
    ranks, queues = pipeline.ranks, pipeline.queues
    input_counts = [len(inputs) for inputs in pipeline.inputs]
    missing = [[count] * chunks for count in input_counts]  # inputs that are not there yet
    latest = [[0.0] * chunks for _ in range(queues)]  # when the last of the others arrives
    starts: Starts = [[] for _ in range(queues)]
    # The next micro-batch of each queue, when its inputs are there, and its priority number. While
    # inputs are missing, both are infinite. They are looked at far more often than they change.
    next_microbatch = [0] * queues
    next_time, next_priority = [inf] * queues, [inf] * queues
    free_at, live, idle = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
    held = [[0.0] * chunks for _ in range(ranks)]  # by each micro-batch
    oldest = [0] * ranks  # the first micro-batch that still needs the rank
    forwards = [[q for q in mine if q < stages] for mine in queues_by_rank]
    weight_grads = [[q for q in mine if q >= 2 * stages] for mine in queues_by_rank]
    shares = [sum(allocated[q] for q in mine) for mine in forwards]
    forwards_left = [chunks * len(mine) for mine in forwards]
    weights_from = 2 * stages
    worst_handicap = max(handicaps)
    events: list[tuple[float, int]] = []
    for queue in range(queues):
        if not input_counts[queue]:
            next_time[queue], next_priority[queue] = 0.0, priorities[queue][0]
            events.append((0.0, rank_of[queue]))

    def is_safe(rank: int, queue: int, microbatch: int) -> bool:
        # The same as SchedulerState.is_safe.
        size, mine = allocated[queue], forwards[rank]
        alive, oldest_open = live[rank] + size, oldest[rank]
        done = [next_microbatch[q] + (q == queue) for q in mine]
        for other in done:
            if other < chunks:
                gone = sum(held[rank][oldest_open:other]) + (size if microbatch < other else 0.0)
                ahead = sum([allocated[q] for q, n in zip(mine, done, strict=True) if n <= other])
                if alive - gone + ahead > caps[rank]:
                    return False
        return True

    while events:
        now, rank = heappop(events)
        if free_at[rank] > now:
            continue
        # `best` can start now. Something with `coming_priority` can start at `arrival`.
        best = -1
        best_priority = coming_priority = arrival = inf
        latest_arrival = now + (patience if forwards_left[rank] else drain_patience)
        for queue in queues_by_rank[rank]:
            time = next_time[queue]
            if time > latest_arrival:
                continue
            priority = next_priority[queue]
            if priority >= (best_priority if time <= now else coming_priority):
                continue
            if queue < stages:
                microbatch = next_microbatch[queue]
                if limits and microbatch - next_microbatch[queue + stages] >= limits[queue]:
                    continue
                size = live[rank] + allocated[queue]
                if size > caps[rank] or (
                    size + shares[rank] > caps[rank] and not is_safe(rank, queue, microbatch)
                ):
                    continue
            if time <= now:
                best, best_priority = queue, priority
            else:
                coming_priority, arrival = priority, time
        if coming_priority < best_priority:
            # Nothing to start, or an F or I that is less urgent.
            waits = best < 0 or (best < weights_from and arrival <= now + patience)
            if best >= weights_from:
                if allowances is None:
                    allowed = max(max(idle), worst_handicap - handicaps[rank])
                else:
                    allowed = allowances[rank]
                waits = idle[rank] + arrival - now <= allowed
            if waits:
                heappush(events, (arrival, rank))
                continue
        if best < 0:
            continue
        microbatch = next_microbatch[best]
        if free_at[rank]:  # it has started something before
            idle[rank] += now - free_at[rank]
            if idle_limits and idle[rank] > idle_limits[rank]:
                return None
        starts[best].append(now)
        later = next_microbatch[best] = microbatch + 1
        if later < chunks and not missing[best][later]:
            next_time[best], next_priority[best] = latest[best][later], priorities[best][later]
        else:
            next_time[best] = next_priority[best] = inf
        forwards_left[rank] -= best < stages
        end = free_at[rank] = now + seconds[best]
        change = allocated[best] - freed[best]
        live[rank] += change
        held[rank][microbatch] += change
        if best >= weights_from:
            oldest[rank] = min([next_microbatch[queue] for queue in weight_grads[rank]])
        heappush(events, (end, rank))
        for queue, delay in outputs[best]:
            time = end + delay
            if time > latest[queue][microbatch]:
                latest[queue][microbatch] = time
            missing[queue][microbatch] -= 1
            if not missing[queue][microbatch]:
                time = latest[queue][microbatch]
                if microbatch == next_microbatch[queue]:
                    next_time[queue] = time
                    next_priority[queue] = priorities[queue][microbatch]
                heappush(events, (time, rank_of[queue]))
    return starts if min(next_microbatch) == chunks else None


def refill_weight_grads(
    pipeline: Pipeline, orders: Orders, allowances: Sequence[float]
) -> Starts | None:
    """Return a schedule with given orders of F and I, in which only the Ws are placed.

    A W runs where it fits before the next F or I, where memory is full, and where its rank would
    otherwise be idle for longer than its allowance.
    """
    stages, seconds, inputs, outputs = (
        pipeline.stages,
        pipeline.seconds,
        pipeline.inputs,
        pipeline.outputs,
    )
    allocated, freed, caps, rank_of = (
        pipeline.allocated,
        pipeline.freed,
        pipeline.caps,
        pipeline.rank,
    )
    ranks = pipeline.ranks
    ends: Starts = [[] for _ in range(pipeline.queues)]
    free_at, live, idle = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
    pending: list[list[int]] = [[] for _ in range(ranks)]  # the queues of Ws, in the order of Is
    weights_done, ordered_done = [0] * ranks, [0] * ranks
    events = [(0.0, rank) for rank in range(ranks)]
    while events:
        now, rank = heappop(events)
        if free_at[rank] > now:
            continue
        has_weight = weights_done[rank] < len(pending[rank])
        takes_weight = has_weight
        if ordered_done[rank] < len(orders[rank]):
            queue = orders[rank][ordered_done[rank]]
            microbatch, arrival = len(ends[queue]), now
            for source, delay in inputs[queue]:
                if len(ends[source]) <= microbatch:
                    arrival = inf
                    break
                arrival = max(arrival, ends[source][microbatch] + delay)
            is_full = live[rank] + allocated[queue] > caps[rank]
            gap = arrival - now
            takes_weight = has_weight and (
                is_full
                or gap >= seconds[pending[rank][weights_done[rank]]]
                or (gap > 0 and idle[rank] + gap > allowances[rank])
            )
            if not takes_weight and (is_full or gap > 0):
                if not is_full and gap < inf:
                    heappush(events, (arrival, rank))
                continue  # an input makes another event
        elif not has_weight:
            continue
        if takes_weight:
            queue = pending[rank][weights_done[rank]]
            weights_done[rank] += 1
        else:
            ordered_done[rank] += 1
        if ordered_done[rank] + weights_done[rank] > 1:
            idle[rank] += now - free_at[rank]
        end = free_at[rank] = now + seconds[queue]
        ends[queue].append(end)
        live[rank] += allocated[queue] - freed[queue]
        if stages <= queue < 2 * stages:
            pending[rank].append(queue + stages)
        heappush(events, (end, rank))
        for other, delay in outputs[queue]:
            if rank_of[other] != rank:
                heappush(events, (end + delay, rank_of[other]))
    if any(len(done) < pipeline.chunks for done in ends):
        return None
    return [[end - seconds[queue] for end in done] for queue, done in enumerate(ends)]


def time_orders(pipeline: Pipeline, orders: Orders) -> Starts | None:
    """Return the starts of all actions in given orders, or None if they wait for each other."""
    seconds, inputs, outputs, rank_of = (
        pipeline.seconds,
        pipeline.inputs,
        pipeline.outputs,
        pipeline.rank,
    )
    ends: Starts = [[] for _ in range(pipeline.queues)]
    free_at, positions = [0.0] * pipeline.ranks, [0] * pipeline.ranks
    ready = list(range(pipeline.ranks))
    while ready:
        rank = ready.pop()
        order, now = orders[rank], free_at[rank]
        position = positions[rank]
        while position < len(order):
            queue = order[position]
            mine = ends[queue]
            microbatch = len(mine)
            start = now
            for source, delay in inputs[queue]:
                done = ends[source]
                if len(done) <= microbatch:
                    break
                time = done[microbatch] + delay
                if time > start:
                    start = time
            else:
                now = start + seconds[queue]
                mine.append(now)
                position += 1
                for other, _ in outputs[queue]:
                    if rank_of[other] != rank:
                        ready.append(rank_of[other])
                continue
            break
        free_at[rank], positions[rank] = now, position
    if any(len(done) < pipeline.chunks for done in ends):
        return None
    return [[end - seconds[queue] for end in done] for queue, done in enumerate(ends)]

"""The search for a fast schedule for given costs, under a memory cap: schedule="fit".

`fit` makes many schedules and keeps the fastest. Each is one list scheduling of the whole training
step with its own rule for what a rank does next:

    known rules   those of `rule_search` that were good for other pipelines
    strategies    the order of a named schedule of the same placement, or one with more or fewer
                  forwards before the first backward, in which only the Ws are placed anew; and
                  simple policies, which choose the order too
    rule search   the best rules so far, with some of their numbers changed

With many micro-batches, half of the effort is for schedules of four micro-batches per rank, which
are then extended (see `extension`). No rule is best everywhere, and each costs little. Finally, a
local search improves the winner.

"Fast" has two meanings, the objectives. The makespan is the time from the first start to the last
end on any rank. The period is the longest time that one rank needs from its first to its last
action. If ranks start the next step without waiting for the others, steps follow each other in
that time.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf, isnan
from random import Random
from typing import NamedTuple

from penstock.errors import ArgumentError
from penstock.schedules.bound import Objective, schedule_bound
from penstock.schedules.cost import Cost, exceeds, expand_memory_caps, fits_in_memory
from penstock.schedules.extension import extend_schedule
from penstock.schedules.families import make, training_families
from penstock.schedules.families.common import Placement, check_sizes
from penstock.schedules.ir import Compute, Op, Schedule, StageGraph, consumes, follows, produces
from penstock.schedules.list_scheduler import (
    ActionChooser,
    SchedulerState,
    follow_order,
    never,
    run_list_scheduler,
    when_full,
    when_lagging,
)
from penstock.schedules.priority_scheduler import Pipeline, Starts, time_orders
from penstock.schedules.rule_search import search_rules, try_known_rules
from penstock.schedules.simulator import Deadlock, Span, check_stages_match, play

# -------------------------------------------------------------------------------------------------
# The objectives.
# -------------------------------------------------------------------------------------------------

# Returns (seconds, the span that ends last) of a simulation, for one objective.
_Measure = Callable[[Sequence[Span]], tuple[float, Span]]


def _measure_makespan(spans: Sequence[Span]) -> tuple[float, Span]:
    last = max(spans, key=lambda span: span.end)
    return last.end, last


def _measure_period(spans: Sequence[Span]) -> tuple[float, Span]:
    starts: dict[int, float] = {}
    last: dict[int, Span] = {}
    for span in spans:
        starts[span.rank] = min(starts.get(span.rank, span.start), span.start)
        if span.rank not in last or span.end > last[span.rank].end:
            last[span.rank] = span
    slowest = max(last.values(), key=lambda span: span.end - starts[span.rank])
    return slowest.end - starts[slowest.rank], slowest


_MEASURES: dict[Objective, _Measure] = {"makespan": _measure_makespan, "period": _measure_period}


def measure_seconds(spans: Sequence[Span], objective: Objective) -> float:
    """Return the seconds of a simulation, for one objective."""
    return _MEASURES[objective](spans)[0]


# -------------------------------------------------------------------------------------------------
# The local search: swap neighbours on the critical path as long as that helps.
#
# The critical path is the chain of actions, back from the last one, in which each starts exactly
# when the one before it ends or its message arrives. Only a change to it makes a schedule faster.
# -------------------------------------------------------------------------------------------------

_TIME_TOLERANCE = 1e-9


def improve_by_swaps(
    schedule: Schedule,
    graph: StageGraph,
    cost: Cost,
    caps: Sequence[float],
    swaps: int,
    objective: Objective = "makespan",
) -> Schedule:
    """Try up to `swaps` swaps of neighbours and return the improved schedule.

    A swap that helps is kept. One that changes nothing is sometimes kept, which gets the search
    past a plateau. The seed is fixed, so the result is always the same.
    """
    draw, measure = Random(0), _MEASURES[objective]
    spans = _simulate_spans(schedule, graph, cost)
    assert spans, "only a schedule that ends can be improved"
    seconds, last = measure(spans)
    improving = True
    while improving and swaps > 0:
        improving = False
        places = sorted(set(_swaps_on_critical_path(schedule, graph, cost, spans, last)))
        draw.shuffle(places)
        for rank, step in places[:swaps]:
            candidate = _swap_neighbours(schedule, rank, step)
            if not _is_legal_swap(candidate.lanes[rank], step, cost, caps[rank]):
                continue
            swaps -= 1
            new_spans = _simulate_spans(candidate, graph, cost)
            if not new_spans:
                continue
            new_seconds, new_last = measure(new_spans)
            gain = seconds - new_seconds
            if gain > _TIME_TOLERANCE or (gain > -_TIME_TOLERANCE and draw.random() < 0.2):
                schedule, spans, improving = candidate, new_spans, True
                seconds, last = new_seconds, new_last
                break
    return schedule


def _simulate_spans(schedule: Schedule, graph: StageGraph, cost: Cost) -> list[Span]:
    """Return the spans of a simulation, or an empty list if the schedule deadlocks."""
    try:
        return list(play(schedule, graph, cost))
    except Deadlock:
        return []


def _swap_neighbours(schedule: Schedule, rank: int, index: int) -> Schedule:
    lane = list(schedule.lanes[rank])
    lane[index : index + 2] = lane[index + 1], lane[index]
    lanes = (*schedule.lanes[:rank], tuple(lane), *schedule.lanes[rank + 1 :])
    return replace(schedule, lanes=lanes)


def _is_legal_swap(lane: Sequence[Compute], index: int, cost: Cost, cap: float) -> bool:
    """Return True if a lane with two actions swapped at `index` is valid and fits in memory."""
    earlier, later = lane[index : index + 2]
    return later not in follows(earlier) and fits_in_memory(lane, cost, cap)


def _swaps_on_critical_path(
    schedule: Schedule, graph: StageGraph, cost: Cost, spans: Sequence[Span], last: Span
) -> Iterator[tuple[int, int]]:
    """Yield the swaps of each action on the critical path to `last` with its neighbours.

    A swap is (rank, index of the first of the two actions in its lane).
    """
    by_action: dict[Compute, Span] = {}
    producers = {}
    for span in spans:
        assert isinstance(span.action, Compute)
        by_action[span.action] = span
        producers.update(dict.fromkeys(produces(span.action, graph), span))
    # Walk back from there. The cause of an action is whatever ended at its start: the
    # action before it in its lane, or the arrival of a message.
    current: Span | None = last
    while current is not None:
        lane = schedule.lanes[current.rank]
        yield from (
            (current.rank, s) for s in (current.step - 1, current.step) if 0 <= s < len(lane) - 1
        )
        assert isinstance(current.action, Compute)
        causes = [(by_action[lane[current.step - 1]], 0.0)] if current.step else []
        for message in consumes(current.action, graph):
            producer = producers[message]
            remote = producer.rank != current.rank
            causes.append((producer, cost.send_seconds(message.src, message.dst) if remote else 0))
        start = current.start
        late = (
            cause for cause, delay in causes if abs(cause.end + delay - start) < _TIME_TOLERANCE
        )
        current = next(late, None)


# -------------------------------------------------------------------------------------------------
# The search.
# -------------------------------------------------------------------------------------------------

_MIN_STRATEGIES = 20  # how many are tried before rules are searched, if the effort allows it
_KNOWN_RULES = 24  # about as many as there are
_RULE_ATTEMPTS = 1000
_SHORT_CHUNKS = 4  # micro-batches per rank of the schedules that are extended to more of them


def fit(
    placement: Sequence[int],
    chunks: int,
    cost: Cost | None = None,
    memory: float | Sequence[float] | None = None,
    graph: StageGraph | None = None,
    effort: int = 400_000,
    objective: Objective = "makespan",
    start: Sequence[Schedule] = (),
) -> Schedule:
    """Search for a fast schedule for a placement, under a memory cap.

    The result is never slower than a named schedule of the placement, or one of `start`, that fits
    in memory. The search ends early if it reaches the lower bound.

    Args:
        placement: The rank of each stage.
        chunks: The number of micro-batches.
        cost: The cost of the actions; by default `Cost.even`.
        memory: The cap on the live activations, one number for all ranks or one per rank. By
            default it is what 1F1B needs: as many micro-batches as there are ranks.
        graph: The stage graph; by default a chain.
        effort: A bound on the work: how many actions all attempts together may place. There is at
            least one attempt.
        objective: "makespan" for the time of one step by itself. "period" for the time between
            steps of which each rank starts the next as soon as it has ended its own part: the
            longest time from the first to the last action of one rank.
        start: Schedules to begin with: those that were found for a smaller cap, or for costs that
            are not much different. Those that exceed the memory are left out.

    Returns:
        The fastest schedule found.

    Raises:
        ArgumentError: The sizes do not match, one micro-batch alone exceeds the memory, or the
            objective is unknown.

    Example:
        >>> from penstock import lower, simulate
        >>> schedule = fit(placement=(0, 1, 1, 0), chunks=4, memory=1.5)
        >>> simulate(lower(schedule)).peak
        (1.5, 1.5)
    """
    placement = tuple(placement)
    cost = cost or Cost.even(placement)
    graph = graph or StageGraph.chain(len(placement))
    if objective not in _MEASURES:
        raise ArgumentError(
            f"objective {objective!r} is unknown: it is {' or '.join(map(repr, _MEASURES))}"
        )
    caps = _memory_caps(placement, chunks, cost, graph, memory)
    for schedule in start:
        if (schedule.placement, schedule.chunks) != (placement, chunks):
            raise ArgumentError(
                f"start has a schedule of {schedule.chunks} micro-batches for the placement "
                f"{schedule.placement}, but {chunks} for {placement} are asked for"
            )
    whole = [False] * len(placement)
    goal = schedule_bound(cost, graph, placement, chunks, whole, caps, objective)
    goal *= 1 + 1e-12  # the bound is a sum of floats; the factor allows for its rounding errors
    # With one stage per rank some families are the same.
    named = list(dict.fromkeys(named_schedules(placement, chunks).values()))
    fitting = [schedule for schedule in (*named, *start) if _fits_caps(schedule, cost, caps)]
    best = _BestSchedule(graph, cost, _MEASURES[objective], fitting)
    pipeline = Pipeline(placement, chunks, cost, caps, graph)
    most = _SHORT_CHUNKS * pipeline.ranks
    if chunks > most and best.seconds > goal:
        more = (chunks - most) * pipeline.period
        short = pipeline.with_chunks(most)
        named_short = list(named_schedules(placement, most).values())
        search = _Search(short, caps, objective, goal - more, named_short, effort // 2)
        effort -= effort // 2
        for starts in search.run(best.seconds - more):
            extended = extend_schedule(short, starts, pipeline, objective)
            if extended and pipeline.measure(extended, objective) < best.seconds:
                best.consider(pipeline.schedule(extended))
    search = _Search(pipeline, caps, objective, goal, named, effort)
    for starts in search.run(best.seconds):
        best.consider(pipeline.schedule(starts))
    assert best.schedule, "the strategies that check is_safe always end"
    if best.seconds <= goal:
        return best.schedule
    swaps = min(200, search.effort // pipeline.actions)
    return improve_by_swaps(best.schedule, graph, cost, caps, swaps, objective)


class _Search:
    """One search: the known rules, the strategies, and then the search of rules.

    effort  how many actions may still be placed
    """

    def __init__(
        self,
        pipeline: Pipeline,
        caps: Sequence[float],
        objective: Objective,
        goal: float,
        named: list[Schedule],
        effort: int,
    ) -> None:
        self._pipeline, self._caps, self._named = pipeline, caps, named
        self._objective, self._goal = objective, goal
        self.effort = effort

    def run(self, best: float) -> Iterator[Starts]:
        """Yield ever better schedules, if they take less than `best` seconds, as their starts."""
        pipeline, objective, goal = self._pipeline, self._objective, self._goal
        size = pipeline.actions
        if best <= goal:
            return
        rule_effort = min(self.effort // 3, _KNOWN_RULES * size)
        for starts in try_known_rules(pipeline, objective, rule_effort, goal, best):
            best = pipeline.measure(starts, objective)
            yield starts
        self.effort -= rule_effort
        # Most of the effort is for the search of rules, which finds more than the strategies.
        strategy_floor = self.effort - max(
            self.effort // 10, min(self.effort, _MIN_STRATEGIES * size)
        )
        placement, chunks, cost = pipeline.placement, pipeline.chunks, pipeline.cost
        for strategy in _strategies(placement, chunks, self._named, cost, self._caps):
            if best <= goal:
                return
            if best < inf and self.effort - size < strategy_floor:
                break
            self.effort -= size
            schedule = strategy.build(placement, chunks, self._caps, pipeline.graph)
            timed = time_orders(pipeline, pipeline.orders(schedule)) if schedule else None
            if timed and pipeline.measure(timed, objective) < best:
                best = pipeline.measure(timed, objective)
                yield timed
        rules = min(self.effort, _RULE_ATTEMPTS * size)
        if rules >= size:
            yield from search_rules(pipeline, objective, rules, goal, best)
            self.effort -= rules


class _BestSchedule:
    """The fastest schedule so far."""

    def __init__(
        self, graph: StageGraph, cost: Cost, measure: _Measure, schedules: Sequence[Schedule]
    ) -> None:
        self._graph, self._cost, self._measure = graph, cost, measure
        self.seconds = float("inf")
        self.schedule: Schedule | None = None
        for schedule in schedules:
            self.consider(schedule)

    def consider(self, schedule: Schedule | None) -> None:
        """Keep a schedule if it is faster than the best. None means that a strategy got stuck."""
        if schedule:
            seconds, _ = self._measure(list(play(schedule, self._graph, self._cost)))
            if seconds < self.seconds:
                self.seconds, self.schedule = seconds, schedule


def lower_bound(
    placement: Sequence[int], chunks: int, cost: Cost, graph: StageGraph | None = None
) -> float:
    """Return a makespan that no schedule can beat, whatever memory it has.

    Args:
        placement: The rank of each stage.
        chunks: The number of micro-batches.
        cost: The cost of the actions.
        graph: The stage graph; by default a chain.

    Returns:
        The bound, in seconds.

    Example:
        >>> from penstock import Cost
        >>> lower_bound((0, 1), chunks=4, cost=Cost.even((0, 1)))
        13.0
    """
    graph = graph or StageGraph.chain(len(placement))
    caps = [inf] * (max(placement) + 1)
    return schedule_bound(cost, graph, placement, chunks, [False] * len(placement), caps)


def _seconds_per_rank(placement: Sequence[int], cost: Cost) -> list[float]:
    """Return the seconds that each rank spends on one micro-batch."""
    return _sum_per_rank(placement, [sum(fiw) for fiw in zip(cost.F, cost.I, cost.W, strict=True)])


def _sum_per_rank(placement: Sequence[int], numbers: Sequence[float]) -> list[float]:
    """Return the sum of the numbers of its stages, for each rank."""
    totals = [0.0] * (max(placement) + 1)
    for rank, number in zip(placement, numbers, strict=True):
        totals[rank] += number
    return totals


def _memory_caps(
    placement: Placement,
    chunks: int,
    cost: Cost,
    graph: StageGraph,
    memory: float | Sequence[float] | None,
) -> list[float]:
    """Return the memory cap of each rank. Raise early if no schedule can fit."""
    ranks = max(placement, default=-1) + 1
    check_sizes(ranks, chunks)
    if set(placement) != set(range(ranks)):
        raise ArgumentError(f"placement {placement}: each rank from 0 to {ranks - 1} needs a stage")
    check_stages_match(placement, graph, cost)
    shares = _sum_per_rank(placement, cost.activation)
    if memory is None:
        return [ranks * share for share in shares]
    caps = expand_memory_caps(memory, ranks)
    short = [
        f"rank {rank}: {cap:g} < {share:g}"
        for rank, (cap, share) in enumerate(zip(caps, shares, strict=True))
        if isnan(cap) or exceeds(share, cap)
    ]
    if short:
        raise ArgumentError(
            f"no schedule fits this memory, as one micro-batch alone needs more "
            f"({', '.join(short)}): give each rank at least its share, {max(shares):g} for all"
        )
    return caps


# ---- strategies ---------------------------------------------------------------------------


class OrderPolicy(NamedTuple):
    """A rule that chooses the order of F, I and W.

    pace               1 starts micro-batches as far apart as the busiest rank needs for one; 0
                       starts them as soon as memory allows, which is better if memory is plenty
    prefer             "F", "I", "turns" (F after I, I after F) or "either"
    deepest_first      prefer the last stage; otherwise the oldest micro-batch
    weights_when_full  run Ws when memory is full; otherwise only when nothing else can run
    """

    pace: float
    prefer: str
    deepest_first: bool
    weights_when_full: bool


ORDER_POLICIES = (
    *(
        OrderPolicy(0.0, *options)
        for options in product(("turns", "F", "I", "either"), (False, True), (False, True))
    ),
    *(OrderPolicy(pace, "F", deepest, False) for pace in (0.8, 0.9) for deepest in (False, True)),
)


class _Strategy(NamedTuple):
    """A chooser, and the costs to plan with.

    The costs may differ from the real ones: an order planned with even costs is sometimes best.
    """

    choose: ActionChooser
    cost: Cost
    pace: float = 0.0
    patience: float = 0.0

    def build(
        self, placement: Placement, chunks: int, caps: Sequence[float], graph: StageGraph
    ) -> Schedule | None:
        """Return the schedule, or None if this strategy gets stuck under the caps."""
        state = SchedulerState(placement, chunks, self.cost, caps, graph, self.pace)
        run_list_scheduler(state, self.choose, self.patience)
        if not state.is_complete():
            return None
        return Schedule(placement, chunks, tuple(map(tuple, state.lanes)))


def _fits_caps(schedule: Schedule, cost: Cost, caps: Sequence[float]) -> bool:
    lanes = zip(schedule.lanes, caps, strict=True)
    return all(fits_in_memory(lane, cost, cap) for lane, cap in lanes)


def _strategies(
    placement: Placement,
    chunks: int,
    named_schedules: list[Schedule],
    cost: Cost,
    caps: Sequence[float],
) -> Iterator[_Strategy]:
    """Yield all strategies: warm-ups, the orders of the named schedules, the order policies."""
    yield from _warm_up_strategies(placement, chunks, cost, caps)
    even = replace(
        Cost.even(placement), activation=cost.activation, weight_activation=cost.weight_activation
    )
    plans = [cost] if cost == even else [cost, even]
    for schedule, plan in product(named_schedules, plans):
        order = [
            [a._replace(op=Op.I) if a.op is Op.B else a for a in lane if a.op is not Op.W]
            for lane in schedule.lanes
        ]
        for due in (never, when_full, when_lagging(lambda rank: rank)):
            yield _Strategy(follow_order(order, due), plan)
    for policy, plan in product(ORDER_POLICIES, plans):
        pace = policy.pace * max(_seconds_per_rank(placement, plan))
        yield _Strategy(_choose_by_policy(policy), plan, pace)
        if plan is cost:
            yield _Strategy(
                _choose_by_policy(policy), plan, pace, patience=sum(plan.F) / len(placement) / 4
            )


def _warm_up_strategies(
    placement: Placement, chunks: int, cost: Cost, caps: Sequence[float]
) -> Iterator[_Strategy]:
    """Yield orders with one stage a rank that differ in the forwards before the first backward.

    The first rank waits least for its first backward if it runs as many forwards as its memory
    allows, or as many as the round trip to the last stage takes. The number for the other ranks
    falls in proportion to their round trips; somewhat more or fewer is sometimes better. After
    these, a rank takes backwards and forwards in turns. The Ws that it postpones as far as its
    memory allows fill the drain. With patience, it rather waits for a backward or forward that
    comes soon than start a W, because all other ranks would wait longer, too.
    """
    stages = len(placement)
    if placement != tuple(range(stages)):
        return
    trips = [
        cost.F[s] + cost.I[s] + cost.send_seconds(s - 1, s) + cost.send_seconds(s, s - 1)
        for s in range(stages)
    ]
    round_trips = [sum(trips[stage + 1 :]) for stage in range(stages)]
    room = [cap / (size or 1.0) for cap, size in zip(caps, cost.activation, strict=True)]
    most = min(room[0], 1 + (round_trips[0] + cost.I[0]) / (cost.F[0] or 1.0), chunks)
    weight = sum(cost.W) / stages
    yielded: set[tuple[tuple[int, ...], float]] = set()
    for more, share in product(_WARM_UP_CHANGES, (1.0, 0.75)):
        slope = max(0.0, most - 1 + more) / (round_trips[0] or 1.0)
        warm_ups = tuple(
            int(max(1, min(1 + slope * trip + 1e-9, most, chunks)))
            for trip, most in zip(round_trips, room, strict=True)
        )
        if (warm_ups, share) in yielded:
            continue
        yielded.add((warm_ups, share))
        order = [_alternate(stage, chunks, count) for stage, count in enumerate(warm_ups)]
        lags = [
            int(min(chunks, share * (cap - count * size) / kept_size)) if kept_size else chunks
            for cap, count, size, kept_size in zip(
                caps, warm_ups, cost.activation, cost.kept_sizes, strict=True
            )
        ]
        choose = follow_order(order, when_lagging(lags.__getitem__))
        for patience in (weight, weight / 2, 0.0):
            yield _Strategy(choose, cost, patience=patience)


# What is added to the forwards of the first rank, in the order in which it is tried.
_WARM_UP_CHANGES = sorted((halves / 2 for halves in range(-4, 9)), key=abs)


def _alternate(stage: int, chunks: int, warm_up: int) -> list[Compute]:
    """Return the order of a stage: the forwards of the warm-up, then I and F in turns."""
    forwards = [Compute(Op.F, stage, microbatch) for microbatch in range(chunks)]
    order = forwards[:warm_up]
    for microbatch in range(chunks):
        order.append(Compute(Op.I, stage, microbatch))
        order += forwards[warm_up + microbatch : warm_up + microbatch + 1]
    return order


def named_schedules(
    placement: Placement, chunks: int, names: Container[str] | None = None
) -> dict[str, Schedule]:
    """Return the named schedules of a placement that can train: those of `names`, or all."""
    ranks = max(placement) + 1
    per_rank = len(placement) // ranks
    return {
        name: make(name, ranks, chunks, per_rank)
        for name in training_families(placement)
        if names is None or name in names
    }


def _choose_by_policy(policy: OrderPolicy) -> ActionChooser:
    """Return the chooser of a policy. It starts an F only if that is safe under the memory cap."""

    def choose(state: SchedulerState, rank: int, options: list[Compute]) -> Compute | None:
        preferred = _preferred_ops(policy, state.lanes[rank])
        # The turn of a W among preferred ops (0) and others (1): before or after all of them.
        weights = -1 if policy.weights_when_full and state.is_full(rank) else 2

        def key(action: Compute) -> tuple[int, int, int]:
            op, stage, microbatch = action
            turn = weights if op is Op.W else int(op not in preferred)
            return (
                (turn, -stage, microbatch) if policy.deepest_first else (turn, microbatch, -stage)
            )

        fitting = [a for a in options if a.op is not Op.F or state.is_safe(rank, a)]
        return min(fitting, key=key, default=None)

    return choose


def _preferred_ops(policy: OrderPolicy, lane: list[Compute]) -> str:
    if policy.prefer == "either":
        return "FI"
    if policy.prefer != "turns":
        return policy.prefer
    last = next((action.op for action in reversed(lane) if action.op is not Op.W), Op.I)
    return "I" if last is Op.F else "F"

"""The search for good numbers of a scheduling rule.

A `PriorityRule` says how slowly micro-batches should go through the stages, how far apart they
should start, and when a rank waits. That gives every action a priority number, and
`schedule_by_priority` a schedule. Good rules are found as in evolution: some are drawn at random,
most are one of the best rules so far with one or two numbers changed. On a V, schedules in rounds
are tried too. The Ws of every good schedule are placed anew, with other allowances of idle time.

What a rule can reach depends on how long its ranks may wait for an F or I before they run a W: too
short, and the Ws delay the others; too long, and the rank loses time that it never gets back. So a
rule aims at an idle time between that of the lower bound and that of the best schedule so far. With
one stage a rank, the first rank's fill often decides, and a rule that aims at the bound reaches it.

An attempt ends as soon as a rank is idle for longer than in every schedule worth keeping. Most do.

A rule that is good at once must not keep others from being changed until they are better. So of
all rules that come from the same ancestor, only the best is changed further. And a long search has
several populations, one after the other: each begins without the ancestor of the best rule of the
one before.

The random numbers have a fixed seed: the same problem always has the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from math import inf
from random import Random
from typing import Any, NamedTuple

from penstock.schedules.bound import Objective
from penstock.schedules.families.common import vee
from penstock.schedules.priority_scheduler import (
    Pipeline,
    Starts,
    refill_weight_grads,
    schedule_by_priority,
)
from penstock.schedules.round_scheduler import RoundRule, schedule_in_rounds

_PARENTS = 6  # rules from which others are made, each with another ancestor
_POPULATION = 150  # attempts that are worth one more population
_MORE_POPULATIONS = 5  # at most
_NEARLY_BEST = 1.003  # the Ws of a schedule that is not much slower than the best are placed anew
_REFILLS = (0.0, 0.5, 1.0)  # the idle times that these aim at: see PriorityRule.aim


class PriorityRule(NamedTuple):
    """The numbers from which priorities are computed.

    forward     how slowly micro-batches go through the first and the second half of the stages, in
                multiples of the shortest possible time
    backward    the same for gradients, through the second and the first half
    shift       how much later Is are than they could be, in periods (the work on one micro-batch)
    pace        the time between micro-batches, in periods
    weight_lag  how much later a W is than its I, in periods
    patience    how long a rank waits for something more urgent, in the mean seconds of a W
    headroom    how many more micro-batches a stage may have in flight than its share of the memory,
                or None for any number
    allowance   how long a rank may be idle before it prefers a W to waiting, in parts of the idle
                time to reach; -1 for as long as any other rank so far
    aim         which idle time to reach: 0 that of the lower bound, 1 that of the best schedule so
                far
    drain       the patience of a rank after its last F, or None for the same as before. If it is
                larger, no W holds up the last input gradients on their way to the first rank.
    """

    forward: tuple[float, float]
    backward: tuple[float, float]
    shift: float
    pace: float
    weight_lag: float
    patience: float
    headroom: float | None
    allowance: float
    aim: float = 1.0
    drain: float | None = None


Rule = PriorityRule | RoundRule

# Where the search begins: a few rules that, together, are good for pipelines of 16 to 32 ranks with
# memory for one to three micro-batches per rank. The first ones are better for one stage a rank,
# the last ones for a V.
_FIRST_RULES = (
    PriorityRule((4, 1.5), (3, 1.5), -0.5, 1, 1000, 1.5, 1, 1, 0),
    PriorityRule((1, 1.5), (2, 2), -0.5, 0.8, 1000, 1.5, 2, 1),
    PriorityRule((1.361, 1.673), (2.775, 2.723), -0.322, 0.77, 1000, 0.85, 2, 0.5),
    PriorityRule((1, 2), (1, 2), 0, 1.5, 1000, 0.1, 0, inf, 0),
    PriorityRule((1.976, 0.863), (5.25, 5.157), 0, 1.2, 1000, 0.56, 0, 0.25, 0),
    PriorityRule((3.176, 1.291), (2.344, 2.795), 0, 0.914, 1000, 0.896, 1, 0.25, 0),
    PriorityRule((2.071, 0.778), (5.839, 4.919), 0.054, 1.288, 1000, 1.426, 0.25, 0.594, 0),
    PriorityRule((3.966, 4.953), (3.047, 0.926), 0.585, 0.89, 1000, 0.2, 0.75, -1),
    PriorityRule((1.9, 2.3), (7, 5.6), -0.35, 1.35, 1000, 0.5, 0, 1),
    PriorityRule((4.135, 8.728), (4.758, 0.874), 0.958, 1.569, 1000, 0.329, None, -1),
    PriorityRule((4.178, 11.911), (2.5, 1), 1, 1.29, 1000, 0.2, 0.25, -1),
    PriorityRule((2.152, 2.009), (6.735, 4.09), -0.35, 1.35, 1000, 0.5, 1, 1),
    PriorityRule((2.619, 12.834), (9.113, 8.32), -2.473, 1.541, 1000, 0.307, 0.75, 1),
    PriorityRule((2.236, 3.969), (7, 5.6), -0.628, 0.993, 1000, 0.5, None, -1, 0),
    PriorityRule((1.9, 2.3), (7, 5.6), -0.437, 1.211, 1000, 0.411, 1.5, inf, 0.9),
    PriorityRule((1.9, 2.3), (9.555, 5.005), -0.921, 1.35, 1000, 0.5, 0, 1),
    PriorityRule((2.364, 2.759), (6.2, 9.346), -1.026, 1.126, 1000, 0.411, 2, 1, 0.5),
    PriorityRule((2.5, 2.9), (5.88, 9.55), -0.956, 1.12, 1000, 0.39, 1, 0.675, 1, 0.75),
    PriorityRule((2.45, 2.2), (6.14, 10.1), -0.88, 1.3, 1000, 0.41, 0, 0.69, 1, 0.75),
)
_FIRST_ROUND_RULES = (
    RoundRule(),
    RoundRule(more=-2, slope=0.1),
    RoundRule(fill_inputs=False),
    RoundRule(more=-1, slope=0.088),
    RoundRule(more=1, slope=0.1, reserve=1),
)

_SLOWNESSES = (1, 1, 1.5, 2, 3, 4)
_SHIFTS = (-2, -1, -0.5, 0, 0, 0, 0.5, 1, 2)
_PACES = (0.3, 0.6, 0.8, 0.9, 1, 1, 1.2, 1.5, 2)
_WEIGHT_LAGS = (0, 1, 2, 5, 20, 1000, 1000, 1000)
_HEADROOMS = (None, -2, -1, 0, 0.25, 0.5, 0.75, 1, 1.5, 2)
_ALLOWANCES = (inf, -1, -1, 0.25, 0.5, 0.75, 1, 1)
_AIMS = (0, 0.5, 0.9, 1)
_DRAINS = (None, None, 0.5, 0.75, 1)


def _draw_rule(draw: Random) -> PriorityRule:
    return PriorityRule(
        (draw.choice(_SLOWNESSES), draw.choice(_SLOWNESSES)),
        (draw.choice(_SLOWNESSES), draw.choice(_SLOWNESSES)),
        draw.choice(_SHIFTS),
        draw.choice(_PACES),
        draw.choice(_WEIGHT_LAGS),
        draw.choice((0, 0.25, 0.5, 1, 1, 1.5)),
        draw.choice(_HEADROOMS),
        draw.choice(_ALLOWANCES),
        draw.choice(_AIMS),
        draw.choice(_DRAINS),
    )


def _change_rule(draw: Random, rule: Rule) -> Rule:
    if isinstance(rule, RoundRule):
        return _change_round_rule(draw, rule)

    # Large changes find other kinds of schedules, small ones the best of a kind.
    width = draw.choice((1.0, 1.0, 0.2))

    def stretch(number: float) -> float:
        return number * draw.uniform(1 - 0.3 * width, 1 + 0.4 * width)

    def stretch_both(pair: tuple[float, float]) -> tuple[float, float]:
        return stretch(pair[0]), stretch(pair[1])

    def shift(number: float) -> float:
        return number + width * draw.uniform(-0.5, 0.5)

    changes: list[Callable[[PriorityRule], PriorityRule]] = [
        lambda r: r._replace(forward=stretch_both(r.forward)),
        lambda r: r._replace(backward=stretch_both(r.backward)),
        lambda r: r._replace(shift=shift(r.shift)),
        lambda r: r._replace(pace=r.pace * draw.uniform(1 - 0.2 * width, 1 + 0.25 * width)),
        lambda r: r._replace(weight_lag=draw.choice(_WEIGHT_LAGS)),
        lambda r: r._replace(patience=draw.uniform(0, 1.6)),
        lambda r: r._replace(drain=draw.choice(_DRAINS)),
        lambda r: r._replace(headroom=draw.choice(_HEADROOMS)),
        lambda r: r._replace(allowance=draw.choice(_ALLOWANCES), aim=draw.choice(_AIMS)),
        lambda r: r._replace(allowance=draw.uniform(0.2, 2.0), aim=draw.choice(_AIMS)),
    ]
    for _ in range(draw.choice((1, 1, 2))):
        rule = draw.choice(changes)(rule)
    return rule


def _draw_round_rule(draw: Random) -> RoundRule:
    return RoundRule(*(draw.choice(numbers) for numbers in _ROUND_NUMBERS))


def _change_round_rule(draw: Random, rule: RoundRule) -> RoundRule:
    numbers: list[Any] = list(rule)
    for _ in range(draw.choice((1, 1, 2))):
        index = draw.randrange(len(numbers))
        numbers[index] = draw.choice(_ROUND_NUMBERS[index])
    return RoundRule(*numbers)


# For each number of a RoundRule, those to draw from.
_ROUND_NUMBERS: tuple[tuple[Any, ...], ...] = (
    (True, True, True, False),
    (True, True, True, False),
    (-2, -1, 0, 0, 0.5, 1, 2, 3, 4),
    (-2, -1, 0, 0, 0, 1, 2, 3),
    (0, 0, 0, 0.1, 0.2, 0.3, -0.1, -0.2),
    (0, 0, 0, 1, 2, 3, 4),
)


class _Trial:
    """A pipeline, an objective, and the seconds that cannot be beaten.

    Each population tries many rules that an earlier one has tried, and many rules give the same
    order of F and I. So the trial remembers the schedules that it has computed.
    """

    def __init__(self, pipeline: Pipeline, objective: Objective, goal: float) -> None:
        self.pipeline, self.objective, self.goal = pipeline, objective, goal
        # By orders of F and I, and their seconds: the schedule with the best Ws, or None.
        self._refilled: dict[Hashable, Starts | None] = {}
        # By what decides a schedule: it, and the `slowest` that was given, or None for a schedule
        # that takes longer.
        self._scheduled: dict[Hashable, tuple[Starts | None, float]] = {}

    def seconds(self, starts: Starts) -> float:
        return self.pipeline.measure(starts, self.objective)

    def idle_time(self, best: float, aim: float) -> float:
        """Return the idle time to reach, between that of the goal and that of the best schedule."""
        lowest = max(0.0, self.goal - self.pipeline.work)
        highest = best - self.pipeline.work if best < inf else self.pipeline.period
        return lowest + aim * max(0.0, highest - lowest)

    def run(self, rule: Rule, best: float, slowest: float, near: float) -> Starts | None:
        """Return the schedule of a rule, or None if it takes more than `slowest` seconds.

        If it takes less than `near` seconds, its Ws are placed anew.
        """
        if isinstance(rule, RoundRule):
            starts = schedule_in_rounds(self.pipeline, rule)
        else:
            starts = _apply_rule(self, rule, best, slowest)
        if starts is None:
            return None
        seconds = self.seconds(starts)
        if self.goal < seconds < near:
            return self._refill(starts, seconds) or starts
        return starts

    def _refill(self, starts: Starts, seconds: float) -> Starts | None:
        """Return a faster schedule with the same orders of F and I, or None if none is found."""
        orders = self.pipeline.orders_by_start(starts, with_weight_grads=False)
        key = tuple(map(tuple, orders)), seconds
        if key not in self._refilled:
            best = None
            for aim in _REFILLS:
                allowances = [self.idle_time(seconds, aim)] * self.pipeline.ranks
                refilled = refill_weight_grads(self.pipeline, orders, allowances)
                if refilled and self.seconds(refilled) < seconds:
                    best, seconds = refilled, self.seconds(refilled)
            self._refilled[key] = best
        return self._refilled[key]

    def schedule(
        self, key: Hashable, slowest: float, compute: Callable[[], Starts | None]
    ) -> Starts | None:
        """Return what `compute` returns, or has returned for the same key.

        It returns None for a schedule that takes longer than `slowest`, and the same schedule for
        all larger limits.
        """
        starts, limit = self._scheduled.get(key, (None, -inf))
        is_known = slowest <= limit if starts is None else slowest >= limit
        if not is_known:
            starts = compute()
            self._scheduled[key] = starts, slowest
        return starts


def try_known_rules(
    pipeline: Pipeline, objective: Objective, effort: int, goal: float, best: float = inf
) -> Iterator[Starts]:
    """Yield ever better schedules of the rules with which `search_rules` begins.

    The arguments are those of `search_rules`.
    """
    trial = _Trial(pipeline, objective, goal)
    for rule in _first_rules(pipeline):
        if effort < pipeline.actions or best <= goal:
            return
        effort -= pipeline.actions
        starts = trial.run(rule, best, best * _NEARLY_BEST, best * _NEARLY_BEST)
        if starts and trial.seconds(starts) < best:
            best = trial.seconds(starts)
            yield starts


def search_rules(
    pipeline: Pipeline, objective: Objective, effort: int, goal: float, best: float = inf
) -> Iterator[Starts]:
    """Yield ever better schedules of a pipeline, as the starts of its actions.

    Args:
        pipeline: The pipeline.
        objective: What to make short: "makespan" or "period".
        effort: How many actions all attempts together may place.
        goal: Seconds that cannot be beaten. The search ends when it reaches them.
        best: Seconds of the best schedule so far. Only faster ones are yielded.
    """
    trial, rules = _Trial(pipeline, objective, goal), _first_rules(pipeline)
    populations = 1 + min(_MORE_POPULATIONS, effort // (_POPULATION * pipeline.actions))
    for population in range(populations):
        winner: Rule | None = None
        share = effort // populations
        for seconds, ancestor, starts in _evolve(trial, Random(population), share, rules):
            winner = ancestor
            if seconds < best:
                best = seconds
                yield starts
        if best <= goal:
            return
        rules = [rule for rule in rules if rule != winner]


def _is_vee(pipeline: Pipeline) -> bool:
    return pipeline.ranks > 1 and pipeline.placement == vee(pipeline.ranks)


def _first_rules(pipeline: Pipeline) -> list[Rule]:
    if _is_vee(pipeline):
        return [*_FIRST_ROUND_RULES, *reversed(_FIRST_RULES)]
    return [*_FIRST_RULES]


def _evolve(
    trial: _Trial, draw: Random, effort: int, first_rules: Sequence[Rule]
) -> Iterator[tuple[float, Rule, Starts]]:
    """Yield (seconds, ancestor, starts) of ever better rules.

    The ancestor is the one of `first_rules`, or the random rule, from which a rule was made.
    """
    pipeline, attempt, best = trial.pipeline, 0, inf
    # By ancestor: the fastest rule that comes from it, and its seconds.
    parents: dict[Rule, tuple[float, Rule]] = {}
    while effort >= pipeline.actions and best > trial.goal:
        if attempt < len(first_rules):
            rule = ancestor = first_rules[attempt]
        elif _is_vee(pipeline) and draw.random() < 0.15:
            rule = ancestor = _draw_round_rule(draw)
        elif not parents or draw.random() < 0.15:
            rule = ancestor = _draw_rule(draw)
        else:
            ancestor = draw.choice(list(parents))
            rule = _change_rule(draw, parents[ancestor][1])
        attempt += 1
        effort -= pipeline.actions
        slowest = inf
        if len(parents) == _PARENTS:
            slowest = max(seconds for seconds, _ in parents.values())
        before = parents[ancestor][0] if ancestor in parents else inf
        near = max(best, min(before, slowest)) * _NEARLY_BEST
        starts = trial.run(rule, best, max(slowest, best * _NEARLY_BEST), near)
        if starts is None:
            continue
        seconds = trial.seconds(starts)
        if seconds < near:
            effort -= len(_REFILLS) * pipeline.actions
        if seconds <= before:
            parents[ancestor] = seconds, rule
            if len(parents) > _PARENTS:
                del parents[max(parents, key=lambda ancestor: parents[ancestor][0])]
        if seconds < best:
            best = seconds
            yield seconds, ancestor, starts


# ---- from a rule to priorities --------------------------------------------------------------


def _apply_rule(trial: _Trial, rule: PriorityRule, best: float, slowest: float) -> Starts | None:
    pipeline = trial.pipeline
    stages, ranks, cost = pipeline.stages, pipeline.ranks, pipeline.cost
    period = rule.pace * pipeline.period
    forward, backward = _path_times(pipeline, rule)
    first_times = [
        *forward,
        *(time + rule.shift * period for time in backward),
        *(time + (rule.shift + rule.weight_lag) * period for time in backward),
    ]
    priorities = [[time + m * period for m in range(pipeline.chunks)] for time in first_times]
    weight = sum(cost.W) / stages
    patience = rule.patience * weight
    drain_patience = patience if rule.drain is None else rule.drain * weight
    limits = None
    if rule.headroom is not None:
        limits = _limits_in_flight(pipeline, rule.headroom)
    even, allowances = [0.0] * ranks, None
    if rule.allowance >= 0:
        idle = trial.idle_time(best, rule.aim)
        allowances = [rule.allowance * idle if idle > 0 else 0.0] * ranks
    idle_limits = [slowest - pipeline.chunks * load for load in pipeline.loads]

    def schedule(handicaps: Sequence[float]) -> Starts | None:
        return schedule_by_priority(
            pipeline,
            priorities,
            patience,
            drain_patience,
            allowances,
            handicaps,
            limits,
            idle_limits,
        )

    key = rule, allowances and allowances[0]
    starts = trial.schedule((key, "first"), slowest, lambda: schedule(even))
    if starts and allowances is None:
        # Once more, now that it is known which ranks are idle for long anyway.
        idle_seconds = pipeline.idle_seconds(starts)
        again = trial.schedule((key, "again"), slowest, lambda: schedule(idle_seconds))
        if again and pipeline.measure(again, "period") < pipeline.measure(starts, "period"):
            return again
    return starts


def _path_times(pipeline: Pipeline, rule: PriorityRule) -> tuple[list[float], list[float]]:
    """Return when the first micro-batch should reach F and I of each stage."""
    stages, cost, placement = pipeline.stages, pipeline.cost, pipeline.placement

    def hop(src: int, dst: int) -> float:
        return cost.send_seconds(src, dst) if placement[src] != placement[dst] else 0.0

    forward, backward = [0.0] * stages, [0.0] * stages
    for s in range(1, stages):
        slowness = rule.forward[2 * (s - 1) >= stages]
        forward[s] = forward[s - 1] + slowness * (cost.F[s - 1] + hop(s - 1, s))
    backward[-1] = forward[-1] + cost.F[-1]
    for s in reversed(range(stages - 1)):
        slowness = rule.backward[2 * (s + 1) < stages]
        backward[s] = backward[s + 1] + slowness * (cost.I[s + 1] + hop(s + 1, s))
    return forward, backward


def _limits_in_flight(pipeline: Pipeline, headroom: float) -> list[int]:
    """Return how many micro-batches each stage may have between F and I.

    The stages of a rank share its memory in proportion to their round trips. Without limits, the
    first stages of a V would fill it before their micro-batches come back.
    """
    cost, placement = pipeline.cost, pipeline.placement
    forward, backward = _path_times(pipeline, _FASTEST)
    bytes_seconds = [
        (backward[s] + cost.I[s] - forward[s]) * cost.activation[s] for s in range(pipeline.stages)
    ]
    totals = [0.0] * pipeline.ranks
    for stage, rank in enumerate(placement):
        totals[rank] += bytes_seconds[stage]
    limits = []
    for stage, rank in enumerate(placement):
        size, cap = cost.activation[stage], pipeline.caps[rank]
        count = pipeline.chunks
        if size and totals[rank] and cap < inf:
            share = cap * bytes_seconds[stage] / totals[rank] / size
            count = int(max(1.0, min(share + headroom, count)))
        limits.append(count)
    return limits


_FASTEST = PriorityRule((1, 1), (1, 1), 0, 1, 0, 0, None, 0)

"""List scheduling by numbers, schedules in rounds, and the search for their rules."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import Cost, lower, simulate
from penstock.schedules import fit, loop, vee
from penstock.schedules.bound import Objective, schedule_bound
from penstock.schedules.cost import fits_in_memory
from penstock.schedules.ir import Schedule, StageGraph
from penstock.schedules.priority_scheduler import (
    Pipeline,
    Starts,
    refill_weight_grads,
    schedule_by_priority,
)
from penstock.schedules.round_scheduler import RoundRule, schedule_in_rounds
from penstock.schedules.rule_search import _Trial, search_rules
from penstock.schedules.verify import verify


def uneven(placement: tuple[int, ...], kept: float = 0.5) -> Cost:
    stages = range(len(placement))
    return Cost(
        F=tuple(3.0 + s % 2 for s in stages),
        I=tuple(3.0 + s % 3 for s in stages),
        W=tuple(2.0 + s % 2 for s in stages),
        activation=tuple(1.0 for _ in stages),
        send=0.5,
        weight_activation=tuple(kept for _ in stages),
    )


def pipeline_of(placement: tuple[int, ...], chunks: int, memory: float) -> Pipeline:
    ranks = max(placement) + 1
    graph = StageGraph.chain(len(placement))
    return Pipeline(placement, chunks, uneven(placement), [memory] * ranks, graph)


def check_schedule(pipeline: Pipeline, schedule: Schedule, memory: float) -> None:
    assert not verify(lower(schedule))
    assert all(fits_in_memory(lane, pipeline.cost, memory) for lane in schedule.lanes)


@pytest.mark.parametrize("objective", ["makespan", "period"])
@pytest.mark.parametrize(
    ("placement", "memory"),
    [(loop(3, 1), 3), (loop(3, 1), 1), (vee(3), 4), (vee(3), 2), (loop(2, 2), 3), ((0, 1, 0), 2)],
)
def test_search_rules_keeps_to_the_memory_and_times_what_it_returns(
    placement: tuple[int, ...], memory: float, objective: Objective
) -> None:
    pipeline = pipeline_of(placement, 7, memory)
    seconds = []
    for starts in search_rules(pipeline, objective, 40 * pipeline.actions, goal=0.0):
        schedule = pipeline.schedule(starts)
        check_schedule(pipeline, schedule, memory)
        timeline = simulate(lower(schedule), pipeline.cost)
        makespan = pipeline.measure(starts, "makespan")
        period = pipeline.measure(starts, "period")
        # The simulator starts everything as soon as it can, so it may only be faster.
        assert timeline.makespan <= makespan + 1e-9
        assert timeline.period <= period + 1e-9
        seconds.append(period if objective == "period" else makespan)
    assert seconds
    assert seconds == sorted(seconds, reverse=True)


def test_search_rules_begins_with_few_micro_batches_and_ends_with_all() -> None:
    pipeline = pipeline_of(vee(3), 40, 6)
    results = list(search_rules(pipeline, "period", 60 * pipeline.actions, goal=0.0))
    assert {len(done) for starts in results for done in starts} == {40}
    best = pipeline.measure(results[-1], "period")
    in_rounds = schedule_in_rounds(pipeline, RoundRule())
    assert in_rounds is not None
    assert best < pipeline.measure(in_rounds, "period") + 1e-9


# In these cases the search remembers schedules for limits that were different.
@pytest.mark.parametrize(
    ("placement", "chunks", "memory", "objective"),
    [
        (loop(3, 2), 12, 4, "makespan"),
        (loop(3, 2), 12, 6, "period"),
        (vee(4), 8, 6, "makespan"),
    ],
)
def test_search_rules_finds_the_same_if_it_computes_everything_anew(
    placement: tuple[int, ...],
    chunks: int,
    memory: float,
    objective: Objective,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = pipeline_of(placement, chunks, memory)

    def search() -> list[Starts]:
        return list(search_rules(pipeline, objective, 450 * pipeline.actions, goal=0.0))

    found, run = search(), _Trial.run

    def run_anew(trial: _Trial, *arguments: Any) -> Starts | None:
        trial._scheduled.clear()
        trial._refilled.clear()
        return run(trial, *arguments)

    monkeypatch.setattr(_Trial, "run", run_anew)
    assert found == search()


def test_refilling_weight_grads_keeps_the_order_of_the_others() -> None:
    pipeline = pipeline_of(vee(4), 12, 8)
    starts = schedule_in_rounds(pipeline, RoundRule())
    assert starts is not None
    refilled = refill_weight_grads(pipeline, pipeline.orders_by_start(starts, False), [5.0] * 4)
    assert refilled is not None
    before, after = pipeline.schedule(starts), pipeline.schedule(refilled)
    check_schedule(pipeline, after, 8)
    for old, new in zip(before.lanes, after.lanes, strict=True):
        assert [a for a in old if a.op != "W"] == [a for a in new if a.op != "W"]


def test_fit_finds_more_with_rules_than_with_the_orders_of_named_schedules() -> None:
    # A row of arXiv 2401.10241 at a quarter of its size.
    placement, chunks = vee(4), 12
    cost = Cost((14.4,) * 8, (14.4,) * 8, (9.7,) * 8, (1.0,) * 8, 1.6, (0.43,) * 8)

    def period(effort: int) -> float:
        schedule = fit(placement, chunks, cost, 8, objective="period", effort=effort)
        return simulate(lower(schedule), cost).period

    actions = 3 * len(placement) * chunks
    assert period(60 * actions) < period(actions)


def test_attempts_end_early_when_a_rank_is_idle_for_too_long() -> None:
    pipeline = pipeline_of(vee(4), 12, 8)
    *_, last = search_rules(pipeline, "period", 60 * pipeline.actions, goal=0.0)
    idle = max(pipeline.idle_seconds(last))
    priorities = [[float(m) for m in range(pipeline.chunks)]] * pipeline.queues

    def run(limit: float) -> object:
        limits = [limit] * pipeline.ranks
        return schedule_by_priority(pipeline, priorities, 0.0, 0.0, None, [0.0] * 4, None, limits)

    assert run(idle / 100) is None
    assert run(1e9) is not None


def test_ranks_with_patience_in_the_drain_hold_up_no_input_gradient() -> None:
    placement = loop(3, 1)
    cost = Cost((1.0,) * 3, (2.0,) * 3, (3.0,) * 3, (1.0,) * 3, 0.5)
    pipeline = Pipeline(placement, 3, cost, [9.0] * 3, StageGraph.chain(3))
    F, I, W = ([[late + m for m in range(3)]] * 3 for late in (0.0, 0.0, 100.0))

    def last_wait(drain_patience: float) -> float:
        """Return how long the last input gradient of the last rank waits on the rank before it."""
        starts = schedule_by_priority(
            pipeline, [*F, *I, *W], 0.0, drain_patience, [99.0] * 3, [0.0] * 3, None
        )
        assert starts is not None
        arrival = starts[5][-1] + 2.0 + 0.5
        return starts[4][-1] - arrival

    assert last_wait(0.0) > 0.1
    assert last_wait(3.0) == pytest.approx(0.0)


def test_known_rules_reach_the_bound_where_a_rule_was_missing() -> None:
    """A point of arXiv 2401.10241: 16 ranks, 64 micro-batches, memory for 1.875 per rank."""
    chunks, kept = 64, 32 * 4096 / (34 * 4096 + 5 * 32 * 1024)
    F, I, W = ((2.0 * seconds,) * 16 for seconds in (14412, 14393, 9688))
    cost = Cost(F, I, W, (1.0,) * 16, 1621, weight_activation=(kept,) * 16)
    schedule = fit(loop(16, 1), chunks, cost, memory=30, objective="period", effort=300_000)
    work = chunks * 2 * (14412 + 14393 + 9688)
    assert round(1 - work / simulate(lower(schedule), cost).period, 6) <= 0.015365


def test_rules_that_aim_at_the_lower_bound_reach_it() -> None:
    # With one stage a rank and less than two micro-batches per rank, the fill decides: the first
    # rank runs as many forwards as fit, and must never wait again after its first backward.
    placement, chunks = loop(16, 1), 48
    cost = Cost((9.5,) * 16, (9.7,) * 16, (7.3,) * 16, (1.0,) * 16, 0.9, (0.46,) * 16)
    schedule = fit(placement, chunks, cost, memory=24, objective="period", effort=20_000)
    caps, chain = [24.0] * 16, StageGraph.chain(16)
    bound = schedule_bound(cost, chain, placement, chunks, [False] * 16, caps, "period")
    assert simulate(lower(schedule), cost).period == pytest.approx(bound)

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from penstock import Cost, lower, schedules, simulate
from penstock.errors import ArgumentError
from penstock.schedules.explain import (
    Place,
    TimelineIndex,
    compare_run,
    critical_path,
    find_idle,
)
from penstock.schedules.ir import Send, consumes, produces


def index_of(name: str, ranks: int, chunks: int, **costs: float) -> TimelineIndex:
    schedule = schedules.make(name, ranks, chunks)
    return TimelineIndex(simulate(lower(schedule), Cost.even(schedule.placement, **costs)))


@pytest.mark.parametrize("name", schedules.FAMILIES)
@pytest.mark.parametrize("send", [0.0, 0.3])
def test_critical_path_adds_up_to_the_makespan(name: str, send: float) -> None:
    index = index_of(name, 4, 8, send=send)
    graph = index.timeline.program.graph
    sent = {s.action.message: s.end for s in index.timeline.spans if isinstance(s.action, Send)}
    path = critical_path(index)
    assert index.span(path[0]).start == 0.0
    assert index.span(path[-1]).end == pytest.approx(index.timeline.makespan)
    for before, place in pairwise(path):  # without a gap: each starts when its cause is there
        cause = index.span(before).end
        if before.rank != place.rank:
            made = produces(index.action(before), graph)
            cause = max(sent[m] for m in consumes(index.action(place), graph) if m in made) + send
        assert index.span(place).start == pytest.approx(cause)


@pytest.mark.parametrize("name", schedules.FAMILIES)
def test_idle_times_add_up_to_the_bubble(name: str) -> None:
    index = index_of(name, 4, 8, send=0.2)
    timeline = index.timeline
    idle = sum(gap.end - gap.start for gap in find_idle(index))
    assert idle == pytest.approx(timeline.bubble * timeline.ranks * timeline.makespan)


def test_idle_time_names_whom_it_waits_for() -> None:
    index = index_of("1f1b", 2, 2)
    first, second, *_ = find_idle(index)
    assert (first.cause, first.blocker) == ("wait", index.places[index.action(Place(1, 1))])
    assert str(index.action(second.blocker or Place(0, 0))) == "1B1"


def test_idle_time_of_1f1b_is_due_to_its_order_or_to_memory() -> None:
    index = index_of("1f1b", 4, 8)
    without = {gap.cause for gap in find_idle(index) if gap.rank == 0}
    capped = {gap.cause for gap in find_idle(index, memory=4) if gap.rank == 0}
    assert without == {"order", "wait"}
    assert capped == {"memory", "wait"}


def test_comparison_with_a_plan_finds_the_slow_stage_and_the_gaps() -> None:
    plan = index_of("1f1b", 3, 4, F=1.0).timeline
    slow = simulate(plan.program, plan.cost.scaled([1, 2, 1]))
    found = compare_run(plan, slow)
    assert {round(ratio, 6) for ratio in found.ratios[1]} == {2.0}
    assert {round(ratio, 6) for ratio in found.ratios[0]} == {1.0}
    assert "stage 1" in found.sentences[1]
    assert compare_run(plan, plan).sentences == ("The step took 18, as planned.",)
    late = simulate(plan.program, replace(plan.cost, send=0.5))
    assert any("passed between actions" in s for s in compare_run(plan, late).sentences)


def test_comparison_of_different_schedules_is_refused() -> None:
    with pytest.raises(ArgumentError, match="of different schedules"):
        compare_run(index_of("gpipe", 2, 4).timeline, index_of("1f1b", 2, 4).timeline)

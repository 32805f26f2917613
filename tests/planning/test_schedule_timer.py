from __future__ import annotations

from math import inf
from random import Random

import pytest

from penstock.planning.schedule_timer import ScheduleTimer
from penstock.planning.stage_costs import CostTable
from penstock.schedules.families import FAMILIES, make
from penstock.schedules.ir import StageGraph
from penstock.schedules.lowering import RecomputePredicate, lower, recompute
from penstock.schedules.timeline import simulate
from tests.planning.problems import even_profile, random_profile

TRAINING = [name for name, family in FAMILIES.items() if family.trains]


def choose_stages(flags: list[bool]) -> RecomputePredicate:
    return lambda stage, microbatch: flags[stage]


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("seed", [11, 12])
def test_timer_agrees_with_the_simulator(name: str, seed: int) -> None:
    draw, ranks, chunks = Random(seed), 3, 6
    schedule = make(name, ranks, chunks)
    profile = next(
        profile
        for profile in map(random_profile, range(seed * 1000, seed * 1000 + 999))
        if len(profile.units) >= schedule.stages and len(profile.devices) == ranks
    )
    table = CostTable(profile, chunks, "threads")
    units = len(profile.units)
    cut = [1] * (schedule.stages - 1) + [units - schedule.stages + 1]
    costs = table.stage_costs(cut, schedule.placement)
    timer = ScheduleTimer(name, schedule, costs.graph)
    for _ in range(4):
        flags = [draw.random() < 0.5 for _ in cut]
        full = recompute(schedule, choose_stages(flags))
        timeline = simulate(lower(full, costs.graph), costs.cost)
        assert timer.seconds(costs, flags) == pytest.approx(timeline.makespan, rel=1e-12)
        assert timer.seconds(costs, flags, "period") == pytest.approx(timeline.period, rel=1e-12)
        for factor in (0.2, 0.7, 0.99, 1.0, 1.3):  # only a slower step may be given up
            limited = timer.seconds(costs, flags, limit=factor * timeline.makespan)
            assert limited == timer.seconds(costs, flags) or (factor < 1 and limited == inf)
        assert timer.seconds(costs, flags, limit=0.2 * timeline.makespan) == inf
        step, period, bubble = timer.forecast(costs, flags)
        assert step == timer.seconds(costs, flags)
        assert period == timer.seconds(costs, flags, "period")
        assert sum(bubble.values()) == pytest.approx(timeline.bubble, rel=1e-9)
        starts = [lane[0].start for lane in timeline.computes]
        assert bubble["fill"] == pytest.approx(sum(starts) / (ranks * step), rel=1e-9)
        peaks = [timer.peak(rank, costs, flags) for rank in range(ranks)]
        assert peaks == pytest.approx(timeline.peak, rel=1e-9)


def test_idle_time_is_split_into_waits_and_messages() -> None:
    profile = even_profile(units=2, ranks=2, rows=2, send=0.5)
    costs = CostTable(profile, 2, "threads").stage_costs([1, 1], (0, 1))
    timer = ScheduleTimer("1f1b", make("1f1b", 2, 2), costs.graph)
    # rank 0: F 0..1, F 1..2, then 1B0 ends at 4.5 and its message is there at 5; B 5..7, and so on.
    step, _, bubble = timer.forecast(costs, (False, False))
    assert step == 10.0
    idle = {cause: share * 2 * step for cause, share in bubble.items()}
    assert idle == pytest.approx({"fill": 1.5, "drain": 2.5, "messages": 1.0, "waits": 3.0})


def test_few_moments_are_left_of_many_microbatches() -> None:
    graph = StageGraph.chain(16)
    timer = ScheduleTimer("dualpipe-v", make("dualpipe-v", 8, 200), graph)
    assert max(map(len, timer._moments)) < 100

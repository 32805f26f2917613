from __future__ import annotations

from random import Random

import pytest

from penstock.planning.schedule_timer import ScheduleTimer
from penstock.planning.stage_costs import CostTable
from penstock.schedules.families import FAMILIES, make
from penstock.schedules.lowering import RecomputePredicate, lower, recompute
from penstock.schedules.timeline import simulate
from tests.planning.problems import random_profile

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
        peaks = [timer.peak(rank, costs, flags) for rank in range(ranks)]
        assert peaks == pytest.approx(timeline.peak, rel=1e-9)

"""Bounds for any schedule under a memory cap."""

from __future__ import annotations

from random import Random

import pytest

from penstock import Cost, lower, simulate
from penstock.planning.solver import has_solver, solve_schedule
from penstock.planning.stage_costs import StageCosts
from penstock.schedules import fit, loop, vee
from penstock.schedules.bound import Objective, schedule_bound
from penstock.schedules.ir import StageGraph


def bound_of(
    cost: Cost, placement: tuple[int, ...], chunks: int, cap: float, objective: Objective
) -> float:
    stages, ranks = len(placement), max(placement) + 1
    graph = StageGraph.chain(stages)
    return schedule_bound(
        cost, graph, placement, chunks, [False] * stages, [cap] * ranks, objective
    )


@pytest.mark.parametrize(
    ("cap", "published"), [(16, 0.153570), (24, 0.063219), (26, 0.049320), (28, 0.035002)]
)
def test_published_bubbles_of_16_ranks_are_the_best_possible(cap: float, published: float) -> None:
    # arXiv 2401.10241: idle before the first gradient, and with little memory after the last
    # forward, too.
    F, I, W = 2 * 14407, 2 * 14380, 2 * 9676
    kept = 32 * 4096 / (34 * 4096 + 5 * 32 * 1024)
    cost = Cost((F,) * 16, (I,) * 16, (W,) * 16, (1.0,) * 16, 1610, (kept,) * 16)
    bound = bound_of(cost, loop(16, 1), 48, cap, "period")
    assert 1 - 48 * (F + I + W) / bound == pytest.approx(published, abs=5e-7)


@pytest.mark.parametrize("objective", ["makespan", "period"])
@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_beats_the_bound(seed: int, objective: Objective) -> None:
    draw = Random(seed)
    placement = draw.choice([loop(2, 1), loop(3, 1), vee(2), loop(2, 2)])
    stages, ranks, chunks = len(placement), max(placement) + 1, draw.choice([3, 4])
    F, I, W = (tuple(float(draw.randint(1, 4)) for _ in range(stages)) for _ in range(3))
    cost = Cost(F, I, W, (1.0,) * stages, 0.5, weight_activation=(0.4,) * stages)
    cap = stages / ranks * draw.choice([1.0, 1.5, 2.0])
    bound = bound_of(cost, placement, chunks, cap, objective)
    schedule = fit(placement, chunks, cost, cap, objective=objective)
    seconds = getattr(simulate(lower(schedule), cost), objective)
    assert bound <= seconds + 1e-9
    if has_solver():
        costs = StageCosts(cost, StageGraph.chain(stages), (0.0,) * ranks)
        flags, caps = [False] * stages, [cap] * ranks
        solution = solve_schedule(costs, schedule, flags, caps, objective, seconds=1.0)
        if solution.schedule is not None:
            seconds = min(seconds, getattr(simulate(lower(solution.schedule), cost), objective))
            assert bound <= seconds + 1e-9

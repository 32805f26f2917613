"""The exact solver of one period, and schedules that repeat its pattern."""

from __future__ import annotations

from itertools import pairwise

import pytest

from penstock import Cost, lower, simulate
from penstock.planning.period_solver import (
    Pattern,
    repeat_pattern,
    shortest_period,
    solve_period,
    unroll_pattern,
)
from penstock.planning.solver import solve_schedule
from penstock.planning.stage_costs import StageCosts
from penstock.schedules import loop, make, vee
from penstock.schedules.cost import exceeds
from penstock.schedules.fit import Objective
from penstock.schedules.ir import Op, StageGraph
from penstock.schedules.priority_scheduler import Pipeline
from penstock.schedules.verify import verify

pytest.importorskip("ortools")


def costs_of(
    placement: tuple[int, ...], F: float = 1.0, I: float = 1.0, W: float = 1.0, send: float = 0.0
) -> StageCosts:
    stages = len(placement)
    cost = Cost(
        F=(F,) * stages,
        I=(I,) * stages,
        W=(W,) * stages,
        activation=(1.0,) * stages,
        send=send,
        weight_activation=(0.5,) * stages,
        stage_input=(0.25,) * stages,
    )
    return StageCosts(cost, StageGraph.chain(stages), (0.0,) * (max(placement) + 1))


def solve_pattern(
    costs: StageCosts, placement: tuple[int, ...], cap: float, recompute: bool = False
) -> Pattern:
    flags = [recompute] * len(placement)
    ranks = max(placement) + 1
    pattern = solve_period(costs, placement, flags, [cap] * ranks, seconds=20.0).pattern
    assert pattern is not None
    return pattern


@pytest.mark.parametrize(
    ("placement", "send"), [(loop(4, 1), 0.0), (loop(3, 1), 0.37), (vee(2), 0.37), (loop(2, 2), 0)]
)
def test_a_repeated_pattern_has_its_period_and_its_peaks(
    placement: tuple[int, ...], send: float
) -> None:
    costs = costs_of(placement, F=1.1, I=0.93, W=0.71, send=send)
    pattern = solve_pattern(costs, placement, cap=20.0)
    assert pattern.period == pytest.approx(shortest_period(costs.cost, placement), rel=2e-3)
    timelines = [
        simulate(lower(repeat_pattern(pattern, placement, chunks)), costs.cost)
        for chunks in (30, 50)
    ]
    grown = timelines[1].makespan - timelines[0].makespan
    assert grown == pytest.approx(20 * pattern.period)
    assert timelines[1].peak == pytest.approx(pattern.peaks)


def test_one_stage_a_rank_needs_the_memory_of_1f1b_at_most() -> None:
    placement = loop(4, 1)
    pattern = solve_pattern(costs_of(placement), placement, cap=20.0)
    assert pattern.is_optimal
    # By way of the last stage, its I ends 8 seconds after its F starts: three activations. But then
    # F and I of stage 2 would be due at the same time of the period. The fourth makes up for that.
    assert max(pattern.peaks) == 4.0


def test_a_v_needs_less_memory_than_v_min() -> None:
    placement = vee(3)
    costs = costs_of(placement)
    pattern = solve_pattern(costs, placement, cap=20.0)
    named = simulate(lower(make("v-min", 3, 12)), costs.cost)
    assert max(pattern.peaks) <= max(named.peak)
    assert pattern.period == 6.0


def test_a_cap_below_the_best_pattern_is_proved_infeasible() -> None:
    placement = loop(4, 1)
    costs, flags = costs_of(placement), [False] * 4
    assert solve_period(costs, placement, flags, [4.0] * 4, seconds=20.0).pattern
    result = solve_period(costs, placement, flags, [3.9] * 4, seconds=20.0)
    assert result.pattern is None
    assert result.is_infeasible
    # With a longer period, fewer micro-batches are alive at the same time.
    slower = solve_period(costs, placement, flags, [3.9] * 4, seconds=20.0, period=4.0)
    assert slower.pattern is not None


def test_recomputed_stages_keep_their_inputs_only() -> None:
    placement = loop(3, 1)
    costs = costs_of(placement)
    whole = solve_pattern(costs, placement, cap=20.0)
    recomputed = solve_pattern(costs, placement, cap=20.0, recompute=True)
    assert recomputed.period == 4.0
    assert max(recomputed.peaks) < max(whole.peaks)
    assert Op.R in {action.op for action in recomputed.starts}


@pytest.mark.parametrize("objective", ["makespan", "period"])
@pytest.mark.parametrize("placement", [loop(3, 1), vee(3)])
def test_an_unrolled_pattern_is_no_slower_than_the_pattern_and_keeps_to_the_caps(
    placement: tuple[int, ...], objective: Objective
) -> None:
    costs = costs_of(placement, send=0.25)
    cap = 4.0
    pattern = solve_pattern(costs, placement, cap)
    pipeline = Pipeline(placement, 12, costs.cost, [cap] * 3, costs.graph)
    schedule = unroll_pattern(pattern, pipeline, objective)
    assert not verify(lower(schedule))
    unrolled, repeated = (
        simulate(lower(work), costs.cost)
        for work in (schedule, repeat_pattern(pattern, placement, 12))
    )
    assert getattr(unrolled, objective) <= getattr(repeated, objective) + 1e-9
    assert not any(exceeds(peak, cap) for peak in unrolled.peak)


def test_the_solver_repeats_a_pattern_where_there_are_too_many_actions() -> None:
    placement, chunks = vee(3), 40
    costs = costs_of(placement)
    start = make("v-min", 3, chunks)
    for recompute in (False, True):
        flags = [recompute] * 6
        solution = solve_schedule(costs, start, flags, [6.0] * 3, "period", seconds=2.0)
        assert solution.schedule is not None
        assert not verify(lower(solution.schedule))
        for lane in solution.schedule.lanes:
            for op in (Op.F, Op.I):
                order = [a.microbatch for a in lane if a.op is op and a.stage == lane[0].stage]
                assert all(a < b for a, b in pairwise(order))

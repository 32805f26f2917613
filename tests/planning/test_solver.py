from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.planning import PerRows, UnitSeconds, search_plan
from penstock.planning.search_space import choose_chunks
from penstock.planning.solver import solve_schedule, solve_space_bound
from penstock.planning.stage_costs import CostTable
from penstock.schedules.families import loop, make, vee
from tests.planning.brute_force import make_problem, solve
from tests.planning.problems import even_profile

pytest.importorskip("ortools")


def test_solver_finds_and_proves_the_best_schedule() -> None:
    profile = even_profile(units=2, ranks=2, rows=4)
    table = CostTable(profile, 4, "threads")
    costs = table.stage_costs((1, 1), (0, 1))
    gpipe = make("gpipe", 2, 4)
    solution = solve_schedule(costs, gpipe, (False, False), (1e9, 1e9), "makespan", 10.0)
    # Rank 1 starts after a second, and works for 12.
    assert solution.bound == pytest.approx(13.0, rel=1e-4)
    assert solution.schedule is not None
    plan = search_plan(profile, chunks=[4], cut=[1, 1], solver_seconds=0)
    assert plan.seconds == pytest.approx(13.0)


@pytest.mark.parametrize("seed", [7, 9])
def test_solver_closes_the_gap_of_small_problems(seed: int) -> None:
    profile = make_problem(seed)
    quick, exact = solve(profile), solve(profile, solver_seconds=20.0)
    assert quick
    assert exact
    assert quick.certificate
    assert exact.certificate
    assert exact.seconds <= quick.seconds
    assert quick.certificate.schedule_bound < quick.seconds * 0.99
    assert exact.certificate.schedule_bound == pytest.approx(exact.seconds, rel=1e-3)
    assert exact.certificate.method == "CP-SAT"


def test_solver_keeps_to_the_memory_of_recomputed_stages() -> None:
    profile = even_profile(units=2, ranks=2, rows=4)
    costs = CostTable(profile, 4, "threads").stage_costs((1, 1), (0, 1))
    # 10 bytes an activation, 1 byte an input. Rank 1 recomputes.
    start = make("1f1b", 2, 4)
    flags = (False, True)
    tight = solve_schedule(costs, start, flags, (20.0, 13.0), "makespan", 10.0)
    loose = solve_schedule(costs, start, flags, (1e9, 1e9), "makespan", 10.0)
    assert loose.bound <= tight.bound
    assert tight.schedule is not None


@pytest.mark.parametrize("placement", [loop(2, 1), loop(2, 2), vee(2)])
def test_no_cut_beats_the_bound_of_the_solver(placement: tuple[int, ...]) -> None:
    profile = even_profile(units=7, ranks=2, rows=6)
    for chunks in choose_chunks(6, 2):
        plan = search_plan(profile, placement=placement, chunks=[chunks], solver_seconds=0)
        table = CostTable(profile, chunks, "threads")
        bound = solve_space_bound(table, placement, plan.memory, "makespan", plan.seconds, 10.0)
        assert 0.5 * plan.seconds < bound <= plan.seconds * (1 + 1e-9)


@pytest.mark.parametrize(("chunks", "least"), [(2, 26.5), (3, 32.5), (4, 40.5)])
def test_bound_of_the_solver_counts_the_way_to_the_first_gradient(
    chunks: int, least: float
) -> None:
    """Before it, a rank can do forwards only. With few micro-batches that is much of a step."""
    profile = even_profile(units=12, ranks=4, rows=chunks)
    plan = search_plan(profile, placement=vee(4), chunks=[chunks], solver_seconds=0)
    table = CostTable(profile, chunks, "threads")
    slow = 2 * plan.seconds
    bound = solve_space_bound(table, vee(4), plan.memory, "makespan", slow, 10.0)
    assert least < bound <= plan.seconds * (1 + 1e-3)


@pytest.mark.parametrize("weight_seconds", [0.0, 0.1])
def test_bound_of_the_solver_counts_the_way_of_the_last_gradient(weight_seconds: float) -> None:
    """Where weight gradients take no time, the gradient that is last travels while ranks idle."""
    profile = even_profile(units=8, ranks=4, rows=4)
    second, weights = PerRows(0.0, 1.0), PerRows(0.0, weight_seconds)
    seconds = {"cpu": UnitSeconds(second, second, weights)}
    profile = replace(profile, units=tuple(replace(u, seconds=seconds) for u in profile.units))
    plan = search_plan(profile, placement=vee(4), chunks=[4], solver_seconds=0)
    table = CostTable(profile, 4, "threads")
    slow = 2 * plan.seconds
    bound = solve_space_bound(table, vee(4), plan.memory, "makespan", slow, 10.0)
    assert 0.999 * plan.seconds < bound <= plan.seconds * (1 + 1e-9)

from __future__ import annotations

import random
from itertools import product

import pytest

from penstock import (
    ArgumentError,
    Cost,
    Schedule,
    StageGraph,
    Timeline,
    lower,
    schedules,
    simulate,
    verify,
)
from penstock.schedules import fit, loop, lower_bound, vee
from penstock.schedules.fit import improve_by_swaps

GROUPS = {
    1: ("naive", "gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"),
    2: ("interleaved", "looped-bfs", "interleaved-zb", "zb-v", "v-half", "v-min", "dualpipe-v"),
}
NAMES = [(name, per_rank) for per_rank, names in GROUPS.items() for name in names]
# benchmarks/fit.py runs the whole grid, with chunks from the ranks to four times the ranks. Here
# each schedule runs every eighth size, and the next schedules the other sizes.
GRID = [(p, m) for p in range(2, 9) for m in sorted({p, p + 1, 2 * p + 1, 4 * p})]


def spread(placement: tuple[int, ...], seed: int) -> Cost:
    """Return costs in which each stage takes from 0.5 to 1.5 of the even time."""
    draw = random.Random(seed)
    return Cost.even(placement).scaled([draw.uniform(0.5, 1.5) for _ in placement])


@pytest.mark.parametrize(("name", "per_rank"), NAMES)
def test_fit_is_at_least_as_fast_as_every_named_schedule_under_its_peak(
    name: str, per_rank: int
) -> None:
    turn = NAMES.index((name, per_rank))
    for ranks, chunks in (size for at, size in enumerate(GRID) if (at + size[0] + turn) % 8 == 0):
        named = schedules.make(name, ranks, chunks, per_rank)
        timeline = simulate(lower(named))
        made = fit(named.placement, chunks, memory=max(timeline.peak))
        found = simulate(lower(made))
        assert found.makespan <= timeline.makespan + 1e-9, (ranks, chunks)
        assert max(found.peak) <= max(timeline.peak) + 1e-9, (ranks, chunks)


@pytest.mark.parametrize(("name", "per_rank"), NAMES)
def test_fit_is_never_slower_and_often_faster_with_uneven_costs(name: str, per_rank: int) -> None:
    better = 0
    for ranks, chunks in ((3, 7), (4, 4), (4, 9)):
        named = schedules.make(name, ranks, chunks, per_rank)
        for cost in (Cost.even(named.placement, send=0.1), spread(named.placement, ranks)):
            timeline = simulate(lower(named), cost)
            made = fit(named.placement, chunks, cost, max(timeline.peak))
            gain = timeline.makespan - simulate(lower(made), cost).makespan
            assert gain >= -1e-9, (ranks, chunks, cost.send)
            better += gain > 1e-9
    assert better >= (1 if name == "zb-h2" else 3)


@pytest.mark.parametrize("placement", [loop(8, 1), loop(8, 2), vee(8)])
@pytest.mark.parametrize("chunks", [8, 11, 16, 32])
def test_fit_meets_the_lower_bound_with_the_memory_of_1f1b(
    placement: tuple[int, ...], chunks: int
) -> None:
    found = simulate(lower(fit(placement, chunks)))
    assert found.makespan == pytest.approx(lower_bound(placement, chunks, found.cost))
    assert max(found.peak) <= 8


def test_fit_with_a_memory_cap_for_each_rank() -> None:
    found = simulate(lower(fit(loop(4, 1), 8, memory=[4, 3, 2, 1])))
    assert all(peak <= cap for peak, cap in zip(found.peak, [4, 3, 2, 1], strict=True))
    assert found.makespan < simulate(lower(schedules.one_f_one_b(4, 8))).makespan


def test_fit_on_any_placement() -> None:
    for placement in ((0, 0, 1), (0, 1, 0, 1, 1), (1, 0), (0, 1, 2, 0), (0,)):
        for memory in (1, 1.5, 3):
            schedule = fit(placement, 5, memory=memory)
            assert verify(schedule, memory=memory) == ()


def test_fit_with_skips() -> None:
    graph = StageGraph.chain(4, skips=[(0, 3), (1, 3)])
    assert verify(fit(vee(2), 6, memory=1.5, graph=graph), graph, memory=1.5) == ()


def test_fit_is_deterministic() -> None:
    cost = spread(vee(3), seed=5)
    assert fit(vee(3), 7, cost, 2) == fit(vee(3), 7, cost, 2)


def test_improve_by_swaps_shortens_the_makespan_within_the_memory_cap() -> None:
    named = schedules.v_half(6, 12)
    cost = spread(named.placement, seed=12)
    graph = StageGraph.chain(named.stages)
    polished = improve_by_swaps(named, graph, cost, [4] * 6, swaps=200)
    before, after = (simulate(lower(s), cost).makespan for s in (named, polished))
    assert after < before - 1e-9
    assert verify(polished, memory=4) == ()


def test_fit_with_too_little_memory_says_how_much_is_needed() -> None:
    with pytest.raises(ArgumentError) as refusal:
        fit(vee(2), 4, memory=0.75)
    assert str(refusal.value) == (
        "no schedule fits this memory, as one micro-batch alone needs more (rank 0: 0.75 < 1, "
        "rank 1: 0.75 < 1): give each rank at least its share, 1 for all"
    )
    with pytest.raises(ArgumentError, match="memory has 3 entries for 2 ranks: give one number"):
        fit(vee(2), 4, memory=[1, 1, 1])
    with pytest.raises(ArgumentError, match="one micro-batch alone needs more"):
        fit(vee(2), 4, memory=float("nan"))


def test_lower_bound_is_at_most_the_makespan_of_fit() -> None:
    for ranks, chunks in product((1, 2, 4), (1, 3, 8)):
        for placement in (loop(ranks, 1), loop(ranks, 2), vee(ranks)):
            cost = Cost.even(placement, send=0.25)
            found = simulate(lower(fit(placement, chunks, cost, chunks)), cost)
            assert found.makespan >= lower_bound(placement, chunks, cost) - 1e-9


# ---- the period -----------------------------------------------------------------------------


def test_fit_reaches_the_period_of_the_zero_bubble_paper() -> None:
    """The row with 8 ranks and 24 micro-batches of arXiv 2401.10241, under twice 1F1B's memory."""
    chunks, seconds = 24, (29718, 29444, 19927)
    forward, inputs, weights = ((number,) * 8 for number in seconds)
    size, kept = 34 * 4096 + 5 * 32 * 1024, 32 * 4096  # bytes for each token
    cost = Cost(forward, inputs, weights, (size,) * 8, 527, weight_activation=(kept,) * 8)
    made = fit(loop(8, 1), chunks, cost, 16 * size, objective="period")
    assert verify(made, memory=16 * size, cost=cost) == ()
    bubble = 1 - chunks * sum(seconds) / simulate(lower(made), cost).period
    assert round(bubble, 4) <= 0.0029


@pytest.mark.parametrize("placement", [loop(3, 1), loop(2, 2), vee(3)])
@pytest.mark.parametrize("memory", [3, 5])
def test_fit_for_the_period_is_never_slower_than_a_named_schedule(
    placement: tuple[int, ...], memory: int
) -> None:
    ranks = max(placement) + 1
    per_rank = len(placement) // ranks
    cost = Cost.even(placement, W=0.5, send=0.2)
    made = fit(placement, 6, cost, memory, objective="period")
    assert verify(made, memory=memory, cost=cost) == ()
    found = simulate(lower(made), cost).period
    for name, family in schedules.FAMILIES.items():
        if family.trains and (family.free or family.stages_per_rank == per_rank):
            named = schedules.make(name, ranks, 6, per_rank)
            timeline = simulate(lower(named), cost)
            if named.placement == placement and max(timeline.peak) <= memory:
                assert found <= timeline.period + 1e-9


def test_fit_refuses_an_unknown_objective() -> None:
    with pytest.raises(ArgumentError, match="objective 'speed' is unknown: it is 'makespan' or"):
        fit(vee(2), 4, objective="speed")  # type: ignore[arg-type]


def test_fit_begins_with_given_schedules_that_fit_in_memory() -> None:
    placement, chunks = vee(4), 12
    cost = Cost((14.4,) * 8, (14.4,) * 8, (9.7,) * 8, (1.0,) * 8, 1.6, (0.43,) * 8)

    def search(memory: float, effort: int, *start: Schedule) -> tuple[Schedule, Timeline]:
        schedule = fit(placement, chunks, cost, memory, None, effort, "period", start)
        return schedule, simulate(lower(schedule), cost)

    small, timeline = search(8, 20_000)
    # With the effort of one attempt, nothing else is as fast.
    assert search(9, 1)[1].period > timeline.period
    assert search(9, 1, small)[1].period == timeline.period
    assert max(search(6, 1, small)[1].peak) <= 6


def test_fit_refuses_to_begin_with_a_schedule_of_another_size() -> None:
    start = [fit(loop(2, 1), 4)]
    with pytest.raises(ArgumentError, match=r"start has a schedule of 4 micro-batches"):
        fit(loop(2, 1), 6, start=start)

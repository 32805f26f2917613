"""Schedules that are extended to more micro-batches by repeating their middle."""

from __future__ import annotations

import pytest

from penstock import Cost, lower, simulate
from penstock.schedules import fit, loop, make, vee
from penstock.schedules.cost import fits_in_memory
from penstock.schedules.extension import extend_schedule
from penstock.schedules.ir import StageGraph
from penstock.schedules.priority_scheduler import Pipeline, Starts, time_orders
from penstock.schedules.verify import verify


def pipeline_of(placement: tuple[int, ...], chunks: int, memory: float) -> Pipeline:
    cost, graph = Cost.even(placement, send=0.1), StageGraph.chain(len(placement))
    return Pipeline(placement, chunks, cost, [memory] * (max(placement) + 1), graph)


def named_starts(pipeline: Pipeline, name: str) -> Starts:
    schedule = make(name, pipeline.ranks, pipeline.chunks, pipeline.stages // pipeline.ranks)
    starts = time_orders(pipeline, pipeline.orders(schedule))
    assert starts is not None
    return starts


@pytest.mark.parametrize(
    ("name", "placement", "memory"),
    [("zb-h1", loop(4, 1), 4.0), ("zb-h2", loop(4, 1), 7.0), ("zb-v", vee(4), 4.0)],
)
@pytest.mark.parametrize("chunks", [17, 20, 40])
def test_extension_is_as_fast_as_the_named_schedule_and_keeps_to_the_memory(
    name: str, placement: tuple[int, ...], memory: float, chunks: int
) -> None:
    short, pipeline = (pipeline_of(placement, number, memory) for number in (16, chunks))
    extended = extend_schedule(short, named_starts(short, name), pipeline, "makespan")
    assert extended is not None
    schedule = pipeline.schedule(extended)
    assert not verify(lower(schedule))
    assert all(fits_in_memory(lane, pipeline.cost, memory) for lane in schedule.lanes)
    named = pipeline.measure(named_starts(pipeline, name), "makespan")
    assert pipeline.measure(extended, "makespan") == pytest.approx(named)
    assert simulate(lower(schedule), pipeline.cost).makespan == pytest.approx(named)


def test_schedule_without_a_middle_cannot_be_extended() -> None:
    placement = loop(2, 1)
    short, pipeline = (pipeline_of(placement, chunks, 9.0) for chunks in (4, 8))
    lanes = [
        [*[stage] * 4, *[2 + stage] * 4, *[4 + stage] * 4] for stage in range(2)
    ]  # as in gpipe
    starts = time_orders(short, lanes)
    assert starts is not None
    assert extend_schedule(short, starts, pipeline, "makespan") is None


def test_orders_that_wait_for_each_other_have_no_starts() -> None:
    pipeline = pipeline_of(loop(2, 1), 1, 9.0)
    assert time_orders(pipeline, [[0, 2, 4], [1, 3, 5]]) is not None
    assert time_orders(pipeline, [[2, 0, 4], [1, 3, 5]]) is None


def test_fit_with_many_micro_batches_is_idle_no_longer_than_with_few() -> None:
    """Without extension, the same effort leaves the ranks idle for 50.8 seconds instead of 43.8."""
    ranks, work = 6, 2 * (14.3 + 14.3 + 9.6)
    F, I, W, even, kept = ((number,) * (2 * ranks) for number in (14.3, 14.3, 9.6, 1.0, 0.43))
    cost = Cost(F, I, W, even, 1.6, weight_activation=kept)
    actions = 3 * 2 * ranks * 4 * ranks  # of a schedule with four micro-batches per rank

    def idle(chunks: int, attempts: int) -> float:
        memory, effort = 2.5 * ranks, attempts * actions
        found = fit(vee(ranks), chunks, cost, memory, effort=effort, objective="period")
        return simulate(lower(found), cost).period - chunks * work

    assert idle(16 * ranks, attempts=20) <= idle(4 * ranks, attempts=10) + 1e-6

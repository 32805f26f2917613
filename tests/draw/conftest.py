"""Timelines to draw, simulated from a schedule or from its text form."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.schedules.cost import Cost
from penstock.schedules.ir import Compute, Op, Schedule, StageGraph
from penstock.schedules.lowering import lower
from penstock.schedules.notation import loads
from penstock.schedules.timeline import Timeline, simulate

Played = Callable[..., Timeline]


@pytest.fixture
def played() -> Played:
    """Return a function that simulates a schedule, or the text form of one."""

    def play(
        work: str | Schedule, cost: Cost | None = None, graph: StageGraph | None = None
    ) -> Timeline:
        schedule = loads(work) if isinstance(work, str) else work
        assert isinstance(schedule, Schedule)
        return simulate(lower(schedule, graph), cost)

    return play


@pytest.fixture
def one_f_one_b() -> Callable[[int, int], Schedule]:
    """Return a function that builds the 1F1B schedule of some ranks and chunks."""

    def build(ranks: int, chunks: int) -> Schedule:
        lanes = []
        for rank in range(ranks):
            ahead = min(ranks - rank, chunks)
            lane = [Compute(Op.F, rank, i) for i in range(ahead)]
            for i in range(chunks):
                lane.append(Compute(Op.B, rank, i))
                if ahead + i < chunks:
                    lane.append(Compute(Op.F, rank, ahead + i))
            lanes.append(tuple(lane))
        return Schedule(tuple(range(ranks)), chunks, tuple(lanes))

    return build


V = """
    placement: 0 1 1 0
    0F0 0F1 3F0 3I0 3F1 0I0 3I1 3W0 0I1 3W1 0W0 0W1
    1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 2W1 1W0 1W1
"""


@pytest.fixture
def v_shape(played: Played) -> Timeline:
    """Return a timeline with two stages a rank, placed as a V, and split backwards."""
    return played(V)

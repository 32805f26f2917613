"""Tests of schedules in rounds under caps that bind."""

from __future__ import annotations

from itertools import product

import pytest

from penstock import Cost
from penstock.schedules import vee
from penstock.schedules.ir import StageGraph
from penstock.schedules.priority_scheduler import Pipeline
from penstock.schedules.round_scheduler import RoundRule, schedule_in_rounds


@pytest.mark.parametrize("extra", [0.0, 3.0])
def test_rounds_end_if_an_earlier_rank_has_no_room(extra: float) -> None:
    """A rank with room waited forever for micro-batches that a full rank before it never sent."""
    placement, graph = vee(3), StageGraph.chain(6)
    for caps in product((2.0, 4.0, 9.0), repeat=3):
        pipeline = Pipeline(placement, 8, Cost.even(placement), caps, graph)
        starts = schedule_in_rounds(pipeline, RoundRule(extra=extra))
        assert starts is None or {len(queue) for queue in starts} == {8}

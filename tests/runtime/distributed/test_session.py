from __future__ import annotations

import pytest

from penstock import lower, play, schedules
from penstock.runtime.distributed.session import prefetch_receives
from penstock.runtime.worker import bind_lane
from penstock.schedules.ir import Compute, Program, Recv, Send

FAMILIES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_prefetch_receives_moves_them_past_at_most_two_computations(name: str, ranks: int) -> None:
    program = lower(schedules.make(name, ranks, 2 * ranks))
    lanes = []
    for rank in range(ranks):
        before = bind_lane(program, rank)
        after = prefetch_receives(before)
        assert sorted(step.lane_index for step in after) == [step.lane_index for step in before]
        for kind in (Recv, Send, Compute):  # each kind of action keeps its order
            kept = [step for step in after if isinstance(step.action, kind)]
            assert kept == [step for step in before if isinstance(step.action, kind)]
        for step in before:
            if isinstance(step.action, Recv):
                passed = set(before[: step.lane_index]) - set(after[: after.index(step)])
                assert sum(isinstance(other.action, Compute) for other in passed) <= 2
        lanes.append(tuple(step.action for step in after))
    play(Program(program.schedule, program.graph, tuple(lanes)))  # the program does not deadlock


def test_prefetch_receives_in_small_1f1b_lanes() -> None:
    program = lower(schedules.make("1f1b", 2, 4))
    first, second = (prefetch_receives(bind_lane(program, rank)) for rank in range(2))
    assert " ".join(str(step.action) for step in first) == (
        "?1>0:0 0F0 !0>1:0 0F1 !0>1:1 ?1>0:1 0B0 0F2 !0>1:2 ?1>0:2 0B1 ?1>0:3 0F3 !0>1:3 0B2 0B3"
    )
    assert " ".join(str(step.action) for step in second) == (
        "?0>1:0 ?0>1:1 1F0 1B0 !1>0:0 ?0>1:2 1F1 1B1 !1>0:1 ?0>1:3 1F2 1B2 !1>0:2 1F3 1B3 !1>0:3"
    )

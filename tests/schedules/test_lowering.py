from __future__ import annotations

from collections import Counter
from textwrap import dedent

import pytest

from penstock import draw, schedules
from penstock.errors import ArgumentError
from penstock.schedules.ir import Compute, Op, Program, Recv, Schedule, Send, StageGraph
from penstock.schedules.lowering import (
    forwards_first,
    lower,
    recompute,
    recompute_mode,
    remove_recompute,
)
from penstock.schedules.notation import dumps
from penstock.schedules.simulator import Deadlock, Sends, play
from penstock.schedules.timeline import simulate
from penstock.schedules.verify import verify
from tests.schedules.texts import schedule


def text(value: Schedule | Program) -> str:
    """Return the lanes in text form, without the headers."""
    return "\n".join(line for line in dumps(value).splitlines() if ": " not in line)


def drawn(picture: str) -> str:
    return dedent(picture).strip("\n")


# ---- messages -----------------------------------------------------------------------------


def test_lowering_writes_send_and_recv_when_a_message_is_produced() -> None:
    # Rank 1 receives micro-batch 1 before 1B0, because 0F1 has ended when 1B0 starts.
    assert text(lower(schedules.one_f_one_b(ranks=2, chunks=2))) == drawn("""
        0F0 !0>1:0 0F1 !0>1:1 ?1>0:0 0B0 ?1>0:1 0B1
        ?0>1:0 1F0 ?0>1:1 1B0 !1>0:0 1F1 1B1 !1>0:1
    """)


def test_lowering_receives_only_after_the_message_is_produced() -> None:
    # 1B0 runs from 2 to 4. Rank 0 starts 0F3 at 3, before it receives the gradient.
    eager = schedule("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3 \n 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3")
    assert text(lower(eager)).startswith("0F0 !0>1:0 0F1 !0>1:1 0F2 !0>1:2 0F3 ?1>0:0 !0>1:3 0B0 ")


def test_lowering_sends_a_skip_directly() -> None:
    skip = StageGraph.chain(3, skips=[(0, 2)])
    assert text(lower(schedule("0F0 0B0 \n 1F0 1B0 \n 2F0 2B0"), skip)) == drawn("""
        0F0 !0>1:0 !0>2:0 ?2>0:0 ?1>0:0 0B0
        ?0>1:0 1F0 !1>2:0 ?2>1:0 1B0 !1>0:0
        ?0>2:0 ?1>2:0 2F0 2B0 !2>0:0 !2>1:0
    """)


def test_lowering_sends_nothing_within_a_rank() -> None:
    skips = StageGraph.chain(4, skips=[(0, 3)])
    v = schedule("placement: 0 1 1 0 \n 0F0 3F0 3B0 0B0 \n 1F0 2F0 2B0 1B0")
    assert text(lower(v, skips)) == drawn("""
        0F0 !0>1:0 ?2>3:0 3F0 3B0 !3>2:0 ?1>0:0 0B0
        ?0>1:0 1F0 2F0 !2>3:0 ?3>2:0 2B0 1B0 !1>0:0
    """)


def test_lowering_of_one_rank_has_no_messages() -> None:
    alone = schedules.interleaved(ranks=1, chunks=3, stages_per_rank=2)
    assert lower(alone).lanes == alone.lanes


def test_lowering_sends_the_gradient_after_i_and_not_after_w() -> None:
    assert text(lower(schedule("0F0 0I0 0W0 \n 1F0 1I0 1W0"))) == drawn("""
        0F0 !0>1:0 ?1>0:0 0I0 0W0
        ?0>1:0 1F0 1I0 !1>0:0 1W0
    """)


def test_lowering_sends_messages_without_a_consumer() -> None:
    assert text(lower(schedule("0F0 \n 1F0 1B0"))) == drawn("""
        0F0 !0>1:0 ?1>0:0
        ?0>1:0 1F0 1B0 !1>0:0
    """)


SKIPS = [(0, 3), (1, 4), (0, 7), (2, 5)]


@pytest.fixture(params=["gpipe", "interleaved", "zb-v", "v-min", "dualpipe-v", "looped-bfs"])
def lowered(request: pytest.FixtureRequest) -> tuple[Schedule, StageGraph]:
    name = str(request.param)
    ranks = 8 if name == "gpipe" else 4
    made = schedules.make(name, ranks, 6)
    return made, StageGraph.chain(made.stages, SKIPS)


def test_lowering_adds_each_message_once_on_the_ranks_of_its_stages(
    lowered: tuple[Schedule, StageGraph],
) -> None:
    made, graph = lowered
    program = lower(made, graph)
    assert (program.schedule, program.graph) == (made, graph)
    assert made.lanes == tuple(
        tuple(a for a in lane if isinstance(a, Compute)) for lane in program.lanes
    )
    sends = Counter(a.message for lane in program.lanes for a in lane if isinstance(a, Send))
    receives = Counter(a.message for lane in program.lanes for a in lane if isinstance(a, Recv))
    assert sends == receives
    assert set(sends.values()) == {1}
    for rank, lane in enumerate(program.lanes):
        assert {made.placement[a.message.src] for a in lane if isinstance(a, Send)} <= {rank}
        assert {made.placement[a.message.dst] for a in lane if isinstance(a, Recv)} <= {rank}
    spans = list(play(program, sends=Sends.RENDEZVOUS))
    assert len(spans) == sum(map(len, program.lanes))


def test_lowering_refuses_a_schedule_that_deadlocks() -> None:
    with pytest.raises(Deadlock) as error:
        lower(schedule("0F0 0B0 0F1 0B1 \n 1F0 1F1 1B1 1B0"))
    assert "rank 0, step 1: 0B0 waits for 1B0 (rank 1, step 3)" in str(error.value)


# ---- recomputation ------------------------------------------------------------------------

GPIPE = schedules.gpipe(ranks=1, chunks=3)


@pytest.mark.parametrize(
    ("mode", "lane"),
    [
        ("always", "0F0 0F1 0F2 0R2 0B2 0R1 0B1 0R0 0B0"),
        ("except_last", "0F0 0F1 0F2 0B2 0R1 0B1 0R0 0B0"),
        ("never", "0F0 0F1 0F2 0B2 0B1 0B0"),
    ],
)
def test_recompute_modes(mode: str, lane: str) -> None:
    assert text(recompute(GPIPE, recompute_mode(mode, chunks=3))) == lane


def test_recompute_with_a_predicate() -> None:
    made = recompute(schedule("0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1"), lambda s, m: s == 0 < m)
    assert text(made) == "0F0 0F1 0B0 0R1 0B1\n1F0 1B0 1F1 1B1"
    assert Op.R not in {action.op for action in GPIPE.lanes[0]}


@pytest.mark.parametrize(
    ("lane", "recomputed"),
    [
        ("0F0 0I0 0W0", "0F0 0R0 0I0 0W0"),
        ("overlaps: 0F1+0B0 \n 0F0 0F1 0B0 0B1", "0F0 0R0 0F1 0B0 0R1 0B1"),
        ("overlaps: 0B0+0F1 \n 0F0 0B0 0F1 0B1", "0F0 0R0 0B0 0F1 0R1 0B1"),
        ("overlaps: 0F0+0B0 \n 0F0 0F1 0B0 0B1", "0F0 0F1 0R0 0B0 0R1 0B1"),
    ],
    ids=["split backward", "overlapping", "backward first", "not neighbours"],
)
def test_recompute_is_inserted_before_i_and_before_overlapping_pairs(
    lane: str, recomputed: str
) -> None:
    assert text(recompute(schedule(lane), lambda s, m: True)) == recomputed


def test_recompute_keeps_overlapping_pairs_together() -> None:
    made = recompute(schedules.dualpipe_v(ranks=2, chunks=6), lambda s, m: True)
    assert made.overlaps
    lanes = [list(lane) for lane in made.lanes]
    for first, second in made.overlaps:
        (lane,) = (lane for lane in lanes if first in lane)
        assert lane[lane.index(first) + 1] == second


def test_recompute_of_a_forward_only_schedule_changes_nothing() -> None:
    forward = schedules.forward_only(ranks=2, chunks=3)
    assert recompute(forward, recompute_mode("always", 3)) == forward


def test_recompute_overlaps_with_waiting_for_the_gradient() -> None:
    plain = schedules.one_f_one_b(ranks=2, chunks=3)
    assert draw.text(simulate(lower(plain))) == drawn("""
        rank 0  F0 F1 ······B0─── F2 B1─── ···B2───
        rank 1  ···F0 B0─── F1 B1─── F2 B2─── ······
        makespan 12, bubble 25.0%, peak 2 (2 1)
    """)
    only_first = recompute(plain, lambda stage, microbatch: stage == 0)
    assert draw.text(simulate(lower(only_first))) == drawn("""
        rank 0  F0 F1 R0 ···B0─── F2 R1 B1─── R2 B2───
        rank 1  ···F0 B0─── F1 B1─── F2 B2─── ·········
        makespan 13, bubble 19.2%, peak 1 on every rank
    """)


def test_recompute_mode_refuses_an_unknown_mode() -> None:
    with pytest.raises(ArgumentError) as error:
        recompute_mode("sometimes", chunks=3)
    assert str(error.value) == (
        "checkpoint must be one of always, except_last, never, not 'sometimes'"
    )


def test_order_of_a_program_is_that_of_its_lanes_with_each_send_before_its_receive() -> None:
    program = lower(schedules.make("zb-v", 3, 5, 2))
    remaining = [iter(lane) for lane in program.lanes]
    actions = [next(remaining[rank]) for rank in program.order]
    assert not any(list(lane) for lane in remaining)
    for index, action in enumerate(actions):
        if isinstance(action, Recv):
            assert Send(action.message) in actions[:index]


# ---- passes for pipe(x) -------------------------------------------------------------------


def test_forwards_first_keeps_the_order_of_forwards_and_of_backwards() -> None:
    made = forwards_first(recompute(schedules.one_f_one_b(2, 3), recompute_mode("always", 3)))
    assert " ".join(map(str, made.lanes[1])) == "1F0 1F1 1F2 1R0 1B0 1R1 1B1 1R2 1B2"
    assert verify(made) == ()


def test_remove_recompute_undoes_recompute() -> None:
    plain = schedules.interleaved(2, 4)
    assert remove_recompute(recompute(plain, recompute_mode("always", 4))) == plain

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from penstock import schedules
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Compute, Op, Schedule, StageGraph
from penstock.schedules.lowering import lower
from penstock.schedules.notation import loads
from penstock.schedules.simulator import (
    Deadlock,
    Sends,
    Span,
    Wait,
    paused_garbage_collection,
    play,
)
from tests.properties.random_schedules import obvious


def times(spans: Iterator[Span]) -> dict[str, tuple[float, float]]:
    return {str(span.action): (span.start, span.end) for span in spans}


def stuck(spans: Iterator[Span]) -> str:
    with pytest.raises(Deadlock) as error:
        list(spans)
    return str(error.value)


# ---- start and end times ------------------------------------------------------------------


def test_times_of_one_microbatch_on_two_ranks() -> None:
    assert times(play(loads("0F0 0B0 \n 1F0 1B0"))) == {
        "0F0": (0.0, 1.0),
        "1F0": (1.0, 2.0),
        "1B0": (2.0, 4.0),
        "0B0": (4.0, 6.0),
    }


def test_send_time_delays_the_receiver_and_keeps_no_rank_busy() -> None:
    cost = Cost.even((0, 1), send=0.5)
    assert times(play(loads("0F0 0F1 0B0 0B1 \n 1F0 1F1 1B0 1B1"), cost=cost)) == {
        "0F0": (0.0, 1.0),
        "0F1": (1.0, 2.0),
        "1F0": (1.5, 2.5),
        "1F1": (2.5, 3.5),
        "1B0": (3.5, 5.5),
        "0B0": (6.0, 8.0),
        "1B1": (5.5, 7.5),
        "0B1": (8.0, 10.0),
    }


def test_no_send_time_between_stages_of_one_rank() -> None:
    cost = Cost.even((0, 0), send=9.0)
    assert times(play(loads("0F0 1F0"), cost=cost)) == {"0F0": (0.0, 0.5), "1F0": (0.5, 1.0)}


def test_times_with_a_cost_per_stage() -> None:
    cost = Cost(F=(1.0, 2.0), I=(3.0, 4.0), W=(5.0, 6.0), activation=(1.0, 1.0))
    assert times(play(loads("0F0 0I0 0W0 \n 1F0 1I0 1W0"), cost=cost)) == {
        "0F0": (0.0, 1.0),
        "1F0": (1.0, 3.0),
        "1I0": (3.0, 7.0),
        "0I0": (7.0, 10.0),
        "1W0": (7.0, 13.0),
        "0W0": (10.0, 15.0),
    }


def test_forward_waits_for_its_skip() -> None:
    skip = StageGraph.chain(3, skips=[(0, 2)])
    cost = Cost.even((0, 1, 0), F=2.0, send=1.0)
    lanes = loads("placement: 0 1 0 \n 0F0 2F0 \n 1F0")
    assert times(play(lanes, skip, cost))["2F0"] == (5.0, 6.0)
    only_skip = StageGraph(((0, 2),))
    assert times(play(lanes, only_skip, cost))["2F0"] == (1.0, 2.0)


def test_recompute_does_not_wait_for_the_gradient() -> None:
    assert times(play(loads("0F0 0R0 0B0 \n 1F0 1B0"))) == {
        "0F0": (0.0, 1.0),
        "1F0": (1.0, 2.0),
        "0R0": (1.0, 2.0),
        "1B0": (2.0, 4.0),
        "0B0": (4.0, 6.0),
    }


def test_program_with_buffered_sends_takes_as_long_as_its_schedule() -> None:
    schedule = schedules.zb_v(ranks=3, chunks=5)
    cost = Cost.even(schedule.placement, F=1.0, I=1.3, W=0.7, send=0.25)
    plain = times(play(schedule, cost=cost))
    lowered = times(play(lower(schedule), cost=cost))
    assert {word: lowered[word] for word in plain} == plain


# ---- spans --------------------------------------------------------------------------------


@pytest.mark.parametrize("sends", Sends)
def test_spans_are_sorted_by_start_time(sends: Sends) -> None:
    program = lower(schedules.zb_v(ranks=4, chunks=6))
    cost = Cost.even(program.schedule.placement, F=1.0, I=1.7, W=0.4, send=0.3)
    starts = [span.start for span in play(program, cost=cost, sends=sends)]
    assert starts == sorted(starts)


def test_every_action_has_one_span() -> None:
    program = lower(schedules.one_f_one_b(ranks=3, chunks=4))
    found = {(span.rank, span.step): span.action for span in play(program)}
    assert found == {
        (rank, step): action
        for rank, lane in enumerate(program.lanes)
        for step, action in enumerate(lane)
    }


def test_play_is_lazy() -> None:
    spans = play(loads("0F0 0B0 \n 1F0"))  # deadlocks after two spans
    assert next(spans) == Span(0, 0, Compute(Op.F, 0, 0), 0.0, 1.0)
    assert next(spans).start == 1.0
    with pytest.raises(Deadlock):
        next(spans)


def test_two_ranks_that_wait_for_one_message_both_go_on() -> None:
    """Such a schedule is not sound. `verify` plays it all the same, to say what is wrong."""
    forward, backward = Op.F, Op.B
    lanes = (
        (Compute(forward, 0, 0), Compute(backward, 0, 0)),
        (Compute(forward, 1, 0), Compute(backward, 1, 0)),
        (Compute(forward, 1, 0),),
    )
    assert len(list(play(Schedule((0, 1), 1, lanes)))) == 5


def test_play_with_empty_lanes() -> None:
    assert list(play(loads("- \n -"))) == []
    assert [span.rank for span in play(loads("placement: 1 \n - \n 0F0 0B0"))] == [1, 1]


def test_play_with_a_thousand_ranks() -> None:
    spans = list(play(schedules.one_f_one_b(ranks=1000, chunks=4)))
    assert len(spans) == 1000 * 4 * 2
    assert max(span.end for span in spans) == (1000 + 4 - 1) * 3


# ---- deadlocks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "waits"),
    [
        ("0R0 0F0 0B0", ["rank 0, step 0: 0R0 waits for 0F0 (rank 0, step 1)"]),
        ("0F0 0W0 0I0", ["rank 0, step 1: 0W0 waits for 0I0 (rank 0, step 2)"]),
        ("0F0 0F1 0B1 0B0 0R0", ["rank 0, step 3: 0B0 waits for 0R0 (rank 0, step 4)"]),
        (
            "0F0 0B0 0F1 0B1 \n 1F0 1F1 1B1 1B0",
            [
                "rank 0, step 1: 0B0 waits for 1B0 (rank 1, step 3)",
                "rank 1, step 1: 1F1 waits for 0F1 (rank 0, step 2)",
            ],
        ),
        ("0F0 \n 1F0 1F1", ["rank 1, step 1: 1F1 waits for 0F1, which no rank does"]),
        (
            "0F0 0B0 0F1 0B1 \n 1F0 1F1 1I1 1I0",
            [
                "rank 0, step 1: 0B0 waits for 1I0 (rank 1, step 3)",
                "rank 1, step 1: 1F1 waits for 0F1 (rank 0, step 2)",
            ],
        ),
        (
            "edges: 0>1 \n !0>1:0 0F0 \n ?0>1:0 1F0",
            [
                "rank 0, step 0: !0>1:0 waits for 0F0 (rank 0, step 1)",
                "rank 1, step 1: 1F0 waits for !0>1:0 (rank 0, step 0)",
            ],
        ),
        (
            "edges: 0>1 \n 0F0 !0>1:0 \n 1F0 ?0>1:0",
            ["rank 1, step 0: 1F0 waits for ?0>1:0 (rank 1, step 1)"],
        ),
        (
            "edges: 0>1 \n 0F0 !0>1:0 \n 1F0",
            ["rank 1, step 0: 1F0 waits for ?0>1:0, which no rank does"],
        ),
    ],
)
def test_deadlock_message_says_which_action_waits_for_which(text: str, waits: list[str]) -> None:
    assert stuck(play(loads(text))).splitlines() == ["deadlock:", *(f"  {wait}" for wait in waits)]


def test_deadlock_error_has_waits() -> None:
    with pytest.raises(Deadlock) as error:
        list(play(loads("0F0 0B0 \n 1F0 1F1 1B0")))
    assert error.value.waits == (
        Wait(0, 1, Compute(Op.B, 0, 0), Compute(Op.B, 1, 0), ((1, 2),)),
        Wait(1, 1, Compute(Op.F, 1, 1), Compute(Op.F, 0, 1), ()),
    )


def test_wait_names_every_place_of_a_duplicated_action() -> None:
    wait = Wait(0, 1, Compute(Op.B, 0, 0), Compute(Op.B, 1, 0), ((1, 3), (2, 0)))
    assert str(wait) == ("rank 0, step 1: 0B0 waits for 1B0 (rank 1, step 3 and rank 2, step 0)")


# ---- messages -----------------------------------------------------------------------------

OBVIOUS = obvious(schedules.one_f_one_b(ranks=2, chunks=2))


def test_naive_lowering_deadlocks_under_rendezvous() -> None:
    assert [" ".join(map(str, lane)) for lane in OBVIOUS.lanes] == [
        "0F0 !0>1:0 0F1 !0>1:1 ?1>0:0 0B0 ?1>0:1 0B1",
        "?0>1:0 1F0 1B0 !1>0:0 ?0>1:1 1F1 1B1 !1>0:1",
    ]
    assert len(list(play(OBVIOUS, sends=Sends.BUFFERED))) == 16
    assert len(list(play(lower(OBVIOUS.schedule), sends=Sends.RENDEZVOUS))) == 16
    assert stuck(play(OBVIOUS, sends=Sends.RENDEZVOUS)) == (
        "deadlock:\n"
        "  rank 0, step 3: !0>1:1 waits for ?0>1:1 (rank 1, step 4)\n"
        "  rank 1, step 3: !1>0:0 waits for ?1>0:0 (rank 0, step 4)"
    )


BLOCKING = """
    edges: 0>1
    0F0 0F1 !0>1:0 !0>1:1
    ?0>1:0 1F0 ?0>1:1 1F1
"""


def test_blocking_send_lasts_until_its_recv() -> None:
    # Micro-batch 1 is received only after 1F0, so its send waits until then.
    assert times(play(loads(BLOCKING), sends=Sends.BUFFERED))["!0>1:1"] == (2.0, 2.0)
    assert times(play(loads(BLOCKING), sends=Sends.RENDEZVOUS))["!0>1:1"] == (3.0, 3.0)


def test_blocking_recv_lasts_until_the_message_arrives() -> None:
    cost = Cost.even((0, 1), send=0.5)
    assert times(play(loads(BLOCKING), cost=cost, sends=Sends.BUFFERED))["?0>1:0"] == (0.0, 0.0)
    rendezvous = times(play(loads(BLOCKING), cost=cost, sends=Sends.RENDEZVOUS))
    assert rendezvous["?0>1:0"] == (2.5, 2.5)
    assert rendezvous["1F0"] == (2.5, 3.5)


def test_deadlock_on_a_missing_send() -> None:
    program = loads("edges: 0>1 \n 0F0 0F1 !0>1:1 \n ?0>1:0 1F0 ?0>1:1 1F1")
    assert stuck(play(program, sends=Sends.RENDEZVOUS)) == (
        "deadlock:\n"
        "  rank 0, step 2: !0>1:1 waits for ?0>1:1 (rank 1, step 2)\n"
        "  rank 1, step 0: ?0>1:0 waits for !0>1:0, which no rank does"
    )


def test_program_is_played_with_its_own_graph() -> None:
    program = loads("edges: \n 1F0 \n 0F0 \n placement: 1 0")
    assert times(play(program, graph=StageGraph.chain(2)))["1F0"] == (0.0, 1.0)


def test_garbage_is_collected_again_after_the_last_of_several_threads() -> None:
    """The thread that came second found collection off, and turned it off again at its end."""
    first, second = paused_garbage_collection(), paused_garbage_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()

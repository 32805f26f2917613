from __future__ import annotations

from penstock import (
    Compute,
    Cost,
    Op,
    Schedule,
    StageGraph,
    draw,
    lower,
    schedules,
    simulate,
    verify,
)
from penstock.schedules.families.one_f_one_b import alternate_forward_backward
from penstock.schedules.list_scheduler import (
    SchedulerState,
    follow_order,
    insert_weight_grads,
    never,
    run_list_scheduler,
    when_full,
    when_lagging,
)

F, I, W = Op.F, Op.I, Op.W


def bench(placement: tuple[int, ...], chunks: int, memory: float, **costs: float) -> SchedulerState:
    cost = Cost.even(placement, **costs)
    caps = [memory] * (max(placement) + 1)
    return SchedulerState(placement, chunks, cost, caps, StageGraph.chain(len(placement)))


def test_startable_actions_need_their_inputs() -> None:
    state = bench((0, 1), chunks=2, memory=2)
    assert state.startable_actions(0, now=0.0) == [Compute(F, 0, 0)]
    assert state.startable_actions(1, now=0.0) == []
    state.start(Compute(F, 0, 0), now=0.0)
    assert state.startable_actions(0, now=1.0) == [Compute(F, 0, 1)]
    assert state.startable_actions(1, now=0.9) == []
    assert state.startable_actions(1, now=1.0) == [Compute(F, 1, 0)]


def test_startable_actions_wait_for_the_send_time() -> None:
    state = bench((0, 1), chunks=1, memory=1, send=0.5)
    state.start(Compute(F, 0, 0), now=0.0)
    assert state.startable_actions(1, now=1.4) == []
    assert state.ready_at(state.startable_actions(1, now=1.5)[0]) == 1.5


def test_startable_actions_wait_for_skips() -> None:
    graph = StageGraph.chain(3, skips=[(0, 2)])
    state = SchedulerState((0, 1, 2), 1, Cost.even((0, 1, 2)), [1, 1, 1], graph)
    state.start(Compute(F, 0, 0), now=0.0)
    assert state.startable_actions(2, now=9.0) == []
    state.start(Compute(F, 1, 0), now=1.0)
    assert state.startable_actions(2, now=2.0) == [Compute(F, 2, 0)]


def test_memory_is_taken_by_f_and_released_by_w() -> None:
    state = bench((0,), chunks=2, memory=1)
    state.start(Compute(F, 0, 0), now=0.0)
    assert state.is_full(0)
    state.start(Compute(I, 0, 0), now=1.0)
    assert state.is_full(0)
    assert state.pending_weight_grads == [1]
    state.start(Compute(W, 0, 0), now=2.0)
    assert not state.is_full(0)
    assert state.pending_weight_grads == [0]


def test_is_safe_reserves_memory_for_earlier_microbatches() -> None:
    """A rank has two stages and memory for three cells. A second forward of stage 0 leaves memory
    for the first forward of stage 1; a third would not, and the rank would be stuck."""
    state = bench((0, 0), chunks=3, memory=1.5)
    state.start(Compute(F, 0, 0), now=0.0)
    assert state.is_safe(0, Compute(F, 0, 1))
    state.start(Compute(F, 0, 1), now=0.5)
    assert state.has_room(0, 0)
    assert not state.is_safe(0, Compute(F, 0, 2))
    assert state.is_safe(0, Compute(F, 1, 0))


def test_patience_waits_for_the_preferred_action() -> None:
    def i_first_w_last(state: SchedulerState, rank: int, options: list[Compute]) -> Compute | None:
        return min(options, key=lambda action: "IFW".index(action.op.value))

    def steps_of_rank_0(patience: float) -> str:
        state = bench((0, 1), chunks=2, memory=2, W=3.0, send=0.25)
        run_list_scheduler(state, i_first_w_last, patience)
        return " ".join(map(str, state.lanes[0]))

    assert steps_of_rank_0(0.0) == "0F0 0F1 0I0 0W0 0I1 0W1"
    assert steps_of_rank_0(9.0) == "0F0 0F1 0I0 0I1 0W0 0W1"


def test_insert_weight_grads_fills_idle_time() -> None:
    cells = [[(rank, i) for i in range(3)] for rank in range(2)]
    lanes = [alternate_forward_backward(row, row, 1 - rank, I) for rank, row in enumerate(cells)]
    order = Schedule((0, 1), 3, tuple(map(tuple, lanes)))
    schedule = insert_weight_grads(order, when_lagging(lambda rank: rank))
    assert draw.text(simulate(lower(schedule))).splitlines() == [
        "rank 0  F0 F1 ···I0 W0 F2 I1 W1 I2 W2",
        "rank 1  ···F0 I0 F1 I1 W0 F2 I2 W1 W2",
        "makespan 10, bubble 10.0%, peak 2 on every rank",
    ]


def test_insert_weight_grads_early_when_full_and_last_when_never_due() -> None:
    order = Schedule((0,), 3, (tuple(Compute(op, 0, i) for i in range(3) for op in (F, I)),))
    assert " ".join(map(str, insert_weight_grads(order, never).lanes[0])) == (
        "0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2"
    )
    assert " ".join(map(str, insert_weight_grads(order, when_full, memory=1).lanes[0])) == (
        "0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2"
    )


def test_follow_order_stops_if_the_order_does_not_fit_in_memory() -> None:
    state = bench((0,), chunks=2, memory=1)
    run_list_scheduler(state, follow_order([[Compute(F, 0, 0), Compute(F, 0, 1)]], never))
    assert not state.is_complete()


def test_schedule_with_inserted_weight_grads_is_sound() -> None:
    assert verify(schedules.zb_h1(5, 9)) == ()

"""Random valid schedules are sound, and `verify` finds random damage to them."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import (
    Compute,
    Cost,
    Deadlock,
    Message,
    Program,
    Schedule,
    Send,
    Sends,
    StageGraph,
    dumps,
    loads,
    lower,
    play,
    recompute,
    simulate,
    verify,
)
from penstock.schedules.ir import consumes, follows, produces
from tests.properties.random_schedules import sound_schedules

QUICK = settings(max_examples=60, deadline=None)


@QUICK
@given(sound_schedules())
def test_verify_accepts_random_valid_schedules(case: tuple[Schedule, StageGraph]) -> None:
    schedule, graph = case
    assert verify(schedule, graph) == ()
    assert verify(lower(schedule, graph)) == ()


@QUICK
@given(sound_schedules(), st.floats(0, 2))
def test_program_with_buffered_sends_has_the_times_of_its_schedule(
    case: tuple[Schedule, StageGraph], send: float
) -> None:
    """Messages only add their delay."""
    schedule, graph = case
    cost = Cost.even(schedule.placement, send=send)
    alone = {s.action: (s.start, s.end) for s in play(schedule, graph, cost)}
    spans = simulate(lower(schedule, graph), cost).spans
    assert alone == {s.action: (s.start, s.end) for s in spans if isinstance(s.action, Compute)}


@QUICK
@given(sound_schedules())
def test_play_respects_dependencies(case: tuple[Schedule, StageGraph]) -> None:
    """No action starts before its inputs are ready, and a rank runs one action at a time."""
    schedule, graph = case
    cost = Cost.even(schedule.placement, send=0.5)
    ended: dict[Compute, float] = {}
    arrived: dict[Message, float] = {}
    free = [0.0] * schedule.ranks
    last = 0.0
    for span in play(schedule, graph, cost):
        action = span.action
        assert isinstance(action, Compute)
        assert span.start >= max(last, free[span.rank])
        assert all(span.start >= ended[e] for e in follows(action) if e in ended)
        assert all(span.start >= arrived[message] for message in consumes(action, graph))
        last, free[span.rank], ended[action] = span.start, span.end, span.end
        for message in produces(action, graph):
            arrived[message] = span.end + (0.5 if schedule.crosses(message) else 0.0)
    assert len(ended) == sum(map(len, schedule.lanes))


@QUICK
@given(sound_schedules(), st.data())
def test_verify_finds_swapped_actions(
    case: tuple[Schedule, StageGraph], data: st.DataObject
) -> None:
    """If two actions of a lane are swapped, `verify` reports it exactly if that deadlocks."""
    schedule, graph = case
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    lane = list(schedule.lanes[rank])
    if len(lane) < 2:
        return
    a = data.draw(st.integers(0, len(lane) - 1))
    b = data.draw(st.integers(0, len(lane) - 1))
    lane[a], lane[b] = lane[b], lane[a]
    lanes = (*schedule.lanes[:rank], tuple(lane), *schedule.lanes[rank + 1 :])
    damaged = replace(schedule, lanes=lanes)
    try:
        stuck = not list(play(damaged, graph))
    except Deadlock:
        stuck = True
    assert bool(verify(damaged, graph)) == stuck


@QUICK
@given(sound_schedules(), st.data())
def test_verify_finds_a_lost_message(
    case: tuple[Schedule, StageGraph], data: st.DataObject
) -> None:
    program = lower(*case)
    rank = data.draw(st.integers(0, len(program.lanes) - 1))
    ends = [k for k, a in enumerate(program.lanes[rank]) if not isinstance(a, Compute)]
    if not ends:
        return
    at = data.draw(st.sampled_from(ends))
    lost = program.lanes[rank][at]
    lane = program.lanes[rank][:at] + program.lanes[rank][at + 1 :]
    broken = replace(program, lanes=(*program.lanes[:rank], lane, *program.lanes[rank + 1 :]))
    assert f"rank {rank}: {lost} occurs never, not once" in verify(broken)


@QUICK
@given(sound_schedules())
def test_loads_and_dumps_round_trip(case: tuple[Schedule, StageGraph]) -> None:
    schedule, graph = case
    program = lower(schedule, graph)
    assert loads(dumps(schedule)) == schedule
    assert loads(dumps(program)) == program


@QUICK
@given(sound_schedules())
def test_lowering_sends_one_message_per_edge_between_ranks(
    case: tuple[Schedule, StageGraph],
) -> None:
    schedule, graph = case
    program: Program = lower(schedule, graph)
    crossing = [e for e in graph.edges if schedule.placement[e[0]] != schedule.placement[e[1]]]
    sends = sum(isinstance(action, Send) for lane in program.lanes for action in lane)
    assert sends == 2 * schedule.chunks * len(crossing)
    assert len(list(play(program, sends=Sends.RENDEZVOUS))) == sum(map(len, program.lanes))


@QUICK
@given(sound_schedules(), st.randoms(use_true_random=False))
def test_recompute_never_raises_the_peak(
    case: tuple[Schedule, StageGraph], draw: random.Random
) -> None:
    schedule, graph = case
    if schedule.recomputed:
        return
    again = recompute(schedule, lambda stage, microbatch: draw.random() < 0.5)
    assert verify(again, graph) == ()
    before, after = (simulate(lower(s, graph)).peak for s in (schedule, again))
    assert all(a <= b + 1e-9 for a, b in zip(after, before, strict=True))

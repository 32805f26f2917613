"""Every schedule at many sizes, where a send blocks until it is received (gloo buffers sends).

The workers are real, with one thread per lane; the stages compute with integers. Receives block in
place, or are posted one compute action earlier.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import (
    Compute,
    Deadlock,
    Program,
    Recv,
    RunError,
    Schedule,
    Send,
    Sends,
    StageGraph,
    lower,
    play,
    recompute,
    schedules,
)
from penstock.runtime.distributed.session import prefetch_receives
from penstock.runtime.rendezvous import Rendezvous
from penstock.runtime.transport import Mailboxes
from penstock.runtime.worker import BoundAction, bind_lane
from penstock.schedules.ir import Action, consumes, produces
from tests.properties.paper import carried_out, unsplit
from tests.properties.random_schedules import obvious, sound_schedules
from tests.properties.test_sweep import CHUNKS, RANKS, VARIANTS, in_turn

strict = Rendezvous
posted = partial(Rendezvous, blocking_recv=False)


def early(program: Program, rank: int) -> list[BoundAction]:
    """Return a lane with each receive one compute action earlier, as in processes."""
    return prefetch_receives(bind_lane(program, rank))


def harder(name: str, ranks: int, chunks: int, v: int) -> Program:
    """Return a program with random skips and random recomputation."""
    draw = random.Random(f"{name} {v} {ranks} {chunks}")
    stages = ranks * v
    pairs = [(a, b) for a in range(stages) for b in range(a + 1, stages)]
    graph = StageGraph.chain(stages, draw.sample(pairs, min(len(pairs), draw.randrange(4))))
    schedule = schedules.make(name, ranks, chunks, v)
    return lower(recompute(schedule, lambda stage, i: draw.random() < 0.5), graph)


@pytest.mark.parametrize("ranks", RANKS[1:])
@pytest.mark.parametrize(("name", "v"), VARIANTS)
def test_every_schedule_and_size_runs_under_rendezvous(name: str, v: int, ranks: int) -> None:
    """Sizes alternate between blocking and posted receives."""
    for chunks in (chunks for chunks in CHUNKS if in_turn(name, v, ranks, chunks)):
        program = harder(name, ranks, chunks, v)
        expected = unsplit(program.graph, ranks * v, chunks, schedules.FAMILIES[name].trains)
        if chunks // 4 % 2:
            assert carried_out(program, strict) == expected, chunks
        else:
            assert carried_out(program, posted, early) == expected, chunks


# ---- programs that must deadlock ----------------------------------------------------------


def test_naive_lowering_deadlocks_only_under_rendezvous() -> None:
    program = obvious(schedules.interleaved(2, 4, 2))
    assert carried_out(program, Mailboxes) == unsplit(program.graph, 4, 4, trains=True)
    for make in (strict, posted):
        with pytest.raises(RunError, match="these ranks wait for each other"):
            carried_out(program, make)


def test_prefetched_receives_deadlock_if_they_block() -> None:
    program = lower(schedules.one_f_one_b(2, 4))
    assert carried_out(program, posted, early) == unsplit(program.graph, 2, 4, trains=True)
    with pytest.raises(RunError, match="these ranks wait for each other"):
        carried_out(program, strict, early)


@settings(max_examples=60, deadline=None)
@given(sound_schedules(), st.randoms(use_true_random=False))
def test_rendezvous_deadlocks_exactly_where_play_does(
    case: tuple[Schedule, StageGraph], draw: random.Random
) -> None:
    """Sends are moved later and receives moved around, so that some of the programs deadlock."""
    program = moved(lower(*case), draw)
    try:
        list(play(program, sends=Sends.RENDEZVOUS))
    except Deadlock:
        with pytest.raises(RunError, match=r"wait for each other|in the same order"):
            carried_out(program, partial(strict, timeout=5.0))
    else:
        schedule = program.schedule
        assert carried_out(program, strict) == unsplit(
            program.graph, schedule.stages, schedule.chunks, trains=True
        )


def moved(program: Program, draw: random.Random) -> Program:
    """Move some sends and receives, each still after its producer and before its consumer."""
    lanes = []
    for lane in program.lanes:
        actions = list(lane)
        for action in draw.sample(lane, min(len(lane), 3)):
            if isinstance(action, Compute):
                continue
            now = actions.index(action)
            lowest, highest = _room(actions, action, program.graph)
            actions.insert(draw.randint(lowest, highest), actions.pop(now))
        lanes.append(tuple(actions))
    return replace(program, lanes=tuple(lanes))


def _room(actions: Sequence[Action], end: Send | Recv, graph: StageGraph) -> tuple[int, int]:
    """Return the lowest and highest index to which a send or receive may move."""
    others = [action for action in actions if action != end]
    ask = produces if isinstance(end, Send) else consumes
    users = [
        k for k, a in enumerate(others) if isinstance(a, Compute) and end.message in ask(a, graph)
    ]
    return (users[0] + 1, len(others)) if isinstance(end, Send) else (0, users[0])

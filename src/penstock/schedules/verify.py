"""Is it whole, does it end, does it fit? One function a claim; each returns every problem it finds.

`verify` makes all the claims that make sense for a schedule or program, also for one that
somebody wrote by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from penstock.errors import InvalidScheduleError
from penstock.schedules.cost import Cost, exceeds, expand_memory_caps, track_live_memory
from penstock.schedules.ir import (
    Compute,
    Op,
    Program,
    Recv,
    Schedule,
    Send,
    StageGraph,
    produces,
    schedule_of,
)
from penstock.schedules.lowering import lower
from penstock.schedules.simulator import Deadlock, Sends, check_stages_match, play


def verify(
    work: Schedule | Program,
    graph: StageGraph | None = None,
    memory: float | Sequence[float] | None = None,
    cost: Cost | None = None,
) -> tuple[str, ...]:
    """Every problem of a schedule or program; none if it is sound.

    A schedule is lowered for `graph` (a chain, if none is given). `memory` caps what is alive on
    every rank, or on each, in the units of `cost.activation`: by default, micro-batches of a
    rank's whole share.

    >>> from penstock.schedules.notation import loads
    >>> for problem in verify(loads("0F0 0B0 0F1 0B1 \\n 1F0 1F1 1B1 1B0")):
    ...     print(problem)
    rank 0, step 1: 0B0 waits for 1B0 (rank 1, step 3)
    rank 1, step 1: 1F1 waits for 0F1 (rank 0, step 2)
    """
    schedule = schedule_of(work)
    graph = work.graph if isinstance(work, Program) else graph
    graph = graph or StageGraph.chain(schedule.stages)
    strays = [*find_misplaced_actions(schedule), *graph.strays(schedule.stages)]
    if isinstance(work, Program):
        strays += [*find_compute_mismatches(work), *find_unknown_message_stages(work)]
    problems = [*strays, *find_incomplete_cells(schedule), *find_invalid_overlaps(schedule)]
    if strays:  # the other claims make no sense of what is not there
        return tuple(problems)
    if isinstance(work, Program):
        problems += find_unmatched_messages(work)
    problems += find_deadlocks(work, graph)
    if memory is not None:
        cost = cost or Cost.even(schedule.placement)
        check_stages_match(schedule.placement, graph, cost)
        problems += find_memory_excess(schedule, memory, cost)
    return tuple(problems)


def require_sound(
    work: Schedule | Program,
    graph: StageGraph | None = None,
    memory: float | Sequence[float] | None = None,
    cost: Cost | None = None,
) -> None:
    """Raise `InvalidScheduleError`, with every problem, unless `verify` finds none."""
    problems = verify(work, graph, memory, cost)
    if problems:
        raise InvalidScheduleError("this schedule must not run:", problems)


# ---- claims about a schedule --------------------------------------------------------------


def find_misplaced_actions(schedule: Schedule) -> Iterator[str]:
    """Each action names a stage and a micro-batch that exist, and stands on its stage's rank."""
    for rank, lane in enumerate(schedule.lanes):
        for step, action in enumerate(lane):
            where = f"rank {rank}, step {step}: {action}"
            if not 0 <= action.stage < schedule.stages:
                yield f"{where} names stage {action.stage}, but there are {schedule.stages}"
            elif schedule.placement[action.stage] != rank:
                owner = schedule.placement[action.stage]
                yield f"{where} stands here, but stage {action.stage} is on rank {owner}"
            if not 0 <= action.microbatch < schedule.chunks:
                yield f"{where} names micro-batch {action.microbatch} of {schedule.chunks}"


def find_incomplete_cells(schedule: Schedule) -> Iterator[str]:
    """Each micro-batch passes each stage: F once; then B once, or I and W once; R at most once.

    A schedule without any backward is one for inference, and whole with its Fs.
    """
    times = Counter(action for lane in schedule.lanes for action in lane)
    trains = any(action.op in (Op.B, Op.I, Op.W) for action in times)
    for stage in range(schedule.stages):
        chunks = range(schedule.chunks)
        seen = {a.microbatch for a in times if a.stage == stage and a.microbatch in chunks}
        if first := list(islice((i for i in chunks if i not in seen), 3)):
            more = schedule.chunks - len(seen) - len(first)
            listed = ", ".join(map(str, first)) + (f" and {more} more" if more > 0 else "")
            yield f"stage {stage}: nothing runs on micro-batch {listed}"
        for microbatch in sorted(seen):
            f, b, i, w, r = (times[Compute(op, stage, microbatch)] for op in Op)
            where = f"stage {stage}, micro-batch {microbatch}"
            if f != 1:
                yield f"{where}: F runs {_format_count(f)}, not once"
            if trains and (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                found = f"B {_format_count(b)}, I {_format_count(i)}, W {_format_count(w)}"
                yield f"{where}: it needs B once, or I and W once, but has {found}"
            if r > 1:
                yield f"{where}: R runs {_format_count(r)}, not at most once"


def _format_count(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def find_invalid_overlaps(schedule: Schedule) -> Iterator[str]:
    """Actions that may overlap are neighbours in a lane."""
    steps = {a: (rank, s) for rank, lane in enumerate(schedule.lanes) for s, a in enumerate(lane)}
    for first, second in sorted(schedule.overlaps):
        if first not in steps or second not in steps:
            yield f"{first} and {second} may overlap, but are not both in the schedule"
        elif steps[second] != (steps[first][0], steps[first][1] + 1):
            yield f"{first} and {second} may overlap, but are not neighbours in a lane"


def find_memory_excess(
    schedule: Schedule, memory: float | Sequence[float], cost: Cost
) -> Iterator[str]:
    """No rank ever holds more than `memory`: one cap for all, or one for each."""
    caps = expand_memory_caps(memory, schedule.ranks)
    for rank, (lane, cap) in enumerate(zip(schedule.lanes, caps, strict=True)):
        step, _, size = max(
            track_live_memory(lane, cost), key=lambda change: change[2], default=(0, True, 0.0)
        )
        if exceeds(size, cap):
            yield f"rank {rank}, step {step}: {lane[step]} makes {size:g} alive, over {cap:g}"


# ---- claims about a program ---------------------------------------------------------------


def find_compute_mismatches(program: Program) -> Iterator[str]:
    """Without its messages, a program is its schedule."""
    for rank, lane in enumerate(program.lanes):
        if tuple(a for a in lane if isinstance(a, Compute)) != program.schedule.lanes[rank]:
            yield f"rank {rank}: the program computes something else than its schedule"


def find_unknown_message_stages(program: Program) -> Iterator[str]:
    """Each message names stages that exist."""
    stages = range(program.schedule.stages)
    for rank, lane in enumerate(program.lanes):
        for step, action in enumerate(lane):
            if not isinstance(action, Compute):
                message = action.message
                for stage in {message.src, message.dst} - set(stages):
                    where = f"rank {rank}, step {step}: {action}"
                    yield f"{where} names stage {stage}, but there are {len(stages)}"


def find_unmatched_messages(program: Program) -> Iterator[str]:
    """Each message between ranks is sent once and received once, on its stages' ranks."""
    schedule, graph = program.schedule, program.graph
    expected: Counter[tuple[int, Send | Recv]] = Counter()
    for lane in schedule.lanes:
        for action in lane:
            for message in filter(schedule.crosses, produces(action, graph)):
                expected[schedule.placement[message.src], Send(message)] = 1
                expected[schedule.placement[message.dst], Recv(message)] = 1
    found = Counter(
        (rank, action)
        for rank, lane in enumerate(program.lanes)
        for action in lane
        if not isinstance(action, Compute)
    )
    for rank, end in sorted(expected.keys() | found.keys(), key=lambda e: (e[0], str(e[1]))):
        want, have = expected[rank, end], found[rank, end]
        if want != have:
            yield f"rank {rank}: {end} stands here {_format_count(have)}, not {_format_count(want)}"


# ---- both ---------------------------------------------------------------------------------


def find_deadlocks(work: Schedule | Program, graph: StageGraph) -> Iterator[str]:
    """It ends, also if a send blocks until it is received, as NCCL's do.

    Who blocks waits for more, so what ends then ends in any case, and is played once.
    """
    try:
        program = lower(work, graph) if isinstance(work, Schedule) else work
    except Deadlock as deadlock:
        yield from map(str, deadlock.waits)
        return
    if blocked := _find_waits(program, Sends.RENDEZVOUS):
        always = _find_waits(program, Sends.BUFFERED)
        yield from always or (f"{w}, when sends block until they are received" for w in blocked)


def _find_waits(program: Program, sends: Sends) -> list[str]:
    """Those that never end."""
    try:
        for _ in play(program, sends=sends):
            pass
    except Deadlock as deadlock:
        return [str(wait) for wait in deadlock.waits]
    return []

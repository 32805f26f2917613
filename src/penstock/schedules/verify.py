"""Check a schedule or program: it is complete, it ends, and it fits in memory.

`verify` runs all checks that apply, also to schedules that were written by hand. Each check is one
function that yields every problem it finds:

    find_misplaced_actions         an action on the wrong rank, or with a wrong stage or micro-batch
    find_incomplete_cells          a stage and micro-batch without its F, or without its backward
    find_invalid_overlaps          overlapping actions that are not neighbours
    find_memory_excess             more alive activations than the cap
    find_compute_mismatches        a program whose computations differ from its schedule
    find_unknown_message_stages    a message that names a stage that does not exist
    find_unmatched_messages        a message without its send or its receive
    find_deadlocks                 ranks that wait for each other forever
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice

from penstock.errors import InvalidScheduleError
from penstock.schedules.cost import Cost, exceeds, expand_memory_caps, track_live_memory
from penstock.schedules.ir import (
    OP_RULES,
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
from penstock.schedules.simulator import (
    Deadlock,
    Sends,
    check_stages_match,
    paused_garbage_collection,
    play,
)


@paused_garbage_collection()
def verify(
    work: Schedule | Program,
    graph: StageGraph | None = None,
    memory: float | Sequence[float] | None = None,
    cost: Cost | None = None,
) -> tuple[str, ...]:
    """Return every problem of a schedule or program.

    Args:
        work: The schedule or program.
        graph: The stage graph of a schedule; a chain if it is left out. A program has its own.
        memory: The cap on the live activations, one number for all ranks or one per rank, in the
            units of `cost.activation`. Without a cap, memory is not checked.
        cost: The cost of the stages. By default the activations of a rank's stages add up to 1, so
            `memory` counts micro-batches.

    Returns:
        One line per problem. The tuple is empty if the schedule may run.

    Example:
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
    # The checks below index by stage and rank, and would fail on those that do not exist.
    if strays:
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
    """Raise unless `verify` finds no problem.

    Args:
        work: The schedule or program.
        graph: The stage graph of a schedule, as in `verify`.
        memory: The cap on the live activations, as in `verify`.
        cost: The cost of the stages, as in `verify`.

    Raises:
        InvalidScheduleError: The schedule must not run. The error lists every problem.

    Example:
        >>> from penstock import schedules
        >>> require_sound(schedules.one_f_one_b(ranks=2, chunks=4), memory=2)
    """
    problems = verify(work, graph, memory, cost)
    if problems:
        raise InvalidScheduleError("this schedule must not run:", problems)


# ---- checks of a schedule -----------------------------------------------------------------


def find_misplaced_actions(schedule: Schedule) -> Iterator[str]:
    """Yield the actions that name an unknown stage or micro-batch, or are on the wrong rank."""
    for rank, lane in enumerate(schedule.lanes):
        for step, action in enumerate(lane):
            _, stage, microbatch = action
            if not 0 <= stage < schedule.stages:
                problem = f"names stage {stage}, but there are {schedule.stages}"
                yield f"rank {rank}, step {step}: {action} {problem}"
            elif schedule.placement[stage] != rank:
                problem = f"stage {stage} is on rank {schedule.placement[stage]}"
                yield f"rank {rank}, step {step}: {action} is in this lane, but {problem}"
            if not 0 <= microbatch < schedule.chunks:
                problem = f"names micro-batch {microbatch} of {schedule.chunks}"
                yield f"rank {rank}, step {step}: {action} {problem}"


def find_incomplete_cells(schedule: Schedule) -> Iterator[str]:
    """Yield the cells whose actions are missing or repeated.

    Each stage needs, for each micro-batch, one F and then one B, or one I and one W. It may have
    one of each optional op, such as R. A schedule without any backward is for inference and needs
    only its Fs.
    """
    ops_by_stage: dict[int, dict[Op, list[int]]] = {}
    for op, stage, microbatch in chain.from_iterable(schedule.lanes):
        ops = ops_by_stage.setdefault(stage, {op: [] for op in Op})
        ops[op].append(microbatch)
    trains = any(ops[op] for ops in ops_by_stage.values() for op in _BACKWARD)
    chunks = range(schedule.chunks)
    for stage in range(schedule.stages):
        if _is_complete(ops_by_stage.get(stage, {}), chunks, trains):
            continue
        times = {op: Counter(ops_by_stage.get(stage, {}).get(op, ())) for op in Op}
        # Not an intersection of sets, which would enumerate all of `chunks`.
        present = {i for counter in times.values() for i in counter if i in chunks}
        # Three examples are enough: a text that says `chunks: 99999999` must not list them all.
        if missing := list(islice((i for i in chunks if i not in present), 3)):
            more = schedule.chunks - len(present) - len(missing)
            listed = ", ".join(map(str, missing)) + (f" and {more} more" if more > 0 else "")
            yield f"stage {stage}: nothing runs on micro-batch {listed}"
        for microbatch in sorted(present):
            where = f"stage {stage}, micro-batch {microbatch}"
            b, i, w = (times[op][microbatch] for op in _BACKWARD)
            if times[Op.F][microbatch] != 1:
                yield f"{where}: F runs {_format_count(times[Op.F][microbatch])}, not once"
            if trains and (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                has = ", ".join(f"{op} {_format_count(times[op][microbatch])}" for op in _BACKWARD)
                yield f"{where}: it needs B once, or I and W once, but has {has}"
            for op in _OPTIONAL:
                if times[op][microbatch] > 1:
                    count = _format_count(times[op][microbatch])
                    yield f"{where}: {op} runs {count}, not at most once"


def _is_complete(ops: Mapping[Op, list[int]], chunks: range, trains: bool) -> bool:
    """Return whether a stage is certainly complete: quicker than to count every micro-batch."""
    # The lengths first: a text may say `chunks: 99999999`, of which no list is made.
    if not ops or len(ops[Op.F]) != len(chunks) or sorted(ops[Op.F]) != list(chunks):
        return False
    full, split, weights = (ops[op] for op in _BACKWARD)
    if trains and (sorted(full + split) != list(chunks) or sorted(split) != sorted(weights)):
        return False
    return all(
        len(set(ops[op])) == len(ops[op]) and max(ops[op], default=0) < len(chunks)
        for op in _OPTIONAL
    )


_OPTIONAL = tuple(op for op, rule in OP_RULES.items() if rule.optional)
_BACKWARD = (Op.B, Op.I, Op.W)


def _format_count(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def find_invalid_overlaps(schedule: Schedule) -> Iterator[str]:
    """Yield the pairs of overlapping actions that are not neighbours in a lane."""
    steps = {a: (rank, s) for rank, lane in enumerate(schedule.lanes) for s, a in enumerate(lane)}
    for left, right in sorted(schedule.overlaps):
        if left not in steps or right not in steps:
            yield f"{left} and {right} may overlap, but are not both in the schedule"
        elif steps[right] != (steps[left][0], steps[left][1] + 1):
            yield f"{left} and {right} may overlap, but are not neighbours in a lane"


def find_memory_excess(
    schedule: Schedule, memory: float | Sequence[float], cost: Cost
) -> Iterator[str]:
    """Yield the ranks that hold more than their cap, with the action at the peak."""
    caps = expand_memory_caps(memory, schedule.ranks)
    for rank, (lane, cap) in enumerate(zip(schedule.lanes, caps, strict=True)):
        step, _, size = max(
            track_live_memory(lane, cost), key=lambda change: change[2], default=(0, True, 0.0)
        )
        if exceeds(size, cap):
            yield (
                f"rank {rank}, step {step}: {lane[step]} brings live memory to {size:g}, over "
                f"{cap:g}"
            )


# ---- checks of a program ------------------------------------------------------------------


def find_compute_mismatches(program: Program) -> Iterator[str]:
    """Yield the ranks whose compute actions differ from those of the program's schedule."""
    for rank, lane in enumerate(program.lanes):
        if tuple(a for a in lane if isinstance(a, Compute)) != program.schedule.lanes[rank]:
            yield f"rank {rank}: the program computes something else than its schedule"


def find_unknown_message_stages(program: Program) -> Iterator[str]:
    """Yield the sends and receives that name a stage that does not exist."""
    stages = range(program.schedule.stages)
    for rank, lane in enumerate(program.lanes):
        for step, action in enumerate(lane):
            if not isinstance(action, Compute):
                message = action.message
                for stage in {stage for stage in message[:2] if stage not in stages}:
                    where = f"rank {rank}, step {step}: {action}"
                    yield f"{where} names stage {stage}, but there are {len(stages)}"


def find_unmatched_messages(program: Program) -> Iterator[str]:
    """Yield the sends and receives that are missing, repeated, superfluous or on the wrong rank.

    Each message between ranks must be sent once and received once, on the ranks of its stages.
    """
    schedule, graph = program.schedule, program.graph
    expected: Counter[tuple[int, Send | Recv]] = Counter()
    for lane in schedule.lanes:
        for action in lane:
            for message in filter(schedule.crosses, produces(action, graph)):
                expected[schedule.placement[message.src], Send(message)] = 1
                expected[schedule.placement[message.dst], Recv(message)] = 1
    actual = Counter(
        (rank, action)
        for rank, lane in enumerate(program.lanes)
        for action in lane
        if not isinstance(action, Compute)
    )
    for rank, end in sorted(expected.keys() | actual.keys(), key=lambda e: (e[0], str(e[1]))):
        want, have = expected[rank, end], actual[rank, end]
        if want != have:
            yield f"rank {rank}: {end} occurs {_format_count(have)}, not {_format_count(want)}"


# ---- checks of both -----------------------------------------------------------------------


def find_deadlocks(work: Schedule | Program, graph: StageGraph) -> Iterator[str]:
    """Yield the ranks that wait forever, even if a send blocks until it is received (NCCL).

    Blocking sends only add waits. So a program that ends with them ends in any case, and one
    simulation is enough for a sound program. A schedule that ends is lowered to a program that
    ends: see `lower`.
    """
    if isinstance(work, Schedule):
        yield from _find_waits(work, graph)
    elif blocked := _find_waits(work, graph, Sends.RENDEZVOUS):
        # Simulate again to tell whether the program is stuck only because sends block.
        always = _find_waits(work, graph)
        yield from always or (f"{w}, when sends block until they are received" for w in blocked)


def _find_waits(
    work: Schedule | Program, graph: StageGraph, sends: Sends = Sends.BUFFERED
) -> list[str]:
    """Return the waits that never end, as text."""
    try:
        for _ in play(work, graph, sends=sends):
            pass
    except Deadlock as deadlock:
        return [str(wait) for wait in deadlock.waits]
    return []

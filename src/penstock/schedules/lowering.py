"""The passes from a schedule to a program. Each is one function and returns a new value.

forwards_first        Schedule -> Schedule   move all forwards to the front, for `loss.backward()`
join_split_backwards  Schedule -> Schedule   replace each I and its W by one B
recompute             Schedule -> Schedule   put an R before every backward that needs one
remove_recompute      Schedule -> Schedule   remove every R
lower                 Schedule -> Program    write the messages in
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

from penstock.errors import ArgumentError
from penstock.schedules.ir import (
    OP_RULES,
    Action,
    Compute,
    Message,
    Op,
    Program,
    Recv,
    Schedule,
    Send,
    StageGraph,
    is_forward,
    produces,
)
from penstock.schedules.simulator import paused_garbage_collection, play

# A function of (stage, micro-batch) that returns True if that cell is to be recomputed.
RecomputePredicate = Callable[[int, int], bool]

# Each mode recomputes the first so many of `chunks` micro-batches. Under GPipe the last micro-batch
# goes backward right after its forward, so "except_last" saves a recomputation for little memory.
_RECOMPUTED_COUNT: dict[str, Callable[[int], int]] = {
    "always": lambda chunks: chunks,
    "except_last": lambda chunks: chunks - 1,
    "never": lambda chunks: 0,
}
CHECKPOINT_MODES = tuple(_RECOMPUTED_COUNT)

# Which cells are recomputed: a mode for all stages, a mode or bool for each, or a function. In a
# table, an entry that is a tuple has one bool for each micro-batch of its stage.
RecomputeTable = str | tuple[str | tuple[bool, ...], ...]
Recomputation = str | Sequence[str | bool | tuple[bool, ...]] | RecomputePredicate


def recompute_mode(mode: Recomputation, chunks: int) -> RecomputePredicate:
    """Return which cells are recomputed, as a function of stage and micro-batch.

    Args:
        mode: "always", "except_last" or "never", the modes of torchgpipe and PyTorch's Pipe; a
            sequence with one of these, or a bool, for each stage; or such a function itself.
        chunks: The number of micro-batches.

    Returns:
        A function of (stage, micro-batch), for `recompute`.

    Raises:
        ArgumentError: The mode is unknown.

    Example:
        >>> wanted = recompute_mode("except_last", chunks=4)
        >>> [wanted(0, microbatch) for microbatch in range(4)]
        [True, True, True, False]
        >>> wanted = recompute_mode(["always", "never"], chunks=4)
        >>> wanted(0, 3), wanted(1, 0)
        (True, False)
    """
    if isinstance(mode, str):
        if mode not in CHECKPOINT_MODES:
            raise ArgumentError(
                f"checkpoint must be one of {', '.join(CHECKPOINT_MODES)}, not '{mode}'"
            )
        recomputed = _RECOMPUTED_COUNT[mode](chunks)
        return lambda stage, microbatch: microbatch < recomputed
    if callable(mode):
        return mode
    stages = [
        entry if isinstance(entry, tuple) else recompute_mode(_mode_of_stage(entry), chunks)
        for entry in mode
    ]

    def wanted(stage: int, microbatch: int) -> bool:
        entry = stages[stage]
        return entry[microbatch] if isinstance(entry, tuple) else entry(stage, microbatch)

    return wanted


def resolve_recomputation(mode: Recomputation, stages: int, chunks: int) -> RecomputeTable:
    """Return a mode as a value that can be compared, sent and used as a key.

    A function is called for every cell. A sequence must have one entry for each stage.

    >>> resolve_recomputation([True, "except_last"], stages=2, chunks=4)
    ('always', 'except_last')
    >>> resolve_recomputation(lambda stage, microbatch: stage > microbatch, stages=2, chunks=2)
    ((False, False), (True, False))
    """
    if isinstance(mode, str):
        recompute_mode(mode, chunks)  # raises if it is unknown
        return mode
    if callable(mode):
        return tuple(
            tuple(bool(mode(stage, microbatch)) for microbatch in range(chunks))
            for stage in range(stages)
        )
    if not isinstance(mode, Sequence):
        raise ArgumentError(
            f"checkpoint must be one of {', '.join(CHECKPOINT_MODES)}, a list of these with one "
            f"for each stage, or a function of (stage, micro-batch), not {mode!r}"
        )
    if len(mode) != stages:
        raise ArgumentError(
            f"checkpoint has {len(mode)} entries, but there are {stages} stages. Give one for each "
            "stage, or one word for all."
        )
    return tuple(entry if isinstance(entry, tuple) else _mode_of_stage(entry) for entry in mode)


def _mode_of_stage(entry: object) -> str:
    """Return the mode of one stage: a word, or the word for a bool."""
    if isinstance(entry, bool):
        return "always" if entry else "never"
    if not isinstance(entry, str) or entry not in CHECKPOINT_MODES:
        raise ArgumentError(
            f"each entry of checkpoint must be one of {', '.join(CHECKPOINT_MODES)}, True or "
            f"False, not {entry!r}"
        )
    return entry


def forwards_first(schedule: Schedule) -> Schedule:
    """Return the schedule with every forward before every backward, each in its own order.

    A loss that the caller computes needs all outputs before there is the first gradient.
    """
    lanes = [
        (*(a for a in lane if is_forward(a)), *(a for a in lane if not is_forward(a)))
        for lane in schedule.lanes
    ]
    return Schedule(schedule.placement, schedule.chunks, tuple(lanes))


def join_split_backwards(schedule: Schedule) -> Schedule:
    """Return the schedule with a full backward in place of each I, and without the Ws."""
    lanes = [
        tuple(Compute(Op.B, *a[1:]) if a.op is Op.I else a for a in lane if a.op is not Op.W)
        for lane in schedule.lanes
    ]
    return Schedule(schedule.placement, schedule.chunks, tuple(lanes))


def recompute(schedule: Schedule, wanted: RecomputePredicate) -> Schedule:
    """Return the schedule with an R right before each backward that needs one.

    An R does not wait for a gradient, so it fills the time in which the gradient is in flight.

    Args:
        schedule: The schedule. Its own Rs stay.
        wanted: A function of (stage, micro-batch) that says whether to recompute it.

    Returns:
        A new schedule.

    Example:
        >>> from penstock import schedules
        >>> schedule = schedules.gpipe(ranks=1, chunks=2)
        >>> print(*recompute(schedule, recompute_mode("always", chunks=2)).lanes[0])
        0F0 0F1 0R1 0B1 0R0 0B0
    """
    lanes = []
    for lane in schedule.lanes:
        out: list[Compute] = []
        for action in lane:
            out.append(action)
            cell = (action.stage, action.microbatch)
            needs_r = Op.R in OP_RULES[action.op].after and cell not in schedule.recomputed
            if needs_r and wanted(*cell):
                # The R goes before a pair that may overlap, so that the pair stays together.
                index = len(out) - 1
                while index and (out[index - 1], out[index]) in schedule.overlaps:
                    index -= 1
                out.insert(index, Compute(Op.R, *cell))
        lanes.append(tuple(out))
    return replace(schedule, lanes=tuple(lanes))


def remove_recompute(schedule: Schedule) -> Schedule:
    """Return the schedule without its Rs."""
    lanes = [tuple(a for a in lane if a.op is not Op.R) for lane in schedule.lanes]
    return replace(schedule, lanes=tuple(lanes))


@paused_garbage_collection()
def lower(schedule: Schedule, graph: StageGraph | None = None) -> Program:
    """Return the program of a schedule, with a send and a receive for every message between ranks.

    Args:
        schedule: The schedule.
        graph: The stage graph, which says which messages there are; a chain if it is left out.

    Returns:
        A program that cannot deadlock, even if a send blocks until it is received (NCCL).

    Raises:
        Deadlock: The order of the schedule's own actions cannot be carried out.

    Example:
        >>> from penstock import schedules
        >>> for lane in lower(schedules.gpipe(ranks=2, chunks=1)).lanes:
        ...     print(*lane)
        0F0 !0>1:0 ?1>0:0 0B0
        ?0>1:0 1F0 1B0 !1>0:0
    """
    # Why the program cannot deadlock: the schedule is simulated, and both ends of each message are
    # written at one moment of that one global order. When an action ends, each message it made
    # becomes the next thing that its two ranks do. So whatever the ranks have done so far, the
    # earliest event that is not done yet can be done. If it is a compute action, everything it
    # needs is there. If it is a message, both of its ranks have reached it.
    graph = graph or StageGraph.chain(schedule.stages)
    placement = schedule.placement
    lanes: list[list[Action]] = [[] for _ in schedule.lanes]
    messages: list[tuple[float, int, Message]] = []  # a heap of (time made, order, message)
    sequence = count()  # keeps messages of one time in the order in which they were made
    order: list[int] = []

    def write_messages(until: float) -> None:
        while messages and messages[0][0] <= until:
            message = heappop(messages)[2]
            src, dst = placement[message.src], placement[message.dst]
            lanes[src].append(Send(message))
            lanes[dst].append(Recv(message))
            order.extend((src, dst))

    for rank, _, action, start, end in play(schedule, graph):
        assert isinstance(action, Compute)
        write_messages(until=start)
        lanes[rank].append(action)
        order.append(rank)
        for message in produces(action, graph):
            if schedule.crosses(message):
                heappush(messages, (end, next(sequence), message))
    write_messages(until=float("inf"))
    return Program(schedule, graph, tuple(map(tuple, lanes)), tuple(order))

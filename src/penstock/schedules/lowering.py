"""From a schedule to a program; one function a pass.

forwards_first     Schedule -> Schedule   what can run behind `loss.backward()`
joined             Schedule -> Schedule   whole backwards in the place of split ones
recompute          Schedule -> Schedule   put an R before every backward that needs one
without_recompute  Schedule -> Schedule   none of those
lower              Schedule -> Program    write the messages in
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

from penstock.errors import ArgumentError
from penstock.schedules.ir import (
    Action,
    Compute,
    Message,
    Op,
    Program,
    Recv,
    Schedule,
    Send,
    StageGraph,
    produces,
)
from penstock.schedules.simulator import play

# Is this (stage, micro-batch) to be recomputed?
RecomputePredicate = Callable[[int, int], bool]

# Of so many micro-batches, the first so many are recomputed.
_RECOMPUTED_COUNT: dict[str, Callable[[int], int]] = {
    "always": lambda chunks: chunks,
    "except_last": lambda chunks: chunks - 1,
    "never": lambda chunks: 0,
}
CHECKPOINT_MODES = tuple(_RECOMPUTED_COUNT)


def recompute_mode(mode: str, chunks: int) -> RecomputePredicate:
    """The modes of checkpointing of torchgpipe and PyTorch's Pipe, as a predicate."""
    if mode not in CHECKPOINT_MODES:
        raise ArgumentError(f"checkpoint is one of {', '.join(CHECKPOINT_MODES)}, not '{mode}'")
    recomputed = _RECOMPUTED_COUNT[mode](chunks)
    return lambda stage, microbatch: microbatch < recomputed


def forwards_first(schedule: Schedule) -> Schedule:
    """Every forward before every backward, both in the schedule's own order.

    A loss that is computed outside needs all outputs before the first gradient.
    """
    lanes = [
        (*(a for a in lane if a.op is Op.F), *(a for a in lane if a.op is not Op.F))
        for lane in schedule.lanes
    ]
    return Schedule(schedule.placement, schedule.chunks, tuple(lanes))


def join_split_backwards(schedule: Schedule) -> Schedule:
    """Each I and its W in one: a whole backward, where the I was."""
    lanes = [
        tuple(Compute(Op.B, *a[1:]) if a.op is Op.I else a for a in lane if a.op is not Op.W)
        for lane in schedule.lanes
    ]
    return Schedule(schedule.placement, schedule.chunks, tuple(lanes))


def recompute(schedule: Schedule, wanted: RecomputePredicate) -> Schedule:
    """Put an R right before each backward that `wanted` asks it for, unless it has one.

    An R waits for no gradient, so it fills the time in which the gradient is on its way. It goes
    before a pair that may overlap, so that the pair stays together.
    """
    lanes = []
    for lane in schedule.lanes:
        out: list[Compute] = []
        for action in lane:
            out.append(action)
            cell = (action.stage, action.microbatch)
            if action.op in (Op.B, Op.I) and cell not in schedule.recomputed and wanted(*cell):
                at = len(out) - 1
                while at and (out[at - 1], out[at]) in schedule.overlaps:
                    at -= 1
                out.insert(at, Compute(Op.R, *cell))
        lanes.append(tuple(out))
    return replace(schedule, lanes=tuple(lanes))


def remove_recompute(schedule: Schedule) -> Schedule:
    """The same without its Rs."""
    lanes = [tuple(a for a in lane if a.op is not Op.R) for lane in schedule.lanes]
    return replace(schedule, lanes=tuple(lanes))


def lower(schedule: Schedule, graph: StageGraph | None = None) -> Program:
    """Write the messages in: both ends of each at one moment of one global order.

    The order is that of `play`. When an action ends, each message it made is written as the next
    thing its two ranks do. So, whatever the ranks have done so far, the earliest event not yet
    done can be done: an action has all it needs, a message has both its ranks standing before
    it. That is why the program ends even if a send blocks until it is received.
    """
    graph = graph or StageGraph.chain(schedule.stages)
    lanes: list[list[Action]] = [[] for _ in schedule.lanes]
    made: list[tuple[float, int, Message]] = []  # a heap: when, in which order, what
    order = count()

    def write_messages(until: float) -> None:
        while made and made[0][0] <= until:
            message = heappop(made)[2]
            lanes[schedule.placement[message.src]].append(Send(message))
            lanes[schedule.placement[message.dst]].append(Recv(message))

    for span in play(schedule, graph):
        assert isinstance(span.action, Compute)
        write_messages(until=span.start)
        lanes[span.rank].append(span.action)
        for message in filter(schedule.crosses, produces(span.action, graph)):
            heappush(made, (span.end, next(order), message))
    write_messages(until=float("inf"))
    return Program(schedule, graph, tuple(map(tuple, lanes)))

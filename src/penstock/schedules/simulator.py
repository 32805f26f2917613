"""The event-driven simulator: `play` says when each action of a schedule or program runs.

Every rank works through its lane in order. The next action of a lane starts when its rank is free
and everything it needs has arrived. A heap holds the actions that may start, earliest first, so n
actions cost O(n log n) whatever the number of ranks is. If some ranks can never go on, the
simulator raises `Deadlock`. Verifying, lowering, timing and drawing all use this one clock.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heappop, heappush
from operator import itemgetter
from typing import NamedTuple

from penstock.errors import ArgumentError, PenstockError
from penstock.schedules.cost import Cost
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
    consumes,
    follows,
    produces,
    schedule_of,
)


class Sends(Enum):
    """The moment at which a send lets its rank go on."""

    BUFFERED = auto()  # at once: the transport keeps the message (gloo, threads)
    RENDEZVOUS = auto()  # when the receiver has reached its receive (NCCL)


class Span(NamedTuple):
    """The time at which an action ran, simulated or measured.

    Attributes:
        rank: The rank that ran it.
        step: The index of the action in the lane of that rank.
        action: The action.
        start: When it started, in seconds.
        end: When it ended, in seconds.
    """

    rank: int
    step: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Wait:
    """A rank that cannot go on, and the action it waits for.

    Attributes:
        rank: The rank that waits.
        step: The index of the waiting action in its lane.
        action: The action that cannot start.
        needs: The action that it waits for.
        places: Where `needs` is in the lanes, as pairs (rank, index). Empty if it is nowhere.
    """

    rank: int
    step: int
    action: Action
    needs: Action
    places: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        where = " and ".join(f"rank {rank}, step {step}" for rank, step in self.places)
        tail = f" ({where})" if where else ", which no rank does"
        return f"rank {self.rank}, step {self.step}: {self.action} waits for {self.needs}{tail}"


class Deadlock(PenstockError, RuntimeError):
    """An error raised when some ranks would wait forever.

    Attributes:
        waits: One `Wait` for each rank that is stuck.
    """

    def __init__(self, waits: Sequence[Wait]) -> None:
        self.waits = tuple(waits)
        super().__init__("\n".join(["deadlock:", *(f"  {wait}" for wait in self.waits)]))

    # Exceptions are pickled with their message by default, but `__init__` takes the waits.
    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.waits,)


def check_stages_match(placement: Sequence[int], graph: StageGraph, cost: Cost) -> None:
    """Raise if a graph or a cost does not have as many stages as the placement."""
    stages = len(placement)
    if len(cost.F) != stages:
        raise ArgumentError(f"the cost is for {len(cost.F)} stages, but there are {stages}")
    for stray in graph.strays(stages):
        raise ArgumentError(stray)


# ---- transitions: what each action waits for and gives ------------------------------------
#
# Actions communicate by tokens. A token stands for one fact, such as "2F0 is done" or "message
# 0>1:3 has arrived". An action starts when all tokens it needs have been given.
#
#     action      needs                                                   gives
#     Compute     DONE of earlier actions, ARRIVED of its messages        DONE; MADE of its messages
#     Recv        with blocking sends, waits on for ARRIVED               AWAITED, at once
#     Send        MADE; with blocking sends also AWAITED                  ARRIVED, after its link
#
# A schedule has no sends and receives. There a Compute gives ARRIVED itself, after its link.


class _Phase(Enum):
    """The facts that a token may stand for."""

    DONE = auto()  # a Compute has been done
    MADE = auto()  # a Message can be sent
    AWAITED = auto()  # the receiver of a Message has reached its Recv
    ARRIVED = auto()  # a Message is at the stage that consumes it


class _TokenKind:
    """The tokens of one phase and one compute or message, for all micro-batches.

    Attributes:
        phase: The phase.
        pattern: The compute or message, of micro-batch 0.
        times: When the token of each micro-batch was given. Without it, it has not been.
        waiting: The ranks that wait for the token of each micro-batch.
    """

    __slots__ = ("pattern", "phase", "times", "waiting")

    def __init__(self, phase: _Phase, pattern: Compute | Message) -> None:
        self.phase, self.pattern = phase, pattern
        self.times: dict[int, float] = {}
        self.waiting: dict[int, list[int]] = {}


class _Transition(NamedTuple):
    """A part of an action: wait for `needs`, take `seconds`, give each token after its delay.

    The tokens are those of the action's micro-batch. `then` is the next part of the same action.
    """

    seconds: float
    needs: tuple[_TokenKind, ...]
    gives: tuple[tuple[_TokenKind, float], ...]
    then: _Transition | None = None


_NOTHING = _Transition(0.0, (), ())


class _TransitionTable:
    """The transitions of each action in one simulation, with the tokens that were given so far.

    A Recv has two transitions if sends block: post the receive, then wait.

    Micro-batches are all alike, so transitions are built once for each op and stage. A simulation
    of a million actions then allocates almost nothing.
    """

    def __init__(
        self, work: Schedule | Program, graph: StageGraph, cost: Cost, sends: Sends
    ) -> None:
        self._schedule = schedule_of(work)
        self._optional_ops = self._schedule.optional_ops
        self._has_messages = isinstance(work, Program)
        self._blocking = sends is Sends.RENDEZVOUS
        self._graph, self._cost = graph, cost
        check_stages_match(self._schedule.placement, graph, cost)
        self._token_kinds: dict[tuple[_Phase, Compute | Message], _TokenKind] = {}
        self._transition_cache: dict[tuple[Op | type, int, int | tuple[Op, ...]], _Transition] = {}

    def find_transition(self, action: Action) -> tuple[_Transition, int]:
        """Return the first transition of an action, and its micro-batch."""
        if isinstance(action, Compute):
            op, stage, microbatch = action
            optional = self._optional_ops.get((stage, microbatch), ())
            transition = self._transition_cache.get((op, stage, optional))
            if transition is None:
                transition = self._compute_transition(Compute(op, stage, 0), optional)
                self._transition_cache[op, stage, optional] = transition
        else:
            src, dst, microbatch = action.message
            transition = self._transition_cache.get((type(action), src, dst))
            if transition is None:
                transition = self._message_transition(type(action), Message(src, dst, 0))
                self._transition_cache[type(action), src, dst] = transition
        return transition, microbatch

    def find_missing_tokens(self) -> dict[int, tuple[_TokenKind, int]]:
        """Return the token that each stuck rank waits for: its kind and micro-batch."""
        return {
            rank: (kind, microbatch)
            for kind in self._token_kinds.values()
            for microbatch, ranks in kind.waiting.items()
            for rank in ranks
        }

    def find_producer(
        self, kind: _TokenKind, microbatch: int, positions: Mapping[Action, object]
    ) -> Action:
        """Return the action that would produce a token, to explain a deadlock.

        Several actions may produce the same token (B and I). This returns the first that exists.
        """
        thing = kind.pattern._replace(microbatch=microbatch)
        if isinstance(thing, Compute):
            return thing
        if kind.phase is _Phase.AWAITED:
            return Recv(thing)
        if kind.phase is _Phase.ARRIVED and self._has_messages and self._schedule.crosses(thing):
            return Send(thing)
        actions = [Compute(op, thing.src, microbatch) for op in Op]
        producers = [action for action in actions if thing in produces(action, self._graph)]
        return next((action for action in producers if action in positions), producers[0])

    def _token(self, phase: _Phase, pattern: Compute | Message) -> _TokenKind:
        kind = self._token_kinds.get((phase, pattern))
        if kind is None:
            kind = self._token_kinds[phase, pattern] = _TokenKind(phase, pattern)
        return kind

    def _compute_transition(self, action: Compute, optional: tuple[Op, ...]) -> _Transition:
        if not 0 <= action.stage < self._schedule.stages:
            raise ArgumentError(
                f"{action} names a stage that does not exist. Call verify to see where it is."
            )
        needs, gives = [], [(self._token(_Phase.DONE, action), 0.0)]
        for message in consumes(action, self._graph):
            needs.append(self._token(_Phase.ARRIVED, message))
            if self._has_messages and self._schedule.crosses(message):
                needs.append(self._token(_Phase.AWAITED, message))
        for earlier in follows(action):
            if not OP_RULES[earlier.op].optional or earlier.op in optional:
                needs.append(self._token(_Phase.DONE, earlier))
        for message in produces(action, self._graph):
            if not self._schedule.crosses(message):
                gives.append((self._token(_Phase.ARRIVED, message), 0.0))
            elif self._has_messages:
                gives.append((self._token(_Phase.MADE, message), 0.0))
            else:
                seconds = self._cost.send_seconds(message.src, message.dst)
                gives.append((self._token(_Phase.ARRIVED, message), seconds))
        return _Transition(self._cost.seconds(action), tuple(needs), tuple(gives))

    def _message_transition(self, action_type: type[Send | Recv], message: Message) -> _Transition:
        phases = (_Phase.MADE, _Phase.AWAITED, _Phase.ARRIVED)
        ready, awaited, arrived = (self._token(phase, message) for phase in phases)
        if action_type is Send:
            needs = (ready, awaited) if self._blocking else (ready,)
            seconds = self._cost.send_seconds(message.src, message.dst)
            return _Transition(0.0, needs, ((arrived, seconds),))
        wait = _Transition(0.0, (arrived,), ()) if self._blocking else None
        return _Transition(0.0, (), ((awaited, 0.0),), wait)


# ---- the garbage collector ------------------------------------------------------------------


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Leave automatic garbage collection off while millions of actions and spans are made.

    Python looks for cycles whenever there are a quarter more objects. None of these tuples is in
    one, and with a million of them the looking takes a third of the time. Also a decorator.
    """
    _collection_pause.enter()
    try:
        yield
    finally:
        _collection_pause.exit()


class _CollectionPause:
    """Turns garbage collection off for its first user, and on again after the last one.

    Collection is on or off for all threads. If each user restored what it found, one that begins
    while another one is at work could leave it off for good.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._user_count = 0
        self._was_collecting = False

    def enter(self) -> None:
        """Add a user."""
        with self._lock:
            if not self._user_count:
                self._was_collecting = gc.isenabled()
                gc.disable()
            self._user_count += 1

    def exit(self) -> None:
        """Remove a user."""
        with self._lock:
            self._user_count -= 1
            if not self._user_count and self._was_collecting:
                gc.enable()


_collection_pause = _CollectionPause()


# ---- the clock ----------------------------------------------------------------------------


def play(
    work: Schedule | Program,
    graph: StageGraph | None = None,
    cost: Cost | None = None,
    sends: Sends = Sends.BUFFERED,
) -> Iterator[Span]:
    """Simulate a schedule or program, and yield the span of every action by start time.

    In a schedule the messages arrive by themselves. In a program they go through the sends and
    receives of its lanes.

    Args:
        work: The schedule or program.
        graph: The stage graph of a schedule; a chain if it is left out. A program has its own.
        cost: The cost of the actions; by default `Cost.even`.
        sends: Whether a send blocks its rank until the receiver is there.

    Yields:
        The span of each action.

    Raises:
        Deadlock: Some ranks cannot finish their lanes. It is raised after the last span.

    Example:
        >>> from penstock.schedules.notation import loads
        >>> for span in play(loads("0F0 0B0 \\n 1F0 1B0")):
        ...     print(span.start, span.action)
        0.0 0F0
        1.0 1F0
        2.0 1B0
        4.0 0B0
    """
    schedule = schedule_of(work)
    if isinstance(work, Program):
        graph = work.graph
    graph = graph or StageGraph.chain(schedule.stages)
    table = _TransitionTable(work, graph, cost or Cost.even(schedule.placement), sends)
    yield from _run_lanes(work.lanes, table)


def _run_lanes(lanes: Sequence[Sequence[Action]], table: _TransitionTable) -> Iterator[Span]:
    """Run all lanes to their ends. This is the event loop of the simulator.

    Each unfinished rank is in one of two places: in the heap, with the time at which its current
    transition starts, or under the first token that it lacks, in the `waiting` of its kind.
    """
    indices = [0] * len(lanes)  # the index of each lane's current action
    transitions: list[_Transition] = [_NOTHING] * len(lanes)  # the current transition of each lane
    microbatches = [0] * len(lanes)  # the micro-batch of that action
    clock = [0.0] * len(lanes)  # when each rank is free
    heap: list[tuple[float, int]] = []

    def queue_or_wait(rank: int) -> None:
        """Queue the rank's transition, or register the rank under the first missing token."""
        start, microbatch = clock[rank], microbatches[rank]
        for kind in transitions[rank].needs:
            time = kind.times.get(microbatch)
            if time is None:
                kind.waiting.setdefault(microbatch, []).append(rank)
                return
            if time > start:
                start = time
        heappush(heap, (start, rank))

    for rank, lane in enumerate(lanes):
        if lane:
            transitions[rank], microbatches[rank] = table.find_transition(lane[0])
            queue_or_wait(rank)
    while heap:
        start, rank = heappop(heap)
        transition, microbatch = transitions[rank], microbatches[rank]
        clock[rank] = end = start + transition.seconds
        for kind, delay in transition.gives:
            kind.times[microbatch] = end + delay
            for other in kind.waiting.pop(microbatch, ()):
                queue_or_wait(other)
        following = transition.then
        if following is None:
            lane, index = lanes[rank], indices[rank]
            yield Span(rank, index, lane[index], start, end)
            indices[rank] = index = index + 1
            if index == len(lane):
                continue
            following, microbatches[rank] = table.find_transition(lane[index])
        transitions[rank] = following
        queue_or_wait(rank)
    # Nothing can start any more. A rank that still waits for a token waits forever.
    missing = table.find_missing_tokens()
    if missing:
        raise Deadlock(_explain_deadlock(lanes, indices, table, missing))


def _explain_deadlock(
    lanes: Sequence[Sequence[Action]],
    indices: list[int],
    table: _TransitionTable,
    missing: dict[int, tuple[_TokenKind, int]],
) -> list[Wait]:
    """Return what each stuck rank waits for. `missing` has the token that each of them lacks."""
    places: dict[Action, list[tuple[int, int]]] = {}
    for rank, lane in enumerate(lanes):
        for step, action in enumerate(lane):
            places.setdefault(action, []).append((rank, step))
    waits = []
    for rank, (kind, microbatch) in sorted(missing.items(), key=itemgetter(0)):
        needs = table.find_producer(kind, microbatch, places)
        producer_places = tuple(places.get(needs, ()))
        waits.append(Wait(rank, indices[rank], lanes[rank][indices[rank]], needs, producer_places))
    return waits

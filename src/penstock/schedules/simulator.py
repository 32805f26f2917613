"""The one clock: `play` runs a schedule or a program on paper and says when each action runs.

Every rank works through its lane in order; the head of a lane starts when the rank is free and
all that it needs has come. A heap holds the heads that may start, earliest first, so n actions
cost O(n log n) whatever the number of ranks. A rank that can never go on is a `Deadlock`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heappop, heappush
from typing import NamedTuple

from penstock.errors import ArgumentError, PenstockError
from penstock.schedules.cost import Cost
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
    consumes,
    follows,
    produces,
    schedule_of,
)


class Sends(Enum):
    """When a send lets its rank go on."""

    BUFFERED = auto()  # at once: the transport keeps the message (gloo, threads)
    RENDEZVOUS = auto()  # when the receiver has reached its receive (NCCL)


class Span(NamedTuple):
    """When an action ran: simulated, or measured."""

    rank: int
    step: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Wait:
    """A rank that cannot go on, and the action it waits for with the places where that stands."""

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
    """Some ranks wait for ever; `.waits` says for whom."""

    def __init__(self, waits: Sequence[Wait]) -> None:
        self.waits = tuple(waits)
        super().__init__("\n".join(["deadlock:", *(f"  {wait}" for wait in self.waits)]))

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.waits,)


def check_stages_match(placement: Sequence[int], graph: StageGraph, cost: Cost) -> None:
    """A graph and a cost are for as many stages as there are."""
    stages = len(placement)
    if len(cost.F) != stages:
        raise ArgumentError(f"the cost is for {len(cost.F)} stages, but there are {stages}")
    for stray in graph.strays(stages):
        raise ArgumentError(stray)


# ---- wiring: what each action waits for and gives -----------------------------------------

# How far a thing has come.
_DONE = 0  # a Compute has been done
_MADE = 1  # a Message can be sent
_AWAITED = 2  # a Message can be received: its receiver has come to the receive
_ARRIVED = 3  # a Message is where it is consumed

_TOKEN_STRIDE = 1 << 32  # between kinds of tokens: more micro-batches than anybody has


class _Transition(NamedTuple):
    """Wait for `needs`, spend `seconds`, give each token, some of them after a delay."""

    seconds: float
    needs: tuple[int, ...]
    gives: tuple[tuple[int, float], ...]


class _TransitionTable:
    """Tells the moves of an action: one, or two when its rank must show up and then wait.

    A token is a number: a kind, which stands for (phase, thing of micro-batch 0), plus the
    micro-batch. Micro-batches are all alike, so the rule is asked once for each op and stage,
    and to play a million actions makes no objects that outlive their turn.
    """

    def __init__(
        self, work: Schedule | Program, graph: StageGraph, cost: Cost, sends: Sends
    ) -> None:
        self._schedule = schedule_of(work)
        self._has_messages = isinstance(work, Program)  # messages go through sends and receives
        self._blocking = sends is Sends.RENDEZVOUS
        self._graph, self._cost = graph, cost
        check_stages_match(self._schedule.placement, graph, cost)
        self._token_kinds: dict[tuple[int, Compute | Message], int] = {}
        self._transition_cache: dict[tuple[str | type, int, int], tuple[_Transition, ...]] = {}

    def transitions(self, action: Action) -> tuple[tuple[_Transition, ...], int]:
        """In order, with the tokens of micro-batch 0; and the micro-batch, to add to each."""
        if isinstance(action, Compute):
            op, stage, microbatch = action
            again = (stage, microbatch) in self._schedule.recomputed
            moves = self._transition_cache.get((op, stage, again))
            if moves is None:
                moves = (self._compute_transition(Compute(op, stage, 0), again),)
                self._transition_cache[op, stage, again] = moves
        else:
            src, dst, microbatch = action.message
            moves = self._transition_cache.get((type(action), src, dst))
            if moves is None:
                moves = self._message_transitions(type(action), Message(src, dst, 0))
                self._transition_cache[type(action), src, dst] = moves
        return moves, microbatch

    def find_producer(self, token: int, positions: Mapping[Action, object]) -> Action:
        """The action that would give the token: the first that exists, of those that could."""
        kind, microbatch = divmod(token, _TOKEN_STRIDE)
        phase, pattern = list(self._token_kinds)[kind]
        thing = pattern._replace(microbatch=microbatch)
        if isinstance(thing, Compute):
            return thing
        if phase == _AWAITED:
            return Recv(thing)
        if phase == _ARRIVED and self._has_messages and self._schedule.crosses(thing):
            return Send(thing)
        actions = [Compute(op, thing.src, microbatch) for op in Op]
        makers = [action for action in actions if thing in produces(action, self._graph)]
        return next((maker for maker in makers if maker in positions), makers[0])

    def _token(self, phase: int, thing: Compute | Message) -> int:
        return self._token_kinds.setdefault((phase, thing), len(self._token_kinds)) * _TOKEN_STRIDE

    def _compute_transition(self, action: Compute, recomputed: bool) -> _Transition:
        if not 0 <= action.stage < self._schedule.stages:
            raise ArgumentError(f"{action} names a stage that is not there: `verify` tells where")
        needs, gives = [], [(self._token(_DONE, action), 0.0)]
        for message in consumes(action, self._graph):
            needs.append(self._token(_ARRIVED, message))
            if self._has_messages and self._schedule.crosses(message):
                needs.append(self._token(_AWAITED, message))
        for earlier in follows(action):
            if earlier.op is not Op.R or recomputed:
                needs.append(self._token(_DONE, earlier))
        for message in produces(action, self._graph):
            if not self._schedule.crosses(message):
                gives.append((self._token(_ARRIVED, message), 0.0))
            elif self._has_messages:
                gives.append((self._token(_MADE, message), 0.0))
            else:
                gives.append((self._token(_ARRIVED, message), self._cost.send))
        return _Transition(self._cost.seconds(action), tuple(needs), tuple(gives))

    def _message_transitions(
        self, action_type: type[Send | Recv], message: Message
    ) -> tuple[_Transition, ...]:
        phases = (_MADE, _AWAITED, _ARRIVED)
        made, awaited, arrived = (self._token(phase, message) for phase in phases)
        if action_type is Send:
            needs = (made, awaited) if self._blocking else (made,)
            return (_Transition(0.0, needs, ((arrived, self._cost.send),)),)
        post = _Transition(0.0, (), ((awaited, 0.0),))
        return (post, _Transition(0.0, (arrived,), ())) if self._blocking else (post,)


# ---- the clock ----------------------------------------------------------------------------


def play(
    work: Schedule | Program,
    graph: StageGraph | None = None,
    cost: Cost | None = None,
    sends: Sends = Sends.BUFFERED,
) -> Iterator[Span]:
    """Yield the span of every action, by start time; at the end, raise `Deadlock` if stuck.

    A schedule is played over `graph` (a chain, if none is given) and what it makes arrives by
    itself; a program is played over its own graph, and messages go through sends and receives.

    >>> from penstock.schedules.notation import loads
    >>> for span in play(loads("0F0 0B0 \\n 1F0 1B0")):
    ...     print(span.start, span.action)
    0.0 0F0
    1.0 1F0
    2.0 1B0
    4.0 0B0
    """
    if isinstance(work, Schedule):
        graph = graph or StageGraph.chain(work.stages)
        placement = work.placement
    else:
        graph = work.graph
        placement = work.schedule.placement
    wiring = _TransitionTable(work, graph, cost or Cost.even(placement), sends)
    yield from _run_lanes(work.lanes, wiring)


def _run_lanes(lanes: Sequence[Sequence[Action]], table: _TransitionTable) -> Iterator[Span]:
    steps = [-1] * len(lanes)
    todo: list[tuple[_Transition, ...]] = [()] * len(lanes)  # what is left of the lane's head
    microbatches = [0] * len(lanes)
    clock = [0.0] * len(lanes)
    given: dict[int, float] = {}
    waiting: dict[int, list[int]] = {}
    heap: list[tuple[float, int]] = []

    def queue_or_wait(rank: int) -> None:
        """Queue the rank's next move, or wait for the first thing that is missing."""
        start, microbatch = clock[rank], microbatches[rank]
        for kind in todo[rank][0].needs:
            time = given.get(kind + microbatch)
            if time is None:
                waiting.setdefault(kind + microbatch, []).append(rank)
                return
            if time > start:
                start = time
        heappush(heap, (start, rank))

    def advance(rank: int) -> None:
        """Go on to the next action of the lane."""
        steps[rank] += 1
        if steps[rank] < len(lanes[rank]):
            todo[rank], microbatches[rank] = table.transitions(lanes[rank][steps[rank]])
            queue_or_wait(rank)

    for rank in range(len(lanes)):
        advance(rank)
    while heap:
        start, rank = heappop(heap)
        move, microbatch = todo[rank][0], microbatches[rank]
        todo[rank] = todo[rank][1:]
        clock[rank] = end = start + move.seconds
        for kind, delay in move.gives:
            given[kind + microbatch] = end + delay
            for other in waiting.pop(kind + microbatch, ()):
                queue_or_wait(other)
        if todo[rank]:
            queue_or_wait(rank)
        else:
            yield Span(rank, steps[rank], lanes[rank][steps[rank]], start, end)
            advance(rank)
    if waiting:
        stuck = {rank: token for token, ranks in waiting.items() for rank in ranks}
        raise Deadlock(_explain_deadlock(lanes, steps, table, stuck))


def _explain_deadlock(
    lanes: Sequence[Sequence[Action]],
    indices: list[int],
    table: _TransitionTable,
    stuck: dict[int, int],
) -> list[Wait]:
    places: dict[Action, list[tuple[int, int]]] = {}
    for rank, lane in enumerate(lanes):
        for step, action in enumerate(lane):
            places.setdefault(action, []).append((rank, step))
    waits = []
    for rank, token in sorted(stuck.items()):
        needs = table.find_producer(token, places)
        found = tuple(places.get(needs, ()))
        waits.append(Wait(rank, indices[rank], lanes[rank][indices[rank]], needs, found))
    return waits

"""Schedules of a V in rounds, after the heuristic of the zero-bubble paper (arXiv 2401.10241).

The fill comes first: as many Fs as memory allows and as fit before the first micro-batch is back.
Then, in each round, every rank takes one I and one F. f i w are the actions of a rank's first
stage, F I W those of its second. A W runs

    to make room for an F,
    where it fits into the gap before an F or I,
    in a smaller gap too, if waiting made the rank idle for longer than any other rank so far.

With the last rule the ranks share the idle time: no rank saves its Ws while another one waits. A
schedule is made in several passes, each of which knows how long the ranks were idle in the one
before. They end when a pass is not faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.schedules.priority_scheduler import Pipeline, Starts

_PASSES = 6  # at most


class RoundRule(NamedTuple):
    """The numbers of one attempt.

    fill_forwards  put a W into a gap before an F that is shorter than the W
    fill_inputs    the same before an i
    extra          how many Fs too many each rank may run before the first micro-batch is back
    more           how many Fs more than the first rank the others run in the fill
    slope          the same, in proportion to the rank
    reserve        activations that the fill leaves free
    """

    fill_forwards: bool = True
    fill_inputs: bool = True
    extra: float = 0.0
    more: int = 0
    slope: float = 0.0
    reserve: float = 0.0


def schedule_in_rounds(pipeline: Pipeline, rule: RoundRule) -> Starts | None:
    """Return the starts of a schedule in rounds, or None if it gets stuck under the caps."""
    best: Starts | None = None
    idle: Sequence[float] = [0.0] * pipeline.ranks
    for _ in range(_PASSES):
        starts = _Rounds(pipeline, rule, idle).run()
        if starts is None:
            break
        if best and pipeline.measure(starts, "period") >= pipeline.measure(best, "period"):
            break
        best, idle = starts, pipeline.idle_seconds(starts)
    return best


class _Rounds:
    """One pass. An action is placed only if all of its inputs have been placed."""

    def __init__(self, pipeline: Pipeline, rule: RoundRule, expected: Sequence[float]) -> None:
        self._pipeline, self._rule = pipeline, rule
        self._expected, self._longest = expected, max(expected)
        self._ends: Starts = [[] for _ in range(pipeline.queues)]
        self._free_at = [0.0] * pipeline.ranks
        self._live = [0.0] * pipeline.ranks
        self._idle = [0.0] * pipeline.ranks
        self._pending: list[deque[int]] = [deque() for _ in range(pipeline.ranks)]

    def run(self) -> Starts | None:
        """Return the starts, or None if this gets stuck."""
        self._fill_first_stages()
        self._fill_second_stages()
        for _ in range(2 * self._pipeline.chunks):
            self._place_input_grads()
            if not self._place_forwards():
                return None
        for rank, pending in enumerate(self._pending):
            while pending:
                self._place_weight_grad(rank)
        if any(len(done) < self._pipeline.chunks for done in self._ends):
            return None
        seconds = self._pipeline.seconds
        return [[end - seconds[queue] for end in done] for queue, done in enumerate(self._ends)]

    # ---- queues: f, F, i and I of a rank ------------------------------------------------------

    def _forward(self, rank: int, second: bool) -> int:
        return self._pipeline.stages - 1 - rank if second else rank

    def _input_grad(self, rank: int, second: bool) -> int:
        return self._pipeline.stages + self._forward(rank, second)

    def _count(self, queue: int) -> int:
        return len(self._ends[queue])

    def _can_go_on(self, queue: int) -> bool:
        return len(self._ends[queue]) < self._pipeline.chunks

    # ---- placing ------------------------------------------------------------------------------

    def _arrival(self, queue: int) -> float | None:
        """Return when the inputs of a queue's next micro-batch are there, or None: not placed."""
        microbatch, time = len(self._ends[queue]), 0.0
        for source, delay in self._pipeline.inputs[queue]:
            if len(self._ends[source]) <= microbatch:
                return None
            time = max(time, self._ends[source][microbatch] + delay)
        return time

    def _place(self, queue: int) -> bool:
        pipeline = self._pipeline
        rank, arrival = pipeline.rank[queue], self._arrival(queue)
        if arrival is None or not self._can_go_on(queue) or not self._has_room(queue):
            return False
        start = max(arrival, self._free_at[rank])
        if self._free_at[rank]:
            self._idle[rank] += start - self._free_at[rank]
        self._free_at[rank] = start + pipeline.seconds[queue]
        self._ends[queue].append(self._free_at[rank])
        self._live[rank] += pipeline.allocated[queue] - pipeline.freed[queue]
        if pipeline.stages <= queue < 2 * pipeline.stages:
            self._pending[rank].append(queue + pipeline.stages)
        return True

    def _place_weight_grad(self, rank: int) -> None:
        self._place(self._pending[rank].popleft())

    def _has_room(self, queue: int, reserve: float = 0.0) -> bool:
        pipeline = self._pipeline
        rank, size = pipeline.rank[queue], pipeline.allocated[queue]
        return not size or self._live[rank] + size + reserve <= pipeline.caps[rank]

    def _place_after_weight_grads(self, queue: int, fills_short_gaps: bool) -> None:
        """Place an F or I, and before it the Ws that fit or are due."""
        rank, arrival = self._pipeline.rank[queue], self._arrival(queue)
        if arrival is None:
            return
        pending, seconds = self._pending[rank], self._pipeline.seconds
        while pending and arrival >= self._free_at[rank] + seconds[pending[0]]:
            self._place_weight_grad(rank)
        allowed = max(max(self._idle), self._longest - self._expected[rank]) - self._idle[rank]
        if pending and fills_short_gaps and arrival - self._free_at[rank] > allowed:
            self._place_weight_grad(rank)
        self._place(queue)

    # ---- the fill -----------------------------------------------------------------------------

    def _fill_first_stages(self) -> None:
        """Place the first micro-batch's Fs, and fs on each rank until it comes back."""
        pipeline, ranks = self._pipeline, self._pipeline.ranks
        for rank in range(ranks):
            self._place(self._forward(rank, False))
        for rank in reversed(range(ranks)):
            f, F = self._forward(rank, False), self._forward(rank, True)
            back = self._arrival(F) or 0.0
            seconds, size = pipeline.seconds[f], pipeline.allocated[f]
            # An F and some fs more will follow on this rank before it can free anything.
            reserve = (1 + 2 * rank) * size + self._rule.reserve
            limit = back + self._rule.extra * seconds
            while (
                rank < ranks - 1
                and self._has_room(f, reserve)
                and self._free_at[rank] + seconds <= limit
                and self._can_go_on(f)
            ):
                placed = [self._place(self._forward(earlier, False)) for earlier in range(rank + 1)]
                if not any(placed):
                    break  # an earlier rank has no room, so nothing more arrives here
            self._place(F)

    def _fill_second_stages(self) -> None:
        """Place f and F in turns until each rank has as many as the first one."""
        pipeline, rule, second = self._pipeline, self._rule, False
        for rank in range(1, pipeline.ranks):
            before = self._forward(rank - 1, True)
            idle_turns = 0
            while idle_turns < 3:
                wanted = self._forwards_done(0) + rule.more + int(rule.slope * rank)
                behind = self._count(self._forward(rank, True)) <= self._count(before)
                if not (
                    (self._forwards_done(rank) < wanted and self._leaves_reserve(rank))
                    or (behind and self._can_go_on(before))
                ):
                    break
                placed = [
                    self._place(self._forward(later, second))
                    for later in reversed(range(rank, pipeline.ranks))
                ]
                second = not second
                idle_turns = 0 if any(placed) else idle_turns + 1

    def _forwards_done(self, rank: int) -> int:
        return sum(self._count(self._forward(rank, second)) for second in (False, True))

    def _leaves_reserve(self, rank: int) -> bool:
        return self._has_room(self._forward(rank, False), self._rule.reserve)

    # ---- the rounds ---------------------------------------------------------------------------

    def _place_input_grads(self) -> None:
        """Place an I or i on every rank: i if its gradient is there, but never before the I."""
        ranks = self._pipeline.ranks
        turns: list[list[int]] = [[], []]  # the ranks that take i, and those that take I
        for rank in range(ranks):
            i, I = self._input_grad(rank, False), self._input_grad(rank, True)
            takes_second = self._count(I) <= self._count(i) or (
                rank < ranks - 1
                and self._count(self._input_grad(rank + 1, False)) <= self._count(i)
                and self._can_go_on(I)
            )
            turns[takes_second].append(rank)
        # Gradients go through the second stages from the first rank to the last, then back.
        for rank in turns[True]:
            if self._can_go_on(self._input_grad(rank, True)):
                self._place_after_weight_grads(self._input_grad(rank, True), True)
        for rank in reversed(turns[False]):
            if self._can_go_on(self._input_grad(rank, False)):
                self._place_after_weight_grads(
                    self._input_grad(rank, False), self._rule.fill_inputs
                )

    def _place_forwards(self) -> bool:
        """Place an F, or an f if its input is not there, on every rank. Return False if stuck."""
        ranks = self._pipeline.ranks
        turns: list[list[int]] = [[], []]
        for rank in range(ranks):
            f, F = self._forward(rank, False), self._forward(rank, True)
            if not self._can_go_on(F):
                continue
            if self._count(F) >= self._count(f):
                turns[False].append(rank)
            elif rank == ranks - 1 or self._count(self._forward(rank + 1, True)) > self._count(F):
                turns[True].append(rank)
            elif self._can_go_on(f):
                turns[False].append(rank)
        for second in (False, True):
            for rank in reversed(turns[second]) if second else turns[second]:
                queue = self._forward(rank, second)
                while not self._has_room(queue):
                    if not self._pending[rank]:
                        return False
                    self._place_weight_grad(rank)
                self._place_after_weight_grads(queue, self._rule.fill_forwards)
        return True

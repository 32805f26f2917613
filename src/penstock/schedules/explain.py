"""Explain a timeline: its critical path, why ranks are idle, and what a run lost against its plan.

An action starts when its rank is free and everything it needs is there. `TimelineIndex` says for
each action what that was: the action before it in its lane, or the message that came last. The
critical path follows these causes back from the action that ends last. Idle time is explained by
the action that ends it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from penstock.errors import ArgumentError
from penstock.schedules.cost import exceeds, expand_memory_caps, track_live_memory
from penstock.schedules.ir import OP_RULES, Compute, Message, Op, Send, consumes, follows, produces
from penstock.schedules.simulator import Span
from penstock.schedules.timeline import Timeline
from penstock.text_format import choose_time_unit, format_stages

# The causes of idle time. "order" means that an action was ready but stands later in the lane.
IDLE_CAUSES = ("fill", "drain", "wait", "order", "memory")

_TOLERANCE = 1e-9  # relative to the makespan


class Place(NamedTuple):
    """The place of a compute action: its rank, and its position among the rank's compute ones."""

    rank: int
    position: int


class Idle(NamedTuple):
    """A time in which a rank does not compute.

    Attributes:
        rank: The idle rank.
        start: When it begins.
        end: When it ends.
        cause: One of `IDLE_CAUSES`.
        blocker: For "wait" the action that made the last missing message or value, for "order" and
            "memory" the action that was ready in this time, otherwise None.
    """

    rank: int
    start: float
    end: float
    cause: str
    blocker: Place | None


class Arrival(NamedTuple):
    """A message that an action needs: when it arrived, and the action that made it."""

    message: Message
    time: float
    producer: Place


@dataclass(frozen=True)
class TimelineIndex:
    """The compute actions of a timeline by place, with what each needs and gives."""

    timeline: Timeline

    @cached_property
    def places(self) -> dict[Compute, Place]:
        """The place of each compute action that ran."""
        return {
            span.action: Place(rank, index)
            for rank, lane in enumerate(self.timeline.computes)
            for index, span in enumerate(lane)
            if isinstance(span.action, Compute)
        }

    def span(self, place: Place) -> Span:
        """Return the span at a place."""
        return self.timeline.computes[place.rank][place.position]

    def action(self, place: Place) -> Compute:
        """Return the action at a place."""
        action = self.span(place).action
        assert isinstance(action, Compute)
        return action

    @cached_property
    def _producers(self) -> dict[Message, Place]:
        graph = self.timeline.program.graph
        return {
            message: place
            for action, place in self.places.items()
            for message in produces(action, graph)
        }

    @cached_property
    def _send_ends(self) -> dict[Message, float]:
        spans = self.timeline.spans
        return {s.action.message: s.end for s in spans if isinstance(s.action, Send)}

    def arrivals(self, place: Place) -> list[Arrival]:
        """Return the messages that an action consumes, from this rank or another."""
        arrivals = []
        for message in consumes(self.action(place), self.timeline.program.graph):
            producer = self._producers.get(message)
            if producer is not None:
                time = self.span(producer).end
                if producer.rank != place.rank:
                    seconds = self.timeline.cost.send_seconds(message.src, message.dst)
                    time = self._send_ends.get(message, time) + seconds
                arrivals.append(Arrival(message, time, producer))
        return arrivals

    def consumers(self, place: Place) -> list[tuple[Message, Place]]:
        """Return the messages that an action makes, with the actions that consume them."""
        graph, action = self.timeline.program.graph, self.action(place)
        consumers = []
        for message in produces(action, graph):
            candidates = (Compute(op, message.dst, message.microbatch) for op in Op)
            for candidate in candidates:
                if candidate in self.places and message in consumes(candidate, graph):
                    consumers.append((message, self.places[candidate]))
        return consumers

    def earlier_on_cell(self, place: Place) -> list[Place]:
        """Return the actions that come first on the same stage and micro-batch."""
        return [self.places[a] for a in follows(self.action(place)) if a in self.places]

    def ready_time(self, place: Place) -> tuple[float, Place | None]:
        """Return when everything that an action needs was there, and what came last."""
        needs = [(a.time, a.producer) for a in self.arrivals(place)]
        needs += [(self.span(earlier).end, earlier) for earlier in self.earlier_on_cell(place)]
        return max(needs, default=(self.timeline.start, None), key=lambda need: need[0])

    def cause(self, place: Place) -> Place | None:
        """Return the action that this one started after: the last one it needs, or its neighbour.

        None if it started at the beginning.
        """
        ready, needed = self.ready_time(place)
        if place.position:
            before = Place(place.rank, place.position - 1)
            if needed is None or ready <= self.span(before).end + self.slack:
                return before
        return needed

    @cached_property
    def slack(self) -> float:
        """The length below which a gap is a rounding error."""
        return _TOLERANCE * (self.timeline.makespan or 1.0)


def critical_path(index: TimelineIndex) -> list[Place]:
    """Return the chain of actions that decides the makespan, from the first to the last.

    >>> from penstock import lower, schedules, simulate
    >>> index = TimelineIndex(simulate(lower(schedules.gpipe(ranks=2, chunks=1))))
    >>> [str(index.action(place)) for place in critical_path(index)]
    ['0F0', '1F0', '1B0', '0B0']
    """
    lanes = index.timeline.computes
    ends = [(lane[-1].end, rank) for rank, lane in enumerate(lanes) if lane]
    if not ends:
        return []
    rank = max(ends)[1]
    place: Place | None = Place(rank, len(lanes[rank]) - 1)
    path: list[Place] = []
    # A measured timeline may hold clocks of several machines, so the walk is bounded.
    while place is not None and len(path) <= len(index.places):
        path.append(place)
        place = index.cause(place)
    return path[::-1]


def find_idle(index: TimelineIndex, memory: float | None = None) -> Iterator[Idle]:
    """Yield the idle times of all ranks with their causes, rank by rank, in order of time.

    Args:
        index: The timeline.
        memory: The cap on live activations. With a cap, a rank that could start a forward if it had
            more memory is idle because of memory.

    Yields:
        The idle times.

    Example:
        >>> from penstock import lower, schedules, simulate
        >>> index = TimelineIndex(simulate(lower(schedules.one_f_one_b(ranks=2, chunks=2))))
        >>> [(idle.rank, idle.start, idle.cause) for idle in find_idle(index)]
        [(0, 2.0, 'wait'), (0, 6.0, 'wait'), (1, 0.0, 'fill'), (1, 7.0, 'drain')]
    """
    timeline = index.timeline
    caps = None if memory is None else expand_memory_caps(memory, timeline.ranks)
    candidates: _LaneCandidates | None = None
    for gap in _find_gaps(index):
        if gap.next_position is None:
            yield Idle(gap.rank, gap.start, gap.end, gap.cause, None)
            continue
        if candidates is None or candidates.rank != gap.rank:
            candidates = _LaneCandidates(index, gap.rank, None if caps is None else caps[gap.rank])
        yield Idle(gap.rank, gap.start, gap.end, *candidates.explain(gap.next_position, gap.end))


class _Gap(NamedTuple):
    """A time in which a rank does not compute, with the position of the action that ends it.

    The cause is "fill" or "drain", and the position None, before the first and after the last
    action of a rank; between two actions, it is "wait".
    """

    rank: int
    start: float
    end: float
    cause: str
    next_position: int | None


def _find_gaps(index: TimelineIndex) -> Iterator[_Gap]:
    """Yield the gaps of all ranks, rank by rank, in order of time."""
    timeline = index.timeline
    begin, finish = timeline.start, timeline.start + timeline.makespan
    for rank, lane in enumerate(timeline.computes):
        if not lane:
            yield _Gap(rank, begin, finish, "fill", None)
            continue
        if lane[0].start > begin + index.slack:
            yield _Gap(rank, begin, lane[0].start, "fill", None)
        for position, (before, span) in enumerate(pairwise(lane), start=1):
            if span.start > before.end + index.slack:
                yield _Gap(rank, before.end, span.start, "wait", position)
        if finish > lane[-1].end + index.slack:
            yield _Gap(rank, lane[-1].end, finish, "drain", None)


class _LaneCandidates:
    """The actions that a rank could run instead of being idle: the next of each stage and op."""

    def __init__(self, index: TimelineIndex, rank: int, cap: float | None) -> None:
        self._index, self.rank, self._cap = index, rank, cap
        lane = [index.action(Place(rank, i)) for i in range(len(index.timeline.computes[rank]))]
        self._sequences: dict[tuple[Op, int], list[int]] = {}
        for step, action in enumerate(lane):
            self._sequences.setdefault((action.op, action.stage), []).append(step)
        # What is alive after each action.
        self._live = [0.0] * len(lane)
        size, changes = 0.0, list(track_live_memory(lane, index.timeline.cost))
        position = 0
        for step in range(len(lane)):
            while position < len(changes) and changes[position][0] <= step:
                size = changes[position][2]
                position += 1
            self._live[step] = size

    def explain(self, step: int, end: float) -> tuple[str, Place | None]:
        """Return the cause of the idle time before an action, and what it waits for."""
        index, rank = self._index, self.rank
        activation = index.timeline.cost.activation
        for (op, stage), steps in self._sequences.items():
            position = bisect_left(steps, step)
            if position == len(steps) or steps[position] == step:
                continue
            later = Place(rank, steps[position])
            if index.ready_time(later)[0] >= end - index.slack:
                continue
            fits = self._cap is None or not exceeds(
                self._live[step - 1] + activation[stage], self._cap
            )
            if fits or not OP_RULES[op].keeps:
                return "order", later
            return "memory", later
        return "wait", index.ready_time(Place(rank, step))[1]


# ---- a run against its plan ---------------------------------------------------------------


@dataclass(frozen=True)
class RunComparison:
    """A measured step beside its plan.

    Attributes:
        ratios: For each rank and compute action, its seconds in the run divided by those planned.
        sentences: What cost the time, the most important first.
    """

    ratios: tuple[tuple[float, ...], ...]
    sentences: tuple[str, ...]


def compare_run(plan: Timeline, run: Timeline) -> RunComparison:
    """Compare a measured timeline with its plan.

    Args:
        plan: The simulated timeline.
        run: The measured timeline of the same schedule.

    Returns:
        The comparison.

    Raises:
        ArgumentError: The two ran different actions, or none.
    """
    planned, measured = TimelineIndex(plan), TimelineIndex(run)
    if not measured.places:
        raise ArgumentError("the run has no spans of computations, so there is nothing to compare")
    if planned.places != measured.places:
        raise ArgumentError(
            "the plan and the run are of different schedules: their ranks do not run the same "
            "actions in the same order"
        )
    ratios = tuple(
        tuple(
            (m.end - m.start) / (p.end - p.start) if p.end > p.start else 1.0
            for p, m in zip(*lanes, strict=True)
        )
        for lanes in zip(plan.computes, run.computes, strict=True)
    )
    return RunComparison(ratios, tuple(_describe_loss(planned, measured)))


def _describe_loss(planned: TimelineIndex, measured: TimelineIndex) -> Iterator[str]:
    """Yield sentences that say where a run lost time.

    The actions on the run's critical path, and the gaps between them, add up to its makespan. An
    action that took longer than planned, and every gap, is time that the plan did not have.
    """
    plan, run = planned.timeline, measured.timeline
    unit = choose_time_unit(run.makespan)
    difference = run.makespan - plan.makespan
    share = abs(difference) / plan.makespan if plan.makespan else 0.0
    took = f"The step took {unit.format(run.makespan)}"
    if share < 0.005:
        yield f"{took}, as planned."
    else:
        word = "more" if difference > 0 else "less"
        yield f"{took}, {unit.format(abs(difference))} ({share:.0%}) {word} than planned."
    slower: dict[tuple[Op, int], float] = {}
    gaps: dict[tuple[int, int], float] = {}
    path = critical_path(measured)
    for before, place in zip([None, *path], path, strict=False):
        action, span = measured.action(place), measured.span(place)
        expected = planned.span(place)
        key = action.op, action.stage
        extra = (span.end - span.start) - (expected.end - expected.start)
        slower[key] = slower.get(key, 0.0) + extra
        if before is not None:
            pair = before.rank, place.rank
            gap = max(0.0, span.start - measured.span(before).end)
            gaps[pair] = gaps.get(pair, 0.0) + gap
    (op, stage), extra = max(slower.items(), key=lambda item: item[1])
    if extra > 0.01 * run.makespan:
        rank = run.program.schedule.placement[stage]
        name = "recomputation" if op is Op.R else OP_RULES[op].name
        yield (
            f"On the critical path, the {name} of stage {stage} took "
            f"{unit.format(extra)} more than planned, on rank {rank}."
        )
    total = sum(gaps.values())
    if total > 0.01 * run.makespan:
        (src, dst), worst = max(gaps.items(), key=lambda item: item[1])
        where = f"before rank {dst} went on" if src == dst else f"from rank {src} to rank {dst}"
        yield (
            f"{unit.format(total)} of it passed between actions, most of it {where}: "
            f"{unit.format(worst)} in messages and overhead."
        )
    busy = run.busy
    mean = sum(busy) / len(busy)
    busiest = max(range(len(busy)), key=busy.__getitem__)
    if mean and busy[busiest] > 1.05 * mean:
        stages = [s for s, rank in enumerate(run.program.schedule.placement) if rank == busiest]
        more = busy[busiest] / mean - 1
        yield (
            f"Rank {busiest}, with {format_stages(stages)}, computes {more:.0%} longer than the "
            "average rank. A more even cut would help."
        )

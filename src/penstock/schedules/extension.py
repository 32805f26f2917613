"""Extend a schedule to more micro-batches by repeating its middle.

In the middle of a step, every rank does the same again and again. What is hard to find are the fill
and the drain, and both look alike for any large number of micro-batches. So a good schedule for a
few micro-batches per rank is a good one for more of them, with a longer middle:

    lane of 4 micro-batches     F F F I F I W I W I W W
    the part that is repeated           |F I W|
    lane of 6 micro-batches     F F F I F I W F I W F I W I W I W W

The part of a rank has as many Fs as Is and Ws, of each of its stages. So after it, the rank is
where it was before, some micro-batches later, and keeps to its memory as it did. The parts of all
ranks have to be about those of the same micro-batches: none may begin with something that needs a
later action of another rank than that one's part begins with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf

from penstock.schedules.bound import Objective
from penstock.schedules.priority_scheduler import Pipeline, Starts, time_orders

_MOMENTS = 24  # at which parts may begin
_MOST_REPEATED = 6  # micro-batches of one part
_REACH = 2.0  # periods before and after a moment in which parts may begin
_TIMED = 12  # extensions that are timed


def extend_schedule(
    short: Pipeline, starts: Starts, pipeline: Pipeline, objective: Objective
) -> Starts | None:
    """Return the fastest extension of a schedule to the micro-batches of another pipeline.

    Args:
        short: The pipeline of the schedule.
        starts: The starts of the schedule.
        pipeline: The same pipeline with more micro-batches.
        objective: What to make short.

    Returns:
        The starts of the extension, or None if the schedule has no middle that can be repeated.
    """
    more = pipeline.chunks - short.chunks
    # No extension is faster than this, unless the middle of the schedule loses time.
    fastest = short.measure(starts, objective) + more * short.period
    orders = short.orders_by_start(starts)
    lanes = [_Lane(short, rank, order, starts) for rank, order in enumerate(orders)]
    best: Starts | None = None
    seconds = inf
    for begins, count in islice(_find_parts(short, lanes, more), _TIMED):
        longer = [
            lane.repeat(begin, count, more) for lane, begin in zip(lanes, begins, strict=True)
        ]
        extended = time_orders(pipeline, longer)
        if extended and pipeline.measure(extended, objective) < seconds:
            best, seconds = extended, pipeline.measure(extended, objective)
        if seconds <= fastest * (1 + 1e-9):
            break
    return best


def _find_parts(
    pipeline: Pipeline, lanes: Sequence[_Lane], more: int
) -> Iterator[tuple[list[int], int]]:
    """Yield (where the part of each rank begins, its micro-batches), the least idle first."""
    last = max(lane.times[-1] for lane in lanes)
    idle_by_part: dict[tuple[int, ...], float] = {}
    for count in range(1, _MOST_REPEATED + 1):
        if more % count:
            continue
        parts = [lane.parts(count) for lane in lanes]
        for index in range(_MOMENTS) if all(parts) else ():
            moment = last * (0.15 + 0.7 * index / _MOMENTS)
            begins = _choose_parts(pipeline, lanes, parts, moment)
            if begins:
                gaps = map(_Lane.idle_seconds, lanes, begins, [count] * len(lanes))
                idle_by_part[count, *begins] = max(gaps) / count
    for count, *begins in sorted(idle_by_part, key=lambda part: idle_by_part[part]):
        yield begins, count


class _Lane:
    """The order of one rank: its starts, and how many of each queue are done before each."""

    def __init__(self, pipeline: Pipeline, rank: int, order: Sequence[int], starts: Starts) -> None:
        self._order, self._period = order, pipeline.period
        self.queues = sorted(set(order))
        self.times = sorted(time for queue in self.queues for time in starts[queue])
        place = {queue: index for index, queue in enumerate(self.queues)}
        counts = [0] * len(self.queues)
        self.done = [tuple(counts)]
        for queue in order:
            counts[place[queue]] += 1
            self.done.append(tuple(counts))

    def parts(self, count: int) -> list[int]:
        """Return where the parts with so many micro-batches begin."""
        width = count * len(self.queues)
        return [
            begin
            for begin in range(len(self.times) - width)
            if all(
                b - a == count
                for a, b in zip(self.done[begin], self.done[begin + width], strict=True)
            )
        ]

    def idle_seconds(self, begin: int, count: int) -> float:
        """Return how far a part is from the seconds that its micro-batches need."""
        end = begin + count * len(self.queues)
        return abs(self.times[end] - self.times[begin] - count * self._period)

    def repeat(self, begin: int, count: int, more: int) -> list[int]:
        """Return the order with a part repeated, for so many micro-batches more."""
        end = begin + count * len(self.queues)
        part = list(self._order[begin:end])
        return [*self._order[:begin], *part * (1 + more // count), *self._order[end:]]


def _choose_parts(
    pipeline: Pipeline, lanes: Sequence[_Lane], parts: Sequence[Sequence[int]], moment: float
) -> list[int] | None:
    """Return the beginnings of parts next to a moment, one of each rank, that agree.

    Each rank has to agree with the one before it. So, rank by rank, the best choice for all ranks
    up to there is kept for each of its parts.
    """
    reach = _REACH * pipeline.period
    choices: list[tuple[float, list[int]]] = [(0.0, [])]
    for rank, lane in enumerate(lanes):
        near = [
            (begin, abs(lane.times[begin] - moment))
            for begin in parts[rank]
            if abs(lane.times[begin] - moment) < reach
        ]
        choices.sort()
        extended = []
        for begin, distance in near:
            for total, begins in choices:
                if not begins or _agree(pipeline, lanes, rank, begins[-1], begin):
                    extended.append((total + distance, [*begins, begin]))
                    break
        choices = extended
    if not choices:
        return None
    _, begins = min(choices)
    return begins if _are_consistent(pipeline, lanes, begins) else None


def _agree(pipeline: Pipeline, lanes: Sequence[_Lane], rank: int, before: int, begin: int) -> bool:
    """Return whether neither of two neighbours has done what the other one has yet to prepare."""
    done: dict[int, int] = {}
    for lane, position in ((lanes[rank - 1], before), (lanes[rank], begin)):
        done.update(zip(lane.queues, lane.done[position], strict=True))
    return all(
        count <= done.get(source, count)
        for queue, count in done.items()
        for source, _ in pipeline.inputs[queue]
    )


def _are_consistent(pipeline: Pipeline, lanes: Sequence[_Lane], begins: Sequence[int]) -> bool:
    """Return whether no rank has done something that another has yet to prepare."""
    done: dict[int, int] = {}
    for lane, begin in zip(lanes, begins, strict=True):
        done.update(zip(lane.queues, lane.done[begin], strict=True))
    return all(
        count <= done[source]
        for queue, count in done.items()
        for source, _ in pipeline.inputs[queue]
    )

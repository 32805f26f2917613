"""Small repairs: swap neighbours on the critical path as long as that helps.

The critical path is the chain of actions, back from the last one, in which each starts when the
one before it ends or its message arrives. Only a change to it can make a schedule quicker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from penstock.cost import Cost, fits_in_memory
from penstock.ir import Compute, Schedule, StageGraph, consumes, follows, produces
from penstock.play import Deadlock, Span, play

_TIME_TOLERANCE = 1e-9


def improve_by_swaps(
    schedule: Schedule, graph: StageGraph, cost: Cost, caps: Sequence[float], swaps: int
) -> Schedule:
    """Try up to `swaps` swaps; keep those that help, and some that change nothing.

    The latter get past a plateau. The draws are always the same, and so is the result.
    """
    draw = Random(0)
    spans = _simulate_spans(schedule, graph, cost)
    assert spans, "only a schedule that ends can be polished"
    improving = True
    while improving and swaps > 0:
        improving = False
        places = sorted(set(_swaps_on_critical_path(schedule, graph, cost, spans)))
        draw.shuffle(places)
        for rank, step in places[:swaps]:
            candidate = _swap_neighbours(schedule, rank, step)
            if not _is_legal_swap(candidate.lanes[rank], step, cost, caps[rank]):
                continue
            swaps -= 1
            found = _simulate_spans(candidate, graph, cost)
            gain = _last_end(spans) - _last_end(found) if found else -1.0
            if gain > _TIME_TOLERANCE or (gain > -_TIME_TOLERANCE and draw.random() < 0.2):
                schedule, spans, improving = candidate, found, True
                break
    return schedule


def _simulate_spans(schedule: Schedule, graph: StageGraph, cost: Cost) -> list[Span]:
    """The spans; none if the schedule deadlocks."""
    try:
        return list(play(schedule, graph, cost))
    except Deadlock:
        return []


def _last_end(spans: Sequence[Span]) -> float:
    return max(span.end for span in spans)


def _swap_neighbours(schedule: Schedule, rank: int, index: int) -> Schedule:
    lane = list(schedule.lanes[rank])
    lane[index : index + 2] = lane[index + 1], lane[index]
    lanes = (*schedule.lanes[:rank], tuple(lane), *schedule.lanes[rank + 1 :])
    return replace(schedule, lanes=lanes)


def _is_legal_swap(lane: Sequence[Compute], index: int, cost: Cost, cap: float) -> bool:
    """After a swap at `step`: is the first independent of the second, and does the lane fit?"""
    first, second = lane[index : index + 2]
    if second in follows(first):
        return False
    return fits_in_memory(lane, cost, cap)


def _swaps_on_critical_path(
    schedule: Schedule, graph: StageGraph, cost: Cost, spans: Sequence[Span]
) -> Iterator[tuple[int, int]]:
    """Each action of the critical path with its neighbours: (rank, step of the first of two)."""
    by_action: dict[Compute, Span] = {}
    makers = {}
    for span in spans:
        assert isinstance(span.action, Compute)
        by_action[span.action] = span
        makers.update(dict.fromkeys(produces(span.action, graph), span))
    here: Span | None = max(spans, key=lambda span: span.end)
    while here is not None:
        lane = schedule.lanes[here.rank]
        yield from ((here.rank, s) for s in (here.step - 1, here.step) if 0 <= s < len(lane) - 1)
        assert isinstance(here.action, Compute)
        causes = [(by_action[lane[here.step - 1]], 0.0)] if here.step else []
        for message in consumes(here.action, graph):
            maker = makers[message]
            causes.append((maker, cost.send if maker.rank != here.rank else 0.0))
        start = here.start
        late = (
            cause for cause, delay in causes if abs(cause.end + delay - start) < _TIME_TOLERANCE
        )
        here = next(late, None)

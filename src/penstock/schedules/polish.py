"""Small repairs: swap neighbours on the critical path as long as that helps.

The critical path is the chain of actions, back from the last one, in which each starts when the
one before it ends or its message arrives. Only a change to it can make a schedule quicker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from penstock.cost import Cost, stays_within
from penstock.ir import Compute, Schedule, StageGraph, consumes, follows, produces
from penstock.play import Deadlock, Span, play

_HAIR = 1e-9


def polish(
    schedule: Schedule, graph: StageGraph, cost: Cost, caps: Sequence[float], swaps: int
) -> Schedule:
    """Try up to `swaps` swaps; keep those that help, and some that change nothing.

    The latter get past a plateau. The draws are always the same, and so is the result.
    """
    draw = Random(0)
    spans = _played(schedule, graph, cost)
    assert spans, "only a schedule that ends can be polished"
    improving = True
    while improving and swaps > 0:
        improving = False
        places = sorted(set(_critical(schedule, graph, cost, spans)))
        draw.shuffle(places)
        for rank, step in places[:swaps]:
            candidate = _swap(schedule, rank, step)
            if not _is_legal(candidate.lanes[rank], step, cost, caps[rank]):
                continue
            swaps -= 1
            found = _played(candidate, graph, cost)
            gain = _end(spans) - _end(found) if found else -1.0
            if gain > _HAIR or (gain > -_HAIR and draw.random() < 0.2):
                schedule, spans, improving = candidate, found, True
                break
    return schedule


def _played(schedule: Schedule, graph: StageGraph, cost: Cost) -> list[Span]:
    """The spans; none if the schedule deadlocks."""
    try:
        return list(play(schedule, graph, cost))
    except Deadlock:
        return []


def _end(spans: Sequence[Span]) -> float:
    return max(span.end for span in spans)


def _swap(schedule: Schedule, rank: int, step: int) -> Schedule:
    lane = list(schedule.lanes[rank])
    lane[step : step + 2] = lane[step + 1], lane[step]
    lanes = (*schedule.lanes[:rank], tuple(lane), *schedule.lanes[rank + 1 :])
    return replace(schedule, lanes=lanes)


def _is_legal(lane: Sequence[Compute], step: int, cost: Cost, cap: float) -> bool:
    """After a swap at `step`: is the first independent of the second, and does the lane fit?"""
    first, second = lane[step : step + 2]
    if second in follows(first):
        return False
    return stays_within(lane, cost, cap)


def _critical(
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
        late = (cause for cause, delay in causes if abs(cause.end + delay - start) < _HAIR)
        here = next(late, None)

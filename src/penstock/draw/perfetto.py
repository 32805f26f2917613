"""A timeline as Chrome trace events, for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

One thread a rank, an arrow for each message between ranks, a counter of what is alive.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.draw.style import find_sent_messages, shift_to_zero
from penstock.schedules.ir import Compute
from penstock.schedules.timeline import Timeline

Event = dict[str, Any]  # a JSON object


def trace(timeline: Timeline) -> dict[str, Any]:
    """The whole trace, ready for `json.dump`. Time zero is the timeline's start."""
    timeline = shift_to_zero(timeline)
    events = [*_slices(timeline), *_arrows(timeline), *_counters(timeline)]
    # The sort is stable: an arrow comes after the slice that starts with it, and so binds to it.
    events.sort(key=lambda event: float(event["ts"]))
    return {"traceEvents": [*_thread_names(timeline), *events], "displayTimeUnit": "ms"}


def write_trace(timeline: Timeline, path: str | PathLike[str]) -> None:
    """Write the trace as a JSON file, to be opened in https://ui.perfetto.dev."""
    Path(path).write_text(json.dumps(trace(timeline), separators=(",", ":")), encoding="utf-8")


def _micros(seconds: float) -> float:
    """Microseconds, to the nanosecond, which is what Perfetto keeps."""
    return round(seconds * 1e6, 3)


def _thread_names(timeline: Timeline) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "pipeline"}}
    for rank in range(timeline.ranks):
        thread = {"ph": "M", "pid": 0, "tid": rank}
        yield {**thread, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _slices(timeline: Timeline) -> Iterator[Event]:
    for rank, lane in enumerate(timeline.computes):
        for span in lane:
            assert isinstance(span.action, Compute)
            start, end = _micros(span.start), _micros(span.end)
            yield {
                "ph": "X",
                "name": str(span.action),
                "cat": span.action.op.value,
                "pid": 0,
                "tid": rank,
                "ts": start,
                "dur": round(end - start, 3),
                "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
            }


def _arrows(timeline: Timeline) -> Iterator[Event]:
    """From the slice that made a message to the slice that used it."""
    for number, (message, maker, user) in enumerate(find_sent_messages(timeline)):
        arrow = {"name": str(message), "cat": "message", "id": number, "pid": 0}
        start, end = _micros(maker.start), _micros(maker.end)
        # A slice ends just before its end; at that moment the arrow would leave from the next.
        leaves = max(start, round(end - 0.001, 3))
        yield {"ph": "s", **arrow, "tid": maker.rank, "ts": leaves}
        arrives = _micros(user.start)
        yield {"ph": "f", "bp": "e", **arrow, "tid": user.rank, "ts": arrives}


def _counters(timeline: Timeline) -> Iterator[Event]:
    for rank in range(timeline.ranks):
        counter = {"ph": "C", "name": f"live activations, rank {rank}", "pid": 0, "tid": rank}
        for time, size in timeline.memory(rank):
            yield {**counter, "ts": _micros(time), "args": {"size": size}}

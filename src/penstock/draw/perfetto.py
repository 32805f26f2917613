"""Draw a timeline as Chrome trace events, for https://ui.perfetto.dev and chrome://tracing.

Each rank is one thread. Each message between ranks is an arrow (a flow event). The live activations
of each rank are a counter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from penstock.draw.style import TextFile, find_sent_messages, shift_to_zero, write_text
from penstock.schedules.ir import Compute
from penstock.schedules.timeline import Timeline

Event = dict[str, Any]  # a JSON object


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as a Chrome trace. Time zero is the timeline's start.

    Args:
        timeline: The timeline, simulated or measured.

    Returns:
        The trace, ready for `json.dump`.

    Example:
        >>> from penstock import lower, schedules, simulate
        >>> events = trace(simulate(lower(schedules.gpipe(ranks=1, chunks=1))))["traceEvents"]
        >>> [event["name"] for event in events if event["ph"] == "X"]
        ['0F0', '0B0']
    """
    timeline = shift_to_zero(timeline)
    events = [*_slices(timeline), *_arrows(timeline), *_counters(timeline)]
    # The sort is stable: an arrow comes after the slice that starts with it, and so binds to it.
    events.sort(key=lambda event: float(event["ts"]))
    return {"traceEvents": [*_thread_names(timeline), *events], "displayTimeUnit": "ms"}


def write_trace(timeline: Timeline, path: TextFile) -> None:
    """Write a timeline as a JSON file that https://ui.perfetto.dev can open.

    Args:
        timeline: The timeline, simulated or measured.
        path: The file to write, or an open text file.
    """
    write_text(path, json.dumps(trace(timeline), separators=(",", ":")))


def _micros(seconds: float) -> float:
    """Return microseconds, rounded to the nanosecond, which is the resolution of Perfetto."""
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
    """Yield the arrow of each message, from the slice that made it to the slice that used it."""
    for number, (message, producer, consumer) in enumerate(find_sent_messages(timeline)):
        arrow = {"name": str(message), "cat": "message", "id": number, "pid": 0}
        start, end = _micros(producer.start), _micros(producer.end)
        # Perfetto binds an arrow to the slice that is open at its time. At the end of the slice
        # that is already the next one, so the arrow leaves a nanosecond earlier.
        leaves = max(start, round(end - 0.001, 3))
        yield {"ph": "s", **arrow, "tid": producer.rank, "ts": leaves}
        arrives = _micros(consumer.start)
        yield {"ph": "f", "bp": "e", **arrow, "tid": consumer.rank, "ts": arrives}


def _counters(timeline: Timeline) -> Iterator[Event]:
    for rank in range(timeline.ranks):
        counter = {"ph": "C", "name": f"live activations, rank {rank}", "pid": 0, "tid": rank}
        for time, size in timeline.memory(rank):
            yield {**counter, "ts": _micros(time), "args": {"size": size}}

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.draw import trace, write_trace
from penstock.schedules.ir import Schedule, Send, StageGraph
from penstock.schedules.timeline import Timeline

Played = Callable[..., Timeline]
Event = dict[str, Any]


@pytest.fixture
def timeline(played: Played, one_f_one_b: Callable[[int, int], Schedule]) -> Timeline:
    return played(one_f_one_b(4, 6), graph=StageGraph.chain(4, skips=[(0, 3)]))


def events(timeline: Timeline, kind: str) -> list[Event]:
    return [event for event in trace(timeline)["traceEvents"] if event["ph"] == kind]


def test_trace_json_round_trip(timeline: Timeline, tmp_path: Path) -> None:
    write_trace(timeline, tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text("utf-8")) == trace(timeline)


def test_trace_has_one_named_thread_per_rank(timeline: Timeline) -> None:
    names = {
        e["tid"]: e["args"]["name"] for e in events(timeline, "M") if e["name"] == "thread_name"
    }
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2", 3: "rank 3"}


def test_trace_has_a_slice_for_each_compute(played: Played) -> None:
    assert events(played("0F0 0B0 \n 1F0 1B0"), "X")[1] == {
        "ph": "X",
        "name": "1F0",
        "cat": "F",
        "pid": 0,
        "tid": 1,
        "ts": 1e6,
        "dur": 1e6,
        "args": {"stage": 1, "microbatch": 0},
    }


def test_trace_slices_of_a_rank_do_not_overlap(timeline: Timeline) -> None:
    slices = events(timeline, "X")
    assert Counter(e["tid"] for e in slices) == dict.fromkeys(range(4), 12)
    for rank in range(4):
        lane = [e for e in slices if e["tid"] == rank]
        for before, after in pairwise(lane):
            assert before["ts"] + before["dur"] <= after["ts"]


def test_trace_events_are_sorted_by_time(timeline: Timeline) -> None:
    stamps = [event["ts"] for event in trace(timeline)["traceEvents"] if event["ph"] != "M"]
    assert stamps == sorted(stamps)
    assert stamps[0] == 0
    assert stamps[-1] == timeline.makespan * 1e6


def test_trace_has_an_arrow_for_each_message_between_ranks(timeline: Timeline) -> None:
    leaving = {e["id"]: e for e in events(timeline, "s")}
    arriving = {e["id"]: e for e in events(timeline, "f")}
    sends = [span.action.message for span in timeline.spans if isinstance(span.action, Send)]
    assert sorted(e["name"] for e in leaving.values()) == sorted(map(str, sends))
    assert leaving.keys() == arriving.keys()
    for number, start in leaving.items():
        end = arriving[number]
        assert start["name"] == end["name"]
        assert start["tid"] != end["tid"]
        assert start["ts"] < end["ts"]


def test_trace_arrows_connect_producer_and_consumer_slices(timeline: Timeline) -> None:
    slices = events(timeline, "X")

    def at(event: Event) -> list[str]:
        """Return the slices of the event's thread that are open at its time."""
        return [
            e["name"]
            for e in slices
            if e["tid"] == event["tid"] and e["ts"] <= event["ts"] < e["ts"] + e["dur"]
        ]

    (leaves,) = [e for e in events(timeline, "s") if e["name"] == "0>3:2"]
    (arrives,) = [e for e in events(timeline, "f") if e["name"] == "0>3:2"]
    assert (at(leaves), at(arrives), arrives["bp"]) == (["0F2"], ["3F2"], "e")
    (leaves,) = [e for e in events(timeline, "s") if e["name"] == "3>2:4"]
    (arrives,) = [e for e in events(timeline, "f") if e["name"] == "3>2:4"]
    assert (at(leaves), at(arrives)) == (["3B4"], ["2B4"])


def test_trace_counts_live_activations(timeline: Timeline) -> None:
    for rank in range(4):
        name = f"live activations, rank {rank}"
        counts = [e for e in events(timeline, "C") if e["name"] == name]
        curve = [(e["ts"] / 1e6, e["args"]["size"]) for e in counts]
        assert curve == timeline.memory(rank)
        assert max(size for _, size in curve) == timeline.peak[rank]


def test_trace_of_a_timeline_that_does_not_start_at_zero(timeline: Timeline) -> None:
    later = [s._replace(start=s.start + 64, end=s.end + 64) for s in timeline.spans]
    assert trace(replace(timeline, spans=tuple(later))) == trace(timeline)

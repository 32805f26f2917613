from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from penstock import schedules
from penstock.errors import FormatError
from penstock.schedules.cost import Cost, track_live_memory
from penstock.schedules.ir import Compute, Op, Program, Schedule, StageGraph
from penstock.schedules.lowering import lower
from penstock.schedules.notation import loads
from penstock.schedules.simulator import Deadlock, Span
from penstock.schedules.timeline import Timeline, cost_from_spans, simulate


def simulated(text: str, cost: Cost | None = None) -> Timeline:
    schedule = loads(text)
    assert isinstance(schedule, Schedule)
    return simulate(lower(schedule), cost)


#   rank 0  F0 F1 ······B0─── ···B1───
#   rank 1  ···F0 B0─── F1 B1─── ······
TWO = "0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1"


def test_makespan_busy_time_bubble_and_computes_of_a_timeline() -> None:
    timeline = simulated(TWO)
    assert (timeline.makespan, timeline.busy, timeline.peak) == (9.0, (6.0, 6.0), (2.0, 1.0))
    assert timeline.bubble == pytest.approx(1 - 12 / 18)  # with fill and drain
    slow = simulated(TWO, Cost.even((0, 1), send=0.5))  # messages keep no rank busy
    assert (slow.makespan, slow.busy) == (10.0, (6.0, 6.0))
    lanes = [" ".join(str(span.action) for span in lane) for lane in slow.computes]
    assert lanes == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]


@pytest.mark.parametrize(
    ("text", "rank", "curve"),
    [
        (TWO, 0, [(0, 0), (0, 1), (1, 2), (6, 1), (9, 0)]),
        (TWO, 1, [(0, 0), (1, 1), (4, 0), (4, 1), (7, 0)]),
        ("0F0 0I0 0F1 0I1 0W0 0W1", 0, [(0, 0), (0, 1), (2, 2), (5, 1), (6, 0)]),
        ("0F0 0F1 0R0 0B0 0R1 0B1", 0, [(0, 0), (2, 1), (5, 0), (5, 1), (8, 0)]),
        ("0F0 0F1", 0, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]),
    ],
    ids=["first rank", "last rank", "split backward", "recomputed", "inference"],
)
def test_memory_curve(text: str, rank: int, curve: list[tuple[float, float]]) -> None:
    timeline = simulated(text)
    assert timeline.memory(rank) == curve
    assert timeline.peak[rank] == max(size for _, size in curve)


def test_memory_uses_the_activation_size_of_each_stage() -> None:
    cost = Cost(F=(1.0,) * 2, I=(1.0,) * 2, W=(1.0,) * 2, activation=(10.0, 300.0))
    assert simulated(TWO, cost).peak == (20.0, 300.0)
    assert simulated("0F0 1F0 1B0 0B0", cost).memory(0) == [
        (0, 0),
        (0, 10),
        (1, 310),
        (4, 10),
        (6, 0),
    ]


def test_spans_may_be_given_in_any_order() -> None:
    timeline = simulated(TWO)
    shuffled = replace(timeline, spans=timeline.spans[::-1])
    assert shuffled.computes == timeline.computes
    assert shuffled.memory(0) == timeline.memory(0)
    assert (shuffled.makespan, shuffled.bubble, shuffled.peak, shuffled.busy) == (
        timeline.makespan,
        timeline.bubble,
        timeline.peak,
        timeline.busy,
    )


def test_measured_timeline_may_start_at_any_time() -> None:
    timeline = simulated(TWO)
    later = tuple(
        span._replace(start=span.start + 100, end=span.end + 100) for span in timeline.spans
    )
    measured = replace(timeline, spans=later)
    assert (measured.start, measured.makespan) == (100.0, 9.0)
    assert measured.bubble == timeline.bubble
    assert measured.memory(0)[:3] == [(100, 0), (100, 1), (101, 2)]


def test_measured_timeline_uses_measured_lengths() -> None:
    schedule = loads("0F0 0B0")
    assert isinstance(schedule, Schedule)
    spans = (Span(0, 0, Compute(Op.F, 0, 0), 2.0, 2.5), Span(0, 1, Compute(Op.B, 0, 0), 3.5, 4.0))
    measured = Timeline(lower(schedule), Cost.even((0,)), spans)
    assert (measured.makespan, measured.busy, measured.bubble) == (2.0, (1.0,), 0.5)


def test_bubble_is_never_negative() -> None:
    schedule = loads("0F0 0F1 0F2")
    assert isinstance(schedule, Schedule)
    times = [0.3, 0.4, 0.6, 1.7]  # rounding makes the sum of the differences exceed 1.4
    spans = tuple(Span(0, i, Compute(Op.F, 0, i), *pair) for i, pair in enumerate(pairwise(times)))
    assert Timeline(lower(schedule), Cost.even((0,)), spans).bubble == 0.0


def test_live_memory_of_fractional_activations_returns_to_exactly_zero() -> None:
    timeline = simulate(lower(schedules.interleaved(ranks=2, chunks=4, stages_per_rank=3)))
    assert timeline.memory(0)[-1][1] == 0.0
    assert timeline.peak == pytest.approx((7 / 3, 5 / 3))


def test_timeline_of_an_empty_program() -> None:
    empty = Program(Schedule((), 1, ((), ())), StageGraph(()), ((), ()))
    timeline = simulate(empty)
    assert (timeline.makespan, timeline.bubble, timeline.peak) == (0.0, 0.0, (0.0, 0.0))


def test_timeline_of_an_idle_rank() -> None:
    timeline = simulated("placement: 1 \n - \n 0F0 0B0")
    assert (timeline.busy, timeline.bubble, timeline.peak) == ((0.0, 3.0), 0.5, (0.0, 1.0))


def test_track_live_memory_yields_step_and_whether_it_is_freed() -> None:
    lane = [Compute(Op.F, 0, 0), Compute(Op.F, 0, 1), Compute(Op.B, 0, 1), Compute(Op.B, 0, 0)]
    assert list(track_live_memory(lane, Cost.even((0,)))) == [
        (0, False, 1.0),
        (1, False, 2.0),
        (2, True, 1.0),
        (3, True, 0.0),
    ]


def test_input_gradient_frees_what_the_weight_gradient_does_not_need() -> None:
    lane = [Compute(op, 0, 0) for op in (Op.F, Op.I, Op.W)]
    lane[1:1] = [Compute(Op.F, 0, 1), Compute(Op.B, 0, 1)]
    cost = Cost((1,), (1,), (1,), activation=(8,), weight_activation=(3,))
    assert list(track_live_memory(lane, cost)) == [
        (0, False, 8.0),
        (1, False, 16.0),
        (2, True, 8.0),  # a full backward keeps nothing
        (3, True, 3.0),
        (4, True, 0.0),
    ]


def test_period_is_the_longest_time_of_one_rank() -> None:
    timeline = simulated("placement: 0 1 \n 0F0 0B0 \n 1F0 1B0")
    assert (timeline.makespan, timeline.period) == (6.0, 6.0)
    timeline = simulated("placement: 0 1 \n 0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1")
    assert timeline.period == max(lane[-1].end - lane[0].start for lane in timeline.computes)


def test_simulate_raises_deadlock() -> None:
    program = loads("edges: 0>1 \n 0F0 \n ?0>1:0 1F0")
    assert isinstance(program, Program)
    with pytest.raises(Deadlock):
        simulate(program)


def test_cost_from_spans_averages_by_stage() -> None:
    program = lower(schedules.gpipe(2, 2))
    cost = Cost(F=(1.0, 3.0), I=(2.0, 1.0), W=(2.0, 1.0), activation=(1.0, 1.0))
    timeline = simulate(program, cost)
    assert cost_from_spans(program, timeline.spans) == cost
    slower = [
        span._replace(end=span.end + 2.0) if str(span.action) == "0F0" else span
        for span in timeline.spans
    ]
    assert cost_from_spans(program, slower).F == (2.0, 3.0)


def test_cost_from_spans_of_actions_that_did_not_run_is_zero() -> None:
    program = lower(schedules.gpipe(1, 1))
    assert cost_from_spans(program, []).F == (0.0,)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v"])
def test_saved_timeline_loads_as_it_was(name: str, tmp_path: Path) -> None:
    schedule = schedules.make(name, ranks=3, chunks=6)
    cost = replace(Cost.even(schedule.placement, F=1 / 3, send=0.1), links={(0, 1): 0.7})
    timeline = simulate(lower(schedule), cost)
    timeline.save(tmp_path / "step.json")
    loaded = Timeline.load(tmp_path / "step.json")
    assert loaded == timeline
    assert (loaded.makespan, loaded.peak) == (timeline.makespan, timeline.peak)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "a timeline"}, "has no field 'format'"),
        ({"version": 2}, "its version is not 1"),
        ({"program": 1}, "it needs 'program', a text"),
        ({"program": "0F0 0B0"}, "its program has no messages"),
        ({"program": "edges: 0>1\n0F0 0B0\n1F0 7B0"}, "so its rank is unknown"),
        ({"cost": {"F": [1], "I": [1], "W": [1], "activation": [1]}}, "its cost is for 1 stages"),
        ({"cost": {"G": [1]}}, "unexpected keyword argument 'G'"),
        ({"cost": {"F": ["x"]}}, "could not convert string"),
        ({"spans": [[0, 0, 1]]}, r"a span is \[rank, step, start, end\]"),
        ({"spans": [[9, 0, 0, 1]]}, "names no rank of the program"),
        ({"spans": [[0, -1, 0, 1]]}, "names no action of its rank"),
        ({"spans": [[0, 0, 2, 1]]}, "does not end after its start"),
        ({"spans": [[0, 0, 0, float("inf")]]}, "does not end after its start"),
        ({"spans": [[0, 0, float("nan"), 1]]}, "does not end after its start"),
        ({"spans": [[True, 0, 0, 1]]}, "names no rank of the program"),
    ],
)
def test_damaged_timeline_is_refused(change: dict[str, object], message: str) -> None:
    file = {**json.loads(simulated(TWO).to_json()), **change}
    with pytest.raises(FormatError, match=message):
        Timeline.from_json(json.dumps(file))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_file_that_is_no_timeline_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    file.write_bytes(content)
    with pytest.raises(FormatError, match="this is not a timeline"):
        Timeline.load(file)

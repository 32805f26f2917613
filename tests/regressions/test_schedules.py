"""Regression tests of schedules, each with the story of its bug."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path

import pytest

from penstock import (
    ArgumentError,
    Compute,
    Cost,
    Deadlock,
    FormatError,
    InvalidScheduleError,
    MissingExtra,
    Op,
    PenstockError,
    Program,
    Schedule,
    StageGraph,
    cli,
    dumps,
    loads,
    lower,
    play,
    recompute,
    schedules,
    simulate,
    verify,
)


def refusal(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["penstock", *words.split()])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_verify_of_a_binary_file_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It used to end in the traceback of a UnicodeDecodeError."""
    file = tmp_path / "noise"
    file.write_bytes(bytes(range(256)))
    said = refusal(f"verify {file}", monkeypatch, capsys)
    assert said == f"penstock: this is not a schedule:\n  {file} is not text\n"


def test_verify_reports_a_wait_within_a_rank_as_a_compute() -> None:
    """A wait for another stage of the same rank was reported as a missing send."""
    program = loads("""
        placement: 0 0 1
        edges: 0>1 1>2
        1F0 0F0 !1>2:0
        ?1>2:0 2F0
    """)
    assert verify(program)[0] == "rank 0, step 0: 1F0 waits for 0F0 (rank 0, step 1)"


def test_errors_can_be_pickled_and_copied() -> None:
    """Workers send errors to each other. They lost their fields, or could not be unpickled."""
    with pytest.raises(Deadlock) as stuck:
        list(play(loads("0B0 0F0")))
    errors: list[PenstockError] = [
        stuck.value,
        InvalidScheduleError("must not run:", ["this", "and that"]),
        FormatError("is no schedule:", ["line 1"]),
        MissingExtra("rich", "cli", "colour"),
        ArgumentError("no"),
    ]
    for error in errors:
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert type(again) is type(error)
            assert str(again) == str(error)
            assert vars(again) == vars(error)


def test_huge_numbers_in_a_schedule_are_reported_at_once() -> None:
    """All numbers up to the largest one were enumerated, some of them in memory."""
    with pytest.raises(FormatError, match="no rank runs stage 0, 1, 2, so its rank is unknown"):
        loads("999999999F0")
    assert verify(loads("0F0 0B0 0F99999999")) == (
        "stage 0: nothing runs on micro-batch 1, 2, 3 and 99999995 more",
        "stage 0, micro-batch 99999999: it needs B once, or I and W once, but has B never, "
        "I never, W never",
    )
    with pytest.raises(FormatError, match="is not an action"):
        loads("0F" + "9" * 5000)


def test_verify_reports_negative_stages_and_micro_batches() -> None:
    """Python counts negative indices from the end, so such actions were not noticed."""
    lane = (Compute(Op.F, 0, 0), Compute(Op.F, -1, 0), Compute(Op.F, 0, -1))
    problems = verify(Schedule((0,), 1, (lane,)))
    assert problems[:2] == (
        "rank 0, step 1: -1F0 names stage -1, but there are 1",
        "rank 0, step 2: 0F-1 names micro-batch -1 of 1",
    )
    with pytest.raises(ArgumentError, match="at least one micro-batch and one lane"):
        Schedule((0,), 0, ((),))


def test_mismatched_schedule_graph_and_cost_are_refused() -> None:
    """They ended in an IndexError in the simulator."""
    schedule = schedules.gpipe(2, 1)
    with pytest.raises(ArgumentError, match="edge 0>9 names stage 9, but there are 2"):
        lower(schedule, StageGraph(((0, 9),)))
    with pytest.raises(ArgumentError, match="the cost is for 1 stages, but there are 2"):
        simulate(lower(schedule), Cost.even((0,)))
    with pytest.raises(ArgumentError, match="the program has 3 lanes, but its schedule has 2"):
        Program(schedule, StageGraph.chain(2), ((), (), ()))
    with pytest.raises(ArgumentError, match="1F0 names a stage that does not exist"):
        list(play(loads("placement: 0 \n 0F0 1F0")))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("show 1f1b -p 2 -m 2 --placement v", "--placement applies to fit only"),
        ("show 1f1b -p 2 -m 2 --messages", "--messages needs --save FILE"),
        ("show 1f1b -p 2 -m 2 --memory nan", "--memory takes a number of micro-batches above 0"),
        ("compare -p 2 -m 2 --memory -1", "--memory takes a number of micro-batches above 0"),
        ("gallery --ranks 0", "ranks=0: each of these must be at least 1"),
    ],
)
def test_inapplicable_cli_options_are_refused_and_write_nothing(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refusal(words, monkeypatch, capsys)
    assert not list(tmp_path.iterdir())


def test_repeated_header_is_refused() -> None:
    with pytest.raises(FormatError, match="line 2: 'chunks:' is given twice"):
        loads("chunks: 1 \n chunks: 2 \n 0F0")


def test_recompute_keeps_chained_overlaps_and_is_idempotent() -> None:
    chained = loads("overlaps: 0F1+0B0 0B0+1B0 \n 0F0 1F0 0F1 0B0 1B0")
    assert isinstance(chained, Schedule)
    once = recompute(chained, lambda stage, microbatch: stage == 1)
    assert " ".join(map(str, once.lanes[0])) == "0F0 1F0 1R0 0F1 0B0 1B0"
    assert recompute(once, lambda stage, microbatch: stage == 1) == once


def test_verify_reports_unknown_stages_in_a_program() -> None:
    """It ended in an IndexError, or told the user to call what they had called."""
    assert verify(loads("edges: 0>1 \n 0F0 !0>1:0 ?7>0:0 \n ?0>1:0 1F0")) == (
        "rank 0, step 2: ?7>0:0 names stage 7, but there are 2",
    )
    program = lower(schedules.gpipe(2, 1))
    lanes = ((*program.lanes[0], Compute(Op.F, 9, 0)), program.lanes[1])
    assert verify(Program(program.schedule, program.graph, lanes)) == (
        "rank 0: the program computes something else than its schedule",
    )


def test_memory_cap_in_bytes_allows_rounding() -> None:
    """Sums of large sizes differ in their last digits, and an absolute tolerance refused them."""
    for size in (123456789.1, 9876543210.7, 3.3e9 / 7):
        cost = Cost(F=(1,), I=(1,), W=(1,), activation=(size,))
        assert verify(schedules.gpipe(1, 7), memory=7 * size, cost=cost) == ()


def test_fit_with_little_effort_is_not_worse_than_named_schedules() -> None:
    """At large sizes, all effort went into the first strategy, which lost to named schedules."""
    names = [name for name, family in schedules.FAMILIES.items() if family.trains]
    for name in names:
        named = schedules.make(name, 6, 12)
        cost = Cost.even(named.placement, send=0.1)
        timeline = simulate(lower(named), cost)
        made = schedules.fit(named.placement, 12, cost, max(timeline.peak), effort=1)
        assert simulate(lower(made), cost).makespan <= timeline.makespan


def test_lower_bound_of_a_graph_with_branches() -> None:
    """The bound assumed a chain, and was above what two parallel stages can reach."""
    graph = StageGraph(((0, 2), (1, 2)))
    assert schedules.lower_bound((0, 1, 2), 1, Cost.even((0, 1, 2)), graph) == 5.0


@pytest.mark.parametrize("placement", [(), (0, 2), (1,), (-1, 0)])
def test_fit_refuses_a_placement_with_gaps(placement: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError):
        schedules.fit(placement, 3)


def test_schedule_from_lists_is_hashable_and_round_trips() -> None:
    schedule = schedules.fit([0, 1], 4, Cost([1, 1], [1, 1], [1, 1], [1, 1]))  # type: ignore[arg-type]
    assert loads(dumps(schedule)) == schedule
    assert hash(schedule)


def test_simulate_of_a_schedule_asks_to_lower_it() -> None:
    with pytest.raises(ArgumentError, match=r"simulate\(lower\(schedule\)\)"):
        simulate(schedules.gpipe(2, 2))  # type: ignore[arg-type]


def test_verify_with_a_memory_cap_for_each_rank() -> None:
    schedule = schedules.one_f_one_b(3, 4)
    with pytest.raises(ArgumentError, match="memory has 2 entries for 3 ranks: give one number"):
        verify(schedule, memory=[3, 2])
    with pytest.raises(ArgumentError, match="the cost is for 1 stages, but there are 3"):
        verify(schedule, memory=3, cost=Cost.even((0,)))
    assert verify(schedule, memory=[3, 2, 1]) == ()
    assert len(verify(schedule, memory=[3, 1, 1])) == 1

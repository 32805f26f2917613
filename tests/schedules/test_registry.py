"""The schedule that a pipe was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import ArgumentError, dumps, schedules, verify
from penstock.schedules.ir import Schedule, StageGraph
from penstock.schedules.registry import (
    build_schedule_factory,
    check_has_backward,
    choose_placement,
    default_stages_per_rank,
    resolve_schedule,
)


def picture(schedule: Schedule) -> str:
    return "\n".join(" ".join(map(str, lane)) for lane in schedule.lanes)


def test_clocked_is_gpipe_where_every_rank_has_a_stage() -> None:
    for ranks in range(1, 5):
        for chunks in range(1, 6):
            clocked = schedules.clocked(tuple(range(ranks)), chunks)
            assert clocked == schedules.gpipe(ranks, chunks)


@pytest.mark.parametrize("placement", [(0, 0, 0), (0, 1, 0), (0, 1, 1, 0), (0, 1, 2, 1), (1, 0)])
def test_clocked_is_sound_over_any_placement(placement: tuple[int, ...]) -> None:
    for chunks in (1, 2, 5):
        assert verify(schedules.clocked(placement, chunks)) == ()


def test_stages_of_one_rank_take_turns_by_the_clock() -> None:
    assert picture(schedules.clocked((0, 0), 2)) == "0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0"
    lane = schedules.clocked((0, 0), 3).lanes[0]
    assert " ".join(map(str, lane[:6])) == "0F0 0F1 1F0 0F2 1F1 1F2"


def test_a_name_is_made_for_any_number_of_micro_batches() -> None:
    choice = build_schedule_factory("1f1b", (0, 1), 4)
    assert choice.name == "1f1b"
    assert choice(4) == schedules.one_f_one_b(2, 4)
    assert choice(3) == schedules.one_f_one_b(2, 3)


def test_a_schedule_of_ones_own_loses_its_last_micro_batches() -> None:
    mine = schedules.eager_one_f_one_b(3, 5)
    choice = build_schedule_factory(mine, mine.placement, 5)
    fewer = choice(2)
    assert fewer.chunks == 2
    assert verify(fewer) == ()
    assert choice.name == "your own"


def test_a_file_is_read(tmp_path: Path) -> None:
    mine = schedules.interleaved(2, 4)
    file = tmp_path / "mine.txt"
    file.write_text(dumps(mine))
    assert resolve_schedule(file) == mine
    assert resolve_schedule(str(file)) == mine


@pytest.mark.parametrize(
    ("asked", "message"),
    [("mine.txt", "there is no file 'mine.txt'")],
)
def test_what_cannot_be_read(asked: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        resolve_schedule(asked)


def test_placements() -> None:
    assert choose_placement(None, 2, 4) == (0, 1, 0, 1)
    assert choose_placement("interleaved", 2, 6) == (0, 1, 0, 1, 0, 1)
    assert choose_placement("zb-v", 2, 4) == (0, 1, 1, 0)
    assert choose_placement("fit", 2, 2) == (0, 1)
    assert choose_placement("fit", 2, 4) == (0, 1, 1, 0)
    assert choose_placement("fit", 2, 6) == (0, 1, 0, 1, 0, 1)
    mine = schedules.clocked((1, 0, 1), 2)
    assert choose_placement(mine, 2, 3) == (1, 0, 1)


def test_stages_a_rank() -> None:
    wanted = (None, "fit", "1f1b", "zb-v", schedules.clocked((1, 0, 1), 2))
    assert [default_stages_per_rank(asked) for asked in wanted] == [1, 1, 1, 2, 2]


def test_fit_is_made_for_the_graph_at_hand() -> None:
    skip = StageGraph.chain(4, [(0, 3)])
    choice = build_schedule_factory("fit", (0, 1, 1, 0), 5, skip)
    assert choice(5) == schedules.fit((0, 1, 1, 0), 5, graph=skip)
    assert verify(choice(2), skip) == ()


def test_a_schedule_without_backwards_does_not_train() -> None:
    for name, family in schedules.FAMILIES.items():
        if family.trains:
            check_has_backward(schedules.make(name, 2, 3), name)
    with pytest.raises(ArgumentError, match="forward-only has no backwards"):
        check_has_backward(schedules.forward_only(2, 2), "forward-only")


@pytest.mark.parametrize(
    ("asked", "ranks", "stages", "message"),
    [
        (None, 2, 3, "3 stages do not divide among 2 devices"),
        ("1f1b", 2, 4, "1f1b needs stages=2 on 2 devices, 1 for each, not 4"),
        (schedules.gpipe(2, 2), 3, 3, "the schedule is for 2 stages on 2 ranks"),
    ],
)
def test_placements_that_cannot_be(
    asked: str | Schedule | None, ranks: int, stages: int, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        choose_placement(asked, ranks, stages)


def test_a_schedule_has_its_own_placement_and_chunks() -> None:
    with pytest.raises(ArgumentError, match="the stages are on ranks 0 1 1, but the schedule"):
        build_schedule_factory(schedules.gpipe(3, 2), (0, 1, 1), 2)
    with pytest.raises(ArgumentError, match="for 2 micro-batches, not 3: set chunks=2"):
        build_schedule_factory(schedules.gpipe(2, 2), (0, 1), 3)

"""Resolving the `schedule` argument of a pipe: names, files, placements."""

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


def test_clocked_interleaves_the_stages_of_one_rank() -> None:
    assert picture(schedules.clocked((0, 0), 2)) == "0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0"
    lane = schedules.clocked((0, 0), 3).lanes[0]
    assert " ".join(map(str, lane[:6])) == "0F0 0F1 1F0 0F2 1F1 1F2"


@pytest.mark.parametrize("family", schedules.FAMILIES.values(), ids=schedules.FAMILIES)
def test_placement_of_a_family_is_that_of_its_schedules(family: schedules.Family) -> None:
    for ranks in (1, 2, 3):
        for per_rank in (1, 2, 3) if family.free else (family.stages_per_rank,):
            sizes = (ranks, 1, per_rank) if family.free else (ranks, 1)
            assert family.placement(ranks, per_rank) == family.build(*sizes).placement


def test_schedule_factory_by_name_for_any_number_of_microbatches() -> None:
    choice = build_schedule_factory("1f1b", (0, 1), 4)
    assert choice.name == "1f1b"
    assert choice(4) == schedules.one_f_one_b(2, 4)
    assert choice(3) == schedules.one_f_one_b(2, 3)


def test_schedule_factory_drops_the_last_microbatches_of_a_user_schedule() -> None:
    mine = schedules.eager_one_f_one_b(3, 5)
    choice = build_schedule_factory(mine, mine.placement, 5)
    fewer = choice(2)
    assert fewer.chunks == 2
    assert verify(fewer) == ()
    assert choice.name == "your own"


def test_resolve_schedule_reads_a_file(tmp_path: Path) -> None:
    mine = schedules.interleaved(2, 4)
    file = tmp_path / "mine.txt"
    file.write_text(dumps(mine))
    assert resolve_schedule(file) == mine
    assert resolve_schedule(str(file)) == mine


@pytest.mark.parametrize(("requested", "message"), [("mine.txt", "there is no file 'mine.txt'")])
def test_resolve_schedule_refuses_a_missing_file(requested: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        resolve_schedule(requested)


def test_choose_placement() -> None:
    assert choose_placement(None, 2, 4) == (0, 1, 0, 1)
    assert choose_placement("interleaved", 2, 6) == (0, 1, 0, 1, 0, 1)
    assert choose_placement("zb-v", 2, 4) == (0, 1, 1, 0)
    assert choose_placement("fit", 2, 2) == (0, 1)
    assert choose_placement("fit", 2, 4) == (0, 1, 1, 0)
    assert choose_placement("fit", 2, 6) == (0, 1, 0, 1, 0, 1)
    mine = schedules.clocked((1, 0, 1), 2)
    assert choose_placement(mine, 2, 3) == (1, 0, 1)


def test_default_stages_per_rank() -> None:
    wanted = (None, "fit", "1f1b", "zb-v", schedules.clocked((1, 0, 1), 2))
    assert [default_stages_per_rank(requested) for requested in wanted] == [1, 1, 1, 2, 2]


def test_schedule_factory_of_fit_uses_the_stage_graph() -> None:
    skip = StageGraph.chain(4, [(0, 3)])
    choice = build_schedule_factory("fit", (0, 1, 1, 0), 5, skip)
    assert choice(5) == schedules.fit((0, 1, 1, 0), 5, graph=skip)
    assert verify(choice(2), skip) == ()


def test_check_has_backward_refuses_forward_only() -> None:
    for name, family in schedules.FAMILIES.items():
        if family.trains:
            check_has_backward(schedules.make(name, 2, 3), name)
    with pytest.raises(ArgumentError, match="forward-only has no backwards"):
        check_has_backward(schedules.forward_only(2, 2), "forward-only")


@pytest.mark.parametrize(
    ("requested", "ranks", "stages", "message"),
    [
        (None, 2, 3, "3 stages do not divide among 2 devices"),
        ("1f1b", 2, 4, "1f1b needs stages=2 on 2 devices, 1 for each, not 4"),
        (schedules.gpipe(2, 2), 3, 3, "the schedule is for 2 stages on 2 ranks"),
    ],
)
def test_choose_placement_refuses_impossible_sizes(
    requested: str | Schedule | None, ranks: int, stages: int, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        choose_placement(requested, ranks, stages)


def test_schedule_factory_refuses_another_placement_or_chunks() -> None:
    with pytest.raises(ArgumentError, match="the stages are on ranks 0 1 1, but the schedule"):
        build_schedule_factory(schedules.gpipe(3, 2), (0, 1, 1), 2)
    with pytest.raises(ArgumentError, match="for 2 micro-batches, not 3: set chunks=2"):
        build_schedule_factory(schedules.gpipe(2, 2), (0, 1), 3)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("1F1B", "1f1b"),
        ("Schedule1F1B", "1f1b"),
        ("GPipe", "gpipe"),
        ("ScheduleGPipe", "gpipe"),
        ("interleaved1f1b", "interleaved"),
        ("ScheduleInterleaved1F1B", "interleaved"),
        ("LoopedBFS", "looped-bfs"),
        ("InterleavedZeroBubble", "interleaved-zb"),
        ("ZBVZeroBubble", "zb-v"),
        ("DualPipeV", "dualpipe-v"),
        ("ZB_V", "zb-v"),
        ("Fit", "fit"),
        ("nonsense", "nonsense"),
    ],
)
def test_names_of_pytorch_are_understood_in_any_case(name: str, ours: str) -> None:
    assert resolve_schedule(name) == ours


def test_schedule_classes_of_pytorch_stand_for_their_names() -> None:
    class ScheduleZBVZeroBubble:
        """Stands for PyTorch's, whose import takes a second."""

    assert resolve_schedule(ScheduleZBVZeroBubble) == "zb-v"

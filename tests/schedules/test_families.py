"""Every schedule family as a picture: 3 ranks, 4 micro-batches."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from textwrap import dedent

import pytest

from penstock import ArgumentError, Cost, Op, Schedule, draw, lower, schedules, simulate

PICTURES = {
    "naive": """
        rank 0  F0 ··················B0─── F1 ··················B1─── F2 ··················B2─── F3 ··················B3───
        rank 1  ···F0 ·········B0─── ·········F1 ·········B1─── ·········F2 ·········B2─── ·········F3 ·········B3─── ······
        rank 2  ······F0 B0─── ··················F1 B1─── ··················F2 B2─── ··················F3 B3─── ············
        makespan 36, bubble 66.7%, peak 1 on every rank
    """,
    "gpipe": """
        rank 0  F0 F1 F2 F3 ··················B3─── B2─── B1─── B0───
        rank 1  ···F0 F1 F2 F3 ·········B3─── B2─── B1─── B0─── ······
        rank 2  ······F0 F1 F2 F3 B3─── B2─── B1─── B0─── ············
        makespan 18, bubble 33.3%, peak 4 on every rank
    """,
    "1f1b": """
        rank 0  F0 F1 F2 ············B0─── F3 B1─── ···B2─── ···B3───
        rank 1  ···F0 F1 ······B0─── F2 B1─── F3 B2─── ···B3─── ······
        rank 2  ······F0 B0─── F1 B1─── F2 B2─── F3 B3─── ············
        makespan 18, bubble 33.3%, peak 3 (3 2 1)
    """,
    "eager-1f1b": """
        rank 0  F0 F1 F2 F3 ·········B0─── ···B1─── ···B2─── ···B3───
        rank 1  ···F0 F1 F2 ···B0─── F3 B1─── ···B2─── ···B3─── ······
        rank 2  ······F0 B0─── F1 B1─── F2 B2─── F3 B3─── ············
        makespan 18, bubble 33.3%, peak 4 (4 3 1)
    """,
    "interleaved": """
        rank 0  0F0 0F1 0F2 3F0 3F1 3F2 0F3 ············3B0──── ····3B1──── 3F3 3B2──── ····0B0──── ····0B1──── 0B2──── 3B3──── ················0B3────
        rank 1  ····1F0 1F1 1F2 4F0 4F1 4F2 ····4B0──── 1F3 4B1──── ····4B2──── ····1B0──── 4F3 1B1──── 1B2──── 4B3──── ················1B3──── ········
        rank 2  ········2F0 2F1 2F2 5F0 5B0──── 5F1 5B1──── 5F2 5B2──── 2F3 2B0──── 2B1──── 2B2──── 5F3 5B3──── ················2B3──── ················
        makespan 17, bubble 29.4%, peak 3.5 (3.5 3 2)
    """,
    "looped-bfs": """
        rank 0  0F0 0F1 0F2 0F3 3F0 3F1 3F2 3F3 ························3B3──── 3B2──── 3B1──── 3B0──── 0B3──── 0B2──── 0B1──── 0B0────
        rank 1  ····1F0 1F1 1F2 1F3 4F0 4F1 4F2 4F3 ············4B3──── 4B2──── 4B1──── 4B0──── 1B3──── 1B2──── 1B1──── 1B0──── ········
        rank 2  ········2F0 2F1 2F2 2F3 5F0 5F1 5F2 5F3 5B3──── 5B2──── 5B1──── 5B0──── 2B3──── 2B2──── 2B1──── 2B0──── ················
        makespan 15, bubble 20.0%, peak 4 on every rank
    """,
    "interleaved-zb": """
        rank 0  0F0 0F1 0F2 3F0 3F1 3F2 ········3I0 3W0 0F3 3I1 3W1 3I2 3W2 0I0 0W0 3F3 0I1 0W1 0I2 0W2 3I3 3W3 ····0I3 0W3
        rank 1  ····1F0 1F1 1F2 4F0 4F1 ····4I0 4F2 4I1 4W0 1F3 4I2 4W1 1I0 1W0 1I1 1W1 4F3 1I2 1W2 4I3 4W2 4W3 1I3 1W3 ····
        rank 2  ········2F0 2F1 2F2 5F0 5I0 5F1 5I1 5F2 5I2 5W0 2F3 2I0 2W0 2I1 2W1 2I2 2W2 5F3 5I3 5W1 5W2 2I3 2W3 5W3 ····
        makespan 13.5, bubble 11.1%, peak 3 on every rank
    """,
    "zb-h1": """
        rank 0  F0 F1 F2 ······I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1  ···F0 F1 ···I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2  ······F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
        makespan 14, bubble 14.3%, peak 3 on every rank
    """,
    "zb-h2": """
        rank 0  F0 F1 F2 F3 ···I0 W0 I1 W1 I2 W2 I3 W3 ···
        rank 1  ···F0 F1 F2 I0 F3 I1 W0 I2 W1 I3 W2 W3 ···
        rank 2  ······F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3
        makespan 14, bubble 14.3%, peak 4 on every rank
    """,
    "zb-v": """
        rank 0  0F0 0F1 0F2 0F3 ····5F0 5I0 5F1 5W0 5I1 5F2 5W1 5I2 0I0 0W0 5F3 5I3 5W2 0I1 0W1 0I2 0W2 0I3 0W3 5W3 ····
        rank 1  ····1F0 1F1 1F2 4F0 1F3 4F1 4I0 4W0 4F2 4I1 4W1 1I0 1W0 4F3 4I2 4W2 1I1 4I3 1I2 1W1 1I3 1W2 1W3 4W3 ····
        rank 2  ········2F0 3F0 2F1 3F1 2F2 3F2 3I0 3W0 2F3 2I0 2W0 3F3 3I1 3W1 2I1 3I2 2I2 3I3 2I3 2W1 2W2 2W3 3W2 3W3
        makespan 13, bubble 7.7%, peak 3 on every rank
    """,
    "v-half": """
        rank 0  0F0 0F1 ············5F0 5I0 0F2 5W0 5F1 5I1 5W1 0I0 0F3 0W0 5F2 5I2 5W2 0I1 0W1 ····5F3 5I3 0I2 0W2 5W3 ····0I3 0W3
        rank 1  ····1F0 ········4F0 1F1 ····4I0 4F1 4W0 1F2 1I0 4I1 1W0 4F2 4W1 1F3 1I1 4I2 1W1 4F3 4W2 1I2 4I3 1W2 4W3 1I3 1W3 ····
        rank 2  ········2F0 3F0 ········2F1 3F1 3I0 2I0 2W0 2F2 3W0 3F2 3I1 2I1 2W1 2F3 3W1 3F3 3I2 2I2 2W2 3W2 3I3 2I3 2W3 3W3 ····
        makespan 14.5, bubble 17.2%, peak 2 on every rank
    """,
    "v-min": """
        rank 0  0F0 0F1 ············5F0 5I0 0F2 5W0 ········5F1 5I1 0I0 0W0 0F3 5W1 5F2 5I2 0I1 0W1 5W2 ····5F3 5I3 0I2 0W2 5W3 ····0I3 0W3
        rank 1  ····1F0 ········4F0 1F1 ····4I0 4W0 ····4F1 1F2 1I0 4I1 1W0 4W1 4F2 1F3 1I1 4I2 1W1 4W2 4F3 1I2 1W2 4I3 4W3 ····1I3 1W3 ····
        rank 2  ········2F0 3F0 ········2F1 ····3I0 3F1 2I0 2W0 2F2 3W0 3I1 3F2 2I1 2W1 2F3 3W1 3I2 3F3 2I2 2W2 3W2 ····3I3 2I3 2W3 3W3 ····
        makespan 15.5, bubble 22.6%, peak 2 on every rank
    """,
    "dualpipe-v": """
        rank 0  0F0 0F1 0F2 0F3 ····5F0 5I0 5W0 5F1 5I1 5W1 5F2 5B2──── 5F3 ····0B0──── 5B3──── 0B1──── ········0B2──── ········0I3 0W3
        rank 1  ····1F0 1F1 1F2 4F0 1F3 4F1 4I0 4W0 4F2 4B1──── 4F3 ····1B0──── 4B2──── 1B1──── 4B3──── 1B2──── ········1B3──── ········
        rank 2  ········2F0 3F0 2F1 3F1 2F2 3F2 2F3 3B0──── 3F3 2B0──── 3B1──── 2B1──── 3B2──── 2B2──── 3B3──── 2B3──── ················
        makespan 15, bubble 20.0%, peak 3.5 (2.5 3 3.5)
    """,
    "forward-only": """
        rank 0  F0 F1 F2 F3 ······
        rank 1  ···F0 F1 F2 F3 ···
        rank 2  ······F0 F1 F2 F3
        makespan 6, bubble 33.3%, peak 1 on every rank
    """,
}


def test_every_family_has_a_picture() -> None:
    assert PICTURES.keys() == schedules.FAMILIES.keys()


@pytest.mark.parametrize("name", PICTURES)
def test_family_equals_its_picture(name: str) -> None:
    timeline = simulate(lower(schedules.make(name, ranks=3, chunks=4)))
    assert draw.text(timeline, width=200) == dedent(PICTURES[name]).strip("\n")


def test_gpipe_runs_backwards_in_reverse_order() -> None:
    backwards = [a.microbatch for a in schedules.gpipe(2, 3).lanes[1] if a.op is Op.B]
    assert backwards == [2, 1, 0]


def test_dualpipe_overlaps_a_forward_with_a_backward_of_the_other_stage() -> None:
    schedule = schedules.dualpipe_v(ranks=2, chunks=5)
    assert schedule.overlaps
    for forward, backward in schedule.overlaps:
        assert (forward.op, backward.op) == (Op.F, Op.B)
        assert forward.stage + backward.stage == schedule.stages - 1


def test_make_reports_all_sizes_below_one() -> None:
    with pytest.raises(ArgumentError) as refusal:
        schedules.make("interleaved", ranks=0, chunks=-2, stages_per_rank=0)
    assert str(refusal.value) == (
        "ranks=0, chunks=-2, stages_per_rank=0: each of these must be at least 1"
    )


@pytest.mark.parametrize("build", [family.build for family in schedules.FAMILIES.values()])
def test_every_family_refuses_zero_chunks(build) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArgumentError, match="chunks=0: each of these must be at least 1"):
        build(2, 0)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"])
def test_family_with_one_stage_per_rank_refuses_two(name: str) -> None:
    with pytest.raises(ArgumentError) as refusal:
        schedules.make(name, 4, 8, stages_per_rank=2)
    assert str(refusal.value) == f"{name} has 1 stage a rank, not 2: use stages_per_rank=1"


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min", "dualpipe-v"])
def test_family_with_two_stages_per_rank_refuses_three(name: str) -> None:
    with pytest.raises(ArgumentError) as refusal:
        schedules.make(name, 4, 8, stages_per_rank=3)
    assert str(refusal.value) == f"{name} has 2 stages a rank, not 3: use stages_per_rank=2"


def test_make_suggests_names_for_an_unknown_schedule() -> None:
    with pytest.raises(ArgumentError) as refusal:
        schedules.make("zbv", 4, 8)
    assert str(refusal.value) == (
        "there is no schedule 'zbv'; did you mean zb-v? The schedules are: naive, gpipe, 1f1b, "
        "eager-1f1b, interleaved, looped-bfs, interleaved-zb, zb-h1, zb-h2, zb-v, v-half, v-min, "
        "dualpipe-v, forward-only, fit"
    )


def columns(schedule: Schedule, weight: float) -> list[str]:
    """Return one text row per rank, with one column per action."""
    stages = schedule.stages
    cost = Cost((1.0,) * stages, (1.0,) * stages, (weight,) * stages, (1.0,) * stages)
    rows = []
    for lane in simulate(lower(schedule), cost).computes:
        row = ""
        for span in lane:
            row = f"{row:<{4 * round(span.start)}}{span.action!s:<4}"
        rows.append(row.rstrip())
    return rows


@pytest.mark.parametrize(
    ("module", "schedule", "weight"),
    [
        ("gpipe", schedules.naive(2, 2), 0.0),
        ("gpipe", schedules.gpipe(2, 2), 0.0),
        ("one_f_one_b", schedules.one_f_one_b(2, 3), 0.0),
        ("one_f_one_b", schedules.zb_h1(2, 3), 1.0),
    ],
)
def test_schedule_pictures_in_docstrings_are_correct(
    module: str, schedule: Schedule, weight: float
) -> None:
    drawn = import_module(f"penstock.schedules.families.{module}").__doc__ or ""
    for row in columns(schedule, weight):
        assert row in drawn


def test_v_schedule_pictures_in_docstrings_are_correct() -> None:
    pictures = import_module("penstock.schedules.families.v_shape").__doc__ or ""
    for row in columns(schedules.zb_v(2, 4), 1.0):
        assert row[:60].rstrip() + " ..." in pictures
    schedule = schedules.dualpipe_v(2, 4)
    for lane in schedule.lanes:
        row = str(lane[0])
        for pair in pairwise(lane):
            row += ("+" if pair in schedule.overlaps else " ") + str(pair[1])
        assert row in pictures

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from textwrap import dedent

import pytest

from penstock.draw import text
from penstock.draw.style import SHADES, contrasting_ink
from penstock.draw.text import _Grid
from penstock.errors import ArgumentError, MissingExtra
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Schedule
from penstock.schedules.simulator import Span
from penstock.schedules.timeline import Timeline

Played = Callable[..., Timeline]
Build = Callable[[int, int], Schedule]


def drawn(picture: str) -> str:
    return dedent(picture).strip("\n")


def test_text_of_one_stage_per_rank(played: Played, one_f_one_b: Build) -> None:
    assert text(played(one_f_one_b(2, 4))) == drawn("""
        rank 0  F0 F1 ······B0─── F2 B1─── F3 B2─── ···B3───
        rank 1  ···F0 B0─── F1 B1─── F2 B2─── F3 B3─── ······
        makespan 15, bubble 20.0%, peak 2 (2 1)
    """)


def test_text_of_two_stages_per_rank(v_shape: Timeline) -> None:
    assert text(v_shape) == drawn("""
        rank 0  0F0 0F1 ····3F0 3I0 3F1 ····0I0 3I1 3W0 ····0I1 3W1 0W0 0W1
        rank 1  ····1F0 2F0 1F1 2F1 2I0 1I0 ········2I1 1I1 2W0 2W1 1W0 1W1
        makespan 7.5, bubble 20.0%, peak 2 on every rank
    """)


def test_text_of_recompute_and_uneven_cost(played: Played) -> None:
    cost = Cost(F=(1.0, 2.0), I=(1.0, 1.0), W=(0.5, 0.5), activation=(1.0, 1.0))
    assert text(played("0F0 0F1 0R0 0B0 0B1 \n 1F0 1B0 1F1 1B1", cost)) == drawn("""
        rank 0  F0─ F1─ R0─ ······B0─── ········B1───
        rank 1  ····F0───── B0─── F1───── B1─── ······
        makespan 9.5, bubble 31.6%, peak 2 (2 1)
    """)


def test_text_scale_fits_the_longest_label(played: Played) -> None:
    lanes = "0F8 0F9 0F10 0B8 0B9 0B10"
    assert text(played(lanes)) == drawn("""
        rank 0  F8─ F9─ F10 B8───── B9───── B10────
        makespan 9, bubble 0.0%, peak 3
    """)


def test_text_aligns_lanes_of_ten_or_more_ranks(played: Played, one_f_one_b: Build) -> None:
    lines = text(played(one_f_one_b(11, 1)), width=200).splitlines()
    assert lines[0].startswith("rank 0   F0 ···")
    assert lines[10].startswith("rank 10  ···")


def test_text_folds_where_it_splits_the_fewest_boxes(played: Played, one_f_one_b: Build) -> None:
    assert text(played(one_f_one_b(2, 6)), width=40) == drawn("""
                t = 0
        rank 0  F0 F1 ······B0─── F2 B1─── F3
        rank 1  ···F0 B0─── F1 B1─── F2 B2───
                t = 10
        rank 0  B2─── F4 B3─── F5 B4─── ···
        rank 1  F3 B3─── F4 B4─── F5 B5───
                t = 19
        rank 0  B5───
        rank 1  ······
        makespan 21, bubble 14.3%, peak 2 (2 1)
    """)


def test_text_lines_are_at_most_as_wide_as_asked(played: Played, one_f_one_b: Build) -> None:
    timeline = played(one_f_one_b(3, 9))
    for width in range(32, 120):
        assert max(map(len, text(timeline, width).splitlines()[:-1])) <= width


def test_text_folding_splits_no_label(played: Played, one_f_one_b: Build) -> None:
    timeline = played(one_f_one_b(4, 8), Cost.even(range(4), send=0.25))
    for width in range(48, 120):
        drawing = text(timeline, width)
        labels = re.findall(r"[FB]\d", drawing)
        assert sorted(labels) == sorted(4 * [f"{op}{i}" for op in "FB" for i in range(8)])
        assert not re.search(r"[FB](?!\d)", drawing)


def test_text_shows_the_label_of_a_split_box_once_and_whole(
    played: Played, one_f_one_b: Build
) -> None:
    timeline = played(one_f_one_b(8, 12), Cost.even(range(8), send=0.25))
    for width in range(32, 120):
        drawing = text(timeline, width)
        assert max(Counter(re.findall(r"[FB]\d+", drawing)).values()) == 8
        assert not re.search(r"^rank \d  \d", drawing, re.MULTILINE)


def test_text_says_how_much_does_not_fit_in_six_bands(played: Played, one_f_one_b: Build) -> None:
    lines = text(played(one_f_one_b(2, 40)), width=60).splitlines()
    times = [line.strip() for line in lines if "t =" in line]
    assert times == ["t = 0", "t = 13", "t = 25", "t = 37", "t = 49", "t = 61"]
    assert lines[-2:] == [
        "the last 50 of 123 is left out: give a larger width, or save a picture",
        "makespan 123, bubble 2.4%, peak 2 (2 1)",
    ]


def test_text_refuses_a_width_that_is_too_narrow(played: Played) -> None:
    with pytest.raises(ArgumentError, match="width is 20, too narrow to draw in: give at least 32"):
        text(played("0F0 0B0"), width=20)


def test_text_counts_actions_that_take_no_time(played: Played) -> None:
    cost = Cost(F=(1.0, 1.0), I=(1.0, 1.0), W=(0.0, 0.0), activation=(1.0, 1.0))
    work = "0F0 0F1 0I0 0W0 0I1 0W1 \n 1F0 1I0 1W0 1F1 1I1 1W1"
    assert text(played(work, cost)) == drawn("""
        rank 0  F0 F1 ···I0 ···I1
        rank 1  ···F0 I0 F1 I1 ···
        4 actions are too short to draw
        makespan 6, bubble 33.3%, peak 2 (2 1)
    """)


def test_text_of_a_timeline_of_zero_length(played: Played) -> None:
    nothing = (0.0, 0.0)
    assert text(played("0F0 0B0 \n 1F0 1B0", Cost(nothing, nothing, nothing, nothing))) == drawn("""
        rank 0
        rank 1
        4 actions are too short to draw
        makespan 0, bubble 0.0%, peak 0 on every rank
    """)


def test_text_of_an_idle_rank(played: Played) -> None:
    assert text(played("0F0 0B0 \n -")) == drawn("""
        rank 0  F0 B0───
        rank 1  ·········
        makespan 3, bubble 50.0%, peak 1 (1 0)
    """)


def test_text_of_measured_times_without_a_common_quantum(played: Played) -> None:
    timeline = played("0F0 0F1 0B0 0B1")
    starts, ends = (7.0, 8.03, 9.1, 9.1001), (8.0, 9.1, 9.1001, 11.17)
    computes = timeline.computes[0]
    spans = [s._replace(start=a, end=b) for s, a, b in zip(computes, starts, ends, strict=True)]
    assert text(replace(timeline, spans=tuple(spans))) == drawn("""
        rank 0  F0 F1 B1────
        1 action is too short to draw
        makespan 4.17, bubble 0.7%, peak 2
    """)


def test_boxes_of_half_a_column_more_are_all_rounded_up() -> None:
    # Python's `round` would go to the even number, and float errors to either side.
    grid = _Grid(scale=10.0, quantum_columns=1)
    ends = [grid.column(0.1 * (number + 0.5)) for number in range(20)]
    assert ends == list(range(1, 21))


def test_text_draws_overlapping_spans_side_by_side(played: Played) -> None:
    timeline = played("0F0 0F1")
    first, second = timeline.computes[0]
    spans: tuple[Span, ...] = (first._replace(end=2.0), second._replace(start=1.0, end=3.0))
    assert text(replace(timeline, spans=spans)).splitlines()[0] == "rank 0  F0─ F"


def test_text_in_colour_has_the_same_layout(v_shape: Timeline) -> None:
    coloured = text(v_shape, color=True)
    assert "\x1b[" in coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert plain == text(v_shape).replace("─", " ")


def test_label_colours_have_enough_contrast() -> None:
    # 4.5 is the contrast that WCAG requires of text.
    def luminance(colour: str) -> float:
        rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for shades in SHADES.values():
        for shade in shades:
            dark, light = sorted((luminance(shade), luminance(contrasting_ink(shade))))
            assert (light + 0.05) / (dark + 0.05) > 4.5


def test_text_in_colour_without_rich_names_the_extra(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.color", None)
    with pytest.raises(MissingExtra) as error:
        text(played("0F0 0B0"), color=True)
    assert str(error.value) == ("text in colour needs rich: pip install 'torch-penstock[cli]'")

"""Drawings of measured timelines: milliseconds, with tiny gaps between actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from xml.etree import ElementTree

import pytest

from penstock.draw import picture, text
from penstock.schedules.ir import Compute
from penstock.schedules.timeline import Timeline
from penstock.text_format import choose_time_unit

Played = Callable[..., Timeline]

SVG = "{http://www.w3.org/2000/svg}"


def shrunk(timeline: Timeline, factor: float, gap: float = 0.0) -> Timeline:
    """Scale the times by `factor`, and end each action `gap` earlier."""
    spans = [
        span._replace(start=span.start * factor, end=(span.end - gap) * factor)
        for span in timeline.spans
        if isinstance(span.action, Compute)
    ]
    return replace(timeline, spans=tuple(spans))


@pytest.fixture
def pipelined(played: Played) -> Timeline:
    return played("0F0 0F1 0B0 0F2 0B1 0B2 \n 1F0 1B0 1F1 1B1 1F2 1B2")


@pytest.mark.parametrize(
    ("makespan", "said"),
    [(0.0, "0"), (12.0, "12"), (1.0, "1"), (0.25, "250 ms"), (0.001, "1 ms"), (2e-5, "20 µs")],
)
def test_time_unit_is_chosen_by_the_makespan(makespan: float, said: str) -> None:
    assert choose_time_unit(makespan).format(makespan) == said


def test_text_of_a_short_timeline_is_in_milliseconds(pipelined: Timeline) -> None:
    drawing = text(shrunk(pipelined, 1 / 64), width=34)
    assert drawing == dedent("""
                t = 0 ms
        rank 0  F0 F1 ······B0─── F2
        rank 1  ···F0 B0─── F1 B1───
                t = 109.4 ms
        rank 0  B1─── ···B2───
        rank 1  F2 B2─── ······
        makespan 187.5 ms, bubble 25.0%, peak 2 (2 1)
    """).strip("\n")


def words(path: Path) -> list[str]:
    return [e.text or "" for e in ElementTree.parse(path).getroot().iter(f"{SVG}text")]


def test_picture_of_a_short_timeline_is_in_milliseconds(
    pipelined: Timeline, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture(shrunk(pipelined, 1 / 64), tmp_path / "drawn.svg")
    found = words(tmp_path / "drawn.svg")
    assert "makespan 187.5 ms, bubble 25.0%, peak 2 (2 1)" in found
    assert "time (ms)" in found
    assert {"0", "50", "100", "150"} <= set(found)


def outline(timeline: Timeline, path: Path) -> str:
    """Draw the timeline and return the SVG path of its curve of live activations."""
    picture(timeline, path)
    shapes = ElementTree.parse(path).getroot().iter(f"{SVG}path")
    return next(s.get("d", "") for s in shapes if "fill: #b9c3d3" in s.get("style", ""))


def test_memory_curve_ignores_tiny_gaps_between_actions(
    pipelined: Timeline, tmp_path: Path
) -> None:
    """The curve of a measured run had a vertical line between every two actions."""
    pytest.importorskip("matplotlib")
    corners = outline(pipelined, tmp_path / "exact.svg").count("L")
    assert outline(shrunk(pipelined, 1.0, gap=0.01), tmp_path / "a.svg").count("L") == corners
    assert outline(shrunk(pipelined, 1.0, gap=0.4), tmp_path / "b.svg").count("L") > corners


def test_memory_curve_keeps_a_short_peak(played: Played, tmp_path: Path) -> None:
    """Only short dips are left out: a peak must be visible, however short it is."""
    pytest.importorskip("matplotlib")
    timeline = played("0F0 0B0 0F1 0B1")
    forward, backward, *others = timeline.computes[0]
    spans = (
        forward._replace(end=0.01),
        backward._replace(start=0.01, end=0.02),
        *(span._replace(start=span.start + 6, end=span.end + 6) for span in others),
    )
    drawn = outline(replace(timeline, spans=spans), tmp_path / "drawn.svg")
    without = outline(replace(timeline, spans=spans[2:]), tmp_path / "without.svg")
    assert drawn.count("L") > without.count("L")

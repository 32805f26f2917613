from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.draw import picture
from penstock.errors import ArgumentError, MissingExtra
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Compute, Op, Schedule, StageGraph
from penstock.schedules.timeline import Timeline

pytest.importorskip("matplotlib")

Played = Callable[..., Timeline]
Build = Callable[[int, int], Schedule]
Svg = Callable[..., ElementTree.Element]

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def svg(tmp_path: Path) -> Svg:
    """Return a function that draws a timeline and parses the SVG."""

    def draw(timeline: Timeline, **options: object) -> ElementTree.Element:
        picture(timeline, tmp_path / "drawn.svg", **options)  # type: ignore[arg-type]
        return ElementTree.parse(tmp_path / "drawn.svg").getroot()

    return draw


def words(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def paths(root: ElementTree.Element, colour: str) -> list[str]:
    """Return the paths that are stroked or filled in a colour."""
    found = root.iter(f"{SVG}path")
    return [path.get("d", "") for path in found if colour in path.get("style", "")]


def test_picture_boxes_show_their_microbatches(
    played: Played, one_f_one_b: Build, svg: Svg
) -> None:
    root = svg(played(one_f_one_b(3, 12)), memory=False)
    assert [words(root).count(str(i)) for i in (11, 7)] == [6, 6]  # F and B of each rank
    forward, legend = sorted(paths(root, "fill: #2f5cb8"), key=len, reverse=True)
    assert forward.count("M") == 3 * 12
    assert legend.count("M") == 1


def test_picture_title_caption_and_legend(played: Played, one_f_one_b: Build, svg: Svg) -> None:
    found = words(svg(played(one_f_one_b(2, 4)), title="From $1 & <2 to $3"))
    assert "From $1 & <2 to $3" in found
    assert "makespan 15, bubble 20.0%, peak 2 (2 1)" in found
    assert {"rank", "time", "live activations", "peak"} <= set(found)
    assert {"forward", "backward"} <= set(found)
    assert not {"weight gradient", "recompute", "may overlap"} & set(found)


def test_picture_of_two_stages_per_rank_uses_two_shades(v_shape: Timeline, svg: Svg) -> None:
    root = svg(v_shape)
    assert {"forward", "input gradient", "weight gradient"} <= set(words(root))
    assert "a rank's stages, alternating" in words(root)
    assert max(path.count("M") for path in paths(root, "fill: #2f5cb8")) == 4
    assert max(path.count("M") for path in paths(root, "fill: #8fc6f7")) == 4


def test_picture_without_memory_panel(played: Played, svg: Svg) -> None:
    found = words(svg(played("0F0 0B0"), memory=False))
    assert "live activations" not in found
    assert found.count("time") == 1


def test_picture_draws_skips_as_arcs(played: Played, one_f_one_b: Build, svg: Svg) -> None:
    schedule, graph = one_f_one_b(4, 3), StageGraph.chain(4, skips=[(0, 2), (0, 3)])
    timeline = played(schedule, graph=graph)
    arcs = [path for path in paths(svg(timeline, skips=True), "stroke: #1d2430") if "C" in path]
    assert [path.count("M") for path in arcs if path.count("M") == 6] == [6, 6]
    assert not any("C" in path for path in paths(svg(timeline), "stroke: #1d2430"))


def test_picture_draws_no_arc_for_a_skip_within_a_rank(
    v_shape: Timeline, played: Played, svg: Svg
) -> None:
    graph = StageGraph.chain(4, skips=[(0, 3)])
    timeline = played(v_shape.program.schedule, graph=graph)
    arcs = paths(svg(timeline, skips=True), "stroke: #1d2430")
    assert not any("C" in path for path in arcs)


def test_picture_outlines_overlapping_actions(v_shape: Timeline, svg: Svg) -> None:
    pair = Compute(Op.F, 2, 1), Compute(Op.I, 2, 0)
    program = v_shape.program
    schedule = replace(program.schedule, overlaps=frozenset([pair]))
    root = svg(replace(v_shape, program=replace(program, schedule=schedule)))
    assert "may overlap" in words(root)
    in_lane, in_legend = (path for path in paths(root, "stroke: #1d2430") if "z" in path)
    assert in_lane.count("M") == in_legend.count("M") == 1


def test_picture_is_deterministic(played: Played, one_f_one_b: Build, tmp_path: Path) -> None:
    graph = StageGraph.chain(4, skips=[(0, 3)])
    for suffix in (".svg", ".png"):
        for name in ("one", "two"):
            timeline = played(one_f_one_b(4, 5), graph=graph)
            picture(timeline, tmp_path / f"{name}{suffix}", skips=True, title="Twice")
        one, two = (tmp_path / f"{name}{suffix}" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


def test_picture_ignores_matplotlib_settings_of_the_user(played: Played, tmp_path: Path) -> None:
    import matplotlib

    timeline = played("0F0 0B0")
    picture(timeline, tmp_path / "one.svg")
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.grid": True}):
        picture(timeline, tmp_path / "two.svg")
        assert matplotlib.rcParams["font.size"] == 30
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_picture_of_a_timeline_that_does_not_start_at_zero(played: Played, tmp_path: Path) -> None:
    timeline = played("0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1")
    later = [s._replace(start=s.start + 64, end=s.end + 64) for s in timeline.spans]
    picture(timeline, tmp_path / "one.svg")
    picture(replace(timeline, spans=tuple(later)), tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_picture_of_an_empty_or_zero_cost_timeline(played: Played, svg: Svg) -> None:
    svg(played("placement: 0\nchunks: 1\n-\n-"), skips=True)
    nothing = (0.0,)
    svg(played("0F0 0B0", Cost(nothing, nothing, nothing, nothing)))


def test_picture_of_a_large_pipeline_has_few_elements_and_no_numbers(
    played: Played, one_f_one_b: Build, svg: Svg
) -> None:
    timeline = played(one_f_one_b(64, 256))
    root = svg(timeline, skips=True)
    assert "255" not in words(root)
    assert len(list(root.iter())) < 2000


def test_picture_refuses_an_unknown_suffix(played: Played, tmp_path: Path) -> None:
    for name in ("drawn.pdf", "drawn"):
        with pytest.raises(ArgumentError) as error:
            picture(played("0F0 0B0"), tmp_path / name)
        assert str(error.value) == (
            f"cannot draw into '{name}': the file name must end in .svg or .png"
        )


def test_picture_without_matplotlib_names_the_extra(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra) as error:
        picture(played("0F0 0B0"), tmp_path / "drawn.svg")
    assert str(error.value) == ("a picture needs matplotlib: pip install 'torch-penstock[draw]'")

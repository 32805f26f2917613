from __future__ import annotations

import html
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.studio.files import small_profile

from penstock import Cost, draw, lower, schedules, simulate
from penstock.draw.page import HtmlPage, comparison_page, plan_page
from penstock.draw.svg import PlotPoint, scatter_svg, timeline_svg
from penstock.planning import search_plan
from penstock.planning.plan import describe_certificate, list_stages
from penstock.schedules.request import ScheduleRequest, summarize

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "forward-only"])
def test_svg_has_a_box_for_every_action(name: str) -> None:
    timeline = simulate(lower(schedules.make(name, 3, 5)))
    root = ElementTree.fromstring(timeline_svg(timeline, title="<&>'"))
    boxes = "".join(path.get("d") or "" for path in root.iter(f"{SVG}path")).count("h-")
    assert boxes == sum(map(len, timeline.computes))
    assert "<&>'" in {text.text for text in root.iter(f"{SVG}text")}


def test_svg_of_a_thousand_ranks_stays_small() -> None:
    timeline = simulate(lower(schedules.one_f_one_b(ranks=300, chunks=4)))
    assert len(timeline_svg(timeline)) < 600_000


def test_plot_names_every_point() -> None:
    points = [PlotPoint(f"p{i}", 1.0, 0.5) for i in range(5)]
    root = ElementTree.fromstring(scatter_svg(points, "x", "y"))
    names = [text.text for text in root.iter(f"{SVG}text") if (text.text or "").startswith("p")]
    assert sorted(name for name in names if name) == [f"p{i}" for i in range(5)]
    places = {(t.get("x"), t.get("y")) for t in root.iter(f"{SVG}text") if t.text in names}
    assert len(places) == 5


def test_page_of_a_run_says_what_cost_the_time_and_needs_no_other_file(tmp_path: Path) -> None:
    plan = simulate(lower(schedules.one_f_one_b(3, 4)), Cost.even((0, 1, 2), F=0.001))
    run = simulate(plan.program, plan.cost.scaled([1, 1, 2]))
    draw.run_page(run, tmp_path / "run.html", plan)
    text = (tmp_path / "run.html").read_text()
    assert "of stage 2 took" in text
    assert text.count("<svg") == 2
    assert "<script" not in text
    assert "src=" not in text
    assert "href=" not in text


def test_page_escapes_every_text(tmp_path: Path) -> None:
    page = HtmlPage("<script>1</script>", "<script>2</script>")
    page.heading("<script>3</script>")
    page.paragraph("<script>4</script>")
    page.preformatted("<script>5</script>")
    page.table(["<script>6</script>"], [["<script>7</script>"]])
    page.write(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 8  # the title is also in the head


def test_comparison_page_has_a_row_and_a_picture_of_each_schedule(tmp_path: Path) -> None:
    request = ScheduleRequest(2, 4, None, {"F": 1.0, "I": 1.0, "W": 1.0}, "never", None)
    timelines = dict(request.simulate_all())
    rows = [summarize(name, timeline) for name, timeline in timelines.items()]
    comparison_page("two ranks", rows, timelines).write(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.count("<svg") == len(rows) + 1
    assert text.count("<tr>") == 2 * (len(rows) + 1)


def test_plan_page_has_the_certificate_and_the_forecast(tmp_path: Path) -> None:
    plan = search_plan(small_profile(), solver_seconds=0)
    plan_page(plan).write(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert text.count("<svg") == 1
    assert plan.certificate is not None
    for sentence in describe_certificate(plan, plan.certificate):
        assert html.escape(sentence[1:]) in text
    for choice in [other.choice for other in plan.alternatives]:
        assert f">{choice}</td>" in text
    for row in list_stages(plan):
        assert all(f">{html.escape(cell)}</t" in text for cell in row)

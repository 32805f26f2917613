"""Every drawing returns its figure, and writes to a path, an open file or nowhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest
from tests.planning.problems import even_profile

from penstock import draw, lower, schedules, simulate
from penstock.errors import ArgumentError, PenstockTypeError
from penstock.model_summary import ModelSummary, UnitSummary
from penstock.planning.search import search_plan

pytest.importorskip("matplotlib")

TIMELINE = simulate(lower(schedules.one_f_one_b(ranks=2, chunks=4)))
OUTLINE = ModelSummary(
    "Net", (UnitSummary("a", 0, 4, 16), UnitSummary("b", 1, 4, 16)), (), (), (4, 4), (16, 16)
)
PLAN = search_plan(even_profile(units=4), solver_seconds=0)
DRAWINGS: dict[str, Callable[..., Any]] = {
    "picture": lambda *file, **options: draw.picture(TIMELINE, *file, **options),
    "memory": lambda *file, **options: draw.memory(TIMELINE, [[], []], *file, **options),
    "plan": lambda *file, **options: draw.plan(PLAN, *file, **options),
    "chain": lambda *file, **options: draw.chain(OUTLINE, *file, **options),
}
SVG, PNG = "<?xml", b"\x89PNG"


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawing_returns_its_figure_and_writes_to_open_files(name: str, tmp_path: Path) -> None:
    drawing = DRAWINGS[name]
    figure = drawing()
    assert figure.get_axes()
    for options, start in (({}, PNG), ({"format": "svg"}, SVG.encode())):
        binary = BytesIO()
        drawing(binary, **options)
        assert binary.getvalue().startswith(start)
    text = StringIO()
    drawing(text)
    assert text.getvalue().startswith(SVG)
    # A path and an open file get the same bytes, and so does a file with a name.
    drawing(tmp_path / "path.svg")
    with (tmp_path / "open.svg").open("wb") as file:
        drawing(file)
    assert (tmp_path / "path.svg").read_bytes() == (tmp_path / "open.svg").read_bytes()
    assert text.getvalue() == (tmp_path / "path.svg").read_text()


def test_figure_of_a_drawing_is_svg_in_a_notebook_and_unknown_to_pyplot() -> None:
    """A notebook shows the figures of pyplot after a cell: it would show this one twice."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before = pyplot.get_fignums()
    figure = draw.picture(TIMELINE)
    assert pyplot.get_fignums() == before
    text = StringIO()
    draw.picture(TIMELINE, text)
    assert figure._repr_svg_() == text.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        ("step.gif", {}, "the file name must end in .svg or .png"),
        ("step.svg", {"format": "pdf"}, "format must be 'svg' or 'png', not 'pdf'"),
        (StringIO(), {"format": "png"}, "a PNG cannot be written to a text file"),
    ],
)
def test_drawing_refuses_other_formats(file: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        draw.picture(TIMELINE, file, **options)


def test_drawing_refuses_what_is_no_file() -> None:
    with pytest.raises(PenstockTypeError, match="cannot draw into a int: pass a path"):
        draw.picture(TIMELINE, 3)  # type: ignore[arg-type]


def test_trace_and_page_are_written_to_open_files(tmp_path: Path) -> None:
    for write, name in ((draw.write_trace, "step.json"), (draw.run_page, "step.html")):
        text = StringIO()
        write(TIMELINE, text)
        write(TIMELINE, tmp_path / name)
        assert text.getvalue() == (tmp_path / name).read_text(encoding="utf-8")


def test_import_of_penstock_leaves_matplotlib_and_ipython_alone() -> None:
    code = (
        "import sys, penstock; "
        "penstock.simulate(penstock.lower(penstock.schedules.gpipe(2, 2)))._repr_html_(); "
        "print([name for name in ('torch', 'matplotlib', 'IPython') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"

"""What a notebook and a terminal show: one-line reprs, HTML, progress, and lines beside a bar."""

from __future__ import annotations

import io
import sys
import warnings
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock import Cost, Pipe, Schedule, StageGraph, lower, schedules, simulate
from penstock.display import shown_progress, write_line
from penstock.draw.notebook import MAX_ACTIONS, MAX_ROWS, partition_html
from penstock.model_summary import ModelSummary, UnitSummary
from penstock.planning import search_plan
from tests.planning.problems import even_profile

X, Y = torch.randn(8, 4), torch.randn(8, 2)
SCHEDULE = schedules.zb_v(ranks=2, chunks=4)
PLAN = search_plan(even_profile(units=4), chunks=[4], solver_seconds=0)


def make_pipe() -> Pipe:
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    cpus = ["cpu", "cpu"]
    return Pipe(layers, chunks=4, stages=2, devices=cpus, schedule="1f1b", loss_fn=nn.MSELoss())


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    """Return one of each public value that notebooks show."""
    pipe = make_pipe()
    result = pipe.step(X, target=Y)
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return {
        "Schedule": SCHEDULE,
        "Program": lower(SCHEDULE),
        "Timeline": simulate(lower(SCHEDULE)),
        "Plan": PLAN,
        "Profile": PLAN.profile,
        "SequentialPartition": penstock.split(layers, stages=[2, 1]),
        "Report": penstock.check(layers, X, stages=2, schedules=["1f1b"], quiet=True),
        "Memory": pipe.memory(X, target=Y),
        "StepResult": result,
    }


class BalancedTags(HTMLParser):
    """Raises if an element is not closed, and collects names of elements and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.names.add(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.names.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(page: str | None) -> BalancedTags:
    assert page is not None
    tags = BalancedTags()
    tags.feed(page)
    assert tags.open == []
    return tags


# ---- reprs ---------------------------------------------------------------------------------------


def test_repr_of_public_values_is_one_short_line(values: dict[str, Any]) -> None:
    for name, value in values.items():
        assert repr(value).startswith(f"{name}("), repr(value)
        assert "\n" not in repr(value)
        assert len(repr(value)) < 140, repr(value)


def test_repr_says_sizes_and_results(values: dict[str, Any]) -> None:
    assert repr(SCHEDULE) == "Schedule(2 ranks, 4 stages, 4 micro-batches, 48 actions)"
    assert repr(lower(SCHEDULE)).endswith("48 actions, 16 messages)")
    one = simulate(lower(schedules.gpipe(ranks=1, chunks=1)))
    assert repr(one) == "Timeline(1 rank, 1 micro-batch, makespan 3, bubble 0.0%, peak 1)"
    assert repr(values["Report"]) == "Report(equal in all 4 runs, to 1e-10)"
    wrong = replace(values["Report"], tolerance=0.0)
    assert repr(wrong).startswith("Report(NOT equal, in ")
    assert "in 2 stages of 2 + 1 units, 58 parameters" in repr(values["SequentialPartition"])
    assert repr(PLAN.profile) == "Profile(even, 4 units, 8 rows, 2 devices: cpu)"


def test_repr_of_costs_and_graphs_of_many_stages_is_short() -> None:
    few = Cost(F=(1, 2), I=(1, 2), W=(1, 2), activation=(1, 1))
    assert eval(repr(few), {"Cost": Cost}) == few
    many = Cost.even(range(1000))
    assert "F=(1, ..., 1: 1000 stages)" in repr(many)
    assert len(repr(many)) < 200
    graph = StageGraph.chain(3, skips=[(0, 2)])
    assert eval(repr(graph), {"StageGraph": StageGraph}) == graph
    assert repr(StageGraph.chain(1000)) == "StageGraph(edges=<999 of them>)"


# ---- HTML ----------------------------------------------------------------------------------------


def test_html_of_public_values_has_a_table_and_a_picture(values: dict[str, Any]) -> None:
    for name, value in values.items():
        tags = parsed(value._repr_html_())
        assert "table" in tags.names, name
        assert ("svg" in tags.names) == (name not in ("Profile", "Report")), name
        assert "script" not in tags.names


@pytest.mark.parametrize("text", ["0F0 0B0\n1B0 1F0", "0F0\n1F0 1B0"], ids=["deadlock", "missing"])
def test_html_of_an_unsound_schedule_says_what_is_wrong(text: str) -> None:
    schedule = penstock.loads(f"placement: 0 1\nchunks: 1\n{text}\n")
    tags = parsed(schedule._repr_html_())
    assert penstock.verify(schedule)[0] in tags.text
    assert "svg" not in tags.names


def test_html_of_a_large_timeline_has_no_picture_and_few_rows() -> None:
    timeline = simulate(lower(schedules.gpipe(ranks=128, chunks=64)))
    assert len(timeline.spans) > MAX_ACTIONS
    page = timeline._repr_html_()
    assert page is not None
    assert len(page) < 10_000
    assert page.count("<tr>") == MAX_ROWS + 1
    assert f"and {128 - MAX_ROWS} more" in page
    huge = Schedule((0,), 1, (tuple(schedules.gpipe(1, 1).lanes[0]) * MAX_ACTIONS,))
    assert "too many actions" in str(huge._repr_html_())


def test_html_escapes_names() -> None:
    name = "<script>alert('x')</script>"
    unit = UnitSummary(name, 0, 1, 4)
    outline = ModelSummary(name, (unit,), (), (), (1,), (4,))
    page = partition_html(outline, name, [("stage", "units"), ("0", name)], [("sends", name)])
    units = [replace(unit, name=name) for unit in even_profile(units=2).units]
    profile = replace(even_profile(units=2), model=name, units=tuple(units))
    plan = search_plan(profile, chunks=[2], solver_seconds=0)
    for html in (page, plan._repr_html_(), profile._repr_html_()):
        assert "<script" not in str(html)
        assert "&lt;script&gt;" in str(html)


# ---- progress ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_of_plan_and_check_is_shown_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.delitem(sys.modules, "tqdm", raising=False)
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    penstock.check(layers, X, stages=2, schedules=["1f1b"], quiet=True, progress=True)
    assert "0 of 4 runs: 1f1b, never, inline" in terminal.getvalue()
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")  # the line is removed again
    penstock.plan(layers, X, devices=2, chunks=4, schedules=["1f1b"], progress=True)
    assert "measuring" in terminal.getvalue()


def test_progress_is_not_shown_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress(True) as report:
        assert report is None
    assert capsys.readouterr() == ("", "")


def test_progress_goes_to_the_function_of_the_caller() -> None:
    reported: list[tuple[str, float]] = []
    with shown_progress(lambda *report: reported.append(report)) as report:
        assert report is not None
        report("half", 0.5)
    assert reported == [("half", 0.5)]


def test_progress_and_lines_leave_a_bar_of_tqdm_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tqdm(total=4, file=terminal, desc="training") as bar:
            bar.update(1)
            with shown_progress(True) as report:
                assert report is not None
                report("measuring", 0.25)
            write_line("a line of text", terminal)
            bar.update(1)
    screen = rendered(terminal.getvalue())
    assert "a line of text" in screen
    assert sum("training" in line for line in screen) == 1
    assert not any("measuring" in line for line in screen)


def rendered(output: str) -> list[str]:
    """Return the lines of a terminal after an output with \\r, \\n and "cursor up"."""
    lines, row, column = [""], 0, 0
    while output:
        if output.startswith("\x1b[A"):
            row, output = max(row - 1, 0), output[3:]
            continue
        character, output = output[0], output[1:]
        if character == "\r":
            column = 0
        elif character == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + character + line[column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def test_progress_in_a_notebook_is_one_output_that_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[tuple[str, dict[str, str]]] = []

    class Handle:
        def update(self, content: dict[str, str], raw: bool) -> None:
            shown.append(("update", content))

    def display(content: dict[str, str], raw: bool, display_id: bool) -> Handle:
        shown.append(("display", content))
        return Handle()

    shell = SimpleNamespace(kernel=object())
    ipython = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr("penstock.display._REDRAW_SECONDS", 0.0)
    with shown_progress(True) as report:
        assert report is not None
        report("<b>measuring", 0.25)
        report("searching", 2.0)
    assert [kind for kind, _ in shown] == ["display", "update", "update"]
    assert "value='0.2500'" in shown[0][1]["text/html"]
    assert "25% &lt;b&gt;measuring" in shown[0][1]["text/html"]
    assert "value='1.0000'" in shown[1][1]["text/html"]
    assert shown[2][1]["text/html"] == ""

"""`penstock check module:factory`: compare pipes over the user's model with the model itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from penstock.checker.check import ProgressCallback, check
from penstock.checker.report import Report, report_page
from penstock.cli.factory import call_factory, run_user_code
from penstock.cli.report import show_activity
from penstock.draw.page import HtmlPage
from penstock.draw.svg import timeline_svg
from penstock.schedules.families import make
from penstock.schedules.lowering import lower
from penstock.schedules.timeline import simulate
from penstock.text_format import make_printable


@dataclass(frozen=True)
class CheckRequest:
    """The arguments of `penstock check`."""

    factory: str
    stages: int
    chunks: int
    schedules: str
    checkpoints: str
    runtimes: str
    units: str | None
    tolerance: float
    quick: bool
    as_json: bool
    html: Path | None


def run(request: CheckRequest) -> bool:
    """Check the model, print the report, and return whether everything is equal."""
    # What the factory and the model print goes to stderr: stdout has the report alone.
    with redirect_stdout(sys.stderr), _show_progress() as progress:
        factory_result = call_factory(request.factory)
        report = _check_model(request, factory_result, progress)
    if request.html:
        _build_page(report, request.stages, request.chunks).write(request.html)
    if request.as_json:
        print(json.dumps(report.as_dict()))
    else:
        _print_report(report)
        if request.html:
            print(f"wrote {make_printable(str(request.html))}")
    return report.ok


def _build_page(report: Report, stages: int, chunks: int) -> HtmlPage:
    page = report_page(report)
    page.heading("The schedules that ran")
    page.paragraph("Simulated; every stage takes the same time.")
    for name, ranks in dict.fromkeys(
        (run.case.schedule, run.case.ranks) for run in report.compared
    ):
        schedule = make(name, ranks, chunks, stages // ranks)
        page.picture(timeline_svg(simulate(lower(schedule)), title=name))
    return page


@contextmanager
def _show_progress() -> Iterator[ProgressCallback]:
    """Show how many runs are done: a bar in a terminal, elsewhere a line now and then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with show_activity("running the unsplit model") as update:
            yield lambda done, total, next_run: update(f"{done} of {total} runs done; {next_run}")
        return
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("the unsplit model", total=None)
        yield lambda done, total, next_run: bar.update(
            task, completed=done, total=total, description=next_run
        )


def _check_model(
    request: CheckRequest, factory_result: Mapping[str, Any], progress: ProgressCallback
) -> Report:
    schedules = request.schedules
    problem = f"{request.factory}: the unsplit model fails, so there is nothing to compare with"
    with run_user_code(problem):
        return check(
            factory_result["model"],
            *factory_result["batch"],
            target=factory_result.get("target"),
            loss_fn=factory_result.get("loss_fn"),
            reduction=factory_result.get("reduction"),
            units=request.units or factory_result.get("units"),
            stages=request.stages,
            chunks=request.chunks,
            schedules=schedules if schedules == "all" else _split_names(schedules),
            checkpoints=_split_names(request.checkpoints),
            runtimes=_split_names(request.runtimes),
            tolerance=request.tolerance,
            quick=request.quick,
            quiet=True,
            progress=progress,
            **factory_result.get("side", {}),
        )


def _split_names(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _print_report(report: Report) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for line in make_printable(str(report)).split("\n"):
        text = Text(line)
        for style, pattern in _STYLES.items():
            text.highlight_regex(pattern, style)
        console.print(text)


# Words and numbers of the report that are colored, by color.
_STYLES = {
    "green": r"\bequal\b",
    "yellow": r"\brefused\b",
    "red": r"\bfailed\b|\bNOT equal\b|\b\de[-+]\d\d\b|\binf\b",
}

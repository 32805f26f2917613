"""`penstock check module:factory`: compare pipes over the user's model with the model itself."""

from __future__ import annotations

import importlib
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
from torch import nn

from penstock.checker.check import ProgressCallback, check
from penstock.checker.report import Report
from penstock.cli.report import describe_exception, show_activity
from penstock.draw.page import HtmlPage
from penstock.errors import ArgumentError, PenstockError
from penstock.text_format import make_printable

_FACTORY_KEYS = ("model", "batch", "target", "loss_fn", "reduction", "side", "units")


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
        factory_result = _parse_factory_result(_call_factory(request.factory), request.factory)
        report = _check_model(request, factory_result, progress)
    if request.html:
        _build_page(report).write(request.html)
    if request.as_json:
        print(json.dumps(report.as_dict()))
    else:
        _print_report(report)
        if request.html:
            print(f"wrote {make_printable(str(request.html))}")
    return report.ok


def _build_page(report: Report) -> HtmlPage:
    page = HtmlPage("Equal" if report.ok else "NOT equal", make_printable(report.model))
    page.paragraph(f"Compared with {make_printable(report.reference)}.")
    page.paragraph(f"The loss is {make_printable(report.loss)}.")
    headings, *rows = report.table()
    page.table(headings, rows)
    page.preformatted(make_printable("\n".join(report.summary())))
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
    with _explain_errors_of_user(problem):
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


@contextmanager
def _explain_errors_of_user(problem: str) -> Iterator[None]:
    """Turn what the user's code raises into an error that names the problem.

    `sys.exit(0)` counts as an error, too: nothing has been checked then.
    """
    try:
        yield
    except (PenstockError, KeyboardInterrupt):  # the message is meant for the user as it is
        raise
    except BaseException as error:
        raise ArgumentError(f"{problem}: {describe_exception(error)}") from error


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


# ---- the factory ----------------------------------------------------------------------------


def _call_factory(path: str) -> Any:
    """Import MODULE, which may be in the current directory, and return what FACTORY() returns."""
    name, _, factory = path.partition(":")
    if not name or not factory:
        raise ArgumentError(f"expected MODULE:FACTORY, such as my_model:make, not '{path}'")
    # A console script does not have the current directory on its path, unlike `python -m`.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with _explain_errors_of_user(f"importing {name} failed"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # The module itself, or a package above it, is missing; or it imports one that is.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise ArgumentError(f"{name} needs {error.name}, which is not installed") from error
            raise ArgumentError(
                f"there is no module '{name}', neither in {here} nor among the installed packages"
            ) from None
        make = getattr(module, factory, None)
    if not callable(make):
        defined = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == name]
        problem = "is not a function" if hasattr(module, factory) else "is not defined"
        raise ArgumentError(
            f"{name} has no factory '{factory}', which {problem}. The module defines "
            f"{', '.join(defined) or 'nothing'}"
        )
    with _explain_errors_of_user(f"{path} failed"):
        return make()


def _parse_factory_result(factory_result: Any, path: str) -> dict[str, Any]:
    """Return the factory's result as a dict, with the batch as a tuple of inputs."""
    if isinstance(factory_result, tuple) and 2 <= len(factory_result) <= 4:
        factory_result = dict(zip(_FACTORY_KEYS, factory_result, strict=False))
    if not isinstance(factory_result, dict) or not {"model", "batch"} <= factory_result.keys():
        actual = _describe_type(factory_result)
        raise ArgumentError(
            f"{path} must return (model, batch), (model, batch, target, loss_fn), or a dict with "
            f"'model' and 'batch', not {actual}"
        )
    unknown = [str(key) for key in factory_result if key not in _FACTORY_KEYS]
    if unknown:
        raise ArgumentError(
            f"{path} returns a dict with unknown keys: {', '.join(unknown)}. It may have "
            f"{', '.join(_FACTORY_KEYS)}"
        )
    if not isinstance(factory_result["model"], nn.Module):
        raise ArgumentError(
            f"{path}: the model must be an nn.Module, not {_describe_type(factory_result['model'])}"
        )
    batch = factory_result["batch"]
    return {**factory_result, "batch": batch if isinstance(batch, tuple) else (batch,)}


def _describe_type(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if isinstance(value, dict):
        return f"a dict with {', '.join(map(str, value))}"
    return f"an object of type {type(value).__name__}"

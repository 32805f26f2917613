"""`penstock check module:factory`: compare pipes over the user's model with the model itself."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text
from torch import nn

from penstock.checker.check import check
from penstock.checker.report import Report
from penstock.errors import ArgumentError, PenstockError

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


def run(request: CheckRequest) -> bool:
    """Check the model, print the report, and return whether everything is equal."""
    factory_result = _parse_factory_result(_call_factory(request.factory), request.factory)
    console = Console(stderr=True)
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("the unsplit model", total=None)

        def show_progress(done: int, total: int, description: str) -> None:
            progress.update(task, completed=done, total=total, description=description)

        report = _check_model(request, factory_result, show_progress)
    if request.as_json:
        print(json.dumps(report.as_dict()))
    else:
        _print_report(report)
    return report.ok


def _check_model(request: CheckRequest, factory_result: Mapping[str, Any], progress: Any) -> Report:
    schedules = request.schedules
    try:
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
    except PenstockError:  # its message is meant for the user as it is
        raise
    except Exception as error:
        raise ArgumentError(
            f"{request.factory}: the unsplit model fails, so there is nothing to compare with: "
            f"{type(error).__name__}: {error}"
        ) from error


def _split_names(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _print_report(report: Report) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for line in str(report).splitlines():
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
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module itself, or a package above it, is missing; or it imports one that is.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ArgumentError(f"{name} needs {error.name}, which is not installed") from error
        raise ArgumentError(
            f"there is no module '{name}', neither in {here} nor among the installed packages"
        ) from None
    except Exception as error:
        raise ArgumentError(f"importing {name} failed: {type(error).__name__}: {error}") from error
    make = getattr(module, factory, None)
    if not callable(make):
        defined = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == name]
        problem = "is not a function" if hasattr(module, factory) else "is not defined"
        raise ArgumentError(
            f"{name} has no factory '{factory}', which {problem}. The module defines "
            f"{', '.join(defined) or 'nothing'}"
        )
    try:
        return make()
    except Exception as error:
        raise ArgumentError(f"{path} failed: {type(error).__name__}: {error}") from error


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

"""`penstock check module:factory`: a user's own model, checked."""

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

from penstock.checking.check import check
from penstock.checking.report import Report
from penstock.errors import ArgumentError, PenstockError

_KEYS = ("model", "batch", "target", "loss_fn", "reduction", "side", "units")


@dataclass(frozen=True)
class Asked:
    """What was asked for on the command line."""

    factory: str
    stages: int
    chunks: int
    schedules: str
    checkpoints: str
    runtimes: str
    units: str | None
    tolerance: float
    as_json: bool


def run(asked: Asked) -> bool:
    """Check, and say so; is everything equal?"""
    given = _read(_called(asked.factory), asked.factory)
    console = Console(stderr=True)
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("the unsplit model", total=None)

        def tell(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)

        report = _checked(asked, given, tell)
    if asked.as_json:
        print(json.dumps(report.as_dict()))
    else:
        _print(report)
    return report.ok


def _checked(asked: Asked, given: Mapping[str, Any], tell: Any) -> Report:
    schedules = asked.schedules
    try:
        return check(
            given["model"],
            *given["batch"],
            target=given.get("target"),
            loss_fn=given.get("loss_fn"),
            reduction=given.get("reduction"),
            units=asked.units or given.get("units"),
            stages=asked.stages,
            chunks=asked.chunks,
            schedules=schedules if schedules == "all" else _words(schedules),
            checkpoints=_words(asked.checkpoints),
            runtimes=_words(asked.runtimes),
            tolerance=asked.tolerance,
            quiet=True,
            progress=tell,
            **given.get("side", {}),
        )
    except PenstockError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"{asked.factory}: the unsplit model fails, so there is nothing to compare with: "
            f"{type(error).__name__}: {error}"
        ) from error


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _print(report: Report) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for line in str(report).splitlines():
        text = Text(line)
        for style, words in _STYLES.items():
            text.highlight_regex(words, style)
        console.print(text)


_STYLES = {
    "green": r"\bequal\b",
    "yellow": r"\brefused\b",
    "red": r"\bfailed\b|\bNOT equal\b|\b\de[-+]\d\d\b|\binf\b",
}


# ---- what the factory gives ---------------------------------------------------------------


def _called(path: str) -> Any:
    """What the factory returns; its module may be in the current directory."""
    name, _, factory = path.partition(":")
    if not name or not factory:
        raise ArgumentError(f"give MODULE:FACTORY, such as my_model:make, not '{path}'")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ArgumentError(f"{name} needs {error.name}, which is not installed") from error
        raise ArgumentError(
            f"there is no module '{name}', neither in {here} nor among what is installed"
        ) from None
    except Exception as error:
        raise ArgumentError(f"importing {name} failed: {type(error).__name__}: {error}") from error
    make = getattr(module, factory, None)
    if not callable(make):
        found = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == name]
        problem = "is no function" if hasattr(module, factory) else "is not there"
        listed = ", ".join(found) or "none"
        raise ArgumentError(f"{name} has no factory '{factory}': it {problem}; it has {listed}")
    try:
        return make()
    except Exception as error:
        raise ArgumentError(f"{path} failed: {type(error).__name__}: {error}") from error


def _read(given: Any, path: str) -> dict[str, Any]:
    """The parts by name, with the batch as a tuple of inputs."""
    if isinstance(given, tuple) and 2 <= len(given) <= 4:
        given = dict(zip(_KEYS, given, strict=False))
    if not isinstance(given, dict) or not {"model", "batch"} <= given.keys():
        found = f"a dict with {', '.join(map(str, given))}" if isinstance(given, dict) else None
        raise ArgumentError(
            f"{path} returns (model, batch), (model, batch, target, loss_fn), or a dict with "
            f"'model' and 'batch', not {found or _kind(given)}"
        )
    unknown = [str(key) for key in given if key not in _KEYS]
    if unknown:
        raise ArgumentError(
            f"{path} returns a dict with {', '.join(unknown)}: it may have {', '.join(_KEYS)}"
        )
    if not isinstance(given["model"], nn.Module):
        raise ArgumentError(f"{path}: the model is an nn.Module, not {_kind(given['model'])}")
    batch = given["batch"]
    return {**given, "batch": batch if isinstance(batch, tuple) else (batch,)}


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"

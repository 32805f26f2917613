"""The report of a check: the result of each run, and the table that is printed.

Report
  rows: Run, one for each schedule, checkpoint mode and runtime
    case: Case                what was run
    result: Compared          the pipe ran: a Difference for each tensor, and its memory
            Refused           Penstock raised an error: this combination is not supported
            Failed            another error came out
  hints: likely causes, if something differs
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from penstock.draw.page import HtmlPage
from penstock.errors import PenstockError
from penstock.text_format import choose_byte_unit, make_printable

# The columns of the table. "inputs" are gradients of the inputs, "again" is a second step that adds
# to the gradients of the first, and "random" compares runs with equal and with different seeds.
COMPARED_KINDS = ("loss", "outputs", "gradients", "buffers", "inputs", "again", "random", "eval")
_COLUMNS = ("schedule", "ranks", *COMPARED_KINDS, "memory")


class Mismatch(PenstockError, AssertionError):
    """Raised when a pipe does not compute what the unsplit model computes.

    The message is the report.
    """


@dataclass(frozen=True)
class Difference:
    """The difference between a tensor of the pipe and that of the unsplit model.

    Attributes:
        kind: The column of the table.
        name: The name of the tensor.
        size: The largest difference between two elements, divided by the largest element if that
            is above 1. Infinite if the two cannot be compared.
        note: Why the two cannot be compared.
    """

    kind: str
    name: str
    size: float
    note: str = ""

    def __str__(self) -> str:
        what = f"{self.kind} {self.name}".strip()
        return f"{what}: {self.note}" if self.note else f"{what}: {self.size:.1e} apart"


@dataclass(frozen=True)
class MemoryComparison:
    """The peak of bytes alive between two actions, for each rank: measured and forecast.

    `slack` allows for tensors that live until the step ends: BatchNorm statistics, and gradients
    of parameters that stages share.
    """

    measured: tuple[int, ...]
    forecast: tuple[int, ...]
    slack: int

    @property
    def worst_rank(self) -> int:
        """The rank with the highest peak, among those over their forecast if there are any."""
        return max(
            self.ranks_over_forecast or range(len(self.measured)),
            key=lambda rank: self.measured[rank],
        )

    @property
    def ranks_over_forecast(self) -> list[int]:
        """The ranks whose peak is over the forecast by more than 1 % and the slack."""
        pairs = enumerate(zip(self.measured, self.forecast, strict=True))
        return [
            rank for rank, (measured, forecast) in pairs if measured > 1.01 * forecast + self.slack
        ]


@dataclass(frozen=True)
class Case:
    """The options of one run."""

    schedule: str
    ranks: int
    checkpoint: str
    runtime: str

    def __str__(self) -> str:
        return f"{self.schedule}, checkpoint {self.checkpoint}, {self.runtime}"


@dataclass(frozen=True)
class Compared:
    """The result of a run that completed."""

    differences: tuple[Difference, ...]
    memory: MemoryComparison | None

    def worst(self, kind: str) -> Difference | None:
        """Return the largest difference of a kind, or None if nothing was compared."""
        differences = [difference for difference in self.differences if difference.kind == kind]
        return max(differences, key=lambda difference: difference.size, default=None)


@dataclass(frozen=True)
class Refused:
    """The result of a run that Penstock refused: it does not support the combination."""

    message: str


@dataclass(frozen=True)
class Failed:
    """The result of a run that raised another error, where the unsplit model runs."""

    message: str


@dataclass(frozen=True)
class Run:
    """One case and its result."""

    case: Case
    result: Compared | Refused | Failed


@dataclass(frozen=True)
class Report:
    """The result of `penstock.check`. It is true if something ran and everything was equal.

    Attributes:
        model: One line on the model, its stages and its micro-batches.
        reference: What the pipes were compared with.
        tolerance: The largest difference that counts as equal.
        rows: One run for each combination of options.
        hints: Likely causes of the differences.
        loss: The loss that the gradients come from.
        left_out: What a quick check did not try.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import penstock
        >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> report = penstock.check(
        ...     layers, torch.randn(8, 4), stages=2, schedules=["1f1b"], quiet=True
        ... )
        >>> report.raise_if_wrong()
        >>> report.problems
        {}
    """

    model: str
    reference: str
    tolerance: float
    rows: tuple[Run, ...]
    hints: tuple[str, ...] = ()
    loss: str = ""
    left_out: str = ""

    @property
    def ok(self) -> bool:
        """Whether at least one run completed, none failed, and nothing differs."""
        return bool(self.compared) and not self.problems

    def __bool__(self) -> bool:
        return self.ok

    @property
    def compared(self) -> list[Run]:
        """The runs that completed."""
        return [run for run in self.rows if isinstance(run.result, Compared)]

    @property
    def refused(self) -> list[Run]:
        """The runs that Penstock does not support."""
        return [run for run in self.rows if isinstance(run.result, Refused)]

    @cached_property
    def worst(self) -> tuple[Run, Difference] | None:
        """The largest difference of all with its run, even if it is within the tolerance."""
        pairs = [
            (run, difference)
            for run in self.compared
            if isinstance(run.result, Compared)
            for difference in run.result.differences
        ]
        return max(pairs, key=lambda pair: pair[1].size, default=None)

    @cached_property
    def problems(self) -> dict[str, list[Run]]:
        """The problems in words, each with the runs that have it, in the order of the columns.

        One problem is one tensor. Its runs may differ in size, and the text has the largest.
        """
        runs_by_problem: dict[Difference, list[Run]] = {}
        for kind in (*COMPARED_KINDS, "memory", "failed"):
            for run in self.rows:
                for problem in _find_problems(run, kind, self.tolerance):
                    # Without its size, the same tensor is one key in all runs.
                    runs_by_problem.setdefault(replace(problem, size=0.0), []).append(run)
        return {
            str(replace(problem, size=_find_largest_size(problem, runs))): runs
            for problem, runs in runs_by_problem.items()
        }

    def raise_if_wrong(self) -> None:
        """Raise unless every run equals the reference.

        Raises:
            Mismatch: Something differs or failed, or nothing ran. The message is the report.
        """
        if not self.ok:
            raise Mismatch(str(self))

    def table(self) -> list[list[str]]:
        """Return the table: a header, and a row for each schedule with the worst of its runs."""
        schedules = dict.fromkeys(run.case.schedule for run in self.rows)
        return [list(_COLUMNS), *(self._build_table_row(schedule) for schedule in schedules)]

    def _build_table_row(self, schedule: str) -> list[str]:
        runs = [run for run in self.rows if run.case.schedule == schedule]
        results = [run.result for run in runs]
        compared = [result for result in results if isinstance(result, Compared)]
        start = [schedule, str(runs[0].case.ranks)]
        # If any run of the schedule completed, the row shows numbers; `summary` lists the others.
        for kind, word in ((Failed, "failed"), (Refused, "refused")):
            if any(isinstance(result, kind) for result in results) and not compared:
                return [*start, word, *("" for _ in _COLUMNS[3:])]
        cells = [self._format_cell([r.worst(kind) for r in compared]) for kind in COMPARED_KINDS]
        return [*start, *cells, _format_memory_cell([r.memory for r in compared if r.memory])]

    def _format_cell(self, differences: Iterable[Difference | None]) -> str:
        sizes = [difference.size for difference in differences if difference is not None]
        if not sizes:
            return "-"
        return "equal" if max(sizes) <= self.tolerance else f"{max(sizes):.0e}"

    def summary(self) -> Iterator[str]:
        """Yield the lines below the table: problems, hints, the largest difference, refusals."""
        if self.problems:
            wrong = {run.case for runs in self.problems.values() for run in runs}
            yield f"NOT equal, in {len(wrong)} of {len(self.rows)} runs:"
            for problem, runs in self.problems.items():
                yield f"  {problem} ({_format_cases([run.case for run in runs])})"
            yield from (f"  hint: {hint}" for hint in self.hints)
        elif not self.compared:
            yield "nothing ran, so nothing is proved"
        else:
            yield f"equal in all {len(self.compared)} runs, to {self.tolerance:g}"
        if self.worst is not None:
            run, difference = self.worst
            yield f"largest difference: {difference} ({run.case})"
        for message, who in self._group_refusals():
            yield f"refused: {', '.join(who)}: {message}"
        if self.left_out:
            yield f"not tried: {self.left_out}"

    def _group_refusals(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each message once, with the schedules or cases that were refused with it.

        Messages that differ in the name of the schedule alone count as one.
        """
        completed = {run.case.schedule for run in self.compared}
        groups: dict[str, tuple[str, list[str]]] = {}
        for run in self.refused:
            assert isinstance(run.result, Refused)
            name = run.case.schedule
            message = run.result.message
            _, refused_names = groups.setdefault(message.replace(name, "..."), (message, []))
            label = f"{run.case}" if name in completed else name
            if label not in refused_names:
                refused_names.append(label)
        yield from groups.values()

    def __str__(self) -> str:
        lines = [f"model      {self.model}", f"loss       {self.loss}"]
        lines += [f"reference  {self.reference}", ""]
        return "\n".join([*lines, *align_columns(self.table()), "", *self.summary()])

    def __repr__(self) -> str:
        return f"Report({next(self.summary()).removesuffix(':')})"

    def _repr_html_(self) -> str:
        return report_page(self).fragment()

    def as_dict(self) -> dict[str, Any]:
        """Return the report for `json.dumps`. Infinite differences are null."""
        return {
            "ok": self.ok,
            "model": self.model,
            "loss": self.loss,
            "reference": self.reference,
            "tolerance": self.tolerance,
            "problems": [
                {"problem": problem, "runs": [str(run.case) for run in runs]}
                for problem, runs in self.problems.items()
            ],
            "hints": list(self.hints),
            "left_out": self.left_out,
            "runs": [{**vars(run.case), **_result_as_dict(run.result)} for run in self.rows],
        }


def report_page(report: Report) -> HtmlPage:
    """Return the report as a page, for `penstock check --html` and for notebooks."""
    title = "A pipe computes what the model computes"
    if not report.ok:
        title = "A pipe does NOT compute what the model computes"
    page = HtmlPage(title, make_printable(report.model))
    page.paragraph(f"Compared with {make_printable(report.reference)}.")
    page.paragraph(f"Loss: {make_printable(report.loss)}.")
    headings, *rows = report.table()
    page.table(headings, rows, tone=_choose_tone)
    page.paragraph(
        "Inputs: gradients of the inputs. Again: a second step that adds to the gradients of the "
        "first. Random: runs with equal and with different seeds. Memory: the measured peak and "
        "its forecast. A dash: there was nothing to compare."
    )
    page.preformatted(make_printable("\n".join(report.summary())))
    return page


def _choose_tone(cell: str) -> str:
    if cell == "equal":
        return "good"
    return "bad" if re.fullmatch(r"failed|inf|\de[-+]\d+", cell) else ""


def align_columns(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, with the first column aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for label, *others in table:
        cells = [label.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()


def _find_problems(run: Run, kind: str, tolerance: float) -> Iterator[Difference]:
    """Yield the problems of one kind in a run.

    A failure and too much memory are differences of infinite size.
    """
    result = run.result
    if isinstance(result, Failed) and kind == "failed":
        yield Difference("failed", "", float("inf"), result.message)
    elif isinstance(result, Compared):
        worst = result.worst(kind)
        if worst is not None and worst.size > tolerance:
            yield worst
        if kind == "memory" and result.memory is not None and result.memory.ranks_over_forecast:
            ranks = ", ".join(map(str, result.memory.ranks_over_forecast))
            yield Difference(kind, "", float("inf"), f"more is kept than forecast on rank {ranks}")


def _find_largest_size(problem: Difference, runs: Sequence[Run]) -> float:
    """Return the largest size of one problem over several runs."""
    return max(
        difference.size
        for run in runs
        for difference in _find_problems(run, problem.kind, 0.0)
        if difference.name == problem.name
    )


def _format_cases(cases: Sequence[Case]) -> str:
    """Return the first case and the number of others."""
    others = len(cases) - 1
    return f"{cases[0]}" + (f", and {others} more" if others else "")


def _format_memory_cell(comparisons: Sequence[MemoryComparison]) -> str:
    """Return measured and forecast peak of the worst run, such as "6.34/6.34 KB".

    A run over its forecast is worse than any other.
    """
    if not comparisons:
        return "-"
    worst = max(comparisons, key=lambda m: (m.ranks_over_forecast != [], m.measured[m.worst_rank]))
    measured, forecast = worst.measured[worst.worst_rank], worst.forecast[worst.worst_rank]
    factor, unit = choose_byte_unit(max(measured, forecast))
    return f"{measured / factor:.3g}/{forecast / factor:.3g} {unit}"


def _result_as_dict(result: Compared | Refused | Failed) -> dict[str, Any]:
    if not isinstance(result, Compared):
        return {"result": type(result).__name__.lower(), "message": result.message}
    worst = [
        difference for kind in COMPARED_KINDS if (difference := result.worst(kind)) is not None
    ]
    return {
        "result": "compared",
        "worst": [{**vars(d), "size": d.size if d.size < float("inf") else None} for d in worst],
        "memory": vars(result.memory) if result.memory else None,
    }

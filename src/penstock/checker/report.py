"""What a check found: a value for each run, and the table that is printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from penstock.errors import PenstockError

# "again" is a second step, which adds to the gradients of the first
COMPARED_KINDS = ("loss", "outputs", "gradients", "buffers", "inputs", "again", "random", "eval")
_COLUMNS = ("schedule", "ranks", *COMPARED_KINDS, "memory")


class Mismatch(PenstockError, AssertionError):
    """The pipe does not compute what the unsplit model computes. The message is the report."""


@dataclass(frozen=True)
class Difference:
    """One value of the pipe against that of the unsplit model.

    `size` is the largest difference between two numbers, divided by the largest number if that is
    above 1; infinite if the two cannot be compared, and `note` says why.
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
    """The most bytes alive between two actions, on each rank: measured, and on paper."""

    measured: tuple[int, ...]
    forecast: tuple[int, ...]
    slack: int  # for what lasts until a step ends: statistics, gradients of what stages share

    @property
    def worst_rank(self) -> int:
        """The rank that keeps more than forecast; if none does, the one that keeps most."""
        return max(
            self.ranks_over_forecast or range(len(self.measured)),
            key=lambda rank: self.measured[rank],
        )

    @property
    def ranks_over_forecast(self) -> list[int]:
        """The ranks that keep more than forecast, by more than 1 % and the slack."""
        pairs = enumerate(zip(self.measured, self.forecast, strict=True))
        return [rank for rank, (found, paper) in pairs if found > 1.01 * paper + self.slack]


@dataclass(frozen=True)
class Case:
    """Under what the pipe ran."""

    schedule: str
    ranks: int
    checkpoint: str
    runtime: str

    def __str__(self) -> str:
        return f"{self.schedule}, checkpoint {self.checkpoint}, {self.runtime}"


@dataclass(frozen=True)
class Compared:
    """The run went through."""

    differences: tuple[Difference, ...]
    memory: MemoryComparison | None

    def worst(self, kind: str) -> Difference | None:
        """The largest of its kind, if there was anything to compare."""
        found = [difference for difference in self.differences if difference.kind == kind]
        return max(found, key=lambda difference: difference.size, default=None)


@dataclass(frozen=True)
class Refused:
    """The pipe said that it does not do this."""

    message: str


@dataclass(frozen=True)
class Failed:
    """An error came out where the unsplit model runs."""

    message: str


@dataclass(frozen=True)
class Run:
    """One case, and what became of it."""

    case: Case
    result: Compared | Refused | Failed


@dataclass(frozen=True)
class Report:
    """What `check` found. It is true if everything is equal."""

    model: str
    reference: str
    tolerance: float
    rows: tuple[Run, ...]
    hints: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Something ran, all of it through, and nothing differs."""
        return bool(self.compared) and not self.problems

    def __bool__(self) -> bool:
        return self.ok

    @property
    def compared(self) -> list[Run]:
        """The runs that went through."""
        return [run for run in self.rows if isinstance(run.result, Compared)]

    @property
    def refused(self) -> list[Run]:
        """The runs that the pipe does not do."""
        return [run for run in self.rows if isinstance(run.result, Refused)]

    @cached_property
    def worst(self) -> tuple[Run, Difference] | None:
        """The largest difference of all, and where; also if it is within the tolerance."""
        found = [
            (run, difference)
            for run in self.compared
            if isinstance(run.result, Compared)
            for difference in run.result.differences
        ]
        return max(found, key=lambda pair: pair[1].size, default=None)

    @cached_property
    def problems(self) -> dict[str, list[Run]]:
        """What is wrong, in words, each with the runs that have it; the first kinds first."""
        found: dict[Difference, list[Run]] = {}
        for kind in (*COMPARED_KINDS, "memory", "failed"):
            for run in self.rows:
                for wrong in _find_problems(run, kind, self.tolerance):
                    found.setdefault(replace(wrong, size=0.0), []).append(run)
        return {
            str(replace(w, size=_find_largest_size(w, runs))): runs for w, runs in found.items()
        }

    def raise_if_wrong(self) -> None:
        """Raise `Mismatch`, with the report as its message, unless all is equal."""
        if not self.ok:
            raise Mismatch(str(self))

    def table(self) -> list[list[str]]:
        """A headline, and a line for each schedule with the worst of its runs."""
        schedules = dict.fromkeys(run.case.schedule for run in self.rows)
        return [list(_COLUMNS), *(self._build_table_row(schedule) for schedule in schedules)]

    def _build_table_row(self, schedule: str) -> list[str]:
        runs = [run for run in self.rows if run.case.schedule == schedule]
        results = [run.result for run in runs]
        compared = [result for result in results if isinstance(result, Compared)]
        start = [schedule, str(runs[0].case.ranks)]
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
        """What stands below the table, line by line."""
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

    def _group_refusals(self) -> Iterator[tuple[str, list[str]]]:
        """Each message once, and who was refused with it: schedules, or some of their cases."""
        through = {run.case.schedule for run in self.compared}
        found: dict[str, tuple[str, list[str]]] = {}
        for run in self.refused:
            assert isinstance(run.result, Refused)
            name = run.case.schedule
            said = run.result.message
            _, who = found.setdefault(said.replace(name, "..."), (said, []))
            shown = f"{run.case}" if name in through else name
            if shown not in who:
                who.append(shown)
        yield from found.values()

    def __str__(self) -> str:
        lines = [f"model      {self.model}", f"reference  {self.reference}", ""]
        return "\n".join([*lines, *align_columns(self.table()), "", *self.summary()])

    def as_dict(self) -> dict[str, Any]:
        """For `json.dumps`. Infinite differences are null."""
        return {
            "ok": self.ok,
            "model": self.model,
            "reference": self.reference,
            "tolerance": self.tolerance,
            "problems": [
                {"problem": problem, "runs": [str(run.case) for run in runs]}
                for problem, runs in self.problems.items()
            ],
            "hints": list(self.hints),
            "runs": [{**vars(run.case), **_result_as_dict(run.result)} for run in self.rows],
        }


def align_columns(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for first, *others in table:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()


def _find_problems(run: Run, kind: str, tolerance: float) -> Iterator[Difference]:
    """What is wrong with a run, of that kind; as differences, also where it is not a number."""
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
    """Of the same value in several runs."""
    return max(
        found.size
        for run in runs
        for found in (*_find_problems(run, problem.kind, 0.0),)
        if found.name == problem.name
    )


def _format_cases(cases: Sequence[Case]) -> str:
    """The first case, and how many others."""
    others = len(cases) - 1
    return f"{cases[0]}" + (f", and {others} more" if others else "")


def _format_memory_cell(comparisons: Sequence[MemoryComparison]) -> str:
    """Measured and on paper, where it is the most; or where it is too much."""
    if not comparisons:
        return "-"
    most = max(comparisons, key=lambda m: (m.ranks_over_forecast != [], m.measured[m.worst_rank]))
    measured, forecast = (
        float(most.measured[most.worst_rank]),
        float(most.forecast[most.worst_rank]),
    )
    unit = 0
    while max(measured, forecast) >= 1000 and unit < len(_BYTE_UNITS) - 1:
        measured, forecast, unit = measured / 1000, forecast / 1000, unit + 1
    return f"{measured:.3g}/{forecast:.3g} {_BYTE_UNITS[unit]}"


_BYTE_UNITS = ("B", "KB", "MB", "GB", "TB")


def _result_as_dict(result: Compared | Refused | Failed) -> dict[str, Any]:
    if not isinstance(result, Compared):
        return {"result": type(result).__name__.lower(), "message": result.message}
    worst = [found for kind in COMPARED_KINDS if (found := result.worst(kind)) is not None]
    return {
        "result": "compared",
        "worst": [{**vars(d), "size": d.size if d.size < float("inf") else None} for d in worst],
        "memory": vars(result.memory) if result.memory else None,
    }

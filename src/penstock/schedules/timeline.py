"""Timelines: when each action ran, and the makespan, bubble and peak memory that follow from it.

`simulate` makes a timeline by playing a program against costs. A measured timeline is the same type
with the spans of a real run, so every function that reads or draws one accepts the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.display import render_html
from penstock.errors import ArgumentError, FormatError
from penstock.schedules.cost import Cost, track_live_memory
from penstock.schedules.ir import Compute, Op, Program, Schedule
from penstock.schedules.notation import dumps, loads
from penstock.schedules.simulator import Sends, Span, paused_garbage_collection, play
from penstock.schedules.verify import find_compute_mismatches, find_misplaced_actions
from penstock.text_format import choose_time_unit, format_number, format_plural, make_printable


@dataclass(frozen=True)
class Timeline:
    """The spans of one run of a program, simulated or measured.

    Attributes:
        program: The program that ran.
        cost: The costs that it was simulated with. `cost.activation` is the size of the
            activations, from which the memory follows.
        spans: When each action ran.

    Example:
        >>> from penstock import lower, schedules
        >>> timeline = simulate(lower(schedules.one_f_one_b(ranks=2, chunks=2)))
        >>> timeline.makespan, timeline.busy
        (9.0, (6.0, 6.0))
    """

    program: Program
    cost: Cost
    spans: tuple[Span, ...]

    def __repr__(self) -> str:
        makespan = choose_time_unit(self.makespan).format(self.makespan)
        peak = format_number(max(self.peak, default=0.0))
        chunks = format_plural(self.program.schedule.chunks, "micro-batch")
        return (
            f"Timeline({format_plural(self.ranks, 'rank')}, {chunks}, makespan {makespan}, "
            f"bubble {self.bubble:.1%}, peak {peak})"
        )

    def _repr_html_(self) -> str | None:
        return render_html(self)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.program.schedule.ranks

    @cached_property
    def computes(self) -> tuple[tuple[Span, ...], ...]:
        """The compute spans of each rank, in order."""
        lanes: list[list[Span]] = [[] for _ in range(self.ranks)]
        # A measured timeline may list spans in any order, so the index in the lane decides.
        for span in sorted(self.spans, key=lambda span: span.step):
            if isinstance(span.action, Compute):
                lanes[span.rank].append(span)
        return tuple(map(tuple, lanes))

    @cached_property
    def makespan(self) -> float:
        """The seconds from the first start to the last end."""
        return max((s.end for s in self.spans), default=0.0) - self.start

    @cached_property
    def period(self) -> float:
        """The longest time from the first to the last action of one rank.

        Steps follow each other in this time if each rank starts the next step as soon as it has
        ended its own part of this one.
        """
        return max((lane[-1].end - lane[0].start for lane in self.computes if lane), default=0.0)

    @cached_property
    def start(self) -> float:
        """The time at which the first action starts."""
        return min((s.start for s in self.spans), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank spends computing."""
        return tuple(sum(s.end - s.start for s in lane) for lane in self.computes)

    @property
    def bubble(self) -> float:
        """The idle fraction of all ranks' time, including the fill and the drain."""
        whole = self.ranks * self.makespan
        return max(0.0, 1 - sum(self.busy) / whole) if whole else 0.0

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """Return the memory curve of a rank: (time, size alive from then on), in order of time.

        Args:
            rank: The number of a rank.
        """
        spans = self.computes[rank]
        lane = [span.action for span in spans if isinstance(span.action, Compute)]
        curve = [(self.start, 0.0)]
        for step, at_end, size in track_live_memory(lane, self.cost):
            curve.append((spans[step].end if at_end else spans[step].start, size))
        return curve

    @cached_property
    def peak(self) -> tuple[float, ...]:
        """The largest size that is alive at one time, for each rank.

        Activations count from their F, or from their R if they are recomputed. The inputs that a
        stage keeps until its R do not count.
        """
        return tuple(max(size for _, size in self.memory(rank)) for rank in range(self.ranks))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the timeline to a JSON file, which `load` and `penstock studio` read.

        Args:
            path: The file to write.

        Example:
            >>> import tempfile
            >>> from penstock import lower, schedules
            >>> timeline = simulate(lower(schedules.gpipe(ranks=2, chunks=2)))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     timeline.save(f"{folder}/step.json")
            ...     Timeline.load(f"{folder}/step.json") == timeline
            True
        """
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | PathLike[str]) -> Timeline:
        """Return the timeline that `save` wrote to a file.

        Args:
            path: The file to read.

        Raises:
            FormatError: The file is not a timeline, or is damaged.
        """
        try:
            return Timeline.from_json(Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            raise FormatError(_NOT_A_TIMELINE, ["it is not text"]) from None

    def to_json(self) -> str:
        """Return the text that `save` writes."""
        spans = [[s.rank, s.step, s.start, s.end] for s in self.spans]
        columns = {field.name: getattr(self.cost, field.name) for field in fields(self.cost)}
        links = [[*pair, seconds] for pair, seconds in self.cost.links.items()]
        file = {
            "format": _TIMELINE_FORMAT,
            "version": _TIMELINE_VERSION,
            "program": dumps(self.program),
            "cost": {**columns, "links": links},
            "spans": spans,
        }
        return json.dumps(file, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Timeline:
        """Return the timeline in a text that `to_json` wrote.

        Args:
            text: What `to_json` has returned.
        """
        try:
            file = json.loads(text)
        except (ValueError, RecursionError):
            raise FormatError(_NOT_A_TIMELINE, ["it is not JSON"]) from None
        if not isinstance(file, dict) or file.get("format") != _TIMELINE_FORMAT:
            raise FormatError(
                _NOT_A_TIMELINE, [f"it has no field 'format' with the value '{_TIMELINE_FORMAT}'"]
            )
        if file.get("version") != _TIMELINE_VERSION:
            problem = f"its version is not {_TIMELINE_VERSION}, the one that this release reads"
            raise FormatError(_NOT_A_TIMELINE, [problem])
        return _read_timeline(file)


_TIMELINE_FORMAT, _TIMELINE_VERSION = "penstock timeline", 1
_NOT_A_TIMELINE = "this is not a timeline that Timeline.save wrote:"


def _read_timeline(file: Mapping[str, Any]) -> Timeline:
    """Return the timeline in a parsed file. Every field is checked, as it may come from anyone."""
    program, columns, rows = (file.get(name) for name in ("program", "cost", "spans"))
    if not (isinstance(program, str) and isinstance(columns, dict) and isinstance(rows, list)):
        problem = "it needs 'program', a text, 'cost', an object, and 'spans', a list"
        raise FormatError(_NOT_A_TIMELINE, [problem])
    work = loads(program)
    if isinstance(work, Schedule):
        raise FormatError(_NOT_A_TIMELINE, ["its program has no messages: a line 'edges: 0>1'"])
    try:
        cost = Cost(**{name: _read_column(name, column) for name, column in columns.items()})
        spans = tuple(_read_span(work, row) for row in rows)
    except (TypeError, ValueError, OverflowError) as error:
        raise FormatError(_NOT_A_TIMELINE, [make_printable(str(error), 200)]) from None
    if len(cost.F) != work.schedule.stages:
        problem = f"its cost is for {len(cost.F)} stages, but there are {work.schedule.stages}"
        raise FormatError(_NOT_A_TIMELINE, [problem])
    for problem in (*find_misplaced_actions(work.schedule), *find_compute_mismatches(work)):
        raise FormatError(_NOT_A_TIMELINE, [problem])
    return Timeline(work, cost, spans)


def _read_column(name: str, column: Any) -> Any:
    if name == "links":
        return {(int(src), int(dst)): float(seconds) for src, dst, seconds in column}
    return tuple(map(float, column)) if isinstance(column, list) else float(column)


def _read_span(program: Program, row: Any) -> Span:
    """Return the span of a row [rank, index in the lane, start, end]."""
    if not (isinstance(row, list) and len(row) == 4):
        raise ValueError(f"a span is [rank, step, start, end], not {row!r}")
    rank, step, start, end = row
    if not (type(rank) is type(step) is int and 0 <= rank < program.schedule.ranks):
        raise ValueError(f"the span {row!r} names no rank of the program")
    if not 0 <= step < len(program.lanes[rank]):
        raise ValueError(f"the span {row!r} names no action of its rank")
    times = float(start), float(end)
    if not -1e12 < times[0] <= times[1] < 1e12:
        raise ValueError(f"the span {row!r} does not end after its start")
    return Span(rank, step, program.lanes[rank][step], *times)


def cost_from_spans(program: Program, spans: Sequence[Span]) -> Cost:
    """Return the mean seconds of the actions of a real run, stage by stage, as a cost.

    A full backward does not show how long its two halves take, so half of it counts as I and half
    as W.
    """
    schedule = program.schedule
    times: dict[tuple[Op, int], list[float]] = {}
    for span in spans:
        if isinstance(span.action, Compute):
            op, stage, _ = span.action
            times.setdefault((op, stage), []).append(span.end - span.start)

    def mean(op: Op, stage: int) -> float:
        seconds = times.get((op, stage), [0.0])
        return sum(seconds) / len(seconds)

    stages = range(schedule.stages)
    backward = [mean(Op.B, stage) for stage in stages]
    return Cost(
        F=tuple(mean(Op.F, stage) for stage in stages),
        I=tuple(mean(Op.I, stage) + backward[stage] / 2 for stage in stages),
        W=tuple(mean(Op.W, stage) + backward[stage] / 2 for stage in stages),
        activation=Cost.even(schedule.placement).activation,
    )


@paused_garbage_collection()
def simulate(program: Program, cost: Cost | None = None) -> Timeline:
    """Simulate a program with given costs.

    Args:
        program: The program. Lower a schedule first, with `lower`.
        cost: The cost of each action. By default F, I and W of all stages of a rank take one
            second each.

    Returns:
        The timeline, with the span of every action.

    Raises:
        ArgumentError: A schedule was given instead of a program.
        Deadlock: The program does not end.

    Example:
        >>> from penstock import lower, schedules
        >>> timeline = simulate(lower(schedules.gpipe(ranks=2, chunks=3)))
        >>> timeline.makespan, timeline.peak
        (12.0, (3.0, 3.0))
    """
    if isinstance(program, Schedule):
        raise ArgumentError(
            "simulate needs a program, and this is a schedule. Messages take time too, so lower it "
            "first: simulate(lower(schedule))"
        )
    cost = cost or Cost.even(program.schedule.placement)
    return Timeline(program, cost, tuple(play(program, cost=cost, sends=Sends.BUFFERED)))

"""`Memory`: the bytes alive on each rank over the actions of a step, beside the forecast's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from typing import NamedTuple

from penstock import draw
from penstock.cost import Cost
from penstock.ir import Action, Compute, Op, Program, Schedule, Send
from penstock.outline import format_bytes
from penstock.timeline import Timeline, simulate


class MemoryReading(NamedTuple):
    """An action, the place it has in its rank's lane, and what was alive after it."""

    rank: int
    lane_index: int
    action: Action
    alive: tuple[int, ...]  # bytes, of every rank


@dataclass(frozen=True, repr=False)
class Memory:
    """What `Pipe.memory` gives back: of one step, the bytes that came on top of what was there.

    What was there before is `held`: parameters, their gradients, buffers. The `readings` stand in
    the order in which the actions ran, one after another.
    """

    program: Program
    readings: tuple[MemoryReading, ...]
    held: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.program.schedule.ranks

    def curve(self, rank: int) -> list[tuple[Compute, int]]:
        """Each of the rank's computations, and the most that was alive from then to the next."""
        found: list[tuple[Compute, int]] = []
        for reading in self.readings:
            if reading.rank == rank and isinstance(reading.action, Compute):
                found.append((reading.action, reading.alive[rank]))
            elif found:
                action, most = found[-1]
                found[-1] = action, max(most, reading.alive[rank])
        return found

    @cached_property
    def peak(self) -> tuple[int, ...]:
        """The most that was alive after any action, on each rank."""
        most = [0] * self.ranks
        for reading in self.readings:
            most = list(map(max, most, reading.alive))
        return tuple(most)

    @cached_property
    def forecast(self) -> Timeline:
        """On paper: its `memory(rank)` and its `peak` are bytes, and all seconds the same."""
        even = Cost.even(self.program.schedule.placement)
        return simulate(self.program, replace(even, activation=self.activation))

    @cached_property
    def activation(self) -> tuple[int, ...]:
        """What one micro-batch keeps on each stage: what its F, or its R, has added at most."""
        most = [0] * self.program.schedule.stages
        for (stage, _), size in self._added_bytes_by_cell().items():
            most[stage] = max(most[stage], size)
        return tuple(most)

    def _added_bytes_by_cell(self) -> dict[tuple[int, int], int]:
        """By cell. What arrives counts with it, and what is sent away does not, if it is moved."""
        schedule = self.program.schedule
        gains: Counter[tuple[int, int]] = Counter()
        before = (0,) * self.ranks
        for reading in self.readings:
            for stage, microbatch in _find_allocating_cells(reading.action, schedule):
                rank = schedule.placement[stage]
                gains[stage, microbatch] += reading.alive[rank] - before[rank]
            before = reading.alive
        return gains

    def __str__(self) -> str:
        columns = zip(self.held, self.peak, self.forecast.peak, strict=True)
        rows = [(str(rank), *map(format_bytes, found)) for rank, found in enumerate(columns)]
        rows = [("rank", "held", "peak of a step", "forecast"), *rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
            for row in rows
        )

    def __repr__(self) -> str:
        return f"Memory(peak={self.peak}, forecast={self.forecast.peak})"

    def draw(self, path: str | PathLike[str], *, title: str | None = None) -> None:
        """The curves of all ranks, measured over forecast, into an SVG or PNG file."""
        ends = {(span.rank, span.action): span.end for span in self.forecast.spans}
        measured = [
            [(ends[rank, action], size) for action, size in self.curve(rank)]
            for rank in range(self.ranks)
        ]
        draw.memory(self.forecast, measured, path, title=title)


def _find_allocating_cells(action: Action, schedule: Schedule) -> Iterator[tuple[int, int]]:
    """The cells of whose birth the action is a part: that of an F has messages."""
    if isinstance(action, Compute):
        cell = action.stage, action.microbatch
        if action.op is (Op.R if cell in schedule.recomputed else Op.F):
            yield cell
    elif isinstance(action, Send) and action.message.src < action.message.dst:
        src, dst, microbatch = action.message
        yield from {(src, microbatch), (dst, microbatch)} - schedule.recomputed

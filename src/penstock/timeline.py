"""When everything ran, and what that says: makespan, bubble, peak.

A timeline is simulated here, by playing a program against costs. A measured one is the same
type with the spans of a real run, so that whatever reads or draws one reads or draws the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.cost import Cost
from penstock.ir import Compute, Program, lifetimes
from penstock.play import Sends, Span, play


def alive(lane: Sequence[Compute], cost: Cost) -> Iterator[tuple[int, bool, float]]:
    """How much is alive after each change: (step, at its start or at its end, size).

    A rank does one thing at a time, so the order of its lane says it all; costs in seconds do not
    matter.
    """
    changes = []
    for (stage, _), (born, last) in lifetimes(lane).items():
        size = cost.activation[stage]
        changes += [(born, 0, size), (last, 1, -size)]
    size = 0.0
    for step, at_end, change in sorted(changes):
        size += change
        yield step, not at_end, round(size, 12) + 0.0  # sums of fractions gather dust


@dataclass(frozen=True)
class Timeline:
    """The spans of one run of a program; `cost.activation` is the size of what stays alive."""

    program: Program
    cost: Cost
    spans: tuple[Span, ...]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.program.schedule.ranks

    @cached_property
    def computes(self) -> tuple[tuple[Span, ...], ...]:
        """The compute spans of each rank, in order."""
        lanes: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in sorted(self.spans, key=lambda span: span.step):
            if isinstance(span.action, Compute):
                lanes[span.rank].append(span)
        return tuple(map(tuple, lanes))

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max((s.end for s in self.spans), default=0.0) - self.start

    @cached_property
    def start(self) -> float:
        """When the first action starts."""
        return min((s.start for s in self.spans), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank spends computing."""
        return tuple(sum(s.end - s.start for s in lane) for lane in self.computes)

    @property
    def bubble(self) -> float:
        """The idle share of all ranks' time, fill and drain included."""
        whole = self.ranks * self.makespan
        return max(0.0, 1 - sum(self.busy) / whole) if whole else 0.0

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """How much is alive from each moment on: (time, size), in order of time."""
        spans = self.computes[rank]
        lane = [span.action for span in spans if isinstance(span.action, Compute)]
        curve = [(self.start, 0.0)]
        for step, is_start, size in alive(lane, self.cost):
            curve.append((spans[step].start if is_start else spans[step].end, size))
        return curve

    @cached_property
    def peak(self) -> tuple[float, ...]:
        """The most that is alive at one time, on each rank."""
        return tuple(max(size for _, size in self.memory(rank)) for rank in range(self.ranks))


def simulate(program: Program, cost: Cost | None = None) -> Timeline:
    """Play a program against costs (by default F = I = W = 1 for a rank's whole share).

    >>> from penstock import lower, schedules
    >>> timeline = simulate(lower(schedules.gpipe(ranks=2, chunks=3)))
    >>> timeline.makespan, timeline.peak
    (12.0, (3.0, 3.0))
    """
    cost = cost or Cost.even(program.schedule.placement)
    return Timeline(program, cost, tuple(play(program, cost=cost, sends=Sends.BUFFERED)))

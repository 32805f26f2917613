"""When everything ran, and what that says: makespan, bubble, peak.

A timeline is simulated here, by playing a program against costs. A measured one is the same
type with the spans of a real run, so that whatever reads or draws one reads or draws the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.errors import ArgumentError
from penstock.schedules.cost import Cost, track_live_memory
from penstock.schedules.ir import Compute, Op, Program, Schedule
from penstock.schedules.simulator import Sends, Span, play


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
        for step, at_end, size in track_live_memory(lane, self.cost):
            curve.append((spans[step].end if at_end else spans[step].start, size))
        return curve

    @cached_property
    def peak(self) -> tuple[float, ...]:
        """The most that is alive at one time, on each rank.

        Activations count from their F, or their R if they are recomputed; the inputs that a stage
        keeps until its R do not.
        """
        return tuple(max(size for _, size in self.memory(rank)) for rank in range(self.ranks))


def cost_from_spans(program: Program, spans: Sequence[Span]) -> Cost:
    """What the actions of a real run took, as a cost: means by stage; I and W halve a B."""
    schedule = program.schedule
    times: dict[tuple[Op, int], list[float]] = {}
    for span in spans:
        if isinstance(span.action, Compute):
            op, stage, _ = span.action
            times.setdefault((op, stage), []).append(span.end - span.start)

    def mean(op: Op, stage: int) -> float:
        found = times.get((op, stage), [0.0])
        return sum(found) / len(found)

    stages = range(schedule.stages)
    backward = [mean(Op.B, stage) for stage in stages]
    return Cost(
        F=tuple(mean(Op.F, stage) for stage in stages),
        I=tuple(mean(Op.I, stage) + backward[stage] / 2 for stage in stages),
        W=tuple(mean(Op.W, stage) + backward[stage] / 2 for stage in stages),
        activation=Cost.even(schedule.placement).activation,
    )


def simulate(program: Program, cost: Cost | None = None) -> Timeline:
    """Play a program against costs (by default F = I = W = 1 for a rank's whole share).

    >>> from penstock import lower, schedules
    >>> timeline = simulate(lower(schedules.gpipe(ranks=2, chunks=3)))
    >>> timeline.makespan, timeline.peak
    (12.0, (3.0, 3.0))
    """
    if isinstance(program, Schedule):
        raise ArgumentError("this is a schedule; its messages take time too: simulate(lower(it))")
    cost = cost or Cost.even(program.schedule.placement)
    return Timeline(program, cost, tuple(play(program, cost=cost, sends=Sends.BUFFERED)))

"""A schedule that somebody asks for by name, sizes, costs and limits, and its simulated timeline.

The command line and the studio both build their requests from text, so everything is checked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import ArgumentError
from penstock.schedules.cost import Cost
from penstock.schedules.families import FAMILIES, check_sizes, family_of, loop, make, vee
from penstock.schedules.fit import fit
from penstock.schedules.ir import Schedule, Send, StageGraph
from penstock.schedules.lowering import lower, recompute, recompute_mode
from penstock.schedules.timeline import Timeline, simulate
from penstock.schedules.verify import find_memory_excess
from penstock.text_format import format_bytes, format_number

MAX_CELLS = 250_000  # the two numbers below were measured at 16,000 and 100,000 cells
SECONDS_PER_CELL, BYTES_PER_CELL = 2e-4, 8e3


def check_cells(ranks: int, chunks: int, stages_per_rank: int) -> None:
    """Raise if a size is below 1, or if a schedule would need minutes and gigabytes."""
    check_sizes(ranks, chunks, stages_per_rank)
    cells = ranks * chunks * stages_per_rank
    if cells > MAX_CELLS:
        raise ArgumentError(
            f"{ranks} ranks x {chunks} micro-batches x {stages_per_rank} stages per rank are "
            f"{cells:,} cells. They would take about {format_number(cells * SECONDS_PER_CELL)} "
            f"seconds and {format_bytes(cells * BYTES_PER_CELL)} of memory, and at most "
            f"{MAX_CELLS:,} are allowed. Use fewer ranks or micro-batches: the pattern repeats"
        )


@dataclass(frozen=True)
class ScheduleRequest:
    """A schedule requested by its sizes, costs and limits.

    Attributes:
        ranks: The number of ranks.
        chunks: The number of micro-batches.
        stages_per_rank: The number of stages per rank; None for what the schedule has by default.
        costs: Seconds of F, I and W of a rank's whole share, and `send` of a message.
        checkpoint: The mode of recomputation.
        memory: The cap on live micro-batches per rank, or None.
        skips: Skip connections, as pairs of stages.
        profile: How the cost is distributed over the depth of the model, from its first layers to
            its last, as factors of the mean. It may have any length. Empty: evenly.
    """

    ranks: int
    chunks: int
    stages_per_rank: int | None
    costs: dict[str, float]
    checkpoint: str
    memory: float | None
    skips: tuple[tuple[int, int], ...] = ()
    profile: tuple[float, ...] = ()

    def simulate_named(self, name: str) -> Timeline:
        """Return the simulated timeline of a named schedule."""
        default = family_of(name).stages_per_rank
        check_cells(self.ranks, self.chunks, self.stages_per_rank or default)
        return self._simulate(make(name, self.ranks, self.chunks, self.stages_per_rank))

    def simulate_fit(self, placement_kind: str) -> Timeline:
        """Return the simulated timeline of `fit`, with stages placed in a loop or a V.

        `fit` plans without recomputation (R), which is added afterwards. With recomputation an F
        keeps only its input, so a plan under the memory limit is too cautious. Three candidates are
        compared then: that plan, a plan without the limit whose backward includes the
        recomputation, and the named schedules with the same placement. The fastest that fits wins.
        """
        placement = self._build_placement(placement_kind)
        cost = self.build_cost(placement)
        graph = self.build_graph(len(placement))
        limited = self._simulate(fit(placement, self.chunks, cost, self.memory, graph))
        if self.checkpoint == "never":
            return limited
        # Recomputation repeats the forward before each backward: I costs I + F.
        slower = replace(cost, I=tuple(i + f for i, f in zip(cost.I, cost.F, strict=True)))
        unlimited = self._simulate(fit(placement, self.chunks, slower, self.chunks, graph))
        candidates = [unlimited, limited, *self._simulate_families_with(placement)]
        fitting = [timeline for timeline in candidates if not self.find_memory_excess(timeline)]
        return min(fitting or [limited], key=lambda timeline: timeline.makespan)

    def _simulate_families_with(self, placement: tuple[int, ...]) -> Iterator[Timeline]:
        per_rank = len(placement) // self.ranks
        for name, family in FAMILIES.items():
            if family.trains and (family.free or family.stages_per_rank == per_rank):
                timeline = replace(self, stages_per_rank=per_rank).simulate_named(name)
                if timeline.program.schedule.placement == placement:
                    yield timeline

    def simulate_all(self) -> Iterator[tuple[str, Timeline]]:
        """Yield every schedule that trains, and `fit`, with its simulated timeline.

        `stages_per_rank` applies to the families that allow any number of stages on a rank.
        """
        fixed = replace(self, stages_per_rank=None)
        for name, family in FAMILIES.items():
            if family.trains:
                yield name, (self if family.free else fixed).simulate_named(name)
        yield "fit", self.simulate_fit("loop")
        yield "fit, v", fixed.simulate_fit("v")

    def find_memory_excess(self, timeline: Timeline) -> list[str]:
        """Return a problem for each rank that holds more than the memory cap."""
        if self.memory is None:
            return []
        return list(find_memory_excess(timeline.program.schedule, self.memory, timeline.cost))

    def build_graph(self, stages: int) -> StageGraph:
        """Return the stage graph: a chain with the skips."""
        return StageGraph.chain(stages, self.skips)

    def build_cost(self, placement: Sequence[int]) -> Cost:
        """Return the cost of the stages of this placement."""
        cost = Cost.even(placement, **self.costs)
        return cost.scaled(resample(self.profile, len(placement))) if self.profile else cost

    def _simulate(self, schedule: Schedule) -> Timeline:
        schedule = recompute(schedule, recompute_mode(self.checkpoint, self.chunks))
        program = lower(schedule, self.build_graph(schedule.stages))
        return simulate(program, self.build_cost(schedule.placement))

    def _build_placement(self, placement_kind: str) -> tuple[int, ...]:
        per_rank = self.stages_per_rank
        default = 2 if placement_kind == "v" else 1
        check_cells(self.ranks, self.chunks, default if per_rank is None else per_rank)
        if placement_kind == "loop":
            return loop(self.ranks, 1 if per_rank is None else per_rank)
        if placement_kind != "v":
            raise ArgumentError(f"placement must be loop or v, not '{placement_kind}'")
        if per_rank not in (None, 2):
            raise ArgumentError(f"placement v needs 2 stages per rank, not {per_rank}")
        return vee(self.ranks)


def resample(profile: Sequence[float], stages: int) -> list[float]:
    """Return the mean of a profile over each of `stages` equal parts of its length.

    >>> resample([1, 3], 4), resample([1, 1, 4], 2)
    ([1.0, 1.0, 3.0, 3.0], [1.0, 3.0])
    """
    # Both are counted in parts of one length, so that the overlaps are whole numbers.
    means = []
    for stage in range(stages):
        begin, end = stage * len(profile), (stage + 1) * len(profile)
        total = 0.0
        for index in range(begin // stages, -(-end // stages)):
            overlap = min(end, (index + 1) * stages) - max(begin, index * stages)
            total += overlap * profile[index]
        means.append(total / len(profile))
    return means


def summarize(name: str, timeline: Timeline) -> dict[str, Any]:
    """Return what the tables of schedules show. `actions` counts computes, sends and receives."""
    program = timeline.program
    actions = [action for lane in program.lanes for action in lane]
    return {
        "schedule": name,
        "ranks": timeline.ranks,
        "chunks": program.schedule.chunks,
        "stages": program.schedule.stages,
        "makespan": timeline.makespan,
        "busy": sum(timeline.busy),
        "bubble": timeline.bubble,
        "peak": list(timeline.peak),
        "messages": sum(isinstance(action, Send) for action in actions),
        "actions": len(actions),
    }

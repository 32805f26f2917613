"""The options that commands share, and what their texts mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from penstock import schedules
from penstock.errors import ArgumentError, FormatError
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Program, Schedule, StageGraph
from penstock.schedules.lowering import CHECKPOINT_MODES, lower, recompute, recompute_mode
from penstock.schedules.notation import loads
from penstock.schedules.timeline import Timeline, simulate
from penstock.schedules.verify import find_memory_excess, require_sound

DEFAULT_COSTS = "F=1,I=1,W=1,send=0"

ScheduleArgument = Annotated[
    str, typer.Argument(help=f"{', '.join(schedules.FAMILIES)}, fit, or a file that was saved.")
]
_RANKS_OPTION = typer.Option("--ranks", "-p", help="Workers, each with one device.")
_CHUNKS_OPTION = typer.Option("--chunks", "-m", help="Micro-batches in a step.")
RanksOption = Annotated[int, _RANKS_OPTION]
OptionalRanksOption = Annotated[int | None, _RANKS_OPTION]
ChunksOption = Annotated[int, _CHUNKS_OPTION]
OptionalChunksOption = Annotated[int | None, _CHUNKS_OPTION]
StagesPerRankOption = Annotated[
    int | None, typer.Option("--stages-per-rank", "-v", help="Stages on a rank.")
]
PlacementOption = Annotated[
    str, typer.Option("--placement", help="For fit: loop, or v (two stages a rank).")
]
CostOption = Annotated[
    str, typer.Option("--cost", help="Seconds of a rank's whole share, and of a message.")
]
CheckpointOption = Annotated[
    str, typer.Option("--checkpoint", help=f"Recomputation: {', '.join(CHECKPOINT_MODES)}.")
]
SkipOption = Annotated[
    list[str] | None, typer.Option("--skip", help="SRC:DST, a skip connection; repeatable.")
]
MemoryOption = Annotated[
    float | None,
    typer.Option(
        "--memory",
        help="Cap on live micro-batches of a rank's whole share. For fit: by default, 1f1b's.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def parse_costs(text: str) -> dict[str, float]:
    """`F=1,I=1,W=1,send=0`, any of them left out."""
    costs = dict(item.split("=") for item in DEFAULT_COSTS.split(","))
    for item in text.split(","):
        key, _, value = item.partition("=")
        if key.strip() not in costs:
            names = ", ".join(costs)
            raise ArgumentError(f"--cost takes {names}, such as {DEFAULT_COSTS}; not '{item}'")
        costs[key.strip()] = value
    try:
        numbers = {key: float(value) for key, value in costs.items()}
    except ValueError:
        raise ArgumentError(
            f"--cost takes numbers, such as {DEFAULT_COSTS}; not '{text}'"
        ) from None
    if not all(0 <= value <= 1e9 for value in numbers.values()):
        raise ArgumentError(
            f"--cost takes numbers from 0 to 1e9, such as {DEFAULT_COSTS}; not '{text}'"
        )
    if not any(numbers[key] for key in "FIW"):
        raise ArgumentError("--cost: at least one of F, I and W must be more than 0")
    return numbers


def parse_skip(text: str) -> tuple[int, int]:
    """`0:3`: from stage 0 to stage 3."""
    src, _, dst = text.partition(":")
    if not (src.isdecimal() and dst.isdecimal()):
        raise ArgumentError(f"--skip takes SRC:DST, two stages, such as 0:3; not '{text}'")
    return int(src), int(dst)


def check_memory_option(memory: float | None) -> None:
    """A cap is a number of micro-batches."""
    if memory is not None and not 0 < memory < float("inf"):
        raise ArgumentError(f"--memory takes a number of micro-batches above 0, not {memory}")


# -------------------------------------------------------------------------------------------------
# What was asked for, and the timeline that answers it.
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScheduleRequest:
    """Sizes, costs and limits, as given on the command line."""

    ranks: int
    chunks: int
    stages_per_rank: int | None
    costs: dict[str, float]
    checkpoint: str
    memory: float | None
    skips: tuple[tuple[int, int], ...] = ()

    def simulate_named(self, name: str) -> Timeline:
        """The timeline of a named schedule."""
        return self._simulate(schedules.make(name, self.ranks, self.chunks, self.stages_per_rank))

    def simulate_fit(self, placement_kind: str) -> Timeline:
        """The timeline of `fit` on a loop or a V.

        It plans without Rs. Where they come in later, what an F keeps is no limit to plan with, and
        the named schedules get another chance.
        """
        placement = self._build_placement(placement_kind)
        cost = Cost.even(placement, **self.costs)
        graph = self._build_graph(len(placement))
        made = self._simulate(schedules.fit(placement, self.chunks, cost, self.memory, graph))
        if self.checkpoint == "never":
            return made
        slower = replace(cost, I=tuple(i + f for i, f in zip(cost.I, cost.F, strict=True)))
        freer = self._simulate(schedules.fit(placement, self.chunks, slower, self.chunks, graph))
        found = [freer, made, *self._simulate_families_with(placement)]
        kept = [timeline for timeline in found if not self.find_memory_excess(timeline)]
        return min(kept or [made], key=lambda timeline: timeline.makespan)

    def _simulate_families_with(self, placement: tuple[int, ...]) -> Iterator[Timeline]:
        per_rank = len(placement) // self.ranks
        for name, family in schedules.FAMILIES.items():
            if family.trains and (family.free or family.stages_per_rank == per_rank):
                timeline = replace(self, stages_per_rank=per_rank).simulate_named(name)
                if timeline.program.schedule.placement == placement:
                    yield timeline

    def find_memory_excess(self, timeline: Timeline) -> list[str]:
        """Where the timeline holds more than the cap."""
        if self.memory is None:
            return []
        return list(find_memory_excess(timeline.program.schedule, self.memory, timeline.cost))

    def _build_graph(self, stages: int) -> StageGraph:
        return StageGraph.chain(stages, self.skips)

    def _simulate(self, schedule: Schedule) -> Timeline:
        schedule = recompute(schedule, recompute_mode(self.checkpoint, self.chunks))
        program = lower(schedule, self._build_graph(schedule.stages))
        return simulate(program, Cost.even(schedule.placement, **self.costs))

    def _build_placement(self, placement_kind: str) -> tuple[int, ...]:
        per_rank = self.stages_per_rank
        schedules.check_sizes(self.ranks, self.chunks, 1 if per_rank is None else per_rank)
        if placement_kind == "loop":
            return schedules.loop(self.ranks, 1 if per_rank is None else per_rank)
        if placement_kind != "v":
            raise ArgumentError(f"--placement is loop or v, not '{placement_kind}'")
        if per_rank not in (None, 2):
            raise ArgumentError(f"a V has 2 stages a rank, not {per_rank}: use --stages-per-rank 2")
        return schedules.vee(self.ranks)


def read_schedule_file(file: Path) -> Schedule | Program:
    """A schedule or program that was saved, or written by hand."""
    try:
        return loads(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise FormatError("this is not a schedule:", [f"{file} is not text"]) from None


def simulate_file(
    file: Path, costs: dict[str, float], skips: tuple[tuple[int, int], ...], memory: float | None
) -> Timeline:
    """The timeline of what stands in a file; refused with every problem unless it is sound."""
    work = read_schedule_file(file)
    if isinstance(work, Schedule):
        graph = StageGraph.chain(work.stages, skips)
        require_sound(work, graph, memory)
        work = lower(work, graph)
    elif skips:
        raise ArgumentError("a program has its own edges: write the skip there, not as --skip")
    require_sound(work, memory=memory)
    return simulate(work, Cost.even(work.schedule.placement, **costs))

"""Options that several commands share: their declarations, their parsing, and their use."""

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
SKIP_WITH_PROGRAM = "a program lists its own edges. Write the skip there instead of using --skip"

ScheduleArgument = Annotated[
    str, typer.Argument(help=f"{', '.join(schedules.FAMILIES)}, fit, or a saved file.")
]
_RANKS_OPTION = typer.Option("--ranks", "-p", help="Workers, each with one device.")
_CHUNKS_OPTION = typer.Option("--chunks", "-m", help="Micro-batches in a step.")
RanksOption = Annotated[int, _RANKS_OPTION]
OptionalRanksOption = Annotated[int | None, _RANKS_OPTION]
ChunksOption = Annotated[int, _CHUNKS_OPTION]
OptionalChunksOption = Annotated[int | None, _CHUNKS_OPTION]
StagesPerRankOption = Annotated[
    int | None, typer.Option("--stages-per-rank", "-v", help="Stages per rank.")
]
PlacementOption = Annotated[
    str, typer.Option("--placement", help="For fit: loop, or v (two stages per rank).")
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
        help="Limit on live micro-batches per rank, over all its stages. For fit: 1f1b's peak.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def parse_costs(text: str) -> dict[str, float]:
    """Return the costs in a text such as `F=1,W=2`, with defaults for those it does not name."""
    costs = dict(item.split("=") for item in DEFAULT_COSTS.split(","))
    for item in text.split(","):
        key, _, value = item.partition("=")
        if key.strip() not in costs:
            names = ", ".join(costs)
            raise ArgumentError(f"--cost takes {names}, such as {DEFAULT_COSTS}, not '{item}'")
        costs[key.strip()] = value
    try:
        numbers = {key: float(value) for key, value in costs.items()}
    except ValueError:
        raise ArgumentError(
            f"--cost takes numbers, such as {DEFAULT_COSTS}, not '{text}'"
        ) from None
    if not all(0 <= value <= 1e9 for value in numbers.values()):
        raise ArgumentError(
            f"--cost takes numbers from 0 to 1e9, such as {DEFAULT_COSTS}, not '{text}'"
        )
    if not any(numbers[key] for key in "FIW"):
        raise ArgumentError("--cost: at least one of F, I and W must be more than 0")
    return numbers


def parse_skip(text: str) -> tuple[int, int]:
    """Return the two stages of a text such as `0:3`, a skip from stage 0 to stage 3."""
    src, _, dst = text.partition(":")
    if not (src.isdecimal() and dst.isdecimal()):
        raise ArgumentError(f"--skip takes two stages as SRC:DST, such as 0:3, not '{text}'")
    return int(src), int(dst)


def check_memory_option(memory: float | None) -> None:
    """Raise unless `--memory` is absent or a positive, finite number of micro-batches."""
    if memory is not None and not 0 < memory < float("inf"):
        raise ArgumentError(f"--memory takes a number of micro-batches above 0, not {memory}")


# ---- simulating the requested schedule ------------------------------------------------------


@dataclass(frozen=True)
class ScheduleRequest:
    """A schedule requested on the command line: its sizes, costs and limits."""

    ranks: int
    chunks: int
    stages_per_rank: int | None
    costs: dict[str, float]
    checkpoint: str
    memory: float | None
    skips: tuple[tuple[int, int], ...] = ()

    def simulate_named(self, name: str) -> Timeline:
        """Return the simulated timeline of a named schedule."""
        return self._simulate(schedules.make(name, self.ranks, self.chunks, self.stages_per_rank))

    def simulate_fit(self, placement_kind: str) -> Timeline:
        """Return the simulated timeline of `fit`, with stages placed in a loop or a V.

        `fit` plans without recomputation (R), which is added afterwards. With recomputation an F
        keeps only its input, so a plan under the memory limit is too cautious. Three candidates are
        compared then: that plan, a plan without the limit whose backward includes the
        recomputation, and the named schedules with the same placement. The fastest that fits wins.
        """
        placement = self._build_placement(placement_kind)
        cost = Cost.even(placement, **self.costs)
        graph = self._build_graph(len(placement))
        limited = self._simulate(schedules.fit(placement, self.chunks, cost, self.memory, graph))
        if self.checkpoint == "never":
            return limited
        # Recomputation repeats the forward before each backward: I costs I + F.
        slower = replace(cost, I=tuple(i + f for i, f in zip(cost.I, cost.F, strict=True)))
        unlimited = self._simulate(
            schedules.fit(placement, self.chunks, slower, self.chunks, graph)
        )
        candidates = [unlimited, limited, *self._simulate_families_with(placement)]
        fitting = [timeline for timeline in candidates if not self.find_memory_excess(timeline)]
        return min(fitting or [limited], key=lambda timeline: timeline.makespan)

    def _simulate_families_with(self, placement: tuple[int, ...]) -> Iterator[Timeline]:
        per_rank = len(placement) // self.ranks
        for name, family in schedules.FAMILIES.items():
            if family.trains and (family.free or family.stages_per_rank == per_rank):
                timeline = replace(self, stages_per_rank=per_rank).simulate_named(name)
                if timeline.program.schedule.placement == placement:
                    yield timeline

    def find_memory_excess(self, timeline: Timeline) -> list[str]:
        """Return a problem for each rank that holds more micro-batches than `--memory` allows."""
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
            raise ArgumentError(f"--placement must be loop or v, not '{placement_kind}'")
        if per_rank not in (None, 2):
            raise ArgumentError(f"--placement v needs --stages-per-rank 2, not {per_rank}")
        return schedules.vee(self.ranks)


def read_schedule_file(file: Path) -> Schedule | Program:
    """Return the schedule or program in a file, saved before or written by hand."""
    try:
        return loads(file.read_text(encoding="utf-8-sig"))  # some editors begin with a BOM
    except UnicodeDecodeError:
        raise FormatError("this is not a schedule:", [f"{file} is not text"]) from None


def simulate_file(
    file: Path, costs: dict[str, float], skips: tuple[tuple[int, int], ...], memory: float | None
) -> Timeline:
    """Return the simulated timeline of a file. Raise with every problem if it is not sound."""
    program = read_schedule_file(file)
    if isinstance(program, Schedule):
        graph = StageGraph.chain(program.stages, skips)
        require_sound(program, graph, memory)
        program = lower(program, graph)
    elif skips:
        raise ArgumentError(SKIP_WITH_PROGRAM)
    # A program can deadlock where its schedule is sound, so it is verified, too.
    require_sound(program, memory=memory)
    return simulate(program, Cost.even(program.schedule.placement, **costs))

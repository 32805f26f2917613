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
from penstock.text_format import format_binary_bytes, format_bytes, format_number

DEFAULT_COSTS = "F=1,I=1,W=1,send=0"
MAX_SIZE = 1_000_000  # of each of ranks, micro-batches and stages per rank
MAX_CELLS = (
    250_000  # of a schedule; the two numbers below were measured at 16,000 and 100,000 cells
)
SECONDS_PER_CELL, BYTES_PER_CELL = 2e-4, 8e3
MAX_FILE_BYTES = 32 * 2**20  # a program of so many cells takes about 20 MB
SKIP_WITH_PROGRAM = "a program lists its own edges. Write the skip there instead of using --skip"

ScheduleArgument = Annotated[
    str, typer.Argument(help=f"{', '.join(schedules.FAMILIES)}, fit, or a saved file.")
]
_RANKS_OPTION = typer.Option("--ranks", "-p", max=MAX_SIZE, help="Workers, each with one device.")
_CHUNKS_OPTION = typer.Option("--chunks", "-m", max=MAX_SIZE, help="Micro-batches in a step.")
RanksOption = Annotated[int, _RANKS_OPTION]
OptionalRanksOption = Annotated[int | None, _RANKS_OPTION]
ChunksOption = Annotated[int, _CHUNKS_OPTION]
OptionalChunksOption = Annotated[int | None, _CHUNKS_OPTION]
StagesPerRankOption = Annotated[
    int | None, typer.Option("--stages-per-rank", "-v", max=MAX_SIZE, help="Stages per rank.")
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
        metavar="MICROBATCHES",
        help="Limit on live micro-batches per rank, over all its stages. For fit: 1f1b's peak. "
        "(A limit in bytes needs a model: penstock plan.)",
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
    if not all(stage.isdecimal() and len(stage) < 10 for stage in (src, dst)):
        raise ArgumentError(f"--skip takes two stages as SRC:DST, such as 0:3, not '{text}'")
    return int(src), int(dst)


def check_memory_option(memory: float | None) -> None:
    """Raise unless `--memory` is absent or a positive, finite number of micro-batches."""
    if memory is not None and not 0 < memory < float("inf"):
        raise ArgumentError(f"--memory takes a number of micro-batches above 0, not {memory}")


def check_cells(ranks: int, chunks: int, stages_per_rank: int) -> None:
    """Raise if a size is below 1, or if a schedule would need minutes and gigabytes."""
    schedules.check_sizes(ranks, chunks, stages_per_rank)
    cells = ranks * chunks * stages_per_rank
    if cells > MAX_CELLS:
        raise ArgumentError(
            f"{ranks} ranks x {chunks} micro-batches x {stages_per_rank} stages per rank are "
            f"{cells:,} cells. They would take about {format_number(cells * SECONDS_PER_CELL)} "
            f"seconds and {format_bytes(cells * BYTES_PER_CELL)} of memory, and commands take at "
            f"most {MAX_CELLS:,}. Use fewer ranks or micro-batches: the pattern repeats"
        )


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
        default = schedules.family_of(name).stages_per_rank
        check_cells(self.ranks, self.chunks, self.stages_per_rank or default)
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
        default = 2 if placement_kind == "v" else 1
        check_cells(self.ranks, self.chunks, default if per_rank is None else per_rank)
        if placement_kind == "loop":
            return schedules.loop(self.ranks, 1 if per_rank is None else per_rank)
        if placement_kind != "v":
            raise ArgumentError(f"--placement must be loop or v, not '{placement_kind}'")
        if per_rank not in (None, 2):
            raise ArgumentError(f"--placement v needs --stages-per-rank 2, not {per_rank}")
        return schedules.vee(self.ranks)


def read_schedule_file(file: Path) -> Schedule | Program:
    """Return the schedule or program in a file, saved before or written by hand."""
    with file.open("rb") as stream:
        content = stream.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        size = f"{file} has more than {format_binary_bytes(MAX_FILE_BYTES)}"
        raise FormatError("this is not a schedule:", [size])
    try:
        return loads(content.decode("utf-8-sig"))  # some editors begin with a BOM
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

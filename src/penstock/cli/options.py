"""Options that several commands share: their declarations, their parsing, and their use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock import schedules
from penstock.errors import ArgumentError, FormatError
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Program, Schedule, StageGraph
from penstock.schedules.lowering import CHECKPOINT_MODES, lower
from penstock.schedules.notation import loads
from penstock.schedules.timeline import Timeline, simulate
from penstock.schedules.verify import require_sound
from penstock.text_format import format_binary_bytes

DEFAULT_COSTS = "F=1,I=1,W=1,send=0"
MAX_SIZE = 1_000_000  # of each of ranks, micro-batches and stages per rank
MAX_FILE_BYTES = 32 * 2**20  # a program of so many cells takes about 20 MB
SKIP_WITH_PROGRAM = "a program lists its own edges. Write the skip there instead of using --skip"

ScheduleArgument = Annotated[
    str,
    typer.Argument(
        help=f"{', '.join(schedules.FAMILIES)}, fit, or a file: a schedule, or a step that "
        "Timeline.save wrote."
    ),
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
HtmlOption = Annotated[
    Path | None, typer.Option("--html", help="Save the report as one HTML file, with pictures.")
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


# ---- files -----------------------------------------------------------------------------------


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


def read_timeline_file(file: Path) -> Timeline:
    """Return the timeline in a file of `Timeline.save`."""
    if file.stat().st_size > MAX_FILE_BYTES:
        size = f"{file} has more than {format_binary_bytes(MAX_FILE_BYTES)}"
        raise FormatError("this is not a timeline:", [size])
    return Timeline.load(file)


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

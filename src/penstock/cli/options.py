"""The options that commands share, and what their texts mean."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock import schedules
from penstock.errors import ArgumentError
from penstock.lower import CHECKPOINT_MODES

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

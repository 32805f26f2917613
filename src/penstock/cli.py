"""The command line: penstock show | compare | verify | demo.

Answers go to stdout. What was asked wrongly is told in one message on stderr, with exit status 2.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from penstock import draw, schedules
from penstock.cost import Cost
from penstock.errors import ArgumentError, FormatError, MissingExtra, PenstockError
from penstock.ir import Program, Schedule, Send, StageGraph
from penstock.lower import CHECKPOINT_MODES, lower, recompute, recompute_mode
from penstock.notation import dumps, loads
from penstock.timeline import Timeline, simulate
from penstock.verify import ends, fits, verify

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError:
    raise SystemExit(str(MissingExtra("typer and rich", "cli", "the command line"))) from None

app = typer.Typer(
    help="Pipeline schedules: show, compare and verify them.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Ranks = Annotated[int, typer.Option("--ranks", "-p", help="Workers, each with one device.")]
Chunks = Annotated[int, typer.Option("--chunks", "-m", help="Micro-batches in a step.")]
PerRank = Annotated[int | None, typer.Option("--stages-per-rank", "-v", help="Stages on a rank.")]
Costs = Annotated[
    str,
    typer.Option("--cost", help="Seconds of a rank's whole share, and of a message."),
]
Checkpoint = Annotated[
    str, typer.Option("--checkpoint", help=f"Recomputation: {', '.join(CHECKPOINT_MODES)}.")
]
Skips = Annotated[
    list[str] | None, typer.Option("--skip", help="SRC:DST, a skip connection; repeatable.")
]
Memory = Annotated[
    float | None,
    typer.Option("--memory", help="Cap on live micro-batches of a rank's whole share."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
UNIT_COSTS = "F=1,I=1,W=1,send=0"


def main() -> None:
    """The entry point."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # boxes and dots, where the encoding has them
        sys.stdout.reconfigure(errors="replace")
    try:
        app()
    except (PenstockError, OSError) as error:
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(2)


# ---- show ---------------------------------------------------------------------------------


@app.command()
def show(
    name: Annotated[str, typer.Argument(help=f"{', '.join(schedules.FAMILIES)}, or fit.")],
    ranks: Ranks,
    chunks: Chunks,
    stages_per_rank: PerRank = None,
    placement: Annotated[
        str, typer.Option("--placement", help="For fit: loop, or v (two stages a rank).")
    ] = "loop",
    cost: Costs = UNIT_COSTS,
    checkpoint: Checkpoint = "never",
    skip: Skips = None,
    memory: Memory = None,
    as_json: Json = False,
    svg: Annotated[Path | None, typer.Option(help="Save the picture as SVG.")] = None,
    png: Annotated[Path | None, typer.Option(help="Save the picture as PNG.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Save a trace for Perfetto.")] = None,
    save: Annotated[Path | None, typer.Option(help="Save the schedule as text.")] = None,
    messages: Annotated[
        bool, typer.Option("--messages", help="With --save: write the messages in, too.")
    ] = False,
) -> None:
    """Show a schedule: its picture, bubble, peak and messages."""
    costs = parse_costs(cost)
    skips = [parse_skip(text) for text in skip or []]
    check_memory_option(memory)
    for path, suffix in ((svg, ".svg"), (png, ".png")):
        if path and path.suffix.lower() != suffix:
            raise ArgumentError(f"{path}: a name that ends in {suffix} is needed here")
    if messages and not save:
        raise ArgumentError("--messages says what to save: give --save FILE, too")
    if name == "fit":
        stages = _placement(placement, ranks, chunks, stages_per_rank)
        graph = StageGraph.chain(len(stages), skips)
        made = schedules.fit(stages, chunks, Cost.even(stages, **costs), memory, graph)
    elif placement != "loop":
        raise ArgumentError(f"--placement is for fit alone; {name} has a placement of its own")
    else:
        made = schedules.make(name, ranks, chunks, stages_per_rank)
        graph = StageGraph.chain(made.stages, skips)
    schedule = recompute(made, recompute_mode(checkpoint, chunks))
    program = lower(schedule, graph)
    timeline = simulate(program, Cost.even(schedule.placement, **costs))
    if memory is not None:
        _check_memory(name, timeline, memory)
    if svg:
        draw.picture(timeline, svg, skips=bool(skips), title=name)
    if png:
        draw.picture(timeline, png, skips=bool(skips), title=name)
    if trace:
        draw.write_trace(timeline, trace)
    if save:
        save.write_text(dumps(program if messages else schedule))
    if as_json:
        print(json.dumps(summary(name, timeline)))
    else:
        _print_timeline(name, timeline, [path for path in (svg, png, trace, save) if path])


def summary(name: str, timeline: Timeline) -> dict[str, Any]:
    """What `--json` prints. `actions` counts computes, sends and receives."""
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
        "deadlock_free": not list(ends(program, program.graph)),
    }


def _print_timeline(name: str, timeline: Timeline, written: list[Path]) -> None:
    console = Console()
    schedule = timeline.program.schedule
    sizes = f"{schedule.ranks} ranks, {schedule.stages} stages, {schedule.chunks} micro-batches"
    facts = summary(name, timeline)
    safe = "ends under rendezvous" if facts["deadlock_free"] else "DEADLOCKS under rendezvous"
    print(f"{name}: {sizes}, {facts['messages']} messages, {safe}\n")
    print(draw.text(timeline, width=max(60, console.width), color=console.is_terminal))
    for path in written:
        print(f"wrote {path}")


def _placement(kind: str, ranks: int, chunks: int, per_rank: int | None) -> tuple[int, ...]:
    schedules.check(ranks, chunks, 1 if per_rank is None else per_rank)
    if kind == "loop":
        return schedules.loop(ranks, 1 if per_rank is None else per_rank)
    if kind != "v":
        raise ArgumentError(f"--placement is loop or v, not '{kind}'")
    if per_rank not in (None, 2):
        raise ArgumentError(f"a V has 2 stages a rank, not {per_rank}: use --stages-per-rank 2")
    return schedules.vee(ranks)


def _check_memory(name: str, timeline: Timeline, memory: float) -> None:
    schedule = timeline.program.schedule
    over = list(fits(schedule, memory, timeline.cost))
    if not over:
        return
    smaller = [
        other
        for other, family in schedules.FAMILIES.items()
        if other != "forward-only"
        and family.peak(schedule.ranks, schedule.chunks, family.stages_per_rank) <= memory
    ]
    listed = "\n".join(f"  {problem}" for problem in over)
    raise ArgumentError(
        f"{name} does not fit in {memory:g} micro-batches a rank:\n{listed}\n"
        f"What fits: {', '.join(smaller) or 'nothing'}; or fit --memory M, from M = 1 on"
    )


# ---- compare ------------------------------------------------------------------------------


@app.command()
def compare(
    ranks: Ranks,
    chunks: Chunks,
    stages_per_rank: PerRank = None,
    cost: Costs = UNIT_COSTS,
    checkpoint: Checkpoint = "never",
    memory: Memory = None,
    as_json: Json = False,
) -> None:
    """Compare all schedules, best first; with --memory, those that fit."""
    costs = parse_costs(cost)
    check_memory_option(memory)
    wanted = recompute_mode(checkpoint, chunks)
    rows = []
    with Console(stderr=True).status("making schedules") as status:
        for name, schedule in _candidates(ranks, chunks, stages_per_rank, costs, memory):
            status.update(f"playing {name}")
            program = lower(recompute(schedule, wanted))
            timeline = simulate(program, Cost.even(schedule.placement, **costs))
            if memory is None or not list(fits(program.schedule, memory, timeline.cost)):
                rows.append((name, timeline))
    rows.sort(key=lambda row: (round(row[1].makespan, 9), max(row[1].peak)))
    if as_json:
        print(json.dumps([summary(name, timeline) for name, timeline in rows]))
    else:
        Console().print(_table(f"{ranks} ranks, {chunks} micro-batches, {cost}", rows))


def _candidates(
    ranks: int, chunks: int, per_rank: int | None, costs: dict[str, float], memory: float | None
) -> Iterator[tuple[str, Schedule]]:
    """Every schedule that trains; those with a free number of stages a rank as asked."""
    for name, family in schedules.FAMILIES.items():
        if name != "forward-only":
            yield name, schedules.make(name, ranks, chunks, per_rank if family.free else None)
    loop = schedules.loop(ranks, per_rank or 1)
    for name, placement in (("fit", loop), ("fit, v", schedules.vee(ranks))):
        yield name, schedules.fit(placement, chunks, Cost.even(placement, **costs), memory)


def _table(title: str, rows: Iterable[tuple[str, Timeline]]) -> Table:
    table = Table(title=title, caption="peak: micro-batches alive on the worst rank")
    table.add_column("schedule")
    for heading in ("stages a rank", "makespan", "bubble", "peak", "messages"):
        table.add_column(heading, justify="right")
    for name, timeline in rows:
        facts = summary(name, timeline)
        table.add_row(
            name,
            f"{facts['stages'] // facts['ranks']}",
            f"{facts['makespan']:g}",
            f"{facts['bubble']:.1%}",
            f"{max(facts['peak']):g}",
            f"{facts['messages']}",
        )
    return table


# ---- verify and demo ----------------------------------------------------------------------


@app.command("verify")
def verify_file(
    file: Annotated[Path, typer.Argument(help="A schedule or program: one line a rank.")],
    memory: Memory = None,
    skip: Skips = None,
) -> None:
    """Check a schedule or program that somebody wrote: exit 0 if it is sound, else 1."""
    check_memory_option(memory)
    try:
        work = loads(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise FormatError("this is not a schedule:", [f"{file} is not text"]) from None
    graph = None
    if isinstance(work, Schedule):
        graph = StageGraph.chain(work.stages, [parse_skip(text) for text in skip or []])
    elif skip:
        raise ArgumentError("a program has its own edges: write the skip there, not as --skip")
    problems = verify(work, graph, memory)
    for problem in problems:
        print(problem)
    if problems:
        raise typer.Exit(1)
    schedule = work.schedule if isinstance(work, Program) else work
    sizes = f"{schedule.ranks} ranks, {schedule.stages} stages, {schedule.chunks} micro-batches"
    print(f"sound: {sizes}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where to save the pictures.")] = Path("gallery"),
    ranks: Ranks = 4,
    chunks: Chunks = 8,
) -> None:
    """Show every schedule, and save the gallery of their pictures."""
    console = Console()
    schedules.check(ranks, chunks)
    for exhibit in draw.write_gallery(out, ranks, chunks):
        print(f"\n{exhibit.name}: {exhibit.family.use}")
        width = max(60, console.width)
        print(draw.text(exhibit.timeline, width=width, color=console.is_terminal))
    print(f"\nwrote the pictures to {out}/, with {out}/index.md")


# ---- parsing ------------------------------------------------------------------------------


def parse_costs(text: str) -> dict[str, float]:
    """`F=1,I=1,W=1,send=0`, any of them left out."""
    costs = dict(item.split("=") for item in UNIT_COSTS.split(","))
    for item in text.split(","):
        key, _, value = item.partition("=")
        if key.strip() not in costs:
            raise ArgumentError(
                f"--cost takes {', '.join(costs)}, such as {UNIT_COSTS}; not '{item}'"
            )
        costs[key.strip()] = value
    try:
        numbers = {key: float(value) for key, value in costs.items()}
    except ValueError:
        raise ArgumentError(f"--cost takes numbers, such as {UNIT_COSTS}; not '{text}'") from None
    if not all(0 <= value <= 1e9 for value in numbers.values()):
        raise ArgumentError(
            f"--cost takes numbers from 0 to 1e9, such as {UNIT_COSTS}; not '{text}'"
        )
    if not any(numbers[key] for key in "FIW"):
        raise ArgumentError("--cost: at least one of F, I and W must be more than 0")
    return numbers


def check_memory_option(memory: float | None) -> None:
    """A cap is a number of micro-batches."""
    if memory is not None and not 0 < memory < float("inf"):
        raise ArgumentError(f"--memory takes a number of micro-batches above 0, not {memory}")


def parse_skip(text: str) -> tuple[int, int]:
    """`0:3`: from stage 0 to stage 3."""
    src, _, dst = text.partition(":")
    if not (src.isdecimal() and dst.isdecimal()):
        raise ArgumentError(f"--skip takes SRC:DST, two stages, such as 0:3; not '{text}'")
    return int(src), int(dst)


if __name__ == "__main__":
    main()

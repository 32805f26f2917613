"""Timelines for the terminal: as text, as a JSON object, and as a row of a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock import draw
from penstock.schedules.ir import Schedule, Send
from penstock.schedules.timeline import Timeline
from penstock.schedules.verify import find_deadlocks


def summarize(name: str, timeline: Timeline) -> dict[str, Any]:
    """Return the object that `--json` prints. `actions` counts computes, sends and receives."""
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
        "deadlock_free": not list(find_deadlocks(program, program.graph)),
    }


def format_sizes(schedule: Schedule) -> str:
    """Return the sizes of a schedule as text."""
    return f"{schedule.ranks} ranks, {schedule.stages} stages, {schedule.chunks} micro-batches"


def draw_for_terminal(timeline: Timeline, width: int | None = None) -> str:
    """Return the picture of a timeline as text, in the width and colors of the terminal."""
    console = Console()
    # No colors in a pipe or a file, in a terminal without them, or if NO_COLOR is set.
    color = console.is_terminal and not console.no_color and console.color_system is not None
    return draw.text(timeline, width=width or max(32, console.width), color=color)


def print_timeline(name: str, timeline: Timeline, width: int | None) -> None:
    """Print the output of `penstock show`."""
    schedule = timeline.program.schedule
    facts = summarize(name, timeline)
    outcome = "ends under rendezvous" if facts["deadlock_free"] else "DEADLOCKS under rendezvous"
    print(f"{name}: {format_sizes(schedule)}, {facts['messages']} messages, {outcome}\n")
    print(draw_for_terminal(timeline, width))
    if schedule.recomputed:
        print("peak does not include the inputs that stages keep for their recomputation")


def print_comparison(title: str, rows: Iterable[tuple[str, Timeline]]) -> None:
    """Print the table of `penstock compare`."""
    caption = "peak: micro-batches alive on the worst rank; fit: under --memory, or 1f1b's peak"
    table = Table(title=title, caption=caption)
    table.add_column("schedule", no_wrap=True)
    for heading in ("stages a rank", "makespan", "bubble", "peak", "messages"):
        table.add_column(heading, justify="right")
    for name, timeline in rows:
        facts = summarize(name, timeline)
        table.add_row(
            name,
            f"{facts['stages'] // facts['ranks']}",
            f"{facts['makespan']:g}",
            f"{facts['bubble']:.1%}",
            f"{max(facts['peak']):g}",
            f"{facts['messages']}",
        )
    Console().print(table)

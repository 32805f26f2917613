"""The output of commands: errors, signs of life, and timelines as text, JSON and tables."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock import draw
from penstock.schedules import request
from penstock.schedules.ir import Schedule
from penstock.schedules.timeline import Timeline
from penstock.schedules.verify import find_deadlocks
from penstock.text_format import make_printable

MAX_ERROR_LINES, MAX_ERROR_LINE = 25, 1000  # of a message on stderr
ACTIVITY_SECONDS = 5.0  # until the first sign of life; the next ones come less and less often


# ---- messages on stderr -------------------------------------------------------------------


def print_error(text: str) -> None:
    """Print a message on stderr: without control characters, and cut if it is very long."""
    lines = text.strip().split("\n", MAX_ERROR_LINES)
    shown = [make_printable(line, MAX_ERROR_LINE) for line in lines[:MAX_ERROR_LINES]]
    if len(lines) > MAX_ERROR_LINES:
        shown.append("...")
    print("penstock: " + "\n".join(shown), file=sys.stderr)


def describe_exception(error: BaseException) -> str:
    """Return the type and the message of an exception, even of one that has no text."""
    return "".join(traceback.format_exception_only(error)).strip()


@contextmanager
def show_activity(activity: str) -> Iterator[Callable[[str], None]]:
    """Tell on stderr that a command works: a status in a terminal, else a line now and then.

    Yields a function that changes the text.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(activity) as status:
            yield status.update
        return
    current, done, start = [activity], threading.Event(), time.monotonic()

    def tell() -> None:
        seconds = ACTIVITY_SECONDS
        while not done.wait(seconds):
            seconds = time.monotonic() - start
            print_error(f"{current[0]}, for {seconds:.0f} s so far")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield lambda text: current.__setitem__(0, text)
    finally:
        done.set()
        thread.join()


# ---- timelines ----------------------------------------------------------------------------


def summarize(name: str, timeline: Timeline) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    program = timeline.program
    deadlock_free = not list(find_deadlocks(program, program.graph))
    return {**request.summarize(name, timeline), "deadlock_free": deadlock_free}


def format_sizes(schedule: Schedule) -> str:
    """Return the sizes of a schedule as text."""
    return f"{schedule.ranks} ranks, {schedule.stages} stages, {schedule.chunks} micro-batches"


def draw_for_terminal(timeline: Timeline, width: int | None = None) -> str:
    """Return the picture of a timeline as text, in the width and colors of the terminal."""
    console = Console()
    # No colors in a pipe or a file, in a terminal without them, or if NO_COLOR is set.
    color = console.is_terminal and not console.no_color and console.color_system is not None
    return draw.text(timeline, width=width or max(32, console.width), color=color)


def print_timeline(facts: dict[str, Any], timeline: Timeline, picture: str) -> None:
    """Print the output of `penstock show`."""
    schedule = timeline.program.schedule
    outcome = "ends under rendezvous" if facts["deadlock_free"] else "DEADLOCKS under rendezvous"
    sizes = f"{format_sizes(schedule)}, {facts['messages']} messages"
    print(f"{facts['schedule']}: {sizes}, {outcome}\n")
    print(picture)
    if schedule.recomputed:
        print("peak does not include the inputs that stages keep for their recomputation")


def print_comparison(title: str, rows: Iterable[dict[str, Any]]) -> None:
    """Print the table of `penstock compare`, with a row for each summary."""
    caption = (
        "peak: micro-batches alive on the worst rank; fit: under --memory, or the peak that 1f1b "
        "has without recomputation"
    )
    table = Table(title=Text(title), caption=caption)
    table.add_column("schedule", no_wrap=True)
    for heading in ("stages a rank", "makespan", "bubble", "peak", "messages"):
        table.add_column(heading, justify="right")
    for facts in rows:
        table.add_row(
            facts["schedule"],
            f"{facts['stages'] // facts['ranks']}",
            f"{facts['makespan']:g}",
            f"{facts['bubble']:.1%}",
            f"{max(facts['peak']):g}",
            f"{facts['messages']}",
        )
    Console().print(table)

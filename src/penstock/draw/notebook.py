"""Values as HTML in a notebook: a picture and a table, without matplotlib.

Schedules, programs, timelines, profiles and plans are below this folder. Their `_repr_html_` calls
`render_html`, with which this module registers a function for each. Values above this folder call
`partition_html` and the others. Every name is escaped, as it may come from a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from penstock.display import render_html
from penstock.draw.page import HtmlPage, plan_page
from penstock.draw.svg import memory_svg, model_svg, timeline_svg
from penstock.model_summary import ModelSummary
from penstock.planning.plan import Plan
from penstock.planning.profile import Profile
from penstock.schedules.ir import Program, Schedule
from penstock.schedules.lowering import lower
from penstock.schedules.notation import dumps
from penstock.schedules.timeline import Timeline, simulate
from penstock.schedules.verify import verify
from penstock.text_format import (
    choose_time_unit,
    format_bytes,
    format_number,
    format_plural,
    format_seconds,
)

PICTURE_WIDTH = 900  # pixels
# A picture with more actions than this would be megabytes in the file of the notebook, and one with
# more units than this is illegible.
MAX_ACTIONS, MAX_UNITS, MAX_ROWS = 20_000, 400, 32


def _add_timeline(page: HtmlPage, timeline: Timeline) -> None:
    """Add the picture of a timeline, unless it is too large, and a table of its ranks."""
    if len(timeline.spans) <= MAX_ACTIONS:
        page.picture(timeline_svg(timeline, width=PICTURE_WIDTH))
    else:
        page.paragraph(
            f"{len(timeline.spans)} actions are too many to show here. penstock.draw.picture("
            "timeline, 'step.png') draws them."
        )
    unit = choose_time_unit(timeline.makespan)
    rows = (
        (
            str(rank),
            unit.format(busy),
            f"{1 - busy / timeline.makespan:.1%}" if timeline.makespan else "-",
            format_number(timeline.peak[rank]),
        )
        for rank, busy in enumerate(timeline.busy)
    )
    _add_rows(page, ("rank", "busy", "idle", "peak"), rows, timeline.ranks)


def _add_rows(
    page: HtmlPage, headings: Sequence[str], rows: Iterable[Sequence[str]], count: int
) -> None:
    """Add a table of at most `MAX_ROWS` rows, and say how many there are if these are more."""
    page.table(headings, islice(rows, MAX_ROWS), text_columns=["units"])
    if count > MAX_ROWS:
        page.paragraph(f"and {count - MAX_ROWS} more")


@render_html.register
def timeline_html(timeline: Timeline) -> str:
    """Return a timeline as HTML: its picture, and a table of its ranks."""
    chunks = timeline.program.schedule.chunks
    sizes = f"{format_plural(timeline.ranks, 'rank')}, {format_plural(chunks, 'micro-batch')}"
    page = HtmlPage(f"Timeline: {sizes}")
    _add_timeline(page, timeline)
    return page.fragment()


@render_html.register
def schedule_html(schedule: Schedule) -> str:
    """Return a schedule as HTML: its picture with even costs, or what is wrong with it."""
    page = HtmlPage(repr(schedule), "simulated: F, I and W of all stages of a rank take 1 each")
    return _add_work(page, schedule).fragment()


@render_html.register
def program_html(program: Program) -> str:
    """Return a program as HTML: its picture with even costs, or what is wrong with it."""
    page = HtmlPage(repr(program), "simulated: F, I and W of all stages of a rank take 1 each")
    return _add_work(page, program).fragment()


def _add_work(page: HtmlPage, work: Schedule | Program) -> HtmlPage:
    if sum(map(len, work.lanes)) > MAX_ACTIONS:
        page.paragraph("It has too many actions to show here. penstock.dumps(...) lists them.")
        return page
    problems = verify(work)
    if problems:
        for problem in problems[:MAX_ROWS]:
            page.paragraph(problem)
        page.preformatted(dumps(work))
    else:
        _add_timeline(page, simulate(lower(work) if isinstance(work, Schedule) else work))
    return page


@render_html.register
def plan_html(plan: Plan) -> str:
    """Return a plan as HTML: its stages, the forecast, what comes next, and the certificate."""
    if len(plan.timeline.spans) <= MAX_ACTIONS:
        return plan_page(plan).fragment()
    page = HtmlPage(f"A plan for {plan.profile.model}", plan.describe_choice())
    page.preformatted(str(plan))
    return page.fragment()


@render_html.register
def profile_html(profile: Profile) -> str:
    """Return a profile as HTML: a table of its units."""
    kind = profile.devices[0].kind
    chunk = f"of one micro-batch of {profile.rows} rows on {kind}"
    page = HtmlPage(f"Profile of {profile.model}", f"{len(profile.devices)} devices; {chunk}")
    rows = (
        (
            unit.name,
            *(format_seconds(getattr(unit.seconds[kind], op).at(profile.rows)) for op in "FIW"),
            format_bytes(unit.parameter_bytes),
            format_bytes(unit.activation.at(profile.rows)),
        )
        for unit in profile.units
    )
    headings = ("unit", "F", "I", "W", "parameters", "keeps")
    _add_rows(page, headings, rows, len(profile.units))
    return page.fragment()


def partition_html(
    outline: ModelSummary,
    title: str,
    rows: Sequence[Sequence[str]],
    sections: Sequence[tuple[str, str]],
) -> str:
    """Return a cut model as HTML: its units, a table of its stages, and notes.

    Args:
        outline: The summary of the model.
        title: The model in one line.
        rows: The headings of the table and its rows.
        sections: The notes, each with its heading.
    """
    page = HtmlPage(title)
    if len(outline.units) <= MAX_UNITS:
        page.picture(model_svg(outline, width=PICTURE_WIDTH))
    _add_rows(page, rows[0], rows[1:], len(rows) - 1)
    for heading, text in sections:
        page.paragraph(f"{heading}: {text}")
    return page.fragment()


def memory_html(
    forecast: Timeline,
    measured: Sequence[Sequence[tuple[float, float]]],
    held: Sequence[int],
    peak: Sequence[int],
) -> str:
    """Return the measured memory of a step as HTML: its curves, and a table of the ranks.

    Args:
        forecast: The simulated timeline, with activations in bytes.
        measured: The curve of each rank, as pairs (time, bytes), by the times of the forecast.
        held: The bytes that each rank holds anyway.
        peak: The most bytes that the step adds on each rank.
    """
    page = HtmlPage("Memory of a step", "bytes in addition to what each rank holds anyway")
    if len(forecast.spans) <= MAX_ACTIONS:
        page.picture(memory_svg(forecast, measured, PICTURE_WIDTH))
    rows = (
        (str(rank), *map(format_bytes, (held[rank], peak[rank], forecast.peak[rank])))
        for rank in range(forecast.ranks)
    )
    _add_rows(page, ("rank", "held", "peak of a step", "forecast"), rows, forecast.ranks)
    return page.fragment()


_NUMBER_FORMATS: Mapping[str, Callable[[float], str]] = {
    "step_seconds": format_seconds,
    "bubble": "{:.1%}".format,
    "peak_bytes": format_bytes,
}


def step_html(timeline: Timeline, numbers: Mapping[str, float]) -> str:
    """Return the result of a step as HTML: its numbers, and its timeline.

    Args:
        timeline: The measured timeline.
        numbers: The numbers of `result.metrics()`.
    """
    page = HtmlPage("Result of a step")
    cells = [_NUMBER_FORMATS.get(name, "{:.6g}".format)(number) for name, number in numbers.items()]
    page.table(tuple(numbers), [cells])
    _add_timeline(page, timeline)
    return page.fragment()

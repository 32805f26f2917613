"""Reports as one HTML file each, with pictures and tables, to be sent to somebody else.

A page needs nothing else: its pictures and styles are in the file, and it has no scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from math import isinf
from typing import Any

from penstock.draw.style import TextFile, format_caption, write_text
from penstock.draw.svg import PlotPoint, scatter_svg, timeline_svg
from penstock.planning.plan import Plan, describe_certificate, describe_step, list_stages
from penstock.schedules.explain import IDLE_CAUSES, TimelineIndex, compare_run, find_idle
from penstock.schedules.notation import dumps
from penstock.schedules.timeline import Timeline, simulate
from penstock.text_format import choose_time_unit, format_bytes, format_seconds

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --faint: #5b6472; --page: #f5f6f8; --card: #fff; --line: #dfe3e8; --good: #2c7a31; --bad: #b3261e }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ebf1; --faint: #9aa5b5; --page: #10141b; --card: #171c25; --line: #29313d; --good: #86c98a; --bad: #ff9a92 } }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: var(--ink); background: var(--page); margin: 0 }
main { max-width: 1180px; margin: 0 auto; padding: 28px 18px 60px }
h1 { font-size: 24px; margin: 0 0 4px } h2 { font-size: 17px; margin: 34px 0 8px }
p { margin: 6px 0; max-width: 84ch } .faint { color: var(--faint) }
.table { overflow-x: auto; margin: 10px 0 }
table { border-collapse: collapse; background: var(--card); border: 1px solid var(--line); font-variant-numeric: tabular-nums }
th, td { padding: 5px 13px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
th { font-weight: 500; color: var(--faint) } th:first-child, td:first-child, .text { text-align: left }
.good { color: var(--good) } .bad { color: var(--bad); font-weight: 600 }
figure { margin: 10px 0; overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: 10px }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px; overflow-x: auto }
"""  # noqa: E501 (a style sheet)


# The styles of a value in a notebook, whose colours and fonts stay those of the notebook.
_FRAGMENT_STYLE = """
.penstock p { margin: 2px 0; line-height: 1.45 } .penstock .faint { opacity: .7 }
.penstock .title { font-weight: 600 } .penstock h2 { font-size: 13px; margin: 10px 0 2px }
.penstock .good { color: #3a9a41 } .penstock .bad { color: #d9483b } .penstock .text { text-align: left }
.penstock table { border-collapse: collapse; margin: 6px 0; font-size: 12px; font-variant-numeric: tabular-nums }
.penstock th, .penstock td { padding: 2px 10px; text-align: right; border-bottom: 1px solid rgba(128, 128, 128, .35) }
.penstock th { font-weight: 500; opacity: .7 } .penstock tr { background: none }
.penstock th:first-child, .penstock td:first-child { text-align: left }
.penstock figure { margin: 6px 0; overflow-x: auto } .penstock svg { max-width: 100%; height: auto }
.penstock pre { font-size: 12px; margin: 6px 0; overflow-x: auto }
"""  # noqa: E501 (a style sheet)


class HtmlPage:
    """A page, or a value in a notebook, that is built from top to bottom. Every text is escaped.

    Args:
        title: The headline.
        subtitle: A line below it.
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title, self._subtitle = title, subtitle
        self._parts: list[str] = []

    def heading(self, text: str) -> None:
        """Add a headline."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def preformatted(self, text: str) -> None:
        """Add a text whose lines and spaces stay as they are."""
        self._parts.append(f"<pre>{escape(text)}</pre>")

    def picture(self, svg: str) -> None:
        """Add a picture: the text of an SVG that this package made."""
        self._parts.append(f"<figure>{svg}</figure>")

    def table(
        self,
        headings: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        text_columns: Sequence[str] = (),
        tone: Callable[[str], str] = lambda cell: "",
    ) -> None:
        """Add a table.

        Args:
            headings: The headings of the columns.
            rows: The cells of each row.
            text_columns: Columns beside the first that hold words, which are aligned left.
            tone: A function of a cell that returns "good", "bad" or "", which colour it.
        """
        columns = ["text" if heading in text_columns else "" for heading in headings]
        head = "".join(
            f"<th scope='col'{_class(column)}>{escape(cell)}</th>"
            for column, cell in zip(columns, headings, strict=True)
        )
        lines = (
            "".join(
                f"<td{_class(column or tone(cell))}>{escape(cell)}</td>"
                for column, cell in zip(columns, row, strict=True)
            )
            for row in rows
        )
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        self._parts.append(
            f"<div class='table'><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table></div>"
        )

    def fragment(self) -> str:
        """Return the content as one element, for the output of a cell in a notebook."""
        head = [f"<p class='title'>{escape(self._title)}</p>"]
        head += [f"<p class='faint'>{escape(self._subtitle)}</p>"] if self._subtitle else []
        content = "\n".join([*head, *self._parts])
        return f"<div class='penstock'><style>{_FRAGMENT_STYLE}</style>\n{content}\n</div>"

    def write(self, path: TextFile) -> None:
        """Write the page to a file."""
        head = f"<h1>{escape(self._title)}</h1>\n<p class='faint'>{escape(self._subtitle)}</p>"
        content = "\n".join([head, *self._parts])
        write_text(
            path,
            f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
            f"<meta name='viewport' content='width=device-width, initial-scale=1'>"
            f"<title>{escape(self._title)}</title><style>{_STYLE}</style></head>\n"
            f"<body><main>{content}</main></body></html>\n",
        )


def _class(name: str) -> str:
    return f" class='{name}'" if name else ""


def run_page(run: Timeline, path: TextFile, plan: Timeline | None = None) -> None:
    """Write a measured step, its plan and what cost the time to one HTML file.

    Args:
        run: The measured timeline, such as `result.timeline`.
        path: The file to write, or an open text file.
        plan: The forecast, such as `pipe.forecast()`. By default the run's own costs are simulated.

    Raises:
        ArgumentError: The plan is of another schedule.

    Example:
        >>> import tempfile
        >>> from penstock import draw, lower, schedules, simulate
        >>> timeline = simulate(lower(schedules.one_f_one_b(ranks=2, chunks=4)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw.run_page(timeline, f"{folder}/run.html")
    """
    plan = plan or simulate(run.program, run.cost)
    page = HtmlPage("A step and its plan", f"{_describe_sizes(run)}; {format_caption(run)}")
    for sentence in compare_run(plan, run).sentences:
        page.paragraph(sentence)
    page.heading("As it ran")
    page.picture(timeline_svg(run))
    page.heading("As planned")
    page.picture(timeline_svg(plan))
    page.heading("Idle time by cause")
    add_idle_table(page, {"run": run, "plan": plan})
    page.write(path)


def schedule_page(name: str, timeline: Timeline) -> HtmlPage:
    """Return the page of `penstock show --html`: a simulated schedule, and why ranks are idle."""
    page = HtmlPage(name, f"{_describe_sizes(timeline)}; {format_caption(timeline)}")
    page.picture(timeline_svg(timeline))
    page.heading("Idle time by cause")
    add_idle_table(page, {name: timeline})
    page.heading("What each rank does, in order")
    page.preformatted(dumps(timeline.program.schedule))
    return page


def _describe_sizes(timeline: Timeline) -> str:
    schedule = timeline.program.schedule
    return f"{schedule.ranks} ranks, {schedule.stages} stages, {schedule.chunks} micro-batches"


def plan_page(plan: Plan) -> HtmlPage:
    """Return the page of `penstock plan --html`: the plan, its certificate and its forecast."""
    page = HtmlPage(f"A plan for {plan.profile.model}", plan.describe_choice())
    step = describe_step(plan)
    page.paragraph(f"{step[0].upper()}{step[1:]}.")
    page.heading("Stages")
    headings, *rows = list_stages(plan)
    page.table(headings, rows, text_columns=["units"])
    page.heading("The forecast of a step")
    page.picture(timeline_svg(plan.timeline, format_size=format_bytes))
    page.heading("Memory of each rank")
    ranks = zip(plan.forecast.peak, plan.forecast.resident, plan.memory, strict=True)
    page.table(
        ["rank", "peak", "without activations", "cap"],
        [
            [
                str(rank),
                format_bytes(peak),
                format_bytes(resident),
                "none" if isinf(cap) else f"{format_bytes(cap)}, {peak / cap:.0%} used",
            ]
            for rank, (peak, resident, cap) in enumerate(ranks)
        ],
    )
    page.heading("Idle time by cause")
    add_idle_table(page, {"forecast": plan.timeline})
    if plan.alternatives:
        page.heading("Next best")
        page.table(
            ["plan", "time", "slower by", "most bytes on a rank"],
            [
                [
                    other.choice,
                    format_seconds(other.seconds),
                    f"{other.seconds / plan.seconds - 1:.1%}",
                    format_bytes(other.peak),
                ]
                for other in plan.alternatives
            ],
        )
    if plan.certificate:
        page.heading("Certificate")
        for sentence in describe_certificate(plan, plan.certificate):
            page.paragraph(f"{sentence[0].upper()}{sentence[1:]}")
    return page


def add_idle_table(page: HtmlPage, timelines: dict[str, Timeline]) -> None:
    """Add a table of the idle share of all ranks' time, by cause."""
    rows = []
    for name, timeline in timelines.items():
        shares = dict.fromkeys(IDLE_CAUSES, 0.0)
        for gap in find_idle(TimelineIndex(timeline)):
            shares[gap.cause] += (gap.end - gap.start) / (timeline.ranks * timeline.makespan)
        rows.append([name, *(f"{share:.1%}" for share in shares.values())])
    page.table(["", *IDLE_CAUSES], rows)
    page.paragraph(
        "Fill and drain: before the first and after the last action of a rank. Wait: a message is "
        "missing. Order: something was ready, but comes later in the lane. Memory: it would have "
        "exceeded the cap."
    )


def comparison_page(
    title: str, rows: Sequence[dict[str, Any]], timelines: dict[str, Timeline]
) -> HtmlPage:
    """Return the page of `penstock compare --html`: a table, a plot and a picture of each."""
    page = HtmlPage("Schedules compared", title)
    cells = [
        [
            row["schedule"],
            f"{row['stages'] // row['ranks']}",
            choose_time_unit(row["makespan"]).format(row["makespan"]),
            f"{row['bubble']:.1%}",
            f"{max(row['peak']):g}",
            f"{row['messages']}",
        ]
        for row in rows
    ]
    page.table(["schedule", "stages a rank", "makespan", "bubble", "peak", "messages"], cells)
    page.heading("Idle time against memory")
    # Naive model parallelism is idle most of the time and would push all others to the bottom.
    plotted = [row for row in rows if row["schedule"] != "naive"]
    points = [PlotPoint(row["schedule"], max(row["peak"]), row["bubble"]) for row in plotted]
    page.picture(scatter_svg(points, "peak, in micro-batches", "bubble"))
    page.heading("Idle time by cause")
    add_idle_table(page, {row["schedule"]: timelines[row["schedule"]] for row in rows})
    for row in rows:
        page.heading(row["schedule"])
        page.picture(timeline_svg(timelines[row["schedule"]]))
    return page

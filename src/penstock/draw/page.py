"""Reports as one HTML file each, with pictures and tables, to be sent to somebody else.

A page needs nothing else: its pictures and styles are in the file, and it has no scripts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from penstock.draw.style import TextFile, format_caption, write_text
from penstock.draw.svg import PlotPoint, scatter_svg, timeline_svg
from penstock.planning.plan import Plan
from penstock.schedules.explain import IDLE_CAUSES, TimelineIndex, compare_run, find_idle
from penstock.schedules.timeline import Timeline, simulate
from penstock.text_format import choose_time_unit

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --faint: #5b6472; --page: #f5f6f8; --card: #fff; --line: #dfe3e8 }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ebf1; --faint: #9aa5b5; --page: #10141b; --card: #171c25; --line: #29313d } }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: var(--ink); background: var(--page); margin: 0 }
main { max-width: 1180px; margin: 0 auto; padding: 28px 18px 60px }
h1 { font-size: 24px; margin: 0 0 4px } h2 { font-size: 17px; margin: 34px 0 8px }
p { margin: 6px 0; max-width: 84ch } .faint { color: var(--faint) }
table { border-collapse: collapse; background: var(--card); border: 1px solid var(--line); font-variant-numeric: tabular-nums }
th, td { padding: 5px 13px; text-align: right; border-bottom: 1px solid var(--line) }
th { font-weight: 500; color: var(--faint) } th:first-child, td:first-child { text-align: left }
figure { margin: 10px 0; overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: 10px }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px; overflow-x: auto }
"""  # noqa: E501 (a style sheet)


# The styles of a value in a notebook, whose colours and fonts stay those of the notebook.
_FRAGMENT_STYLE = """
.penstock p { margin: 2px 0; line-height: 1.45 } .penstock .faint { opacity: .7 }
.penstock .title { font-weight: 600 }
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

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Add a table."""
        head = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in headings)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
        )
        self._parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")

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
    schedule = run.program.schedule
    sizes = f"{schedule.ranks} ranks, {schedule.stages} stages, {schedule.chunks} micro-batches"
    page = HtmlPage("A step and its plan", f"{sizes}; {format_caption(run)}")
    for sentence in compare_run(plan, run).sentences:
        page.paragraph(sentence)
    page.heading("As it ran")
    page.picture(timeline_svg(run))
    page.heading("As planned")
    page.picture(timeline_svg(plan))
    page.heading("Idle time by cause")
    add_idle_table(page, {"run": run, "plan": plan})
    page.write(path)


def plan_page(plan: Plan) -> HtmlPage:
    """Return the page of `penstock plan --html`: the plan, its certificate and its forecast."""
    page = HtmlPage(f"A plan for {plan.profile.model}", plan.describe_choice())
    page.preformatted(str(plan))
    page.heading("The forecast of a step")
    page.picture(timeline_svg(plan.timeline))
    page.heading("Idle time by cause")
    add_idle_table(page, {"forecast": plan.timeline})
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

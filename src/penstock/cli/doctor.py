"""`penstock doctor`: examine the ranks, print tables of ranks and links, and say what to fix."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.report import print_error, show_activity
from penstock.doctor.advice import Advice, advise, iter_first_rank_of_hosts
from penstock.doctor.facts import FreeSpace, RankInfo, get_rank_env
from penstock.doctor.links import Link
from penstock.doctor.survey import (
    SurveyResult,
    compute_max_seconds,
    survey_all_ranks,
    survey_single_process,
)
from penstock.errors import ArgumentError, RunError
from penstock.launch.torchrun_env import is_launched
from penstock.text_format import format_bandwidth, format_gib, make_printable

MAX_MATRIX_RANKS = 8  # with more ranks, the slowest links are listed instead of a matrix
MAX_LISTED_LINKS = 10

_STYLES = {"broken": "bold red", "look": "yellow"}


def run(patience: float, as_json: bool) -> bool:
    """Survey the ranks, print the report, and return whether nothing is broken.

    Under a launcher rank 0 prints for all ranks, and the process exits here.
    """
    if not 0 < patience <= 600:
        raise ArgumentError(f"--patience takes seconds above 0 and up to 600, not {patience:g}")

    def report(survey: SurveyResult) -> bool:
        advice_list = advise(survey)
        if as_json:
            print(json.dumps(_as_dict(survey, advice_list)))
        else:
            _print_report(survey, advice_list)
        return not any(advice.broken for advice in advice_list)

    if not is_launched():
        return report(survey_single_process())
    rank_env = get_rank_env()
    # Every wait in the survey has a limit, except a call of the store whose host has gone silent.
    # The timer is for that.
    watchdog = threading.Timer(
        compute_max_seconds(rank_env.world_size, patience), _exit_on_timeout, [rank_env.rank]
    )
    watchdog.daemon = True
    watchdog.start()
    try:
        with show_activity(f"rank {rank_env.rank} waits for the others, or measures links"):
            is_sound = survey_all_ranks(rank_env, patience, report)
    except RunError as error:
        print_error(str(error))
        is_sound = False
    _exit_process(is_sound)
    raise AssertionError("the process has exited")


def _exit_on_timeout(rank: int) -> None:
    print_error(f"rank {rank} gives up, because the launcher's store does not answer")
    _exit_process(False)


def _exit_process(is_sound: bool) -> None:
    """Exit at once: threads that wait forever in a dead link would delay a normal exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if is_sound else 1)


def _as_dict(survey: SurveyResult, advice_list: Iterable[Advice]) -> dict[str, object]:
    return {
        "size": survey.world_size,
        "backend": survey.backend,
        "missing": survey.missing_ranks,
        "ranks": [asdict(facts) for facts in survey.rank_infos.values()],
        "links": [asdict(link) for link in survey.links],
        "clocks": {str(rank): ahead for rank, (ahead, _) in survey.clock_offsets.items()},
        "broken": [advice.text for advice in advice_list if advice.broken],
        "look": [advice.text for advice in advice_list if not advice.broken],
    }


# ---- the report as text ---------------------------------------------------------------------


def _print_report(survey: SurveyResult, advice_list: list[Advice]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(_build_rank_table(survey))
    _print_rank_info(console, survey)
    if survey.links:
        console.print(_build_link_table(survey))
    for advice in advice_list:
        text = Text(make_printable(str(advice)))
        text.stylize(_STYLES[str(advice).partition(":")[0]], 0, str(advice).index(":"))
        console.print(text)
    if not advice_list:
        console.print(Text("nothing to fix", "green"))


def _build_rank_table(survey: SurveyResult) -> Table:
    is_single_process = survey.backend == "threads"
    title = f"{len(survey.rank_infos)} of {survey.world_size} ranks, over {survey.backend}"
    table = Table(title="one process" if is_single_process else title)
    for heading in ("rank", "host", "device", "free memory", "threads"):
        table.add_column(heading, no_wrap=True)
    if not is_single_process:
        table.add_column("interface", no_wrap=True)
        table.add_column("clock", justify="right", no_wrap=True)
    ahead = {0: 0.0} | {rank: seconds for rank, (seconds, _) in survey.clock_offsets.items()}
    for rank, facts in survey.rank_infos.items():
        memory = _format_free_space(next(iter(facts.memory.values()))) if facts.memory else "?"
        cells = [str(rank), facts.host, facts.device, memory, f"{facts.threads} of {facts.cores}"]
        if not is_single_process:
            clock = f"{ahead[rank] * 1e3:+.1f} ms" if rank in ahead else "?"
            cells += [facts.interface or "?", clock]
        table.add_row(*cells)
    return table


def _print_rank_info(console: Console, survey: SurveyResult) -> None:
    """Print what all ranks have in common once, and what differs with its rank or host."""
    first_texts: dict[str, str] = {}
    for rank, facts in survey.rank_infos.items():
        for name, text in _describe_rank(facts).items():
            if name not in first_texts:
                console.print(Text(make_printable(f"{name:<9} {text}")))
            elif first_texts[name] != text:
                console.print(Text(make_printable(f"{name:<9} {text}  (rank {rank})")))
            first_texts.setdefault(name, text)
    for _, facts in iter_first_rank_of_hosts(survey):
        spaces = {"memory": facts.memory.get("host"), **facts.disk}
        texts = [f"{name} {_format_free_space(space)}" for name, space in spaces.items() if space]
        line = f"{'free':<9} {', '.join(texts)}  ({facts.host})"
        console.print(Text(make_printable(line)))


def _describe_rank(rank_info: RankInfo) -> dict[str, str]:
    settings = {
        name: v for name, v in rank_info.settings.items() if not name.startswith("TORCHELASTIC")
    }
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in rank_info.versions.items()),
        "settings": " ".join(f"{name}={value}" for name, value in settings.items()) or "none",
    }


def _format_free_space(space: FreeSpace) -> str:
    return f"{space.free / 2**30:.1f} of {format_gib(space.total)}"


def _build_link_table(survey: SurveyResult) -> Table:
    """Return a matrix of all pairs: latency above the diagonal, bandwidth below it."""
    ends = sorted({rank for link in survey.links for rank in (link.a, link.b)})
    endpoint_kind = "GPU" if survey.backend == "threads" else "rank"
    if len(ends) > MAX_MATRIX_RANKS:
        return _build_slowest_link_table(survey.links, endpoint_kind)
    table = Table(title="links: time of a small message above, bandwidth of a large one below")
    table.add_column("")
    for end in ends:
        table.add_column(f"{endpoint_kind} {end}", justify="right")
    links = {(link.a, link.b): link for link in survey.links}
    for row in ends:
        cells = []
        for column in ends:
            link = links.get((min(row, column), max(row, column)))
            cells.append("" if link is None else _format_link(link, show_latency=row < column))
        table.add_row(f"{endpoint_kind} {row}", *cells)
    return table


def _format_link(link: Link, show_latency: bool) -> str:
    if link.problem:
        return "[red]dead[/red]"
    return f"{link.latency * 1e6:.0f} us" if show_latency else format_bandwidth(link.bandwidth)


def _build_slowest_link_table(links: list[Link], endpoint_kind: str) -> Table:
    table = Table(title=f"the slowest {min(MAX_LISTED_LINKS, len(links))} of {len(links)} links")
    for heading in (f"{endpoint_kind}s", "small message", "bandwidth"):
        table.add_column(heading, justify="right")
    for link in sorted(links, key=lambda link: link.bandwidth)[:MAX_LISTED_LINKS]:
        table.add_row(
            f"{link.a}, {link.b}",
            _format_link(link, show_latency=True),
            _format_link(link, show_latency=False),
        )
    return table

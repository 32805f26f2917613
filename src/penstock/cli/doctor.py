"""`penstock doctor`: what there is to compute with, and what to fix."""

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

MAX_MATRIX_RANKS = 8  # ranks of which every link has a place in the table
MAX_LISTED_LINKS = 10  # links that are told of where there are more

_STYLES = {"broken": "bold red", "look": "yellow"}


def run(patience: float, as_json: bool) -> bool:
    """Look, and say so; can it run? Under a launcher, rank 0 speaks for all."""
    if not 0 < patience <= 600:
        raise ArgumentError(f"--patience takes seconds above 0, up to 600; not {patience:g}")

    def report(survey: SurveyResult) -> bool:
        given = advise(survey)
        if as_json:
            print(json.dumps(_as_dict(survey, given)))
        else:
            _print_report(survey, given)
        return not any(advice.broken for advice in given)

    if not is_launched():
        return report(survey_single_process())
    seat = get_rank_env()
    late = threading.Timer(
        compute_max_seconds(seat.world_size, patience), _exit_on_timeout, [seat.rank]
    )
    late.daemon = True
    late.start()
    try:
        sound = survey_all_ranks(seat, patience, report)
    except RunError as error:
        print(f"penstock: {error}", file=sys.stderr)
        sound = False
    _exit_process(sound)
    raise AssertionError


def _exit_on_timeout(rank: int) -> None:
    print(f"penstock: rank {rank} was left alone: the launcher's store is silent", file=sys.stderr)
    _exit_process(False)


def _exit_process(is_sound: bool) -> None:
    """At once: threads may be waiting for ever in a link that is dead."""
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


# ---- as text ------------------------------------------------------------------------------


def _print_report(survey: SurveyResult, advice_list: list[Advice]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(_build_rank_table(survey))
    _print_rank_info(console, survey)
    if survey.links:
        console.print(_build_link_table(survey))
    for advice in advice_list:
        text = Text(str(advice))
        text.stylize(_STYLES[str(advice).partition(":")[0]], 0, str(advice).index(":"))
        console.print(text)
    if not advice_list:
        console.print(Text("nothing to fix", "green"))


def _build_rank_table(survey: SurveyResult) -> Table:
    alone = survey.backend == "threads"
    title = f"{len(survey.rank_infos)} of {survey.world_size} ranks, over {survey.backend}"
    table = Table(title="one process" if alone else title)
    for heading in ("rank", "host", "device", "free memory", "threads"):
        table.add_column(heading, no_wrap=True)
    if not alone:
        table.add_column("interface", no_wrap=True)
        table.add_column("clock", justify="right", no_wrap=True)
    ahead = {0: 0.0} | {rank: seconds for rank, (seconds, _) in survey.clock_offsets.items()}
    for rank, facts in survey.rank_infos.items():
        memory = _format_free_space(next(iter(facts.memory.values()))) if facts.memory else "?"
        cells = [str(rank), facts.host, facts.device, memory, f"{facts.threads} of {facts.cores}"]
        if not alone:
            clock = f"{ahead[rank] * 1e3:+.1f} ms" if rank in ahead else "?"
            cells += [facts.interface or "?", clock]
        table.add_row(*cells)
    return table


def _print_rank_info(console: Console, survey: SurveyResult) -> None:
    """What is the same everywhere, once; what differs, with the rank or host that has it."""
    told: dict[str, str] = {}
    for rank, facts in survey.rank_infos.items():
        for name, text in _describe_rank(facts).items():
            if name not in told:
                console.print(f"{name:<9} {text}")
            elif told[name] != text:
                console.print(f"{name:<9} {text}  (rank {rank})")
            told.setdefault(name, text)
    for _, facts in iter_first_rank_of_hosts(survey):
        rooms = {"memory": facts.memory.get("host"), **facts.disk}
        texts = [f"{name} {_format_free_space(room)}" for name, room in rooms.items() if room]
        console.print(f"{'free':<9} {', '.join(texts)}  ({facts.host})")


def _describe_rank(rank_info: RankInfo) -> dict[str, str]:
    settings = {
        name: v for name, v in rank_info.settings.items() if not name.startswith("TORCHELASTIC")
    }
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in rank_info.versions.items()),
        "settings": " ".join(f"{name}={value}" for name, value in settings.items()) or "none",
    }


def _format_free_space(space: FreeSpace) -> str:
    return f"{space.free / 2**30:.1f} of {space.total / 2**30:.1f} GiB"


def _build_link_table(survey: SurveyResult) -> Table:
    """Every two ranks: the seconds of a message above the diagonal, its bandwidth below."""
    ends = sorted({rank for link in survey.links for rank in (link.a, link.b)})
    what = "GPU" if survey.backend == "threads" else "rank"
    if len(ends) > MAX_MATRIX_RANKS:
        return _build_slowest_link_table(survey.links, what)
    table = Table(title="links: time of a small message above, bandwidth of a large one below")
    table.add_column("")
    for end in ends:
        table.add_column(f"{what} {end}", justify="right")
    links = {(link.a, link.b): link for link in survey.links}
    for row in ends:
        cells = []
        for column in ends:
            link = links.get((min(row, column), max(row, column)))
            cells.append("" if link is None else _format_link(link, show_latency=row < column))
        table.add_row(f"{what} {row}", *cells)
    return table


def _format_link(link: Link, show_latency: bool) -> str:
    if link.problem:
        return "[red]dead[/red]"
    return f"{link.latency * 1e6:.0f} us" if show_latency else f"{link.bandwidth / 1e9:.2f} GB/s"


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

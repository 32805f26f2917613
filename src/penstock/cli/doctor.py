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

from penstock.doctor.advice import Advice, advise, first_of_each_host
from penstock.doctor.facts import Facts, Room, here
from penstock.doctor.links import Link
from penstock.doctor.visit import Found, alone, longest, together
from penstock.errors import ArgumentError, RunError
from penstock.launch.launched import is_launched

WIDEST = 8  # ranks of which every link has a place in the table
SLOWEST = 10  # links that are told of where there are more

_STYLES = {"broken": "bold red", "look": "yellow"}


def run(patience: float, as_json: bool) -> bool:
    """Look, and say so; can it run? Under a launcher, rank 0 speaks for all."""
    if not 0 < patience <= 600:
        raise ArgumentError(f"--patience takes seconds above 0, up to 600; not {patience:g}")

    def conclude(found: Found) -> bool:
        given = advise(found)
        if as_json:
            print(json.dumps(_as_dict(found, given)))
        else:
            _print(found, given)
        return not any(advice.broken for advice in given)

    if not is_launched():
        return conclude(alone())
    seat = here()
    late = threading.Timer(longest(seat.size, patience), _give_up, [seat.rank])
    late.daemon = True
    late.start()
    try:
        sound = together(seat, patience, conclude)
    except RunError as error:
        print(f"penstock: {error}", file=sys.stderr)
        sound = False
    _end(sound)
    raise AssertionError


def _give_up(rank: int) -> None:
    print(f"penstock: rank {rank} was left alone: the launcher's store is silent", file=sys.stderr)
    _end(False)


def _end(sound: bool) -> None:
    """At once: threads may be waiting for ever in a link that is dead."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if sound else 1)


def _as_dict(found: Found, given: Iterable[Advice]) -> dict[str, object]:
    return {
        "size": found.size,
        "backend": found.backend,
        "missing": found.missing,
        "ranks": [asdict(facts) for facts in found.facts.values()],
        "links": [asdict(link) for link in found.links],
        "clocks": {str(rank): ahead for rank, (ahead, _) in found.clocks.items()},
        "broken": [advice.text for advice in given if advice.broken],
        "look": [advice.text for advice in given if not advice.broken],
    }


# ---- as text ------------------------------------------------------------------------------


def _print(found: Found, given: list[Advice]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(_ranks(found))
    _print_shared(console, found)
    if found.links:
        console.print(_links(found))
    for advice in given:
        text = Text(str(advice))
        text.stylize(_STYLES[str(advice).partition(":")[0]], 0, str(advice).index(":"))
        console.print(text)
    if not given:
        console.print(Text("nothing to fix", "green"))


def _ranks(found: Found) -> Table:
    alone = found.backend == "threads"
    title = f"{len(found.facts)} of {found.size} ranks, over {found.backend}"
    table = Table(title="one process" if alone else title)
    for heading in ("rank", "host", "device", "free memory", "threads"):
        table.add_column(heading, no_wrap=True)
    if not alone:
        table.add_column("interface", no_wrap=True)
        table.add_column("clock", justify="right", no_wrap=True)
    ahead = {0: 0.0} | {rank: seconds for rank, (seconds, _) in found.clocks.items()}
    for rank, facts in found.facts.items():
        memory = _room(next(iter(facts.memory.values()))) if facts.memory else "?"
        cells = [str(rank), facts.host, facts.device, memory, f"{facts.threads} of {facts.cores}"]
        if not alone:
            clock = f"{ahead[rank] * 1e3:+.1f} ms" if rank in ahead else "?"
            cells += [facts.interface or "?", clock]
        table.add_row(*cells)
    return table


def _print_shared(console: Console, found: Found) -> None:
    """What is the same everywhere, once; what differs, with the rank or host that has it."""
    told: dict[str, str] = {}
    for rank, facts in found.facts.items():
        for name, text in _lines(facts).items():
            if name not in told:
                console.print(f"{name:<9} {text}")
            elif told[name] != text:
                console.print(f"{name:<9} {text}  (rank {rank})")
            told.setdefault(name, text)
    for _, facts in first_of_each_host(found):
        rooms = {"memory": facts.memory.get("host"), **facts.disk}
        texts = [f"{name} {_room(room)}" for name, room in rooms.items() if room]
        console.print(f"{'free':<9} {', '.join(texts)}  ({facts.host})")


def _lines(facts: Facts) -> dict[str, str]:
    settings = {
        name: v for name, v in facts.settings.items() if not name.startswith("TORCHELASTIC")
    }
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in facts.versions.items()),
        "settings": " ".join(f"{name}={value}" for name, value in settings.items()) or "none",
    }


def _room(room: Room) -> str:
    return f"{room.free / 2**30:.1f} of {room.total / 2**30:.1f} GiB"


def _links(found: Found) -> Table:
    """Every two ranks: the seconds of a message above the diagonal, its bandwidth below."""
    ends = sorted({rank for link in found.links for rank in (link.a, link.b)})
    what = "GPU" if found.backend == "threads" else "rank"
    if len(ends) > WIDEST:
        return _slowest(found.links, what)
    table = Table(title="links: time of a small message above, bandwidth of a large one below")
    table.add_column("")
    for end in ends:
        table.add_column(f"{what} {end}", justify="right")
    links = {(link.a, link.b): link for link in found.links}
    for row in ends:
        cells = []
        for column in ends:
            link = links.get((min(row, column), max(row, column)))
            cells.append("" if link is None else _cell(link, above=row < column))
        table.add_row(f"{what} {row}", *cells)
    return table


def _cell(link: Link, above: bool) -> str:
    if link.problem:
        return "[red]dead[/red]"
    return f"{link.latency * 1e6:.0f} us" if above else f"{link.bandwidth / 1e9:.2f} GB/s"


def _slowest(links: list[Link], what: str) -> Table:
    table = Table(title=f"the slowest {min(SLOWEST, len(links))} of {len(links)} links")
    for heading in (f"{what}s", "small message", "bandwidth"):
        table.add_column(heading, justify="right")
    for link in sorted(links, key=lambda link: link.bandwidth)[:SLOWEST]:
        table.add_row(f"{link.a}, {link.b}", _cell(link, above=True), _cell(link, above=False))
    return table

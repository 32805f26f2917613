"""Compare `fit` with the bubbles that the zero-bubble paper (arXiv 2401.10241) publishes.

    python benchmarks/zero_bubble.py                the table: 12 pipelines, five schedules; some
                                                    minutes on two cores
    python benchmarks/zero_bubble.py --curves 16    bubble against memory for 16, 24 or 32 ranks,
                                                    one stage a rank and two in a V
    python benchmarks/zero_bubble.py --curves 32 --workers 16 --every 5

`zero_bubble.json` has the published numbers and the costs behind them. All times are simulated, not
measured, so every run prints the same table. The objective is the period: the longest time from the
first to the last action of one rank.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from penstock import Cost, lower, schedules, simulate

PUBLISHED = json.loads(Path(__file__).with_suffix(".json").read_text())
EFFORT = 4_000_000  # actions that `fit` may place for one point; about half a minute
TOKENS = 1024  # of one sequence; the attention scores keep 5 bytes per head and pair of tokens


class Point(NamedTuple):
    """One published bubble: the pipeline, the schedule or cap, and what `fit` reaches."""

    ranks: int
    chunks: int
    name: str
    published: float
    digits: int  # how many the publication gives
    found: float

    @property
    def verdict(self) -> str:
        """Better, equal in the published digits, or worse."""
        difference = round(self.found, self.digits) - self.published
        unit = 10**-self.digits
        return "worse" if difference > unit / 2 else "equal" if difference > -unit / 2 else "better"


class Case(NamedTuple):
    """A pipeline to plan: one row of the paper, and a named schedule or a memory cap."""

    row: dict[str, Any]
    name: str
    published: float
    digits: int
    placement: tuple[int, ...]
    scale: int  # of the costs
    memory: float | None  # None: the named schedule


def cost_of(row: dict[str, Any], stages: int, scale: int) -> Cost:
    """Return the costs of a row; an activation has size 1."""
    kept = 32 * row["h"] / (34 * row["h"] + 5 * row["a"] * TOKENS)
    forward, inputs, weights = ((scale * row[name],) * stages for name in "FIW")
    even = (1.0,) * stages
    return Cost(forward, inputs, weights, even, row["send"], weight_activation=(kept,) * stages)


def solve(case: Case) -> Point:
    """Return the bubble of the case's schedule."""
    row, ranks, chunks = case.row, case.row["ranks"], case.row["chunks"]
    cost = cost_of(row, len(case.placement), case.scale)
    if case.memory is None:
        schedule = schedules.make(case.name, ranks, chunks)
    else:
        schedule = schedules.fit(
            case.placement, chunks, cost, case.memory, effort=EFFORT, objective="period"
        )
    work = chunks * sum(case.scale * row[name] for name in "FIW") * len(case.placement) / ranks
    found = 1 - work / simulate(lower(schedule), cost).period
    return Point(ranks, chunks, case.name, case.published, case.digits, found)


def table_cases() -> list[Case]:
    cases = []
    for row in PUBLISHED["table"]:
        placement = schedules.loop(row["ranks"], 1)
        caps = {"zb-1p": row["ranks"], "zb-2p": 2 * row["ranks"]}
        cases += [
            Case(row, name, bubble, 4, placement, 1, caps.get(name))
            for name, bubble in row["bubble"].items()
        ]
    return cases


def curve_cases(ranks: int) -> list[Case]:
    cases = []
    for row in PUBLISHED["curves"]:
        if row["ranks"] != ranks:
            continue
        for kind, placement, scale in (
            ("zb", schedules.loop(ranks, 1), 2),
            ("zb_v", schedules.vee(ranks), 1),
        ):
            per_rank = len(placement) // ranks
            cases += [
                Case(row, f"{kind} {cap}p", bubble, 6, placement, scale, per_rank * cap * ranks)
                for cap, bubble in zip(row["cap"], row[kind], strict=True)
            ]
    return cases


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--curves", type=int, choices=(16, 24, 32), metavar="RANKS")
    parser.add_argument("--every", type=int, default=1, help="only every so many cases")
    parser.add_argument("--workers", type=int, help="processes; by default one per core")
    options = parser.parse_args(arguments)
    cases = curve_cases(options.curves) if options.curves else table_cases()
    points = []
    print("ranks  chunks  schedule        published     found")
    with ProcessPoolExecutor(options.workers) as pool:
        for point in pool.map(solve, cases[:: options.every]):
            points.append(point)
            print(
                f"{point.ranks:5}  {point.chunks:6}  {point.name:12}  {point.published:11.6f}  "
                f"{point.found:8.6f}  {point.verdict}",
                flush=True,
            )
    verdicts = [point.verdict for point in points]
    counts = {verdict: verdicts.count(verdict) for verdict in ("better", "equal", "worse")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if counts["worse"]:
        worst = max(points, key=lambda point: point.found - point.published)
        print(
            f"worst: {worst.name} of {worst.ranks} ranks and {worst.chunks} micro-batches, "
            f"{worst.found:.6f} for {worst.published:.6f}"
        )
    return 1 if counts["worse"] else 0


if __name__ == "__main__":
    sys.exit(main())

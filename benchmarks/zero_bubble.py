"""Compare `fit` with the bubbles that the zero-bubble paper (arXiv 2401.10241) publishes.

    python benchmarks/zero_bubble.py                 everything; half an hour on two cores
    python benchmarks/zero_bubble.py --table         the table: 12 pipelines, five schedules
    python benchmarks/zero_bubble.py --curves 16 24  bubble against memory for 16, 24 or 32 ranks,
                                                     one stage a rank and two in a V
    python benchmarks/zero_bubble.py --effort 10000000
                                                     search longer for each point

`zero_bubble.json` has the published numbers and the costs behind them. All times are simulated, not
measured, so every run prints the same table. The objective is the period: the longest time from the
first to the last action of one rank. The search for a point of a curve begins with the schedules of
the points before it: what fits under a cap also fits under a larger one. Points are printed to
stderr as they are found, and to stdout in order. The exit status is 1 if any is worse than
published.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from penstock import Cost, lower, schedules, simulate
from penstock.schedules.ir import Schedule

PUBLISHED = json.loads(Path(__file__).with_suffix(".json").read_text())
RANKS = (16, 24, 32)  # of the curves
EFFORT = 3_000_000  # actions that `fit` may place for one point: ten seconds
TOKENS = 1024  # of one sequence; the attention scores keep 5 bytes per head and pair of tokens


class Case(NamedTuple):
    """One published bubble, of a named schedule or of the best one under a memory cap."""

    name: str
    published: float
    memory: float | None  # None: the named schedule


class Pipeline(NamedTuple):
    """The published bubbles of one pipeline, by rising cap."""

    row: dict[str, Any]
    placement: tuple[int, ...]
    scale: int  # of the costs
    digits: int  # how many are published
    cases: tuple[Case, ...]
    effort: int = EFFORT

    @property
    def actions(self) -> int:
        """The number of actions of one schedule."""
        return 3 * len(self.placement) * int(self.row["chunks"])

    @property
    def cost(self) -> Cost:
        """The costs of the stages; an activation has size 1."""
        row, stages = self.row, len(self.placement)
        kept = 32 * row["h"] / (34 * row["h"] + 5 * row["a"] * TOKENS)
        forward, inputs, weights = ((self.scale * row[name],) * stages for name in "FIW")
        even = (1.0,) * stages
        return Cost(forward, inputs, weights, even, row["send"], weight_activation=(kept,) * stages)


class Point(NamedTuple):
    """A published bubble, and what `fit` reaches."""

    ranks: int
    chunks: int
    case: Case
    digits: int
    found: float

    @property
    def verdict(self) -> str:
        """Better, equal in the published digits, or worse."""
        difference = round(self.found, self.digits) - self.case.published
        unit = 10**-self.digits
        return "worse" if difference > unit / 2 else "equal" if difference > -unit / 2 else "better"

    def __str__(self) -> str:
        return (
            f"{self.ranks:5}  {self.chunks:6}  {self.case.name:12}  {self.case.published:11.6f}  "
            f"{self.found:8.6f}  {self.verdict}"
        )


def solve(pipeline: Pipeline) -> list[Point]:
    """Return the bubbles that are reached."""
    row, placement, cost = pipeline.row, pipeline.placement, pipeline.cost
    ranks, chunks = row["ranks"], row["chunks"]
    work = chunks * pipeline.scale * sum(row[name] for name in "FIW") * len(placement) / ranks
    effort = pipeline.effort
    points = []
    best: tuple[Schedule, ...] = ()
    for case in pipeline.cases:
        if case.memory is None:
            schedule = schedules.make(case.name, ranks, chunks)
        else:
            schedule = schedules.fit(
                placement, chunks, cost, case.memory, effort=effort, objective="period", start=best
            )
            best = (schedule,)
        found = 1 - work / simulate(lower(schedule), cost).period
        points.append(Point(ranks, chunks, case, pipeline.digits, found))
        if case.memory is not None:
            print(f"... {points[-1]}", file=sys.stderr, flush=True)
    return points


def table() -> list[Pipeline]:
    pipelines = []
    for row in PUBLISHED["table"]:
        caps = {"zb-1p": row["ranks"], "zb-2p": 2 * row["ranks"]}
        cases = (Case(name, bubble, caps.get(name)) for name, bubble in row["bubble"].items())
        pipelines.append(Pipeline(row, schedules.loop(row["ranks"], 1), 1, 4, tuple(cases)))
    return pipelines


def curves(ranks: int) -> list[Pipeline]:
    pipelines = []
    for row in PUBLISHED["curves"]:
        if row["ranks"] != ranks:
            continue
        for kind, placement, scale in (
            ("zb", schedules.loop(ranks, 1), 2),
            ("zb_v", schedules.vee(ranks), 1),
        ):
            activations = len(placement)  # of one micro-batch per rank
            cases = (
                Case(f"{kind} {cap}p", bubble, cap * activations)
                for cap, bubble in zip(row["cap"], row[kind], strict=True)
            )
            pipelines.append(Pipeline(row, placement, scale, 6, tuple(cases)))
    return pipelines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="only the table")
    parser.add_argument("--curves", type=int, choices=RANKS, nargs="+", metavar="RANKS")
    parser.add_argument("--effort", type=int, default=EFFORT, help="of fit, for one point")
    parser.add_argument("--workers", type=int, help="processes; by default one per core")
    options = parser.parse_args(arguments)
    everything = not options.table and not options.curves
    pipelines = table() if options.table or everything else []
    for ranks in RANKS if everything else options.curves or ():
        pipelines += curves(ranks)
    pipelines = [pipeline._replace(effort=options.effort) for pipeline in pipelines]

    began = perf_counter()
    points: list[Point] = []
    print("ranks  chunks  schedule        published     found")
    with ProcessPoolExecutor(options.workers) as pool:
        # The largest ones begin first, so that no process is left with one of them in the end.
        by_size = sorted(pipelines, key=lambda pipeline: -pipeline.actions)
        results = {id(pipeline): pool.submit(solve, pipeline) for pipeline in by_size}
        for pipeline in pipelines:
            new = results[id(pipeline)].result()
            points += new
            print(*new, sep="\n", flush=True)
    verdicts = [point.verdict for point in points]
    counts = {verdict: verdicts.count(verdict) for verdict in ("better", "equal", "worse")}
    seconds = perf_counter() - began
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()), end="")
    print(f", after {seconds:.0f} s")
    if counts["worse"]:
        worst = max(points, key=lambda point: point.found - point.case.published)
        print(
            f"worst: {worst.case.name} of {worst.ranks} ranks and {worst.chunks} micro-batches, "
            f"{worst.found:.6f} for {worst.case.published:.6f}"
        )
    return 1 if counts["worse"] else 0


if __name__ == "__main__":
    sys.exit(main())

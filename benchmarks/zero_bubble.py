"""Compare `fit` with the bubbles that the zero-bubble paper (arXiv 2401.10241) publishes.

    python benchmarks/zero_bubble.py                 everything; five minutes on 14 cores
    python benchmarks/zero_bubble.py --table         the table: 12 pipelines, five schedules
    python benchmarks/zero_bubble.py --curves 16 24  bubble against memory for 16, 24 or 32 ranks,
                                                     one stage a rank and two in a V
    python benchmarks/zero_bubble.py --points 60:80  some of all points, by their numbers
    python benchmarks/zero_bubble.py --save found.jsonl
                                                     write every result there; go on where a run
                                                     with the same file was stopped

`zero_bubble.json` has the published numbers and the costs behind them. All times are simulated, not
measured, so every run prints the same table. The objective is the period: the longest time from the
first to the last action of one rank. What fits under a cap also fits under a larger one, so a point
takes the schedule of an earlier point of its curve if that is faster than its own. The first search
of a point is short. If it ends neither below the published bubble nor at the lower bound, the next
one has ten times its effort; the last one, with ten times more, is only for points that are worse
than published. Results are printed to stderr as they are found, and to stdout in order. The exit
status is 1 if any is worse than published.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from penstock import Cost, lower, schedules, simulate
from penstock.schedules.bound import schedule_bound
from penstock.schedules.ir import StageGraph

PUBLISHED = json.loads(Path(__file__).with_suffix(".json").read_text())
RANKS = (16, 24, 32)  # of the curves
EFFORT = 3_000_000  # actions that `fit` may place for one point: ten to twenty seconds
FIRST_EFFORT = 300_000  # of the first search of a point
TOKENS = 1024  # of one sequence; the attention scores keep 5 bytes per head and pair of tokens


class Point(NamedTuple):
    """One published bubble, of a named schedule or of the best one under a memory cap."""

    row: dict[str, Any]
    placement: tuple[int, ...]
    scale: int  # of the costs
    digits: int  # how many are published
    name: str
    published: float
    memory: float | None  # None: the named schedule

    @property
    def key(self) -> str:
        """The name of the point in a file of results."""
        return f"{self.row['ranks']} {self.row['chunks']} {self.name}"

    @property
    def curve(self) -> tuple[int, int, tuple[int, ...], int]:
        """The points whose schedules can be compared: they differ in memory only."""
        return self.row["ranks"], self.row["chunks"], self.placement, self.scale

    @property
    def cost(self) -> Cost:
        """The costs of the stages; an activation has size 1."""
        row, stages = self.row, len(self.placement)
        kept = 32 * row["h"] / (34 * row["h"] + 5 * row["a"] * TOKENS)
        forward, inputs, weights = ((self.scale * row[name],) * stages for name in "FIW")
        even = (1.0,) * stages
        return Cost(forward, inputs, weights, even, row["send"], weight_activation=(kept,) * stages)

    @property
    def work(self) -> float:
        """The seconds that each rank computes."""
        row, stages_per_rank = self.row, len(self.placement) / self.row["ranks"]
        return float(row["chunks"] * self.scale * sum(row[op] for op in "FIW") * stages_per_rank)

    @property
    def actions(self) -> int:
        """The number of actions of one schedule."""
        return 3 * len(self.placement) * int(self.row["chunks"])

    def bound(self) -> float:
        """Return a period that no schedule can beat."""
        stages = len(self.placement)
        caps = [inf if self.memory is None else self.memory] * self.row["ranks"]
        chain, whole = StageGraph.chain(stages), [False] * stages
        arguments = (self.cost, chain, self.placement, self.row["chunks"], whole, caps)
        return schedule_bound(*arguments, "period")


class Result(NamedTuple):
    """The period that `fit` reaches at a point."""

    point: Point
    period: float

    @property
    def bubble(self) -> float:
        """The part of the period in which a rank is idle."""
        return 1 - self.point.work / self.period

    @property
    def verdict(self) -> str:
        """Better, equal in the published digits, or worse."""
        difference = round(self.bubble, self.point.digits) - self.point.published
        unit = 10**-self.point.digits
        return "worse" if difference > unit / 2 else "equal" if difference > -unit / 2 else "better"

    @property
    def is_settled(self) -> bool:
        """Whether a longer search has no purpose."""
        at_bound = self.period <= self.point.bound() * (1 + 1e-9)
        return self.point.memory is None or self.verdict == "better" or at_bound

    def __str__(self) -> str:
        row = self.point.row
        return (
            f"{row['ranks']:5}  {row['chunks']:6}  {self.point.name:12}  "
            f"{self.point.published:11.6f}  {self.bubble:8.6f}  {self.verdict}"
        )


def solve(point: Point, effort: int) -> Result:
    """Return the period of the named schedule, or of the fastest one that `fit` finds."""
    ranks, chunks, cost = point.row["ranks"], point.row["chunks"], point.cost
    if point.memory is None:
        schedule = schedules.make(point.name, ranks, chunks)
    else:
        schedule = schedules.fit(
            point.placement, chunks, cost, point.memory, effort=effort, objective="period"
        )
    return Result(point, simulate(lower(schedule), cost).period)


def table() -> Iterator[Point]:
    """Yield the points of the table: five schedules of each pipeline."""
    for row in PUBLISHED["table"]:
        caps = {"zb-1p": row["ranks"], "zb-2p": 2 * row["ranks"]}
        for name, bubble in row["bubble"].items():
            placement = schedules.loop(row["ranks"], 1)
            yield Point(row, placement, 1, 4, name, bubble, caps.get(name))


def curves(ranks: int) -> Iterator[Point]:
    """Yield the points of the curves, each by rising cap."""
    for row in PUBLISHED["curves"]:
        if row["ranks"] != ranks:
            continue
        for kind, placement, scale in (
            ("zb", schedules.loop(ranks, 1), 2),
            ("zb_v", schedules.vee(ranks), 1),
        ):
            activations = len(placement)  # of one micro-batch per rank
            for cap, bubble in zip(row["cap"], row[kind], strict=True):
                name = f"{kind} {cap}p"
                yield Point(row, placement, scale, 6, name, bubble, cap * activations)


# ---- running --------------------------------------------------------------------------------


class Results:
    """The shortest period so far at each point, and the effort of the search for it."""

    def __init__(self, points: Sequence[Point], file: Path | None) -> None:
        self._points, self._file = points, file
        self._periods: dict[str, float] = {}
        self._efforts: dict[str, int] = {}
        if file and file.exists():
            for line in file.read_text().splitlines():
                entry = json.loads(line)
                self._add(entry["point"], entry["period"], entry["effort"])

    def _add(self, key: str, period: float, effort: int) -> None:
        self._periods[key] = min(period, self._periods.get(key, inf))
        self._efforts[key] = max(effort, self._efforts.get(key, 0))

    def add(self, result: Result, effort: int) -> None:
        """Keep a result, and write it to the file."""
        key = result.point.key
        self._add(key, result.period, effort)
        if self._file:
            entry = {"point": key, "period": result.period, "effort": effort}
            with self._file.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def open_points(self, effort: int) -> list[Point]:
        """Return the points that are worth a search with this effort."""
        found = {result.point.key: result for result in self.results()}
        return [
            point
            for point in self._points
            if self._efforts.get(point.key, 0) < effort
            and not (point.key in found and found[point.key].is_settled)
        ]

    def results(self) -> Iterator[Result]:
        """Yield the results, each at least as good as those of its curve with less memory."""
        best: dict[Any, float] = {}
        for point in self._points:
            period = self._periods.get(point.key, inf)
            if point.memory is not None:
                period = best[point.curve] = min(period, best.get(point.curve, inf))
            if period < inf:
                yield Result(point, period)


def search(results: Results, effort: int, workers: int | None) -> None:
    """Run the searches of all points that are open, with ever more effort."""
    efforts = [effort]
    while efforts[0] > FIRST_EFFORT:
        efforts.insert(0, efforts[0] // 10)
    with ProcessPoolExecutor(workers) as pool:
        for effort in efforts:
            _run(pool, results, results.open_points(effort), effort)
        worse = {result.point.key for result in results.results() if result.verdict == "worse"}
        points = results.open_points(10 * effort)
        _run(pool, results, [point for point in points if point.key in worse], 10 * effort)


def _run(pool: Executor, results: Results, points: Sequence[Point], effort: int) -> None:
    # The largest ones begin first, so that no process is left with one of them in the end.
    by_size = sorted(points, key=lambda point: -point.actions)
    for future in as_completed([pool.submit(solve, point, effort) for point in by_size]):
        results.add(future.result(), effort)
        print(f"... {future.result()}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="only the table")
    parser.add_argument("--curves", type=int, choices=RANKS, nargs="+", metavar="RANKS")
    parser.add_argument("--points", metavar="FIRST:END", help="some of these, by number from 0")
    parser.add_argument("--effort", type=int, default=EFFORT, help="of fit, for one point")
    parser.add_argument("--workers", type=int, help="processes; by default one per core")
    parser.add_argument("--save", type=Path, metavar="FILE", help="of results, to go on later")
    options = parser.parse_args(arguments)
    everything = not options.table and not options.curves
    points = [*table()] if options.table or everything else []
    for ranks in RANKS if everything else options.curves or ():
        points += curves(ranks)
    if options.points:
        first, _, end = options.points.partition(":")
        points = points[int(first or 0) : int(end) if end else None]

    began = perf_counter()
    results = Results(points, options.save)
    search(results, options.effort, options.workers)
    print("ranks  chunks  schedule        published     found")
    found = [*results.results()]
    print(*found, sep="\n")
    verdicts = [result.verdict for result in found]
    counts = {verdict: verdicts.count(verdict) for verdict in ("better", "equal", "worse")}
    seconds = perf_counter() - began
    reached = counts["better"] + counts["equal"]
    print(
        f"{len(found)} points: {reached} at or below the published bubble, {counts['better']} of "
        f"them strictly below; {counts['worse']} worse; {seconds:.0f} s"
    )
    if counts["worse"]:
        worst = max(found, key=lambda result: result.bubble - result.point.published)
        print(f"worst: {worst}")
    return 1 if counts["worse"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare `fit` with every named schedule of the same placement, under the peak of that schedule.

    python benchmarks/fit.py            2 to 8 ranks, with one to four times as many chunks:
                                        about half an hour on two cores
    python benchmarks/fit.py --quick    a third of the points

All makespans are simulated, not timed, so every run prints the same table.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import NamedTuple

from penstock import Cost, lower, schedules, simulate

PLACEMENTS = {
    "one stage a rank": ("naive", "gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"),
    "two, in a loop": ("interleaved", "looped-bfs", "interleaved-zb"),
    "two, in a V": ("zb-v", "v-half", "v-min", "dualpipe-v"),
}
COSTS = ("F = I = W = 1, messages free", "messages take 0.1 F", "uneven stages")


class Point(NamedTuple):
    """Makespans of one size: the named schedule, `fit` under its peak, and the lower bound."""

    costs: str
    placement: str
    name: str
    ranks: int
    chunks: int
    named: float
    fit: float
    bound: float


def costs_for(kind: str, placement: tuple[int, ...]) -> Cost:
    even = Cost.even(placement, send=0.1 if kind == COSTS[1] else 0.0)
    if kind != COSTS[2]:
        return even
    rng = random.Random(len(placement))
    return even.scaled([rng.uniform(0.5, 1.5) for _ in placement])


def points(kind: str, ranks: int, chunks: int) -> Iterator[Point]:
    for group, names in PLACEMENTS.items():
        makespans: dict[float, float] = {}
        for name in names:
            per_rank = 1 if group.startswith("one") else 2
            schedule = schedules.make(name, ranks, chunks, per_rank)
            placement = schedule.placement
            cost = costs_for(kind, placement)
            timeline = simulate(lower(schedule), cost)
            cap = max(timeline.peak)
            if cap not in makespans:
                best = schedules.fit(placement, chunks, cost, cap)
                makespans[cap] = simulate(lower(best), cost).makespan
            bound = schedules.lower_bound(placement, chunks, cost)
            yield Point(kind, group, name, ranks, chunks, timeline.makespan, makespans[cap], bound)


def measure(job: tuple[str, int, int]) -> list[Point]:
    return list(points(*job))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    stride = 3 if parser.parse_args().quick else 1
    jobs = [
        (kind, ranks, chunks)
        for kind, ranks in product(COSTS, range(2, 9))
        for chunks in range(ranks, 4 * ranks + 1, stride)
    ]
    measured: list[Point] = []
    with ProcessPoolExecutor() as pool:
        for done, batch in enumerate(pool.map(measure, jobs), start=1):
            measured += batch
            print(f"\r{done} of {len(jobs)} sizes", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print_table(measured)


def print_table(measured: list[Point]) -> None:
    print("| costs | placement | under the peak of | points | better | equal | worse | gain |")
    print("|---|---|---|---|---|---|---|---|")
    for kind, (group, names) in product(COSTS, PLACEMENTS.items()):
        for name in names:
            rows = [p for p in measured if (p.costs, p.placement, p.name) == (kind, group, name)]
            better = sum(p.fit < p.named - 1e-9 for p in rows)
            worse = sum(p.fit > p.named + 1e-9 for p in rows)
            gain = sum(p.named / p.fit - 1 for p in rows) / len(rows)
            equal = len(rows) - better - worse
            cells = [kind, group, name, len(rows), better, equal, worse, f"{gain:.1%}"]
            print("| " + " | ".join(map(str, cells)) + " |")
    print("\nHow far fit is above the lower bound (which knows no memory), mean and worst:\n")
    print("| costs | placement | under the peak of | mean | worst | at the bound |")
    print("|---|---|---|---|---|---|")
    for kind, (group, names) in product(COSTS, PLACEMENTS.items()):
        for name in names:
            rows = [p for p in measured if (p.costs, p.placement, p.name) == (kind, group, name)]
            gaps = [p.fit / p.bound - 1 for p in rows]
            at_bound = sum(gap < 1e-9 for gap in gaps)
            figures = [
                f"{sum(gaps) / len(gaps):.1%}",
                f"{max(gaps):.1%}",
                f"{at_bound} of {len(rows)}",
            ]
            print("| " + " | ".join([kind, group, name, *figures]) + " |")
    ties = [p for p in measured if abs(p.fit - p.named) < 1e-9 and p.costs != COSTS[0]]
    short = [p for p in ties if p.fit > p.bound + 1e-9]
    print(
        f"\nEqual though costs differ: {len(ties)} points, {len(ties) - len(short)} at the bound."
    )
    for p in short:
        print(f"  {p.costs}: {p.name}, {p.ranks} ranks, {p.chunks} chunks: {p.fit:g} > {p.bound:g}")


if __name__ == "__main__":
    main()

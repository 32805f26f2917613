"""Measure how long it takes to play a schedule: about n log n, for any number of ranks.

    python benchmarks/play.py

Each time is the median of three runs in one process. A program has about three times the actions
of its schedule, because every message adds a send and a receive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median
from time import perf_counter

from penstock import Program, Schedule, Sends, lower, play, schedules

SIZES = [(8, 32), (16, 64), (32, 128), (64, 256), (128, 704), (1000, 64)]


def seconds(work: Callable[[], object], runs: int = 3) -> float:
    times = []
    for _ in range(runs):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return median(times)


def played(work: Schedule | Program, sends: Sends = Sends.BUFFERED) -> float:
    return seconds(lambda: deque(play(work, sends=sends), maxlen=0))


def main() -> None:
    print("interleaved, two stages a rank\n")
    print("| ranks | chunks | computes | play | lower | actions | play | rendezvous | us/action |")
    print("|---|---|---|---|---|---|---|---|---|")
    for ranks, chunks in SIZES:
        schedule = schedules.interleaved(ranks, chunks, 2)
        program = lower(schedule)
        computes = sum(map(len, schedule.lanes))
        actions = sum(map(len, program.lanes))
        buffered = played(program)
        cells = [
            ranks,
            chunks,
            f"{computes:,}",
            f"{played(schedule):.2f} s",
            f"{seconds(lambda s=schedule: lower(s)):.2f} s",  # type: ignore[misc]
            f"{actions:,}",
            f"{buffered:.2f} s",
            f"{played(program, Sends.RENDEZVOUS):.2f} s",
            f"{1e6 * buffered / actions:.1f}",
        ]
        print("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()

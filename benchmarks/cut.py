"""Measure how long the exact search for the best cut takes, for hard and for easy problems.

    python benchmarks/cut.py

Each row is one search, in seconds of CPU time. `slowest` is the time of the slowest stage relative
to the total work divided by the total speed, a bound for every cut. `one of 300` has random costs
below 1, and one unit of cost 300, which is more than the even share of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from time import process_time

from penstock.schedules.balance import (
    CutProblem,
    DeviceCapacity,
    UnitLoad,
    UnitOutput,
    find_best_cut,
)

SIZES = [(100, 8), (300, 16), (1000, 64)]
Seconds = Callable[[Random, int], float]
COSTS: dict[str, Seconds] = {
    "equal": lambda random, index: 1.0,
    "random": lambda random, index: random.random(),
    "long tail": lambda random, index: random.lognormvariate(0, 1),
    "one of 300": lambda random, index: 300.0 if index == 40 else random.random(),
}
SPEEDS: dict[str, Callable[[Random, int], float]] = {
    "alike": lambda random, rank: 1.0,
    "own speeds": lambda random, rank: random.uniform(0.5, 1.5),
}


def task(
    units: int, stages: int, costs: str, speeds: str, messages: bool, tight: bool
) -> CutProblem:
    """Build a problem of units that hold 10 bytes each, with a skip from every fifth unit."""
    random = Random(units)
    loads = [
        UnitLoad(COSTS[costs](random, index), static_bytes=10, activation_bytes=1)
        for index in range(units)
    ]
    values = [UnitOutput(index, (index + 1,), random.randint(1, 9)) for index in range(units - 1)]
    for index in range(0, units - 60, 5):
        values.append(UnitOutput(index, (index + random.randint(2, 50), index + 55), 4))
    # with the in-flight micro-batches of 1f1b, this is slightly more than the units need
    room = 11.5 * units / stages * (1 + 0.1 * stages / 2) if tight else float("inf")
    devices = [DeviceCapacity(SPEEDS[speeds](random, rank), room) for rank in range(stages)]
    return CutProblem(
        tuple(loads), tuple(devices), tuple(values), seconds_per_byte=0.02 if messages else 0.0
    )


def slowest(problem: CutProblem, counts: tuple[int, ...]) -> float:
    """Return the seconds of the slowest stage, with its messages."""
    seconds, start = [], 0
    for rank, count in zip(problem.placement, counts, strict=True):
        end = start + count
        moved = sum(
            value.size
            for value in problem.values
            if (start <= value.src < end and max(value.dsts) >= end)
            or (value.src < start and any(start <= dst < end for dst in value.dsts))
        )
        compute = sum(unit.seconds for unit in problem.units[start:end])
        seconds.append(compute / problem.devices[rank].speed + problem.seconds_per_byte * moved)
        start = end
    return max(seconds)


def cases() -> Iterator[tuple[int, int, str, str, bool, bool]]:
    for units, stages in SIZES[:-1]:
        yield units, stages, "random", "own speeds", True, True
    for costs in COSTS:
        for speeds in SPEEDS:
            for messages, tight in ((False, False), (True, False), (True, True)):
                yield *SIZES[-1], costs, speeds, messages, tight


def main() -> None:
    print("| units | stages | costs | devices | messages | memory | seconds | slowest |")
    print("|---|---|---|---|---|---|---|---|")
    for units, stages, costs, speeds, messages, tight in cases():
        problem = task(units, stages, costs, speeds, messages, tight)
        start = process_time()
        counts = find_best_cut(problem)
        seconds = process_time() - start
        ideal = sum(u.seconds for u in problem.units) / sum(d.speed for d in problem.devices)
        cells = [
            f"{units:,}",
            stages,
            costs,
            speeds,
            "cost" if messages else "free",
            "tight" if tight else "enough",
            f"{seconds:.2f}",
            f"{slowest(problem, counts) / ideal:.3f}",
        ]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()

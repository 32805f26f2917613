"""How long the exact search for the best cut takes, for hard and for easy tasks.

    python benchmarks/cut.py

Each row is one search. `slowest` is the slowest stage against the work divided by speed, which no
cut can beat; `devices` with four speeds have them in turn, and with own ones each its own.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from time import perf_counter

from penstock.balance import Device, Task, Unit, Value, best_cut

SIZES = [(100, 8), (300, 16), (1000, 64)]
Seconds = Callable[[Random, int], float]
COSTS: dict[str, Seconds] = {
    "equal": lambda random, at: 1.0,
    "random": lambda random, at: random.random(),
    "long tail": lambda random, at: random.lognormvariate(0, 1),
    "one of 300": lambda random, at: 300.0 if at == 40 else random.random(),
}
SPEEDS: dict[str, Callable[[Random, int], float]] = {
    "alike": lambda random, rank: 1.0,
    "four speeds": lambda random, rank: 1.0 + rank % 4 / 3,
    "own speeds": lambda random, rank: random.uniform(0.5, 1.5),
}


def task(units: int, stages: int, costs: str, speeds: str, messages: bool, tight: bool) -> Task:
    """Units that keep 1 byte each; a skip from every fifth unit to another, up to 50 further."""
    random = Random(units)
    made = [Unit(COSTS[costs](random, at), holds=1.0, keeps=0.1) for at in range(units)]
    values = [Value(at, (at + 1,), random.randint(1, 9)) for at in range(units - 1)]
    for at in range(0, units - 60, 5):
        values.append(Value(at, (at + random.randint(2, 50), at + 55), 4))
    # with as many in flight as 1f1b has, this is little more than the units need
    room = 1.15 * units / stages * (1 + 0.1 * stages / 2) if tight else float("inf")
    devices = [Device(SPEEDS[speeds](random, rank), room) for rank in range(stages)]
    return Task(tuple(made), tuple(devices), tuple(values), second_a_byte=0.02 if messages else 0.0)


def main() -> None:
    print("| units | stages | costs | devices | messages | memory | seconds | slowest |")
    print("|---|---|---|---|---|---|---|---|")
    for units, stages in SIZES:
        for costs in COSTS:
            for speeds in SPEEDS:
                for messages, tight in ((False, False), (True, False), (True, True)):
                    asked = task(units, stages, costs, speeds, messages, tight)
                    start = perf_counter()
                    cut = best_cut(asked)
                    seconds = perf_counter() - start
                    ideal = sum(u.seconds for u in asked.units) / sum(
                        d.speed for d in asked.devices
                    )
                    cells = [
                        f"{units:,}",
                        stages,
                        costs,
                        speeds,
                        "cost" if messages else "free",
                        "tight" if tight else "enough",
                        f"{seconds:.2f}",
                        f"{cut.bottleneck / ideal:.3f}",
                    ]
                    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()

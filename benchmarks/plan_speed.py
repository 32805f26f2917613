"""Measure how long it takes to find a plan, with the certificate.

    python benchmarks/plan_speed.py                     every case
    python benchmarks/plan_speed.py 48-blocks --solver 10 --repeat 3
    python benchmarks/plan_speed.py --solver 0          without the solver alone

The models are profiles in numbers, so no device is needed. "48-blocks" is a GPT on 8 devices with
up to two stages each, also under a cap that binds. "1000-devices" plans 2,000 units, with a
simulation of every action at the end. Each time is the least of its repetitions. On a busy machine,
compare the CPU seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from time import perf_counter, process_time
from typing import NamedTuple

from penstock.planning import (
    DeviceProfile,
    LinkProfile,
    PerRows,
    Plan,
    Profile,
    UnitProfile,
    UnitSeconds,
    ValueProfile,
    search_plan,
)
from penstock.planning.solver import has_solver


class Case(NamedTuple):
    """A problem of the planner, by its sizes."""

    blocks: int
    devices: int
    rows: int
    memory: str | None = None

    def profile(self) -> Profile:
        """Return a model of equal blocks, with an embedding before and a head after them."""
        units = [
            _unit("embedding", 0.1, 65e6, 4e6),
            *(_unit(f"h.{index}", 1.0, 25e6, 80e6) for index in range(self.blocks)),
            _unit("head", 2.0, 65e6, 130e6),
        ]
        return Profile(
            f"{self.blocks} blocks",
            rows=self.rows,
            units=tuple(units),
            values=tuple(
                ValueProfile(index, (index + 1,), PerRows(0, 4e6))
                for index in range(len(units) - 1)
            ),
            devices=(DeviceProfile("gpu", memory=80e9),) * self.devices,
            link=LinkProfile(latency=2e-5, bandwidth=20e9),
            optimizer_factor=2,
        )


def _unit(name: str, share: float, parameters: float, activation: float) -> UnitProfile:
    """Return a unit that takes so many times the milliseconds of a block."""
    forward, weight = PerRows(1e-4 * share, 1e-3 * share), PerRows(1e-4 * share, 0.8e-3 * share)
    return UnitProfile(
        name,
        {"gpu": UnitSeconds(F=forward, I=forward, W=weight)},
        parameter_bytes=parameters,
        gradient_bytes=parameters,
        activation=PerRows(0, activation),
    )


CASES = {
    "48-blocks": Case(48, 8, 64),
    "48-blocks-3GB": Case(48, 8, 64, "3GB"),
    "1000-devices": Case(1998, 1000, 8000),
}


class Result(NamedTuple):
    """The seconds of one search, and of a simulation of all actions of its plan."""

    plan: Plan
    wall: float
    cpu: float
    simulation: float


def measure(case: Case, solver_seconds: float, simulates: bool) -> Result:
    """Plan once, and simulate the plan."""
    profile = case.profile()
    wall, cpu = perf_counter(), process_time()
    plan = search_plan(profile, memory=case.memory, solver_seconds=solver_seconds)
    str(plan)  # makes the forecast
    planned = process_time()
    if simulates:
        plan.timeline  # noqa: B018
    now = process_time()
    return Result(plan, perf_counter() - wall, now - cpu, now - planned)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--solver", type=float, nargs="*", default=[0.0, 10.0], help="seconds")
    parser.add_argument("--repeat", type=int, default=1)
    given = parser.parse_args(argv)
    unknown = [name for name in given.cases if name not in CASES]
    if unknown:
        parser.error(f"there is no case {', '.join(unknown)}: choose from {', '.join(CASES)}")
    print("| case | solver | wall | CPU | of it simulation | step | gap | choice |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in given.cases:
        case = CASES[name]
        for solver in given.solver:
            if solver and not has_solver():
                print(f"| {name} | {solver:g} s | ortools is not installed | | | | | |")
                continue
            results = [measure(case, solver, case.devices >= 100) for _ in range(given.repeat)]
            plan = results[0].plan
            cells = [
                name,
                f"{solver:g} s" if solver else "no",
                f"{min(result.wall for result in results):.1f} s",
                f"{min(result.cpu for result in results):.1f} s",
                f"{min(result.simulation for result in results):.1f} s",
                f"{plan.seconds:.4f} s",
                f"{plan.gap:.1%}",
                f"{plan.schedule_name}, {len(plan.cut)} stages, {plan.chunks} chunks",
            ]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

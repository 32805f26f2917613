"""Compare plans with brute force over the same space, on random small problems.

    python -m tests.planning.brute_force                 200 problems, half an hour on one core
    python -m tests.planning.brute_force --first 7 --cases 1

Brute force tries every cut, placement, number of micro-batches, runtime, set of recomputed stages
and schedule, one by one, in the simulator. It knows one bound: what the busiest rank computes in
longer than the best step so far is left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise, product
from random import Random
from statistics import median
from time import perf_counter

from penstock.errors import ArgumentError
from penstock.planning import Plan, Profile
from penstock.planning.search import _FIT_ATTEMPTS, fit_with_recomputation, search_plan
from penstock.planning.stage_costs import CostTable, StageCosts
from penstock.schedules.cost import fits_in_memory
from penstock.schedules.families import FAMILIES, loop, make, vee
from penstock.schedules.ir import Schedule
from penstock.schedules.lowering import recompute
from penstock.schedules.simulator import play
from tests.planning.problems import random_profile, with_memory


def brute_force(profile: Profile) -> float:
    """Return the seconds of the fastest plan, or infinity if none fits."""
    ranks, units = len(profile.devices), len(profile.units)
    best = float("inf")
    late: list[tuple[float, tuple[int, ...], int, StageCosts, tuple[bool, ...], list[float]]] = []
    for runtime, chunks in product(profile.runtimes, range(1, profile.rows + 1)):
        if -(-profile.rows // -(-profile.rows // chunks)) != chunks:
            continue  # the batch yields fewer micro-batches
        table = CostTable(profile, chunks, runtime)
        for placement in {loop(ranks, 1), loop(ranks, 2), vee(ranks)}:
            if len(placement) > units:
                continue
            for cut in _cuts(units, len(placement)):
                costs = table.stage_costs(cut, placement)
                free = list(costs.free_bytes([device.memory for device in profile.devices]))
                for flags in product((False, True), repeat=len(placement)):
                    work = _work(costs, placement, flags)
                    if chunks * work >= best:
                        continue
                    for schedule in _schedules(placement, chunks):
                        best = min(best, _time(schedule, costs, flags, free))
                    late.append((work, placement, chunks, costs, flags, free))
    for work, placement, chunks, costs, flags, free in late:
        if chunks * work < best:
            effort = _FIT_ATTEMPTS * 4 * len(placement) * chunks
            found = fit_with_recomputation(
                costs, placement, chunks, flags, free, "makespan", effort
            )
            if found:
                best = min(best, _time(found, costs, flags, free))
    return best


def _cuts(units: int, stages: int) -> Iterator[tuple[int, ...]]:
    for ends in combinations(range(1, units), stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *ends, units)))


@cache
def _schedules(placement: tuple[int, ...], chunks: int) -> set[Schedule]:
    schedules = set()
    ranks = max(placement) + 1
    for name, family in FAMILIES.items():
        per_rank = len(placement) // ranks
        if family.trains and (family.free or family.stages_per_rank == per_rank):
            schedule = make(name, ranks, chunks, per_rank)
            if schedule.placement == placement:
                schedules.add(schedule)
    return schedules


def _work(costs: StageCosts, placement: Sequence[int], flags: Sequence[bool]) -> float:
    cost, work = costs.cost, [0.0] * (max(placement) + 1)
    for stage, rank in enumerate(placement):
        work[rank] += cost.F[stage] + cost.I[stage] + cost.W[stage] + flags[stage] * cost.R[stage]
    return max(work)


def _time(
    schedule: Schedule, costs: StageCosts, flags: Sequence[bool], free: Sequence[float]
) -> float:
    full = recompute(schedule, lambda stage, microbatch: flags[stage])
    fits = map(fits_in_memory, full.lanes, [costs.cost] * len(free), free)
    return max(s.end for s in play(full, costs.graph, costs.cost)) if all(fits) else float("inf")


def make_problem(seed: int) -> Profile:
    """Return a random profile whose memory cap binds in most cases."""
    profile = random_profile(seed)
    draw = Random(-seed)
    plan = search_plan(profile, solver_seconds=0)
    return with_memory(profile, max(plan.forecast.peak) * draw.uniform(0.6, 1.02))


def solve(profile: Profile, solver_seconds: float = 0.0) -> Plan | None:
    try:
        return search_plan(profile, solver_seconds=solver_seconds)
    except ArgumentError as error:
        if "no plan fits" not in str(error):
            raise
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--solver-seconds", type=float, default=0.0)
    options = parser.parse_args()
    counts = {"equal": 0, "better": 0, "worse": 0, "nothing fits": 0}
    gaps, seconds = [], []
    for seed in range(options.first, options.first + options.cases):
        profile = make_problem(seed)
        start = perf_counter()
        plan = solve(profile, options.solver_seconds)
        seconds.append(perf_counter() - start)
        best = brute_force(profile)
        if plan is None:
            verdict = "nothing fits" if best == float("inf") else "worse"
        else:
            ratio = plan.seconds / best
            verdict = "worse" if ratio > 1 + 1e-9 else "better" if ratio < 1 - 1e-9 else "equal"
            assert plan.certificate
            assert plan.certificate.bound <= best * (1 + 1e-9), (seed, plan.certificate, best)
            gaps.append(plan.seconds / plan.certificate.schedule_bound - 1)
        counts[verdict] += 1
        print(f"seed {seed}: {verdict}, {plan!r}, brute force {best:.6g}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if gaps:
        print(
            f"gap to the bound for the plan's cut and memory: median {median(gaps):.2%}, "
            f"largest {max(gaps):.2%}; the search took {median(seconds):.2f} s in the median"
        )
    return 1 if counts["worse"] else 0


if __name__ == "__main__":
    sys.exit(main())

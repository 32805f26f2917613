"""Compare plans with brute force over the same space, on random small problems.

    python -m tests.planning.brute_force --workers 2     200 problems, minutes
    python -m tests.planning.brute_force --first 7 --cases 1

Brute force tries every cut, placement, number of micro-batches, runtime, set of recomputed stages
and schedule, one by one, in the simulator. It has a bound of its own, `_least_seconds`, and goes
through the choices in the order of these: once the bound exceeds the best step, no other choice can
be better.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import combinations, pairwise, product, repeat
from random import Random
from statistics import median
from time import perf_counter
from typing import NamedTuple

from penstock.errors import ArgumentError
from penstock.planning import Plan, Profile
from penstock.planning.recomputed_fit import fit_with_recomputation
from penstock.planning.search import _FIT_ATTEMPTS, search_plan
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
    caps = [device.memory for device in profile.devices]
    best = float("inf")
    candidates = []
    for runtime, chunks in product(profile.runtimes, range(1, profile.rows + 1)):
        if -(-profile.rows // -(-profile.rows // chunks)) != chunks:
            continue  # the batch yields fewer micro-batches
        table = CostTable(profile, chunks, runtime)
        for placement in {loop(ranks, 1), loop(ranks, 2), vee(ranks)}:
            if len(placement) > units:
                continue
            for cut in _cuts(units, len(placement)):
                costs = table.stage_costs(cut, placement)
                free = costs.free_bytes(caps)
                for flags in product((False, True), repeat=len(placement)):
                    least = _least_seconds(costs, placement, chunks, flags)
                    candidates.append((least, placement, chunks, costs, flags, free))
    candidates.sort(key=lambda candidate: candidate[0])
    for least, placement, chunks, costs, flags, free in candidates:
        if least >= best:
            break
        for schedule in _schedules(placement, chunks):
            best = min(best, _time(schedule, costs, flags, free))
    for least, placement, chunks, costs, flags, free in candidates:
        if least >= best:
            break
        effort = _FIT_ATTEMPTS * 4 * len(placement) * chunks
        found = fit_with_recomputation(costs, placement, chunks, flags, free, "makespan", effort)
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


def _least_seconds(
    costs: StageCosts, placement: Sequence[int], chunks: int, flags: Sequence[bool]
) -> float:
    """Return what the busiest rank takes, from the first forward that reaches it.

    The first micro-batch goes through the stages before, and the gradient of the last one goes
    back through them.
    """
    cost, ranks = costs.cost, max(placement) + 1
    first_stage = [placement.index(rank) for rank in range(ranks)]
    way, back = [0.0] * len(placement), [0.0] * len(placement)
    for stage in range(1, len(placement)):
        before = stage - 1
        crosses = placement[before] != placement[stage]
        way[stage] = way[before] + cost.F[before]
        back[stage] = back[before] + cost.I[before]
        if crosses:
            way[stage] += cost.send_seconds(before, stage)
            back[stage] += cost.send_seconds(stage, before)
    ordered, work = [0.0] * ranks, [0.0] * ranks
    for stage, rank in enumerate(placement):
        ordered[rank] += cost.F[stage] + cost.I[stage] + flags[stage] * cost.R[stage]
        work[rank] += cost.W[stage]
    return max(
        way[first_stage[rank]]
        + chunks * ordered[rank]
        + max(chunks * work[rank], back[first_stage[rank]])
        for rank in range(ranks)
    )


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


class Comparison(NamedTuple):
    """A plan against brute force: the outcome, the gaps of its certificate, seconds to search."""

    outcome: str
    text: str
    gaps: tuple[float, ...]
    seconds: float


def compare(seed: int, solver_seconds: float) -> Comparison:
    """Plan one problem, and solve it by brute force."""
    profile = make_problem(seed)
    start = perf_counter()
    plan = solve(profile, solver_seconds)
    seconds = perf_counter() - start
    best = brute_force(profile)
    gaps: tuple[float, ...] = ()
    if plan is None:
        outcome = "nothing fits" if best == float("inf") else "worse"
    else:
        ratio = plan.seconds / best
        outcome = "worse" if ratio > 1 + 1e-9 else "better" if ratio < 1 - 1e-9 else "equal"
        certificate = plan.certificate
        assert certificate
        assert certificate.bound <= best * (1 + 1e-9), (seed, certificate, best)
        gaps = tuple(
            plan.seconds / bound - 1 for bound in (certificate.bound, certificate.schedule_bound)
        )
    text = f"seed {seed}: {outcome}, {plan!r}, brute force {best:.6g}"
    return Comparison(outcome, text, gaps, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--solver-seconds", type=float, default=0.0)
    options = parser.parse_args()
    counts = {"equal": 0, "better": 0, "worse": 0, "nothing fits": 0}
    results = []
    seeds = range(options.first, options.first + options.cases)
    with ProcessPoolExecutor(options.workers) as pool:
        for result in pool.map(compare, seeds, repeat(options.solver_seconds)):
            counts[result.outcome] += 1
            results.append(result)
            print(result.text, flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    planned = [result for result in results if result.gaps]
    for index, what in enumerate(("the searched space", "the plan's cut and memory")):
        gaps = [result.gaps[index] for result in planned]
        if gaps:
            print(f"gap to the bound of {what}: median {median(gaps):.2%}, most {max(gaps):.2%}")
    print(f"the search took {median(result.seconds for result in results):.2f} s in the median")
    return 1 if counts["worse"] else 0


if __name__ == "__main__":
    sys.exit(main())

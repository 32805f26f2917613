"""The best cut under the memory of each rank, and what to say if none fits.

Stages that share a rank share its memory, so what one may keep depends on the others. The search
is first let loose as if each had all of it. If the best cut is too much for a rank, then in every
cut that fits one of its stages keeps no more than in proportion to what is there: each such case
is searched, and the best of all is gone on with, until one fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from penstock.balance.search import CutCandidate, search_under_stage_memory
from penstock.balance.task import CutProblem, EvaluatedCut
from penstock.balance.whole import IntegerCutProblem
from penstock.errors import ArgumentError

_MAX_CASES = 256  # after so many, the stages of a rank get equal shares of its memory


def find_best_cut(problem: CutProblem) -> EvaluatedCut:
    """The cut whose slowest stage, its messages included, is as fast as it can be.

    Every rank has memory enough for its stages. Among equals the stages' seconds are as even as
    they can be (the least sum of squares), then their numbers of units, and then the larger stages
    come first. It is exact; only where ranks with several stages are so short of memory that
    hundreds of searches find no cut does each of their stages get an equal share of it.

    >>> from penstock.balance import Device, Unit
    >>> units = (Unit(seconds=1.0, holds=10),) * 6
    >>> best_cut(Task(units, (Device(speed=2.0), Device()))).counts
    (4, 2)
    >>> best_cut(Task(units, (Device(speed=2.0, memory=30), Device()))).counts
    (3, 3)
    """
    whole = IntegerCutProblem.from_problem(problem)
    found = _search_under_rank_memory(whole)
    if found is None:
        raise ArgumentError(_explain_infeasible(problem, whole))
    return problem.evaluate(found.counts)


def _search_under_rank_memory(problem: IntegerCutProblem) -> CutCandidate | None:
    rooms = tuple(problem.rank_memory[rank] for rank in problem.placement)
    seen = {rooms}
    cases: list[tuple[CutCandidate, tuple[int, ...]]] = []
    _push_candidate(cases, problem, rooms)
    while cases:
        found, rooms = heappop(cases)
        tight = list(_find_tighter_limits(problem, found.counts))
        if not tight:
            return found
        if len(seen) > _MAX_CASES:
            return search_under_stage_memory(
                problem, _equal_memory_shares(problem, problem.rank_memory)
            )
        for stage, most in tight:
            case = (*rooms[:stage], most, *rooms[stage + 1 :])
            if case not in seen:
                seen.add(case)
                _push_candidate(cases, problem, case)
    return None


def _push_candidate(
    cases: list[tuple[CutCandidate, tuple[int, ...]]],
    problem: IntegerCutProblem,
    stage_memory: tuple[int, ...],
) -> None:
    found = search_under_stage_memory(problem, stage_memory)
    if found is not None:
        heappush(cases, (found, stage_memory))


def _find_tighter_limits(
    problem: IntegerCutProblem, counts: Sequence[int]
) -> list[tuple[int, int]]:
    """For the first rank that is given too much: its stages, and what one of them may keep."""
    kept = _memory_by_stage(problem, counts)
    for rank, room in enumerate(problem.rank_memory):
        own = [stage for stage, at in enumerate(problem.placement) if at == rank]
        wanted = sum(kept[stage] for stage in own)
        if wanted > room:
            return [(stage, kept[stage] * room // wanted) for stage in own if kept[stage]]
    return []


def _memory_by_stage(problem: IntegerCutProblem, counts: Sequence[int]) -> list[int]:
    found, start = [], 0
    for sums, count in zip(problem.prefix_memory, counts, strict=True):
        found.append(sums[start + count] - sums[start])
        start += count
    return found


def _equal_memory_shares(problem: IntegerCutProblem, rank_memory: Sequence[int]) -> list[int]:
    return [rank_memory[rank] // problem.placement.count(rank) for rank in problem.placement]


def _explain_infeasible(problem: CutProblem, integer_problem: IntegerCutProblem) -> str:
    """What every rank would need more, if all got as much more, and who needs it."""
    low, high = 0, sum(sums[-1] for sums in integer_problem.prefix_memory) * integer_problem.stages
    while low < high:
        more = (low + high) // 2
        if integer_problem.is_feasible(
            _equal_memory_shares(
                integer_problem, [room + more for room in integer_problem.rank_memory]
            )
        ):
            high = more
        else:
            low = more + 1
    found = search_under_stage_memory(
        integer_problem,
        _equal_memory_shares(integer_problem, [room + low for room in integer_problem.rank_memory]),
    )
    assert found is not None
    cut = problem.evaluate(found.counts)
    lacks = []
    for rank, device in enumerate(problem.devices):
        own = [stage for stage, at in enumerate(problem.placement) if at == rank]
        wanted = sum(cut.loads[stage].memory for stage in own)
        if wanted > device.memory:
            stages = f"stage{'s' * (len(own) > 1)} {' and '.join(map(str, own))}"
            lacks.append(
                f"{stages} would need {_format_bytes(wanted)} on rank {rank}, which has "
                f"{_format_bytes(device.memory)}: {_format_bytes(wanted - device.memory)} too much"
            )
    return (
        f"no cut of {len(problem.units)} units into {problem.stages} stages fits the memory. The nearest "
        f"is {list(cut.counts)}, and there {'; '.join(lacks)}. Take more stages or devices with "
        "more memory, cut the batch into more chunks, recompute (checkpoint='always'), or take a "
        "schedule with fewer micro-batches in flight"
    )


def _format_bytes(number: float) -> str:
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            return f"{number / 1024**power:.2f} {name}"
    return f"{number:g} bytes"

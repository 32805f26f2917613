"""Cuts and recomputed stages that may be faster than those that are known."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from math import prod

from penstock.planning.bound import schedule_bound
from penstock.planning.search_space import MAX_FLAG_SETS, Group, Point
from penstock.planning.stage_costs import StageCosts
from penstock.schedules.cost import exceeds

# How many actions may be timed to move units, a fifth of a microsecond each.
_MOVED_ACTIONS = 20_000_000
_BOUNDED_STAGES = 10_000  # how many stages are looked at for a cut with a low bound


def find_possible_flags(group: Group, costs: StageCosts, best: float) -> list[tuple[bool, ...]]:
    """Return the sets of recomputed stages with which a schedule might be faster than `best`.

    On each rank one micro-batch has to fit, and its work has to end in time. If the group is not
    exhausted, only two are tried: as little and as much as possible on each rank.
    """
    if group.space.recomputed:
        return [group.space.recomputed]
    cost, chunks, stages = costs.cost, group.chunks, range(group.stages)
    by_rank: list[list[frozenset[int]]] = []
    for mine, cap in zip(group.stages_by_rank, costs.free_bytes(group.space.memory), strict=True):
        sets = []
        # If all micro-batches fit at once, a schedule without recomputation is faster than the same
        # one with it. (`fit` may happen to find a better one with it. That is not searched.)
        fits_all = not exceeds(chunks * sum(cost.activation[s] for s in mine), cap)
        for size in range(1 if fits_all else len(mine) + 1):
            for subset in combinations(mine, size):
                again = sum((cost.R or cost.F)[stage] for stage in subset)
                work = again + sum(cost.F[s] + cost.I[s] + cost.W[s] for s in mine)
                # Some moment holds one micro-batch: one stage active, the others at their least.
                least = max(
                    cost.activation[s]
                    + sum(
                        cost.stage_input[o] if o in subset else cost.activation[o]
                        for o in mine
                        if o < s
                    )
                    for s in mine
                )
                if chunks * work < best and not exceeds(least, cap):
                    sets.append(frozenset(subset))
        by_rank.append(sets)
    if prod(map(len, by_rank)) > MAX_FLAG_SETS:
        group.is_exhausted = False
    if group.is_exhausted:
        choices = [frozenset[int]().union(*sets) for sets in product(*by_rank)]
    elif not all(by_rank):
        choices = []
    else:
        choices = [
            frozenset[int]().union(*(pick(sets, key=len) for sets in by_rank))
            for pick in (min, max)
        ]
    return list(dict.fromkeys(tuple(s in chosen for s in stages) for chosen in choices))


def move_units(point: Point) -> Iterator[Point]:
    """Yield ever faster points: units move between stages as long as that helps.

    A unit may move over several stages: each of them passes one on.
    """
    group, improving = point.group, not point.group.space.cut
    budget = _MOVED_ACTIONS // group.actions
    pairs = _list_moves(group.stages)
    while improving:
        improving = False
        for src, dst in pairs:
            if point.cut[src] == 1:
                continue
            budget -= 1
            if budget < 0:
                return
            counts = list(point.cut)
            counts[src] -= 1
            counts[dst] += 1
            timed = min(
                group.time(tuple(counts), point.seconds, point.name),
                key=lambda p: p.seconds,
                default=None,
            )
            if timed and timed.seconds < point.seconds * (1 - 1e-9):
                point, improving = timed, True
                yield timed


def find_low_bound_cut(
    group: Group, cut: tuple[int, ...], recomputed: tuple[bool, ...]
) -> tuple[int, ...]:
    """Return a cut with a lower bound: units move as long as that lowers it."""

    def bound_of(cut: tuple[int, ...]) -> float:
        costs = group.table.stage_costs(cut, group.placement)
        free = costs.free_bytes(group.space.memory)
        return schedule_bound(
            costs, group.placement, group.chunks, recomputed, free, group.space.objective
        )

    budget, lowest, improving = _BOUNDED_STAGES // group.stages, bound_of(cut), True
    while improving:
        improving = False
        for src, dst in _list_moves(group.stages):
            if cut[src] == 1:
                continue
            budget -= 1
            if budget < 0:
                return cut
            counts = list(cut)
            counts[src] -= 1
            counts[dst] += 1
            bound = bound_of(tuple(counts))
            if bound < lowest * (1 - 1e-9):
                lowest, cut, improving = bound, tuple(counts), True
    return cut


def _list_moves(stages: int) -> list[tuple[int, int]]:
    """Return the pairs of stages between which a unit may move, near ones first."""
    furthest = stages if stages <= 16 else 3
    return [
        (src, dst)
        for distance in range(1, furthest + 1)
        for src in range(stages)
        for dst in (src - distance, src + distance)
        if 0 <= dst < stages
    ]

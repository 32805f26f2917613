"""Let `fit` make a schedule with recomputations, which it does not know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.planning.stage_costs import StageCosts
from penstock.schedules.bound import Objective
from penstock.schedules.cost import exceeds
from penstock.schedules.families.common import group_stages
from penstock.schedules.fit import fit
from penstock.schedules.ir import Schedule


def fit_with_recomputation(
    costs: StageCosts,
    placement: tuple[int, ...],
    chunks: int,
    recomputed: Sequence[bool],
    free: Sequence[float],
    objective: Objective,
    effort: int,
) -> Schedule | None:
    """Return the schedule that `fit` finds, if these stages are recomputed.

    `fit` knows no R. A recomputed stage therefore looks to it like one with a longer I and a
    smaller activation, and its rank keeps some memory back for the moment of the recomputation.
    """
    cost = costs.cost
    kept_sizes = cost.kept_sizes
    sizes = [
        max(cost.stage_input[s], kept_sizes[s]) if recomputed[s] else cost.activation[s]
        for s in range(len(placement))
    ]
    caps = list(free)
    for rank, mine in enumerate(group_stages(placement)):
        caps[rank] -= max(cost.activation[s] - sizes[s] for s in mine)
    again = [
        seconds if flag else 0.0 for seconds, flag in zip(cost.R or cost.F, recomputed, strict=True)
    ]
    disguised = replace(
        cost,
        I=tuple(map(sum, zip(cost.I, again, strict=True))),
        activation=tuple(sizes),
        weight_activation=kept_sizes,
    )
    shares = [0.0] * len(caps)
    for stage, rank in enumerate(placement):
        shares[rank] += sizes[stage]
    if any(map(exceeds, shares, caps)):
        return None
    return fit(placement, chunks, disguised, caps, costs.graph, effort, objective)

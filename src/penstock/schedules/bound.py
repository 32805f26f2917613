"""Lower bounds: seconds that no schedule of given stages can beat, whatever the order of actions.

The bound is the largest of these, over all ranks:

    work     when the first micro-batch can be there, and then all actions of the rank
    drain    the same without the weight gradients, and then the way of the last gradient to the
             first stage
    fill     no input gradient can start before a micro-batch has been through the later stages and
             back; until then there is only memory for so many forwards
    both     the same, and after the last forward: its gradient is back only after so many seconds,
             and memory holds only so many micro-batches that are left to do until then
    memory   every micro-batch occupies its activations for its way through the later stages and
             back; these areas of bytes x seconds have to fit next to each other below the cap
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Literal

from penstock.schedules.cost import Cost, exceeds
from penstock.schedules.families.common import group_stages
from penstock.schedules.ir import StageGraph

Objective = Literal["makespan", "period"]


def schedule_bound(
    cost: Cost,
    graph: StageGraph,
    placement: Sequence[int],
    chunks: int,
    recomputed: Sequence[bool],
    free: Sequence[float],
    objective: Objective = "makespan",
) -> float:
    """Return seconds that no schedule of these stages can beat.

    Args:
        cost: The costs of the stages.
        graph: Which stage feeds which.
        placement: The rank of each stage.
        chunks: The number of micro-batches.
        recomputed: Whether each stage recomputes its activations.
        free: The bytes that each rank has for activations.
        objective: The makespan of one step, or the period of steps that follow each other.
    """
    stages = range(len(placement))
    R = cost.R or cost.F

    def hop(src: int, dst: int) -> float:
        return cost.send_seconds(src, dst) if placement[src] != placement[dst] else 0.0

    # Of a single micro-batch, with nothing in its way. down: from the start of the step to its F.
    # trip: from the start of its F to the end of its I. tail: from the end of its I to the end of
    # the step.
    down, tail, trip = ([0.0] * len(placement) for _ in range(3))
    for s in stages:
        down[s] = max((down[b] + cost.F[b] + hop(b, s) for b in graph.before(s)), default=0.0)
        tail[s] = max([cost.W[s], *(hop(s, b) + cost.I[b] + tail[b] for b in graph.before(s))])
    for s in reversed(stages):
        away = max((hop(s, a) + trip[a] + hop(a, s) for a in graph.after(s)), default=0.0)
        trip[s] = cost.F[s] + max(away, R[s] if recomputed[s] else 0.0) + cost.I[s]
    bound = 0.0
    if objective == "makespan":
        bound = max(down[s] + trip[s] + tail[s] for s in stages)
    for mine, cap in zip(group_stages(placement, len(free)), free, strict=True):
        if not mine:
            continue
        again = {s: R[s] if recomputed[s] else 0.0 for s in mine}
        ordered = chunks * sum(cost.F[s] + cost.I[s] + again[s] for s in mine)
        work = ordered + chunks * sum(cost.W[s] for s in mine)
        wait = min(trip[s] - cost.I[s] for s in mine)
        early = _most_seconds_before_first_gradient(cost, mine, chunks, recomputed, cap)
        fill = max(0.0, wait - early)
        after = min(trip[s] - cost.F[s] + cost.W[s] for s in mine)
        late = _most_seconds_after_last_forward(cost, mine, chunks, recomputed, cap)
        drain = max(0.0, after - late)
        spans = [
            work + fill,
            work + drain,
            _fill_area(cost, mine, chunks, recomputed, trip, cap),
        ]
        if exceeds(chunks * sum(_least_size(cost, s, recomputed[s]) for s in mine), cap):
            # Some gradient comes before the last forward, so the two are not at the same time.
            spans.append(work + fill + drain)
        if objective == "period":
            bound = max(bound, *spans)
            continue
        start = min(down[s] for s in mine)
        first_gradient = min(down[s] + trip[s] - cost.I[s] for s in mine)
        bound = max(
            bound,
            *(start + span for span in spans),
            first_gradient + work - early,
            start + ordered + min(tail[s] for s in mine),
        )
    return bound


def _most_seconds_before_first_gradient(
    cost: Cost,
    stages: Sequence[int],
    chunks: int,
    recomputed: Sequence[bool],
    cap: float,
) -> float:
    """Return the most work that a rank can do before its first input gradient.

    Until then nothing is freed, so only so many Fs and Rs fit in memory.
    """
    items = []
    for s in stages:
        size = cost.activation[s]
        if recomputed[s]:
            input_size = cost.stage_input[s]
            items += [(cost.F[s], input_size), ((cost.R or cost.F)[s], size - input_size)]
        else:
            items.append((cost.F[s], size))
    return _most_seconds_in_memory(items, chunks, cap)


def _most_seconds_after_last_forward(
    cost: Cost, stages: Sequence[int], chunks: int, recomputed: Sequence[bool], cap: float
) -> float:
    """Return the most work that a rank can have left after its last forward.

    Whatever is left to do has something in memory: activations before their I, less before their W.
    """
    items = []
    for s in stages:
        again = (cost.R or cost.F)[s] if recomputed[s] else 0.0
        items.append((again + cost.I[s] + cost.W[s], _least_size(cost, s, recomputed[s])))
        items.append((cost.W[s], cost.kept_sizes[s]))
    return _most_seconds_in_memory(items, chunks, cap)


def _least_size(cost: Cost, stage: int, is_recomputed: bool) -> float:
    """Return the least that a micro-batch keeps between its F and I."""
    return cost.stage_input[stage] if is_recomputed else cost.activation[stage]


def _most_seconds_in_memory(items: list[tuple[float, float]], chunks: int, cap: float) -> float:
    """Return the most seconds of items (seconds, size) that fit, with so many micro-batches each.

    A fraction of an item counts, too: this makes the sum easy and keeps it an upper bound.
    """
    seconds = 0.0
    items = sorted(items, key=lambda item: item[0] / item[1] if item[1] else inf, reverse=True)
    for length, size in items:
        count = min(chunks, cap / size) if size else chunks
        seconds += count * length
        cap -= count * size
    return seconds


def _fill_area(
    cost: Cost,
    stages: Sequence[int],
    chunks: int,
    recomputed: Sequence[bool],
    trip: Sequence[float],
    cap: float,
) -> float:
    """Return the seconds in which the bytes x seconds of all micro-batches fit below the cap."""
    area = 0.0
    for s in stages:
        whole, end = cost.activation[s], cost.kept_sizes[s] * cost.W[s]
        if recomputed[s]:
            redo = (cost.R or cost.F)[s] + cost.I[s]
            area += cost.stage_input[s] * (trip[s] - redo) + whole * redo + end
        else:
            area += whole * trip[s] + end
    return chunks * area / cap if cap > 0 else inf

"""The exact solver of one period: how a pipeline with many micro-batches repeats itself.

In the middle of a long step, every rank does the same for each micro-batch, one period later. So
the middle is described by the start of each op of each stage for one micro-batch, whatever the
number of micro-batches. Of each rank, the F of its first stage is the origin:

    start = start of the rank + turns x period + offset        0 <= offset < period

    rank       offsets of two ops do not overlap: either is first in the period
    messages   a start is not before the end of each input, plus its message
    memory     when an F or R starts, so many micro-batches are between two ops of a stage:
               the difference of their turns, plus 1 or 0 by their order in the period

All of these are linear, and there are only a few ops per rank, so CP-SAT (ortools) is quick. A
period can be no shorter than the work of the busiest rank on one micro-batch. At this period, the
solver finds the pattern that needs least memory, or proves that none fits.

`unroll_pattern` repeats a pattern for all micro-batches. Its fill and its drain follow the same
order, with everything as early as memory allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, inf, isinf
from typing import Any, NamedTuple

from penstock.planning.stage_costs import StageCosts
from penstock.schedules.bound import Objective
from penstock.schedules.cost import Cost, exceeds
from penstock.schedules.fit import measure_seconds
from penstock.schedules.ir import Compute, Op, Schedule, consumes, follows, produces
from penstock.schedules.priority_scheduler import (
    Pipeline,
    Starts,
    refill_weight_grads,
    schedule_by_priority,
)
from penstock.schedules.simulator import play

_MOST_TICKS = 2_000  # in a period: coarser is quicker to solve
_UNITS = 1_000_000  # in a cap
_MAX_OPS = 400  # above, the solver seldom ends in reasonable time
_PATIENCES = (0.0, 0.5, 1.0)  # in the mean seconds of a W
_ALLOWANCES = (0.0, 0.25, 0.5, 1.0)  # in parts of the idle time of a schedule


class Pattern(NamedTuple):
    """One micro-batch of a schedule that repeats itself.

    Attributes:
        period: Seconds from one micro-batch to the next.
        starts: When each op of each stage starts; the micro-batch is 0.
        peaks: The most bytes of activations that are alive on each rank.
        is_optimal: Whether no pattern with this period needs less memory, by the largest part of
            its cap that a rank uses.
    """

    period: float
    starts: Mapping[Compute, float]
    peaks: tuple[float, ...]
    is_optimal: bool


class PeriodResult(NamedTuple):
    """A pattern, if one was found, and whether it is proved that there is none."""

    pattern: Pattern | None
    is_infeasible: bool = False


def shortest_period(cost: Cost, placement: Sequence[int], recomputed: Sequence[bool] = ()) -> float:
    """Return the seconds of the busiest rank for one micro-batch."""
    loads = [0.0] * (max(placement) + 1)
    for stage, rank in enumerate(placement):
        loads[rank] += cost.F[stage] + cost.I[stage] + cost.W[stage]
        if recomputed and recomputed[stage]:
            loads[rank] += (cost.R or cost.F)[stage]
    return max(loads)


def solve_period(
    costs: StageCosts,
    placement: Sequence[int],
    recomputed: Sequence[bool],
    free: Sequence[float],
    seconds: float,
    period: float | None = None,
) -> PeriodResult:
    """Return the pattern with a given period that needs least memory.

    Args:
        costs: The costs of the stages.
        placement: The rank of each stage.
        recomputed: Whether each stage recomputes its activations.
        free: The bytes that each rank has for activations.
        seconds: How long the solver may search.
        period: The seconds from one micro-batch to the next; by default the shortest possible.

    Returns:
        The pattern. Without one, the result says whether it is proved that none fits. A pattern
        repeats every micro-batch: schedules that repeat only every second one are not searched.
    """
    cost, stages = costs.cost, range(len(placement))
    ops = [
        Compute(op, s, 0)
        for s in stages
        for op in (Op.F, *([Op.R] if recomputed[s] else []), Op.I, Op.W)
    ]
    if len(ops) > _MAX_OPS or seconds <= 0:
        return PeriodResult(None)
    from ortools.sat.python import cp_model

    period = period or shortest_period(cost, placement, recomputed)
    delays = {
        (m.src, m.dst): cost.send_seconds(m.src, m.dst)
        if placement[m.src] != placement[m.dst]
        else 0.0
        for a in ops
        for m in consumes(a, costs.graph)
    }
    ticks = _count_ticks([cost.seconds(a) for a in ops] + list(delays.values()), period)
    # Rounded down, the problem is never harder than the real one: a proof holds for that, too.
    lengths = {a: floor(cost.seconds(a) / period * ticks + 1e-9) for a in ops}
    model = cp_model.CpModel()
    # The way there and back, if every op waits for a whole period.
    way = sum(lengths.values()) + sum(delays.values()) / period * ticks
    most_turns = ceil(way / ticks) + len(ops)
    offsets: dict[Compute, Any] = {}
    turns: dict[Compute, Any] = {}
    begins = [model.new_int_var(0, most_turns * ticks, f"rank {rank}") for rank in range(len(free))]
    model.add(begins[placement[0]] == 0)
    by_rank = [[a for a in ops if placement[a.stage] == rank] for rank in range(len(free))]
    for mine in by_rank:
        for a in mine:
            is_origin = a == mine[0]
            offsets[a] = 0 if is_origin else model.new_int_var(0, ticks - lengths[a], f"in {a}")
            turns[a] = 0 if is_origin else model.new_int_var(0, most_turns, f"turn {a}")

    def start(a: Compute) -> Any:
        return begins[placement[a.stage]] + ticks * turns[a] + offsets[a]

    # Whether one op of a rank is before another in the period.
    precedes: dict[tuple[Compute, Compute], Any] = {}
    for mine in by_rank:
        for index, a in enumerate(mine):
            precedes[a, a] = 0
            for b in mine[index + 1 :]:
                is_first = model.new_bool_var(f"{a} before {b}") if index else 1
                precedes[a, b], precedes[b, a] = is_first, 1 - is_first
                if not index:  # the origin
                    model.add(offsets[b] >= lengths[a])
                    continue
                model.add(offsets[b] >= offsets[a] + lengths[a]).only_enforce_if(is_first)
                model.add(offsets[a] >= offsets[b] + lengths[b]).only_enforce_if(~is_first)
    producers = {message: a for a in ops for message in produces(a, costs.graph)}
    for a in ops:
        for earlier in follows(a):
            if earlier in lengths:
                model.add(start(a) >= start(earlier) + lengths[earlier])
        for message in consumes(a, costs.graph):
            source = producers[message]
            delay = floor(delays[message.src, message.dst] / period * ticks + 1e-9)
            model.add(start(a) >= start(source) + lengths[source] + delay)
    fullest = model.new_int_var(0, _UNITS, "part of a cap")
    bounded = [rank for rank, cap in enumerate(free) if not isinf(cap)]
    for rank in bounded:
        unit = free[rank] / _UNITS
        for moment in by_rank[rank]:
            if moment.op in (Op.F, Op.R):
                held = [
                    floor(size / unit)
                    * (turns[end] - turns[begin] + precedes[moment, end] - precedes[moment, begin])
                    for begin, end, size in _pieces(cost, by_rank[rank], moment)
                ]
                model.add(sum(held) <= fullest)
    if bounded:
        model.minimize(fullest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return PeriodResult(None, is_infeasible=status == cp_model.INFEASIBLE)
    turn = {a: solver.value(turns[a]) for a in ops}
    order = [sorted(mine, key=lambda a: (solver.value(offsets[a]), lengths[a])) for mine in by_rank]
    before = {
        (a, b): int(index < other)
        for mine in order
        for index, a in enumerate(mine)
        for other, b in enumerate(mine)
    }
    # With the real numbers. An edge: (earlier, later, seconds between the starts, periods less).
    edges = []
    for a in ops:
        sources = [(earlier, 0.0) for earlier in follows(a) if earlier in lengths]
        sources += [(producers[m], delays[m.src, m.dst]) for m in consumes(a, costs.graph)]
        edges += [(source, a, cost.seconds(source) + delay, 0) for source, delay in sources]
    for mine in order:
        for a, b in zip(mine, [*mine[1:], mine[0]], strict=True):
            edges.append((a, b, cost.seconds(a), turn[a] - turn[b] + (b == mine[0])))
    period, starts = _retime(ops, edges, period)
    pattern = Pattern(
        period,
        starts,
        tuple(_peak(cost, mine, turn, before) for mine in by_rank),
        is_optimal=status == cp_model.OPTIMAL,
    )
    return PeriodResult(pattern)


def _count_ticks(numbers: Sequence[float], period: float) -> int:
    """Return into how many ticks to divide a period: few if all numbers are whole ones then."""
    for ticks in range(1, _MOST_TICKS):
        parts = [number / period * ticks for number in numbers]
        if all(abs(part - round(part)) < 1e-9 * ticks for part in parts):
            return ticks
    return _MOST_TICKS


def _retime(
    ops: Sequence[Compute],
    edges: Sequence[tuple[Compute, Compute, float, int]],
    shortest: float,
) -> tuple[float, dict[Compute, float]]:
    """Return the shortest period in which the ops keep their order and turns, and their starts.

    The solver rounds seconds down, so the period can be somewhat longer than it thought.
    """

    def settle(period: float) -> dict[Compute, float] | None:
        """Return the earliest starts, or None if an op would wait for itself."""
        starts = dict.fromkeys(ops, 0.0)
        for _ in range(len(ops) + 1):
            is_settled = True
            for a, b, seconds, fewer in edges:
                start = starts[a] + seconds - fewer * period
                if start > starts[b] + 1e-9 * period:
                    starts[b], is_settled = start, False
            if is_settled:
                return starts
        return None

    starts = settle(shortest)
    if starts is not None:
        return shortest, starts
    low, high = shortest, 1.01 * shortest
    while (starts := settle(high)) is None:
        low, high = high, 2 * high - shortest
    for _ in range(30):
        middle = (low + high) / 2
        settled = settle(middle)
        low, high, starts = (middle, high, starts) if settled is None else (low, middle, settled)
    return high, starts


def _pieces(
    cost: Cost, ops: Sequence[Compute], moment: Compute
) -> list[tuple[Compute, Compute, float]]:
    """Return what the stages of a rank keep: (from the start or end of, to the end of, bytes).

    What begins or ends at the moment itself is alive in it.
    """
    pieces = []
    for forward in ops:
        if forward.op is not Op.F:
            continue
        s = forward.stage
        again, back, weight = (forward._replace(op=op) for op in (Op.R, Op.I, Op.W))
        if again in ops:
            pieces.append((forward, again, cost.stage_input[s]))
            forward = again
        pieces += [(forward, back, cost.activation[s]), (back, weight, cost.kept_sizes[s])]
    return pieces


def _peak(
    cost: Cost,
    ops: Sequence[Compute],
    turns: Mapping[Compute, int],
    precedes: Mapping[tuple[Compute, Compute], int],
) -> float:
    return max(
        sum(
            size * (turns[end] - turns[begin] + precedes[moment, end] - precedes[moment, begin])
            for begin, end, size in _pieces(cost, ops, moment)
        )
        for moment in ops
        if moment.op in (Op.F, Op.R)
    )


# ---- from a pattern to a schedule -----------------------------------------------------------


def repeat_pattern(pattern: Pattern, placement: Sequence[int], chunks: int) -> Schedule:
    """Return the schedule in which every micro-batch follows the pattern, without its Rs."""
    lanes = []
    for rank in range(max(placement) + 1):
        actions = [
            (start + microbatch * pattern.period, action._replace(microbatch=microbatch))
            for action, start in pattern.starts.items()
            if placement[action.stage] == rank and action.op is not Op.R
            for microbatch in range(chunks)
        ]
        lanes.append(tuple(action for _, action in sorted(actions)))
    return Schedule(tuple(placement), chunks, tuple(lanes))


def unroll_pattern(
    pattern: Pattern, pipeline: Pipeline, objective: Objective = "makespan"
) -> Schedule:
    """Return the fastest schedule of a pipeline whose middle follows the pattern.

    One candidate repeats the pattern as it is, others also place the Ws of that anew. In the last
    ones the pattern says what is more urgent, so the fill uses all of the memory: more forwards
    than in the pattern run before the first backward.
    """
    placement, chunks = pipeline.placement, pipeline.chunks
    schedule = repeat_pattern(pattern, placement, chunks)
    queues = [Compute(op, s, 0) for op in (Op.F, Op.I, Op.W) for s in range(pipeline.stages)]
    times = [
        [pattern.starts[action] + m * pattern.period for m in range(chunks)] for action in queues
    ]
    candidates: list[Starts | None] = []
    patience = sum(pipeline.cost.W) / pipeline.stages
    no_idle = [0.0] * pipeline.ranks
    for part in _PATIENCES:
        waits = part * patience
        candidates.append(schedule_by_priority(pipeline, times, waits, waits, None, no_idle, None))
    bubble = pipeline.measure(times, objective) - pipeline.work
    for basis in (times, *candidates):
        orders = pipeline.orders_by_start(basis, with_weight_grads=False) if basis else None
        for part in _ALLOWANCES if orders else ():
            assert orders is not None
            candidates.append(
                refill_weight_grads(pipeline, orders, [part * bubble] * pipeline.ranks)
            )
    best = inf
    if not any(map(exceeds, pattern.peaks, pipeline.caps)):
        spans = play(schedule, pipeline.graph, pipeline.cost)
        best = measure_seconds(list(spans), objective)
    for starts in candidates:
        if starts and pipeline.measure(starts, objective) < best:
            best, schedule = pipeline.measure(starts, objective), pipeline.schedule(starts)
    return schedule

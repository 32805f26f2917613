"""The exact solver: the best schedule of a cut, by constraint programming (CP-SAT of ortools).

Every action is an interval on its rank, intervals of one rank do not overlap, messages are delays,
and the activations of a rank are a cumulative resource. Each stage takes the micro-batches in
order, as all schedules but gpipe's backward do. With too many actions for that, `period_solver`
finds the best pattern of one micro-batch, which is then repeated. `solve_space_bound` is a smaller
problem: the cut with the lowest bound.

The solver counts in whole numbers. Seconds and bytes are rounded down and caps up, so the rounded
problem is never harder than the real one, and its bound holds for the real one. Its schedule is
timed and checked with the real numbers by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from math import ceil, floor, isinf
from typing import Any, NamedTuple

from penstock.planning.period_solver import repeat_pattern, solve_period, unroll_pattern
from penstock.planning.stage_costs import CostTable, StageCosts
from penstock.schedules.bound import Objective
from penstock.schedules.families.common import group_stages
from penstock.schedules.ir import Compute, Op, Schedule, consumes, follows, produces
from penstock.schedules.lowering import recompute
from penstock.schedules.priority_scheduler import Pipeline
from penstock.schedules.simulator import play

_TICKS = 1_000_000  # in the seconds of the schedule that is to be improved, and in a cap
_MAX_ACTIONS = 400  # above, the solver seldom finds or proves anything in reasonable time


class Solution(NamedTuple):
    """A schedule, if a better one was found, and seconds that no schedule can beat."""

    schedule: Schedule | None
    bound: float


def has_solver() -> bool:
    """Return whether ortools is installed."""
    return find_spec("ortools") is not None


def solve_schedule(
    costs: StageCosts,
    start: Schedule,
    recomputed: Sequence[bool],
    free: Sequence[float],
    objective: Objective,
    seconds: float,
) -> Solution:
    """Search for the best schedule of a cut, beginning with a good one.

    Args:
        costs: The costs of the stages.
        start: A schedule that fits. Its backwards may be whole or split.
        recomputed: Whether each stage recomputes its activations.
        free: The bytes that each rank has for activations.
        objective: What to minimize.
        seconds: How long the solver may search.

    Returns:
        The best schedule found, and a bound. If the problem is too large, the bound is 0 and the
        schedule repeats the best pattern of one micro-batch.
    """
    stages, chunks, cost = range(start.stages), start.chunks, costs.cost
    ops = {stage: [Op.F, *([Op.R] if recomputed[stage] else []), Op.I, Op.W] for stage in stages}
    actions = [Compute(op, s, m) for s in stages for op in ops[s] for m in range(chunks)]
    if seconds <= 0:
        return Solution(None, 0.0)
    if len(actions) > _MAX_ACTIONS:
        return Solution(
            _repeat_best_pattern(costs, start, recomputed, free, objective, seconds), 0.0
        )
    from ortools.sat.python import cp_model

    full = recompute(start, lambda stage, microbatch: recomputed[stage])
    hints, makespan = {}, 0.0
    for span in play(full, costs.graph, cost):
        assert isinstance(span.action, Compute)
        makespan = max(makespan, span.end)
        if span.action.op is Op.B:
            cell = span.action.stage, span.action.microbatch
            hints[Compute(Op.I, *cell)] = span.start
            hints[Compute(Op.W, *cell)] = span.start + cost.I[cell[0]]
        else:
            hints[span.action] = span.start
    tick = makespan / _TICKS
    model = cp_model.CpModel()
    horizon = 2 * _TICKS
    starts = {a: model.new_int_var(0, horizon, str(a)) for a in actions}
    lengths = {a: floor(cost.seconds(a) / tick) for a in actions}
    ends = {a: starts[a] + lengths[a] for a in actions}
    producers = {message: a for a in actions for message in produces(a, costs.graph)}
    for a in actions:
        model.add_hint(starts[a], floor(hints[a] / tick))
        for earlier in follows(a):
            if earlier in starts:
                model.add(starts[a] >= ends[earlier])
        for message in consumes(a, costs.graph):
            source = producers[message]
            delay = cost.send_seconds(message.src, message.dst) if start.crosses(message) else 0.0
            model.add(starts[a] >= ends[source] + floor(delay / tick))
        previous = a._replace(microbatch=a.microbatch - 1)
        if previous in starts:
            model.add(starts[a] >= ends[previous])
    spans = []
    for rank in range(start.ranks):
        mine = [a for a in actions if start.placement[a.stage] == rank]
        intervals = [
            model.new_fixed_size_interval_var(starts[a], lengths[a], f"run {a}") for a in mine
        ]
        model.add_no_overlap(intervals)
        begin, last = (model.new_int_var(0, horizon, f"{end} {rank}") for end in ("first", "last"))
        for a in mine:
            model.add(begin <= starts[a])
            model.add(last >= ends[a])
        spans.append((begin, last))
        if not isinf(free[rank]):
            _add_memory(model, costs, mine, starts, ends, recomputed, free[rank])
    longest = model.new_int_var(0, horizon, "longest")
    for begin, last in spans:
        model.add(longest >= (last if objective == "makespan" else last - begin))
    model.minimize(longest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    bound = solver.best_objective_bound * tick
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Solution(None, max(0.0, bound))
    lanes = [
        tuple(
            sorted(
                (a for a in actions if start.placement[a.stage] == rank and a.op is not Op.R),
                key=lambda a: (solver.value(starts[a]), solver.value(starts[a]) + lengths[a]),
            )
        )
        for rank in range(start.ranks)
    ]
    return Solution(Schedule(start.placement, chunks, tuple(lanes)), max(0.0, bound))


def _repeat_best_pattern(
    costs: StageCosts,
    start: Schedule,
    recomputed: Sequence[bool],
    free: Sequence[float],
    objective: Objective,
    seconds: float,
) -> Schedule | None:
    """Return a schedule whose middle is the pattern that needs least memory, if one is found."""
    placement, chunks = start.placement, start.chunks
    pattern = solve_period(costs, placement, recomputed, free, seconds).pattern
    if pattern is None:
        return None
    if any(recomputed):
        return repeat_pattern(pattern, placement, chunks)
    pipeline = Pipeline(placement, chunks, costs.cost, free, costs.graph)
    return unroll_pattern(pattern, pipeline, objective)


def _add_memory(
    model: Any,
    costs: StageCosts,
    actions: Sequence[Compute],
    starts: dict[Compute, Any],
    ends: dict[Compute, Any],
    recomputed: Sequence[bool],
    free: float,
) -> None:
    """Keep the activations of a rank below its cap.

    Each micro-batch of a stage occupies up to three sizes, one after the other: its input until R,
    its activation until the end of I, and what W needs until the end of W.
    """
    cost, unit = costs.cost, free / _TICKS
    intervals, sizes = [], []
    for a in actions:
        if a.op is not Op.F:
            continue
        s = a.stage
        back, weight = a._replace(op=Op.I), a._replace(op=Op.W)
        pieces = [(starts[a], ends[back], cost.activation[s])]
        if recomputed[s]:
            again = starts[a._replace(op=Op.R)]
            pieces = [
                (starts[a], again, cost.stage_input[s]),
                (again, ends[back], cost.activation[s]),
            ]
        pieces.append((ends[back], ends[weight], cost.kept_sizes[s]))
        for index, (begin, end, size) in enumerate(pieces):
            length = model.new_int_var(0, 2 * _TICKS, f"alive {a} {index}")
            intervals.append(model.new_interval_var(begin, length, end, f"held {a} {index}"))
            sizes.append(floor(size / unit))
    model.add_cumulative(intervals, sizes, ceil(free / unit))


def solve_space_bound(
    table: CostTable,
    placement: Sequence[int],
    memory: Sequence[float],
    objective: Objective,
    best: float,
    seconds: float,
) -> float:
    """Return seconds that no cut with this placement and number of micro-batches can beat.

    The variables are where the stages start. These times are bounds for every schedule:

        a rank   from the moment on that the first micro-batch can reach a stage of it, or that its
                 first gradient can be back there, all work that was not possible before
        a rank   the same for all stages, or the later ones, without weight gradients, and then the
                 way of the last gradient back to the first stage, and its weight gradient there

    Args:
        table: The costs of the units, for this number of micro-batches.
        placement: The rank of each stage.
        memory: The cap of each rank. Only parameters and optimizer state are held against it.
        objective: The objective of the plan.
        best: The seconds of the best plan: a higher bound is of no use.
        seconds: How long the solver may search.
    """
    from ortools.sat.python import cp_model

    units, stages, chunks = len(table.profile.units), len(placement), table.chunks
    tick = best / _TICKS
    model = cp_model.CpModel()
    starts = [model.new_constant(0)]
    starts += [model.new_int_var(s, units - stages + s, f"stage {s}") for s in range(1, stages)]
    starts.append(model.new_constant(units))
    for s in range(1, stages - 1):
        model.add(starts[s] < starts[s + 1])
    looked_up: dict[tuple[int, ...], Any] = {}

    def look_up(numbers: Sequence[float], boundary: int) -> Any:
        """Return the number at the start of a stage, in ticks. Equal ones are one variable."""
        whole = [floor(number / tick) for number in numbers]
        key = boundary, *whole
        if key not in looked_up:
            variable = model.new_int_var(0, max(whole), f"{len(looked_up)} at {boundary}")
            model.add_element(starts[boundary], whole, variable)
            looked_up[key] = variable
        return looked_up[key]

    def between(ops: str, rank: int, stage: int) -> Any:
        """Return the ticks of some ops of one micro-batch on a stage, at most."""
        columns = [table.seconds[rank][op] for op in ops]
        ticks = sum(look_up(sums, stage + 1) - look_up(sums, stage) for sums in columns)
        return ticks + floor(len(ops) * table.overhead / tick) - len(ops)

    # The fastest device for each unit: whoever has the units before a stage.
    before: dict[str, list[float]] = {op: [0.0] for op in "FI"}
    for u in range(units):
        for op, sums in before.items():
            sums.append(sums[-1] + min(s[op][u + 1] - s[op][u] for s in table.seconds))
    longest = model.new_int_var(0, _TICKS, "longest")
    whole = {op: floor(sums[-1] / tick) - 1 for op, sums in before.items()}
    last_weight_grad = between("W", placement[0], 0)
    for rank, mine in enumerate(group_stages(placement)):
        if objective == "period":
            model.add(longest >= chunks * sum(between("FIW", rank, s) for s in mine))
            continue
        # From when on the rank can do what: ops of its stages, in the order of these times.
        possible = [(look_up(before["F"], s), "F", s) for s in mine]
        for s in reversed(mine):
            later = whole["I"] - look_up(before["I"], s + 1)
            possible.append((whole["F"] + later, "IW", s))
        for index, (time, _, _) in enumerate(possible):
            todo = [(ops, s) for _, ops, s in possible[index:]]
            work = sum(between(ops, rank, s) for ops, s in todo)
            model.add(longest >= time + chunks * work)
            for first in mine:
                # After what these stages do, but for weight gradients, a gradient travels on.
                ordered = [between(ops.rstrip("W"), rank, s) for ops, s in todo if s >= first]
                if ordered:
                    back = look_up(before["I"], first) + last_weight_grad
                    model.add(longest >= time + chunks * sum(ordered) + back)
    for rank, mine in enumerate(group_stages(placement)):
        if not isinf(memory[rank]):
            unit = memory[rank] / _TICKS
            sizes = [floor(size / unit) for size in table.resident]
            held = []
            for s in mine:
                pair = []
                for boundary in (s, s + 1):
                    size = model.new_int_var(0, sizes[-1], f"bytes {rank} {boundary}")
                    model.add_element(starts[boundary], sizes, size)
                    pair.append(size)
                held.append(pair[1] - pair[0])
            model.add(sum(held) <= _TICKS + len(mine))
    model.minimize(longest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    if solver.solve(model) == cp_model.INFEASIBLE:
        return best
    return max(0.0, min(best, solver.best_objective_bound * tick))

"""Compare `fit` with the optimum, at sizes that an exact solver can handle.

    pip install -e '.[bench]'
    python benchmarks/exact.py

Messages take 0.1 F, and the memory cap is the peak of the named schedule. The solver gets one
minute per point. Each stage processes its micro-batches in order, as in `fit`.
"""

from __future__ import annotations

from ortools.sat.python import cp_model

from penstock import Cost, lower, schedules, simulate
from penstock.schedules.ir import Op

POINTS = [
    ("zb-h1", 2, 4),
    ("zb-h1", 3, 6),
    ("zb-h1", 4, 7),
    ("zb-h1", 4, 8),
    ("zb-h1", 5, 8),
    ("zb-h2", 4, 4),
    ("zb-v", 2, 5),
    ("interleaved-zb", 2, 4),
    ("interleaved-zb", 4, 8),
    ("v-min", 4, 5),
    ("v-min", 4, 7),
]
SEND, TICKS = 0.1, 20  # ticks in the F of all stages of a rank


def exact(
    placement: tuple[int, ...], chunks: int, memory: float, seconds: float
) -> tuple[str, float]:
    """Return the status of the solver, and the shortest makespan that it found."""
    model = cp_model.CpModel()
    per_rank = len(placement) // (max(placement) + 1)
    length, send = TICKS // per_rank, round(SEND * TICKS)
    horizon = TICKS * (3 * chunks + 6 * len(placement))
    start = {
        (op, stage, i): model.new_int_var(0, horizon, f"{stage}{op}{i}")
        for op in (Op.F, Op.I, Op.W)
        for stage in range(len(placement))
        for i in range(chunks)
    }

    def after(later: tuple[Op, int, int], earlier: tuple[Op, int, int]) -> None:
        is_remote = placement[later[1]] != placement[earlier[1]]
        model.add(start[later] >= start[earlier] + length + (send if is_remote else 0))

    for op, stage, i in start:
        if i:
            after((op, stage, i), (op, stage, i - 1))
        if op is Op.F and stage:
            after((op, stage, i), (op, stage - 1, i))
        if op is Op.I and stage + 1 < len(placement):
            after((op, stage, i), (op, stage + 1, i))
        if op is not Op.F:
            after((op, stage, i), (Op.F if op is Op.I else Op.I, stage, i))
    for rank in set(placement):
        on_rank = {key: time for key, time in start.items() if placement[key[1]] == rank}
        model.add_no_overlap(
            model.new_fixed_size_interval_var(t, length, str(k)) for k, t in on_rank.items()
        )
        lifetimes = []
        for (op, stage, i), allocation in on_rank.items():
            if op is Op.F:
                release = start[Op.W, stage, i] + length
                size = model.new_int_var(0, horizon, "")
                lifetimes.append(model.new_interval_var(allocation, size, release, ""))
        model.add_cumulative(lifetimes, [1] * len(lifetimes), round(memory * per_rank))
    end = model.new_int_var(0, horizon, "end")
    model.add_max_equality(end, [time + length for time in start.values()])
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model)
    return solver.status_name(status).lower(), solver.objective_value / TICKS


def main() -> None:
    print("| under the peak of | ranks | chunks | named | fit | solver | |")
    print("|---|---|---|---|---|---|---|")
    for name, ranks, chunks in POINTS:
        named = schedules.make(name, ranks, chunks)
        cost = Cost.even(named.placement, send=SEND)
        timeline = simulate(lower(named), cost)
        cap = max(timeline.peak)
        fitted = simulate(lower(schedules.fit(named.placement, chunks, cost, cap)), cost)
        status, best = exact(named.placement, chunks, cap, seconds=60)
        figures = [f"{time:g}" for time in (timeline.makespan, fitted.makespan, best)]
        print(f"| {name} | {ranks} | {chunks} | {' | '.join(figures)} | {status} |", flush=True)


if __name__ == "__main__":
    main()

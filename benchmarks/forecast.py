"""Compare measured steps with their forecasts, and the gains of zero-bubble schedules.

    python benchmarks/forecast.py [--ranks 2]              CPU ranks, one intra-op thread each
    python benchmarks/forecast.py --ranks 4 --sms 32       one GPU split in four

The model has plain Linear layers, so that F, I and W take about the same time. The batch requires a
gradient, so that the first stage has all three. In every round, each schedule runs two steps. The
costs of the first give the forecast of the second, which is measured from the start of its first
action to the end of its last. `gain` is the time of 1f1b over that of the schedule. `simulated` is
the same ratio from simulations, with the costs of the schedule for both. All are medians of the
rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import penstock
from penstock import Cost, Pipe
from penstock.device.device import Device
from penstock.schedules.timeline import Timeline

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "fit")


class Found(NamedTuple):
    """The measurements of one round of a schedule, in seconds."""

    measured: float
    forecast: float
    cost: Cost


def layers(number: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    linears = [nn.Linear(width, width) for _ in range(number)]
    for layer in linears:
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*linears)


def loss_of(out: Tensor) -> Tensor:
    return out.float().square().mean()


def one_round(pipe: Pipe, x: Tensor) -> Found:
    def step() -> Timeline:
        pipe.zero_grad(set_to_none=False)
        x.grad = None
        return pipe.step(x).timeline

    cost = step().cost
    forecast = pipe.forecast(cost).makespan
    return Found(step().makespan, forecast, cost)


def on_one_f_one_b(cost: Cost, placement: tuple[int, ...], chunks: int) -> float:
    """Simulate the makespan of 1f1b, with all stages of a rank merged into one."""
    ranks = max(placement) + 1

    def by_rank(column: tuple[float, ...]) -> tuple[float, ...]:
        pairs = list(zip(column, placement, strict=True))
        return tuple(sum(c for c, r in pairs if r == rank) for rank in range(ranks))

    joined = Cost(by_rank(cost.F), by_rank(cost.I), by_rank(cost.W), (1.0,) * ranks, cost.send)
    schedule = penstock.schedules.one_f_one_b(ranks, chunks)
    return penstock.simulate(penstock.lower(schedule), joined).makespan


def shares(cost: Cost) -> str:
    """Format the total costs of F, I and W relative to F."""
    F, I, W = (sum(column) for column in (cost.F, cost.I, cost.W))
    return f"1 : {I / F:.2f} : {W / F:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--sms",
        type=int,
        default=0,
        help="multiprocessors per rank of a split GPU; 0 for CPU ranks",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--chunks", type=int)
    parser.add_argument("--rows", type=int, help="rows of a micro-batch")
    parser.add_argument("--width", type=int)
    parser.add_argument(
        "--layers", type=int, default=2, help="layers of a stage, with two stages per rank"
    )
    args = parser.parse_args()
    on_gpu, ranks = args.sms > 0, args.ranks
    chunks = args.chunks or 2 * ranks
    rows, width = args.rows or (8192 if on_gpu else 512), args.width or (4096 if on_gpu else 512)
    places: list[Any] = ["cpu"] * ranks
    tensor_options: dict[str, Any] = {}
    machine = f"{os.cpu_count()} cores"
    if on_gpu:
        places = list[Device](penstock.virtual_devices("cuda:0", ranks, args.sms))
        tensor_options = {"device": "cuda:0", "dtype": torch.bfloat16}
        machine = f"{torch.cuda.get_device_name()}, {args.sms} multiprocessors a rank"
    torch.set_num_threads(1)
    model = layers(2 * ranks * args.layers, width).to(**tensor_options)
    x = torch.randn(chunks * rows, width, **tensor_options).requires_grad_()
    pipes = {
        name: Pipe(model, chunks, "never", devices=places, schedule=name, loss_fn=loss_of)
        for name in SCHEDULES
    }
    times: dict[str, list[Found]] = {name: [] for name in SCHEDULES}
    for round_index in range(args.rounds + 1):
        for name, pipe in pipes.items():
            measurement = one_round(pipe, x)
            if round_index:
                times[name].append(measurement)
    print(f"torch {torch.__version__}, {machine}: {ranks} ranks, {chunks} micro-batches of {rows}")
    print(f"rows, {2 * args.layers} layers of width {width} a rank, medians of {args.rounds}\n")
    print(
        "| schedule | F : I : W | ms a step | forecast | measured / forecast | gain | simulated |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, rounds in times.items():
        report(name, rounds, times["1f1b"], pipes[name], chunks)


def report(name: str, rounds: list[Found], base: list[Found], pipe: Pipe, chunks: int) -> None:
    """Print one row of the table."""
    median = statistics.median
    schedule = pipe.forecast().program.schedule
    ratio = median(measurement.measured / measurement.forecast for measurement in rounds)
    gain = median(b.measured / f.measured for b, f in zip(base, rounds, strict=True))
    simulated = median(
        on_one_f_one_b(f.cost, schedule.placement, chunks) / f.forecast for f in rounds
    )
    print(
        f"| {name} | {shares(rounds[len(rounds) // 2].cost) if schedule.divided else ''} | "
        f"{median(measurement.measured for measurement in rounds) * 1e3:.1f} | "
        f"{median(measurement.forecast for measurement in rounds) * 1e3:.1f} | "
        f"{ratio:.3f} | {gain:.3f} | {simulated:.3f} |"
    )


if __name__ == "__main__":
    main()

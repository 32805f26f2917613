"""Is a step as long as its forecast, and does a zero-bubble schedule gain what it promises?

    python benchmarks/forecast.py [--ranks 2]              CPU ranks, one intra-op thread each
    python benchmarks/forecast.py --ranks 4 --sms 32       a GPU cut in four

Plain Linear layers, so that F, I and W take about the same; the batch wants a gradient, so that
the first stage has all three. In every round each schedule takes two steps: the costs of the first
give the forecast of the second, which is measured (the spans of its actions, first to last).
`gain` is 1f1b's time over the schedule's: measured, and on paper with the schedule's own costs for
both. Medians of all rounds.
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
    """Of one round of a schedule, in seconds."""

    measured: float
    forecast: float
    cost: Cost


def layers(number: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    made = [nn.Linear(width, width) for _ in range(number)]
    for layer in made:
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*made)


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
    """The makespan of 1f1b, with a rank's stages put together."""
    ranks = max(placement) + 1

    def by_rank(column: tuple[float, ...]) -> tuple[float, ...]:
        pairs = list(zip(column, placement, strict=True))
        return tuple(sum(c for c, r in pairs if r == rank) for rank in range(ranks))

    joined = Cost(by_rank(cost.F), by_rank(cost.I), by_rank(cost.W), (1.0,) * ranks, cost.send)
    schedule = penstock.schedules.one_f_one_b(ranks, chunks)
    return penstock.simulate(penstock.lower(schedule), joined).makespan


def shares(cost: Cost) -> str:
    """F, I and W of all stages; F is 1."""
    F, I, W = (sum(column) for column in (cost.F, cost.I, cost.W))
    return f"1 : {I / F:.2f} : {W / F:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sms", type=int, default=0, help="a rank is so many multiprocessors")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--chunks", type=int)
    parser.add_argument("--rows", type=int, help="of a micro-batch")
    parser.add_argument("--width", type=int)
    parser.add_argument("--layers", type=int, default=2, help="of a stage, with two stages a rank")
    given = parser.parse_args()
    on_gpu, ranks = given.sms > 0, given.ranks
    chunks = given.chunks or 2 * ranks
    rows, width = given.rows or (8192 if on_gpu else 512), given.width or (4096 if on_gpu else 512)
    places: list[Any] = ["cpu"] * ranks
    kind: dict[str, Any] = {}
    machine = f"{os.cpu_count()} cores"
    if on_gpu:
        places = list[Device](penstock.virtual_devices("cuda:0", ranks, given.sms))
        kind = {"device": "cuda:0", "dtype": torch.bfloat16}
        machine = f"{torch.cuda.get_device_name()}, {given.sms} multiprocessors a rank"
    torch.set_num_threads(1)
    model = layers(2 * ranks * given.layers, width).to(**kind)
    x = torch.randn(chunks * rows, width, **kind).requires_grad_()
    pipes = {
        name: Pipe(model, chunks, "never", devices=places, schedule=name, loss_fn=loss_of)
        for name in SCHEDULES
    }
    times: dict[str, list[Found]] = {name: [] for name in SCHEDULES}
    for turn in range(given.rounds + 1):
        for name, pipe in pipes.items():
            found = one_round(pipe, x)
            if turn:
                times[name].append(found)
    print(f"torch {torch.__version__}, {machine}: {ranks} ranks, {chunks} micro-batches of {rows}")
    print(f"rows, {2 * given.layers} layers of width {width} a rank, medians of {given.rounds}\n")
    print(
        "| schedule | F : I : W | ms a step | forecast | measured / forecast | gain | simulated |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, rounds in times.items():
        report(name, rounds, times["1f1b"], pipes[name], chunks)


def report(name: str, rounds: list[Found], base: list[Found], pipe: Pipe, chunks: int) -> None:
    """One line of the table."""
    median = statistics.median
    schedule = pipe.forecast().program.schedule
    off = median(found.measured / found.forecast for found in rounds)
    gain = median(b.measured / f.measured for b, f in zip(base, rounds, strict=True))
    paper = median(on_one_f_one_b(f.cost, schedule.placement, chunks) / f.forecast for f in rounds)
    print(
        f"| {name} | {shares(rounds[len(rounds) // 2].cost) if schedule.divided else ''} | "
        f"{median(found.measured for found in rounds) * 1e3:.1f} | "
        f"{median(found.forecast for found in rounds) * 1e3:.1f} | {off:.3f} | {gain:.3f} | "
        f"{paper:.3f} |"
    )


if __name__ == "__main__":
    main()

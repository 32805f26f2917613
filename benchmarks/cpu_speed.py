"""Measure two balanced stages on two cores against one thread and against the ideal speed-up.

    python benchmarks/cpu_speed.py

The blocks are compute-heavy, with one intra-op thread per rank. Every round runs each variant once,
so that all see the same noise. The ideal is the simulated speed-up of the schedule over one rank,
for two equal stages and a B that takes twice as long as an F. `of the ideal` is the median speed-up
of all rounds, divided by the ideal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import penstock
from penstock import Pipe, schedules

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(torch.relu(self.one(x)))
        return out


def loss_of(out: Tensor) -> Tensor:
    return out.square().mean()


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=128, help="rows of a micro-batch")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--blocks", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(args.width) for _ in range(args.blocks)])
    x = torch.randn(args.chunks * args.rows, args.width)

    def one_thread() -> None:
        for piece in x.chunk(args.chunks):
            (loss_of(model(piece)) / args.chunks).backward()

    variants: dict[str, Callable[[], object]] = {"one thread": one_thread}
    for name in SCHEDULES:
        pipe = Pipe(
            model,
            args.chunks,
            "never",
            stages=2,
            devices=["cpu"] * 2,
            schedule=name,
            loss_fn=loss_of,
        )
        variants[name] = lambda pipe=pipe: pipe.step(x)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_index in range(args.rounds + 2):
        for name, run in variants.items():
            duration = timed(run)
            if round_index > 1:
                times[name].append(duration)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {args.chunks} micro-batches of")
    print(f"{args.rows} rows, {args.blocks} blocks of width {args.width}, {args.rounds} rounds\n")
    print("| | ms a step | speed-up | ideal | of the ideal |")
    print("|---|---|---|---|---|")
    alone = times["one thread"]
    for name, durations in times.items():
        ideal = 1.0 if name == "one thread" else ideal_of(name, args.chunks)
        speedups = [a / b for a, b in zip(alone, durations, strict=True)]
        print(
            f"| {name} | {statistics.median(durations) * 1e3:.0f} | "
            f"{statistics.median(speedups):.2f} | {ideal:.2f} | "
            f"{statistics.median(speedups) / ideal:.2f} |"
        )


def ideal_of(name: str, chunks: int) -> float:
    """Return the simulated speed-up: all work over the makespan."""
    timeline = penstock.simulate(penstock.lower(schedules.make(name, 2, chunks)))
    return sum(timeline.busy) / timeline.makespan


if __name__ == "__main__":
    main()

"""Two balanced stages on two cores, against the same layers on one thread and against the ideal.

    python benchmarks/cpu_speed.py

Compute-heavy blocks, one intra-op thread a rank. In every round each way takes its turn, so that
all meet the same noise. Ideal: the schedule's speed-up over one rank on paper, two equal stages and
a B of twice an F. `of the ideal` is the median of the rounds' speed-ups over that.
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
    parser.add_argument("--rows", type=int, default=128, help="of a micro-batch")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--blocks", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(given.width) for _ in range(given.blocks)])
    x = torch.randn(given.chunks * given.rows, given.width)

    def one_thread() -> None:
        for piece in x.chunk(given.chunks):
            (loss_of(model(piece)) / given.chunks).backward()

    ways: dict[str, Callable[[], object]] = {"one thread": one_thread}
    for name in SCHEDULES:
        pipe = Pipe(
            model,
            given.chunks,
            "never",
            stages=2,
            devices=["cpu"] * 2,
            schedule=name,
            loss_fn=loss_of,
        )
        ways[name] = lambda pipe=pipe: pipe.step(x)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(given.rounds + 2):
        for name, run in ways.items():
            taken = timed(run)
            if turn > 1:
                times[name].append(taken)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {given.chunks} micro-batches of")
    print(
        f"{given.rows} rows, {given.blocks} blocks of width {given.width}, {given.rounds} rounds\n"
    )
    print("| | ms a step | speed-up | ideal | of the ideal |")
    print("|---|---|---|---|---|")
    alone = times["one thread"]
    for name, found in times.items():
        ideal = 1.0 if name == "one thread" else ideal_of(name, given.chunks)
        ups = [a / b for a, b in zip(alone, found, strict=True)]
        print(
            f"| {name} | {statistics.median(found) * 1e3:.0f} | {statistics.median(ups):.2f} | "
            f"{ideal:.2f} | {statistics.median(ups) / ideal:.2f} |"
        )


def ideal_of(name: str, chunks: int) -> float:
    """All the work over the makespan on paper; two equal stages, B twice an F."""
    timeline = penstock.simulate(penstock.lower(schedules.make(name, 2, chunks)))
    return sum(timeline.busy) / timeline.makespan


if __name__ == "__main__":
    main()

"""What the machinery costs: microseconds a cell, beside torchgpipe and fairscale.

    pip install -c constraints.txt -e '.[bench]'
    python benchmarks/cell.py

A cell is a stage and a micro-batch, forward and backward: here Linear(8, 8) on 8 rows, 4 stages,
8 micro-batches, one intra-op thread. What is left above the plain loop is machinery. The peers
give all CPU stages to one worker; so does `1 rank`, which is the caller's own thread. `4 ranks` has
a thread a stage, more than there are cores. Every way takes its turn in every round, so that all
meet the same noise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

from penstock import Pipe

STAGES, CHUNKS = 4, 8
MODES = ("never", "except_last", "always")
OURS = {
    "penstock, 1 rank": (1, "threads"),
    "penstock, 4 ranks": (4, "threads"),
    "penstock, 4 ranks inline": (4, "inline"),
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(STAGES)])


def peers() -> dict[str, Callable[..., nn.Module]]:
    """Those that are installed."""
    found: dict[str, Callable[..., nn.Module]] = {}
    try:
        from torchgpipe import GPipe

        found["torchgpipe"] = GPipe
        from fairscale.nn import Pipe as FairscalePipe

        found["fairscale"] = FairscalePipe
    except ImportError as missing:
        print(f"{missing}: see the top of this file", file=sys.stderr)
    return found


def plain(x: torch.Tensor) -> Callable[[], None]:
    model = layers()

    def run() -> None:
        for piece in x.chunk(CHUNKS):
            model(piece).sum().backward()

    return run


def ways(x: torch.Tensor, mode: str) -> dict[str, Callable[[], None]]:
    """Each a training step of the same model."""
    pipes: dict[str, nn.Module] = {}
    for name, (ranks, runtime) in OURS.items():
        pipes[name] = Pipe(
            layers(), CHUNKS, mode, stages=[1] * STAGES, devices=["cpu"] * ranks, runtime=runtime
        )
    for name, peer in peers().items():
        devices = ["cpu"] * STAGES
        pipes[name] = peer(layers(), [1] * STAGES, devices=devices, chunks=CHUNKS, checkpoint=mode)

    def run(pipe: nn.Module) -> Callable[[], None]:
        return lambda: pipe(x).sum().backward()

    return {"plain loop": plain(x), **{name: run(pipe) for name, pipe in pipes.items()}}


def microseconds(found: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """A cell's, median of all rounds."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(rounds + 5):
        for name, run in found.items():
            start = time.perf_counter()
            run()
            if turn >= 5:
                times[name].append(time.perf_counter() - start)
    return {n: statistics.median(t) / STAGES / CHUNKS * 1e6 for n, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    x = torch.randn(64, 8)
    tables = {mode: microseconds(ways(x, mode), rounds) for mode in MODES}
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, medians of {rounds} rounds\n")
    print("| us a cell | " + " | ".join(MODES) + " |")
    print("|---|" + "---|" * len(MODES))
    for name in tables["never"]:
        print(f"| {name} | " + " | ".join(f"{tables[mode][name]:.0f}" for mode in MODES) + " |")
    for peer in ("torchgpipe", "fairscale"):
        if peer in tables["never"]:
            ratios = [tables[mode]["penstock, 1 rank"] / tables[mode][peer] for mode in MODES]
            print(f"| 1 rank / {peer} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
            above = [
                (times["penstock, 1 rank"] - times["plain loop"])
                / (times[peer] - times["plain loop"])
                for times in tables.values()
            ]
            name = f"the same above the plain loop, {peer}"
            print(f"| {name} | " + " | ".join(f"{ratio:.2f}" for ratio in above) + " |")
    sys.stdout.flush()
    os._exit(0)  # the peers' threads do not end by themselves


if __name__ == "__main__":
    main()

"""Measure the overhead per cell in microseconds, next to torchgpipe and fairscale.

    pip install -e '.[bench]'
    python benchmarks/cell.py

A cell is the forward and the backward of one stage on one micro-batch: here Linear(8, 8) on 8 rows,
with 4 stages, 8 micro-batches and one intra-op thread. The time above the plain loop is overhead.
The other libraries run all CPU stages in one worker. So does `1 rank`, in the thread of the caller.
`4 ranks` has one thread per stage, which may be more than there are cores. Every round runs each
variant once, so that all see the same noise.
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
    """Return the other libraries that are installed."""
    libraries: dict[str, Callable[..., nn.Module]] = {}
    try:
        from torchgpipe import GPipe

        libraries["torchgpipe"] = GPipe
        from fairscale.nn import Pipe as FairscalePipe

        libraries["fairscale"] = FairscalePipe
    except ImportError as missing:
        print(f"{missing}: see the top of this file", file=sys.stderr)
    return libraries


def plain(x: torch.Tensor) -> Callable[[], None]:
    model = layers()

    def run() -> None:
        for piece in x.chunk(CHUNKS):
            model(piece).sum().backward()

    return run


def ways(x: torch.Tensor, mode: str) -> dict[str, Callable[[], None]]:
    """Return functions that run a training step of the same model, by name."""
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


def microseconds(variants: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the median time per cell of each variant."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_index in range(rounds + 5):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            if round_index >= 5:
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
    os._exit(0)  # the threads of the other libraries do not exit by themselves


if __name__ == "__main__":
    main()

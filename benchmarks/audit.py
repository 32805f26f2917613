"""Measure what the audit costs: the first step with and without it, and later steps.

    python benchmarks/audit.py [--device cuda] [--rounds 7]

A transformer is cut into two stages on the CPU, or into two virtual GPUs. Every round builds a pipe
with the audit and one without, and runs a few steps of each, one after the other, so that both see
the same noise. The promise is a first step of at most 1 + 1.5 / chunks of one without the audit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from torch import nn

import penstock

LATER_STEPS = 4


def build_model(width: int, blocks: int, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        for _ in range(blocks)
    ]
    return nn.Sequential(*layers).to(device)


def time_steps(
    audit: str, chunks: int, checkpoint: str, args: argparse.Namespace, devices: Sequence[object]
) -> tuple[float, float]:
    """Return the seconds of the first step, and the median of later ones."""
    model = build_model(args.width, args.blocks, args.device)
    x = torch.randn(chunks * args.rows, args.length, args.width, device=args.device)
    pipe = penstock.Pipe(
        model,
        chunks,
        checkpoint,
        stages=2,
        devices=devices,
        schedule="1f1b",
        loss_fn=lambda y: y.square().mean(),
        audit=audit,
    )
    times = []
    for _ in range(1 + LATER_STEPS):
        begin = time.perf_counter()
        pipe.step(x)
        if args.device != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return times[0], statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4, help="rows of a micro-batch")
    parser.add_argument("--length", type=int, default=64)
    args = parser.parse_args()
    devices: Sequence[object] = ["cpu", "cpu"]
    if args.device != "cpu":
        devices = penstock.virtual_devices("cuda:0", 2)
    print(
        f"torch {torch.__version__}, {args.device}, {args.blocks} blocks of width {args.width}, "
        f"micro-batches of {args.rows} x {args.length}, medians of {args.rounds} rounds\n"
    )
    print("| chunks | checkpoint | first step, audit / off | promised | later steps, audit / off |")
    print("|---|---|---|---|---|")
    for checkpoint in ("except_last", "never"):
        for chunks in (2, 4, 8):
            time_steps("first", chunks, checkpoint, args, devices)  # warm-up
            first, later = [], []
            for _ in range(args.rounds):
                off = time_steps("off", chunks, checkpoint, args, devices)
                on = time_steps("first", chunks, checkpoint, args, devices)
                first.append(on[0] / off[0])
                later.append(on[1] / off[1])
            print(
                f"| {chunks} | {checkpoint} | {statistics.median(first):.2f} | "
                f"{1 + 1.5 / chunks:.2f} | {statistics.median(later):.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

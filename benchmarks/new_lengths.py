"""Measure the first step of a sequence length that a pipe has not seen.

    python -m benchmarks.new_lengths [--layers 32] [--runtime inline threads]

A Llama of transformers with tiny layers, 4 stages, 4 micro-batches, so that the work of a step
itself is small. The first two lengths are traced and compared with the unsplit model in full. Of
each later length, the first step is compared with the median of three further steps of the same
length, in wall-clock time and in CPU time; the rows are medians over the lengths.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch

from penstock import Pipe


def make_batch(length: int) -> dict[str, Any]:
    ids = torch.randint(0, 64, (4, length))
    return {"input_ids": ids, "labels": ids}


def timed(pipe: Pipe, length: int) -> tuple[float, float]:
    """Return the milliseconds of a step, by the clock and of the CPU."""
    batch = make_batch(length)
    start = time.perf_counter(), time.process_time()
    pipe.step(**batch)
    return 1e3 * (time.perf_counter() - start[0]), 1e3 * (time.process_time() - start[1])


def measure(runtime: str, layers: int, lengths: list[int]) -> list[str]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    pipe = Pipe(
        LlamaForCausalLM(config),
        example=make_batch(16),
        chunks=4,
        stages=4,
        schedule="1f1b",
        runtime=runtime,
    )
    rows = []
    for name, length in (("first", 16), ("second", 20)):
        first_step = timed(pipe, length)
        later = [timed(pipe, length) for _ in range(8)]
        rows.append((name, [first_step], [tuple(map(statistics.median, zip(*later, strict=True)))]))
    firsts, laters = [], []
    for length in lengths:
        firsts.append(timed(pipe, length))
        repeated = [timed(pipe, length) for _ in range(3)]
        laters.append(tuple(map(statistics.median, zip(*repeated, strict=True))))
    rows.append(("later ones", firsts, laters))
    lines = []
    for name, first_steps, later_steps in rows:
        cells = []
        for column in (0, 1):
            first = statistics.median([step[column] for step in first_steps])
            above = [a[column] - b[column] for a, b in zip(first_steps, later_steps, strict=True)]
            cells.append(f"{first:.0f} | {statistics.median(above):.1f}")
        lines.append(f"| {runtime} | {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--runtime", nargs="+", default=["inline", "threads"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[24, 28, 31, 40, 17])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.layers} layers, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}\n")
    print("| runtime | length | first step, ms | above a repeated step | CPU, ms | above |")
    print("|---|---|---|---|---|---|")
    for runtime in args.runtime:
        print(*measure(runtime, args.layers, args.lengths), sep="\n", flush=True)


if __name__ == "__main__":
    main()

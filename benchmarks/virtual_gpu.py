"""Compare a pipeline on virtual GPUs with its ceiling.

    python benchmarks/virtual_gpu.py [--devices 4] [--sms 32] [--chunks 16] [--rows 4096]

The blocks are bf16 MLPs, x + W2 gelu(W1 norm(x)), two per stage. The table has medians of one run;
`benchmarks/virtual.py` explains its terms.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import penstock
from penstock import Pipe, schedules
from penstock.device.nvidia import VirtualGpu

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.virtual import (
    blocks_of,
    contention,
    head,
    ideal_of,
    line,
    loss_of,
    milliseconds,
    needs_cuda,
)

HEADS = ["schedule", "checkpoint", "ms a step", "speed-up", "ideal", "ceiling", "of the ceiling"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--sms", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--rows", type=int, default=4096, help="rows of a micro-batch")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--times", type=int, default=9)
    args = parser.parse_args()
    needs_cuda()
    ranks, chunks = args.devices, args.chunks
    places = penstock.virtual_devices("cuda:0", ranks, args.sms)
    blocks = blocks_of(2 * ranks, args.width)
    x = torch.randn(chunks * args.rows, args.width, device="cuda:0", dtype=torch.bfloat16)
    share = contention(places, blocks[:2], x[: args.rows])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {ranks} x {places[0].sms}")
    print(f"multiprocessors, {chunks} micro-batches of {args.rows} rows, width {args.width},")
    print(f"medians of {args.times} steps; contention {share:.3f}\n")
    naive = None
    print(head(HEADS))
    for name, checkpoint in [
        ("naive", "never"),
        ("gpipe", "never"),
        ("1f1b", "never"),
        ("eager-1f1b", "never"),
        ("1f1b", "always"),
        ("loss.backward()", "never"),
    ]:
        duration = measured(blocks, x, chunks, name, checkpoint, places, args.times)
        naive = naive or duration
        ideal = ideal_of(name, checkpoint, ranks, chunks)
        ceiling = 1.0 if name == "naive" else ideal * share
        cells = [f"{naive / duration:.2f}", f"{ideal:.2f}", f"{ceiling:.2f}"]
        print(
            line([name, checkpoint, f"{duration:.1f}", *cells, f"{naive / duration / ceiling:.3f}"])
        )


def measured(
    blocks: nn.Sequential,
    x: Tensor,
    chunks: int,
    name: str,
    checkpoint: str,
    places: list[VirtualGpu],
    times: int,
) -> float:
    """Return the milliseconds of a step, or of a call and its backward."""
    schedule = name if name in schedules.FAMILIES else "gpipe"
    pipe = Pipe(blocks, chunks, checkpoint, devices=places, schedule=schedule, loss_fn=loss_of)
    is_call = name != schedule
    duration = milliseconds(lambda: loss_of(pipe(x)).backward() if is_call else pipe.step(x), times)
    pipe.zero_grad()
    return duration


if __name__ == "__main__":
    main()

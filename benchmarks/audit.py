"""Measure what the audit costs: the first step with and without it, and later steps.

    python benchmarks/audit.py [--device cuda] [--rounds 7] [--runtime inline]

A transformer is cut into two stages on the CPU, or into two virtual GPUs. Every round builds a pipe
with the audit and one without, and runs a few steps of each, one after the other, so that both see
the same noise. The promise is a first step of at most 1 + 1.5 / chunks of one without the audit:
one and a half micro-batches more.

With runtime="inline" a step takes as long as its micro-batches together, as in that formula. On p
parallel ranks it takes (chunks + p - 1) / p micro-batches, but the unsplit model still runs its
stages one after another: one and a half micro-batches are a first step of 1 + 1.5 * p / (chunks + p
- 1). The column "micro-batches more" counts in the time that one takes over all stages, inline.

The last columns are the parts of the audit, in milliseconds: the forward and the backward of the
unsplit model, the comparison of two rows with both together, and the digests while the pipe runs
(added over the ranks). The rest of the audit is isolation.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import penstock
from penstock.runtime.audit import Audit
from penstock.runtime.audit_reference import Reference
from penstock.runtime.audit_rows import RowsCheck

LATER_STEPS = 4
PARTS: dict[str, list[tuple[type, str]]] = {
    "forward": [(Reference, "run_forward")],
    "backward": [(Reference, "run_backward")],
    "rows": [(RowsCheck, "compare_two_rows")],
    "digests": [(Audit, "before_compute"), (Audit, "after_compute"), (Audit, "check_step")],
}


class Clock:
    """Adds up the seconds of the parts of audits. A part inside another one counts once."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._is_running = False
        for part, methods in PARTS.items():
            for owner, name in methods:
                self._watch(part, owner, name)

    def _watch(self, part: str, owner: type, name: str) -> None:
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_running and part != "digests":
                return method(*args, **kwargs)
            self._is_running, begin = part != "digests", time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - begin
                self._is_running = False

        setattr(owner, name, timed)


def build_model(width: int, blocks: int, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        for _ in range(blocks)
    ]
    return nn.Sequential(*layers).to(device)


def time_steps(
    audit: str,
    runtime: str,
    chunks: int,
    checkpoint: str,
    args: argparse.Namespace,
    devices: Sequence[object],
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
        runtime=runtime,
        loss_fn=lambda y: y.square().mean(),
        audit=audit,
    )
    times = []
    gc.collect()
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
    parser.add_argument("--runtime", action="append", help="by default inline and threads")
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
    clock = Clock()
    print(
        "| runtime | chunks | checkpoint | first step, audit / off | promised | micro-batches more "
        f"| later steps, audit / off | {' | '.join(PARTS)} |\n|{'---|' * (7 + len(PARTS))}"
    )
    for runtime in args.runtime or ("inline", "threads"):
        for checkpoint in ("except_last", "never"):
            for chunks in (2, 4, 8):
                case = runtime, chunks, checkpoint, args, devices
                time_steps("first", *case)  # warm-up
                clock.seconds.clear()
                off, on = [], []
                for _ in range(args.rounds):
                    off.append(time_steps("off", *case))
                    on.append(time_steps("first", *case))
                inline = [time_steps("off", "inline", *case[1:])[1] for _ in range(args.rounds)]
                microbatch = statistics.median(inline) / chunks
                pairs = list(zip(on, off, strict=True))
                more = statistics.median(a[0] - b[0] for a, b in pairs) / microbatch
                first = statistics.median(a[0] / b[0] for a, b in pairs)
                later = statistics.median(a[1] / b[1] for a, b in pairs)
                parts = [f"{clock.seconds[part] / args.rounds * 1e3:.0f}" for part in PARTS]
                print(
                    f"| {runtime} | {chunks} | {checkpoint} | {first:.2f} | {1 + 1.5 / chunks:.2f} "
                    f"| {more:.2f} | {later:.3f} | {' | '.join(parts)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()

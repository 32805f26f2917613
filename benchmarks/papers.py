"""Compare speed-ups with the tables of the GPipe and torchgpipe papers.

    python benchmarks/papers.py                 one GPU with 128 multiprocessors or more
    python benchmarks/papers.py --models unet --unet 5 64 192 64 16 --checkpoint never
    python benchmarks/papers.py --cpu           tiny models on CPU ranks, as a smoke test

One GPU is split into K virtual devices. Their size does not depend on K, so that K devices have K
times the multiprocessors of one, as in the papers. But they share the memory and the clock of one
chip. The ceiling is the speed-up of K devices over one when they exchange no data at all.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock.config import RUNTIMES

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from amoebanet import amoebanet_d
from resnet101 import resnet101
from unet import unet

CLASSES = 1000
WARM_UP = 2  # with runtime='graph', the second step is captured

# TIMES_ONE has speed-ups over one device without pipelining: from the torchgpipe paper for the
# U-Net, and from the documentation of torchgpipe 0.0.3 for ResNet-101. TIMES_K2_M1 has speed-ups
# over (K=2, M=1), from the GPipe paper and the torchgpipe paper.
TIMES_ONE = {
    "unet": {2: "1.246", 4: "2.352", 8: "3.105"},
    "resnet101": {2: "1.489", 4: "2.629", 8: "4.367"},
}
TIMES_K2_M1 = {"amoebanet": {2: "1.21, 1.773", 4: "1.84, 2.709", 8: "3.48, 4.953"}}

# The sizes of the model, pixels per side, images in an undivided batch, images in a micro-batch.
SIZES = {"unet": "B C", "resnet101": "WIDTH", "amoebanet": "L D"}
FULL = {
    "unet": [5, 64, 192, 64, 8],
    "resnet101": [64, 224, 256, 48],
    "amoebanet": [18, 256, 224, 128, 16],
}
TINY = {"unet": [2, 4, 64, 4, 1], "resnet101": [4, 64, 8, 2], "amoebanet": [3, 16, 64, 8, 2]}


HEADS = ["model", "batch", "K", "M", "step", "samples/s", "x one device", "ceiling", "torchgpipe"]
HEADS += ["x (K=2, M=1)", "GPipe, torchgpipe"]


class Case(NamedTuple):
    """A model, its loss, and the sizes of its images and batches."""

    label: str
    build: Callable[[], nn.Sequential]
    loss: Callable[[Tensor, Tensor], Tensor]
    pixels: int
    whole: int
    micro: int

    def images(self, M: int) -> int:
        """Return the number of images in a batch of M micro-batches."""
        return self.whole if M == 1 else M * self.micro

    def batch(self, M: int, device: str) -> tuple[Tensor, Tensor]:
        """Return noise images and random targets: masks for the U-Net, classes for the others."""
        rows = self.images(M)
        noise = torch.randn(rows, 3, self.pixels, self.pixels, device=device)
        if self.loss is functional.cross_entropy:
            return noise, torch.randint(CLASSES, (rows,), device=device)
        return noise, torch.rand(rows, 1, self.pixels, self.pixels, device=device)


class Row(NamedTuple):
    """One measurement: K devices, M micro-batches, seconds a step."""

    K: int
    M: int
    seconds: float


def case(model: str, args: argparse.Namespace) -> Case:
    *sizes, pixels, whole, micro = getattr(args, model)
    size = ", ".join(map(str, sizes))
    if model == "unet":
        loss = functional.binary_cross_entropy_with_logits
        return Case(f"U-Net ({size})", partial(unet, *sizes), loss, pixels, whole, micro)
    label, build = f"AmoebaNet-D ({size})", partial(amoebanet_d, *sizes, classes=CLASSES)
    if model == "resnet101":
        label, build = f"ResNet-101, width {size}", partial(resnet101, width=sizes[0])
    return Case(label, build, functional.cross_entropy, pixels, whole, micro)


def devices(K: int, args: argparse.Namespace) -> Sequence[Any]:
    return ["cpu"] * K if args.cpu else penstock.virtual_devices("cuda:0", K, sms=args.sms)


def seconds(step: Callable[[], object], args: argparse.Namespace) -> float:
    """Return the median time of a step after warm-up."""
    times = []
    for _ in range(WARM_UP + args.steps):
        start = perf_counter()
        step()
        if not args.cpu:
            torch.cuda.synchronize()
        times.append(perf_counter() - start)
    return median(times[WARM_UP:])


def measure(what: Case, K: int, M: int, args: argparse.Namespace) -> Row:
    """Time a step of a new pipe. One device gets the undivided batch and recomputes nothing."""
    gc.collect()
    device = "cpu" if args.cpu else "cuda:0"
    images, target = what.batch(M, device)
    profile = K > 1 and not args.cpu
    with torch.device(device):
        model = what.build()
    pipe = penstock.Pipe(
        model,
        chunks=M,
        checkpoint="never" if K == 1 else args.checkpoint,
        stages=K,
        devices=devices(K, args),
        schedule=args.schedule,
        runtime=args.runtime,
        loss_fn=what.loss,
        balance="time" if profile else "parameters",
        example=images if profile else None,
        target=target if profile else None,
        # The audit takes time in the first step, and this benchmark builds many pipes.
        audit="off",
    )

    def step() -> None:
        pipe.zero_grad()
        pipe.step(images, target=target)

    row = Row(K, M, seconds(step, args))
    print(f"{what.label}, {row}", file=sys.stderr, flush=True)
    return row


def ceiling(K: int, args: argparse.Namespace) -> float:
    """Return the speed-up of K devices over one, each with its own independent convolutions."""
    x = torch.randn(2, 8, 8, 8) if args.cpu else torch.randn(32, 256, 56, 56, device="cuda:0")
    channels = x.shape[1]
    pipes = [
        penstock.Pipe(
            nn.Sequential(*(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(8))),
            checkpoint="never",
            stages=1,
            devices=[device],
            loss_fn=functional.mse_loss,
        )
        for device in devices(K, args)
    ]
    with ThreadPoolExecutor(K) as pool:
        alone = seconds(lambda: pipes[0].step(x, target=x), args)
        together = seconds(lambda: list(pool.map(lambda p: p.step(x, target=x), pipes)), args)
    return K * alone / together


def print_rows(model: str, what: Case, rows: list[Row], ceilings: dict[int, float]) -> None:
    speeds = {(row.K, row.M): what.images(row.M) / row.seconds for row in rows}
    for row in rows:
        speed = speeds[row.K, row.M]
        pipelined = row.M > 1
        cells = [
            what.label,
            f"{what.images(row.M)} of {what.pixels} px",
            f"{row.K}",
            f"{row.M}",
            f"{1000 * row.seconds:.0f} ms",
            f"{speed:.1f}",
            f"{speed / speeds[1, 1]:.2f}",
            f"{ceilings[row.K]:.2f}",
            TIMES_ONE.get(model, {}).get(row.K, "") if pipelined else "",
            f"{speed / speeds[2, 1]:.2f}",
            TIMES_K2_M1.get(model, {}).get(row.K, "") if pipelined else "",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="tiny models on CPU ranks")
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    for model, size_names in SIZES.items():
        metavar = (*size_names.split(), "PIXELS", "BATCH", "MICRO")
        parser.add_argument(f"--{model}", nargs=len(metavar), type=int, metavar=metavar)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8], help="values of K")
    parser.add_argument("--chunks", type=int, help="M; default 32, or 4 with --cpu")
    parser.add_argument("--schedule", default="gpipe")
    parser.add_argument("--runtime", choices=RUNTIMES, default="threads")
    parser.add_argument(
        "--checkpoint", choices=["always", "except_last", "never"], default="except_last"
    )
    parser.add_argument("--sms", type=int, default=16, help="multiprocessors per device")
    parser.add_argument(
        "--steps", type=int, default=3, help="timed steps, of which the median is reported"
    )
    args = parser.parse_args(argv)
    for model, sizes in (TINY if args.cpu else FULL).items():
        setattr(args, model, getattr(args, model) or sizes)
    args.chunks = args.chunks or (4 if args.cpu else 32)
    if not args.cpu and not torch.cuda.is_available():
        parser.error("this measures virtual devices of a CUDA GPU, and there is none; try --cpu")
    return args


def main() -> None:
    args = arguments()
    start = perf_counter()
    ceilings = {K: ceiling(K, args) for K in sorted({1, 2, *args.ranks})}
    print("| " + " | ".join(HEADS) + " |")
    print("|---" * len(HEADS) + "|")
    for model in args.models:
        what = case(model, args)
        sizes = [(1, 1), (2, 1), *((K, args.chunks) for K in args.ranks)]
        print_rows(model, what, [measure(what, K, M, args) for K, M in sizes], ceilings)
    machine = (
        "CPU ranks" if args.cpu else f"{args.sms} SMs each of a {torch.cuda.get_device_name()}"
    )
    settings = f"{args.schedule}, {args.runtime}, checkpoint {args.checkpoint}"
    print(f"\n{machine}; {settings}, but one device recomputes")
    print(f"nothing; float32; median of {args.steps} steps, after {WARM_UP} to warm up;")
    print(f"torch {torch.__version__}; {perf_counter() - start:.0f} s in all.")


if __name__ == "__main__":
    main()

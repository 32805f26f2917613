"""Compare speed-ups with the tables of the GPipe and torchgpipe papers.

    python benchmarks/papers.py                 one GPU with 128 multiprocessors or more
    python benchmarks/papers.py --models unet --unet 5 64 192 64 16 --checkpoint never
    python benchmarks/papers.py --cpu           tiny models on CPU ranks, as a smoke test
    python benchmarks/papers.py --seconds 100   no row begins after 100 seconds
    python benchmarks/papers.py --lock FILE     beside others with this FILE, in turns
    python benchmarks/papers.py --runtime graph --rows 8/1f1b/never 8/gpipe/except_last

One GPU is split into K virtual devices. Their size does not depend on K, so that K devices have K
times the multiprocessors of one, as in the papers. But they share the memory and the clock of one
chip. The ceiling is that of `benchmarks/graph.py`, as a speed-up over one device: the layers'
kernels are timed alone on one device, these times are simulated under the schedule with the cut of
the row, and the result is divided by the contention, the speed of convolutions while all K devices
are busy relative to one alone.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import inf, nan
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock.config import RUNTIMES
from penstock.model.profiler import bind_target, profile_layers
from penstock.model.traced.traced_partition import UnitCost

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from amoebanet import amoebanet_d
from benchmarks.virtual import (
    GpuLock,
    choose_cut,
    contention_of_graphs,
    head,
    line,
    simulate_units,
)
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


HEADS = [
    "model",
    "batch",
    "K",
    "M",
    "schedule",
    "recomputed",
    "step",
    "samples/s",
    "x one device",
    "ceiling",
]
HEADS += ["of the ceiling", "torchgpipe", "x (K=2, M=1)", "GPipe, torchgpipe"]


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


class Setting(NamedTuple):
    """K devices, M micro-batches, a schedule, and what is recomputed."""

    K: int
    M: int
    schedule: str
    checkpoint: str


class Row(NamedTuple):
    """One measurement: its setting, seconds a step, and seconds at the ceiling."""

    setting: Setting
    seconds: float
    ceiling: float = nan


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


def seconds(step: Callable[[], object], args: argparse.Namespace, lock: GpuLock) -> float:
    """Return the median time of a step after two to warm up; the second may be captured."""
    with lock.hold(exclusive=False):
        step()
    if args.runtime == "graph":
        with lock.around_replays():
            step()
    else:
        with lock.hold(exclusive=False):
            step()
    times = []
    with lock.hold(exclusive=True):
        for _ in range(args.steps):
            start = perf_counter()
            step()
            if not args.cpu:
                torch.cuda.synchronize()
            times.append(perf_counter() - start)
    return median(times)


class Model(NamedTuple):
    """A case with its model, which all rows share, and the costs of its layers on one device."""

    case: Case
    layers: nn.Sequential
    costs: Sequence[UnitCost]

    @staticmethod
    def build(case: Case, args: argparse.Namespace, lock: GpuLock) -> Model:
        """Build a model, and time the layers on a micro-batch unless it is on the CPU."""
        with torch.device("cpu" if args.cpu else "cuda:0"):
            layers = case.build()
        if args.cpu:
            return Model(case, layers, [])
        (device,) = devices(1, args)
        images, target = case.batch(args.chunks, "cuda:0")
        loss = bind_target(case.loss, target, args.chunks)
        profile = partial(profile_layers, chunks=args.chunks, device=device.device, loss=loss)
        with lock.hold(exclusive=True), device.activate():
            return Model(case, layers, profile(list(layers), (images,)))

    def choose_stages(self, wanted: Setting, args: argparse.Namespace) -> tuple[int, ...] | None:
        """Return the cut of these costs. None: by parameters, or nothing is to be cut."""
        K, M, schedule, _ = wanted
        if K == 1:
            return (len(self.layers),)
        return choose_cut(schedule, devices(K, args), M, self.costs) if self.costs else None


def measure(model: Model, wanted: Setting, args: argparse.Namespace, lock: GpuLock) -> Row:
    """Time a step of a new pipe."""
    K, M, schedule, checkpoint = wanted
    model.layers.zero_grad()
    gc.collect()
    if not args.cpu:
        torch.cuda.empty_cache()
    begin = perf_counter()
    what = model.case
    images, target = what.batch(M, "cpu" if args.cpu else "cuda:0")
    stages = model.choose_stages(wanted, args)
    pipe = penstock.Pipe(
        model.layers,
        chunks=M,
        checkpoint=checkpoint,
        stages=K if stages is None else stages,
        devices=devices(K, args),
        schedule=schedule,
        runtime=args.runtime,
        loss_fn=what.loss,
        balance="parameters" if stages is None else None,
        # The audit takes time in the first step, and this benchmark builds many pipes.
        audit="off",
    )

    def step() -> None:
        pipe.zero_grad()
        pipe.step(images, target=target)

    row = Row(wanted, seconds(step, args, lock))
    if model.costs and K > 1 and M > 1:
        with lock.hold(exclusive=True):
            row = row._replace(ceiling=simulate_units(pipe, model.costs) / contention(K, args.sms))
    print(f"{what.label}, {row}: {perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
    return row


@cache
def contention(K: int, sms: int) -> float:
    """Return the speed of a device while all K compute convolutions, relative to one alone."""
    x = torch.randn(32, 256, 56, 56, device="cuda:0")
    convolutions = nn.Sequential(*(nn.Conv2d(256, 256, 3, padding=1) for _ in range(4))).cuda()
    return contention_of_graphs(
        list(penstock.virtual_devices("cuda:0", K, sms=sms)), convolutions, [x]
    )


def print_rows(name: str, args: argparse.Namespace, end: float, lock: GpuLock) -> None:
    """Measure a network, and print each row. None begins after `end`."""
    model = Model.build(case(name, args), args, lock)
    what, published = model.case, (TIMES_ONE.get(name, {}), TIMES_K2_M1.get(name, {}))
    # One device gets the undivided batch, and recomputes nothing.
    settings = [Setting(1, 1, "gpipe", "never")]
    if published[1]:  # the paper about AmoebaNet-D compares with two devices, one busy at a time
        settings.append(Setting(2, 1, args.schedule, args.checkpoint))
    settings += args.settings
    speeds: dict[tuple[int, int], float] = {}
    for wanted in settings:
        K, M = wanted.K, wanted.M
        if perf_counter() > end:
            return
        try:
            row = measure(model, wanted, args, lock)
        except RuntimeError as error:  # the other rows are still worth their time
            print(line([what.label, "", *wanted, error]), flush=True)
            continue
        speed = speeds[K, M] = what.images(M) / row.seconds
        one, two = speeds.get((1, 1), nan), speeds.get((2, 1), nan)
        cells = [
            what.label,
            f"{what.images(M)} of {what.pixels} px",
            *wanted,
            f"{1000 * row.seconds:.0f} ms",
            f"{speed:.1f}",
            f"{speed / one:.2f}",
            f"{what.images(M) / row.ceiling / one:.2f}",
            f"{row.ceiling / row.seconds:.3f}",
            published[0].get(K, "") if M > 1 else "",
            f"{speed / two:.2f}",
            published[1].get(K, "") if M > 1 else "",
        ]
        print(line(cells).replace("nan", ""), flush=True)


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
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="K/SCHEDULE/CHECKPOINT",
        help="these rows, instead of all --ranks with --schedule and --checkpoint",
    )
    parser.add_argument("--sms", type=int, default=16, help="multiprocessors per device")
    parser.add_argument(
        "--steps", type=int, default=3, help="timed steps, of which the median is reported"
    )
    parser.add_argument("--seconds", type=float, default=inf, help="no row begins later")
    parser.add_argument("--lock", help="a file by which processes that share the GPU take turns")
    args = parser.parse_args(argv)
    for model, sizes in (TINY if args.cpu else FULL).items():
        setattr(args, model, getattr(args, model) or sizes)
    args.chunks = args.chunks or (4 if args.cpu else 32)
    wanted = args.rows or [f"{K}/{args.schedule}/{args.checkpoint}" for K in args.ranks]
    args.settings = [
        Setting(int(K), args.chunks, schedule, checkpoint)
        for K, schedule, checkpoint in (text.split("/") for text in wanted)
    ]
    if not args.cpu and not torch.cuda.is_available():
        parser.error("this measures virtual devices of a CUDA GPU, and there is none; try --cpu")
    return args


def main() -> None:
    args = arguments()
    start, lock = perf_counter(), GpuLock(args.lock)
    print(head(HEADS), flush=True)
    for model in args.models:
        print_rows(model, args, start + args.seconds, lock)
    machine = (
        "CPU ranks" if args.cpu else f"{args.sms} SMs each of a {torch.cuda.get_device_name()}"
    )
    print(f"\n{machine}; {args.runtime}; float32; median of {args.steps} steps, after")
    print(f"{WARM_UP} to warm up; torch {torch.__version__};", end=" ")
    print(f"{perf_counter() - start:.0f} s in all.")


if __name__ == "__main__":
    main()

"""Measure steps captured as one CUDA graph, against threads and against the ceiling.

    python benchmarks/graph.py                              blocks: all sizes, about five minutes
    python benchmarks/graph.py --devices 8 --rows 128 512   some of them
    python benchmarks/graph.py --figure 2                   8 devices, 512 and 128 rows
    python benchmarks/graph.py --figure 3                   4 devices, 4,096 rows
    python benchmarks/graph.py --figure 4                   host time of a replay
    python benchmarks/graph.py --figure 5                   one device, against accumulation
    python benchmarks/graph.py --host                       host time of a replay, at all sizes
    python benchmarks/graph.py --transformers               TransformerEncoderLayer, with dropout

The model has eight blocks x + W2 gelu(W1 norm(x)) in bf16. It runs with 32 micro-batches on 2, 4 or
8 virtual GPUs, without recomputation. The table has median milliseconds per step:

naive       one group at a time, as a graph, so that the host does not slow it down at any size
threads     1f1b with one thread per device
graph       1f1b, replayed
torchgpipe  the design of torchgpipe: gpipe with threads
unsplit     the model on the whole GPU, with eager gradient accumulation over micro-batches
plain graph the same, captured as one CUDA graph

Contention is also measured with captured work. `host` is the time that the host takes to launch a
replayed step on an idle device, as a share of the step. Of this, the device only waits for what
comes before the launch of the graph and for the beginning of the launch, which `--host` measures:
the time of a step less that from its first to its last action on the device. `memory` is the memory
of the graph over that of threads: the peak in tensors, and the memory reserved from the device.
`--figure` prints claims, and exits with 1 if one of them does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

import penstock

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.bench import GRAPH, NAIVE, THREADS, TORCHGPIPE, WARM_UP, Bench
from benchmarks.virtual import blocks_of, head, in_turns, line, milliseconds, needs_cuda

BLOCKS, WIDTH, CHUNKS = 8, 2048, 32
DEVICES = (2, 4, 8)
ROWS = (64, 128, 512, 2048)

HEADS = ["devices", "rows", "naive", "threads", "graph", "torchgpipe", "unsplit", "plain graph"]
HEADS += ["contention", "ceiling", "x threads", "of the ceiling", "host", "memory"]


class Claim(NamedTuple):
    """A bound that a measured number must satisfy."""

    what: str
    found: float
    asked: float
    at_most: bool = False

    @property
    def holds(self) -> bool:
        return self.found <= self.asked if self.at_most else self.found >= self.asked

    def __str__(self) -> str:
        bound = f"at {'most' if self.at_most else 'least'} {self.asked:g}"
        return line([self.what, f"{self.found:.3f}", bound, "yes" if self.holds else "NO"])


def mlp(rows: int, args: argparse.Namespace) -> Bench:
    x = torch.randn(args.chunks * rows, WIDTH, device="cuda:0", dtype=torch.bfloat16)
    return Bench(blocks_of(BLOCKS, WIDTH), x, args.chunks, args.times)


# ---- the table -----------------------------------------------------------------------------


def row(bench: Bench, ranks: int, unsplit: tuple[float, float]) -> str:
    places = penstock.virtual_devices("cuda:0", ranks)
    speed = bench.speed(list(places))
    host, step = bench.host(places)
    tensors, reserved = bench.memory(places)
    times = [speed.naive, speed.threads, speed.graph, bench.step(TORCHGPIPE, places), *unsplit]
    measurements = [*(f"{duration:.1f}" for duration in times), f"{speed.contention:.3f}"]
    ratios = [f"{speed.ceiling:.1f}", f"{speed.over_threads:.2f}", f"{speed.of_the_ceiling:.3f}"]
    shares = [f"{host / step:.1%}", f"{tensors:.2f}, {reserved:.2f}"]
    return line([ranks, len(bench.x) // bench.chunks, *measurements, *ratios, *shares])


def sizes(args: argparse.Namespace) -> None:
    print(head(HEADS), flush=True)
    for rows in args.rows:
        bench = mlp(rows, args)
        eager = milliseconds(bench.accumulate, args.times)
        unsplit = eager, bench.plain(torch.cuda.Stream())
        bench.tidy()
        for ranks in args.devices:
            if perf_counter() < args.end:
                print(row(bench, ranks, unsplit), flush=True)


class Replays(NamedTuple):
    """Median milliseconds of replayed steps on an idle device.

    Attributes:
        step: Until the device is done.
        host: Until the call of `step` returns.
        before: Until the launch of the graph begins.
        launch: The launch, a call of the driver.
        device: From the first to the last action, by the clock of the device.
        in_a_row: A step among several that are launched before the host waits, as in training.
    """

    step: float
    host: float
    before: float
    launch: float
    device: float
    in_a_row: float

    @property
    def waits(self) -> float:
        """Milliseconds in which the device waits for the host, in a step on an idle device."""
        return self.step - self.device


def time_replays(pipe: penstock.Pipe, x: torch.Tensor, times: int) -> Replays:
    rounds = []
    with timed_launches() as launches:
        for _ in range(WARM_UP):
            pipe.step(x)
        for _ in range(times):
            torch.cuda.synchronize()
            start = perf_counter()
            result = pipe.step(x)
            returned = perf_counter()
            torch.cuda.synchronize()
            end = perf_counter()
            launch_begin, launch_end = launches[-1]
            durations = (
                end - start,
                returned - start,
                launch_begin - start,
                launch_end - launch_begin,
                result.timeline.makespan,
            )
            rounds.append([1e3 * duration for duration in durations])
    (in_a_row,) = in_turns([lambda: pipe.step(x)], times)
    step, host, before, launch, device = map(statistics.median, zip(*rounds, strict=True))
    return Replays(step, host, before, launch, device, in_a_row)


def hosts(args: argparse.Namespace) -> None:
    """Print the host time of a replay at each size, and how long the device waits for it."""
    heads = ["devices", "rows", "step", "host", "before", "launch", "host / step"]
    heads += ["on the device", "waits", "waits / step", "in a row"]
    print(head(heads), flush=True)
    for rows, ranks in itertools.product(args.rows, args.devices):
        if perf_counter() > args.end:
            return
        bench, places = mlp(rows, args), penstock.virtual_devices("cuda:0", ranks)
        replays = bench.of_pipe(GRAPH, places, partial(time_replays, x=bench.x, times=args.times))
        host = [replays.step, replays.host, replays.before, replays.launch]
        cells = [ranks, rows, *(f"{ms:.2f}" for ms in host), f"{replays.host / replays.step:.1%}"]
        cells += [f"{replays.device:.2f}", f"{replays.waits:.2f}"]
        cells += [f"{replays.waits / replays.step:.1%}", f"{replays.in_a_row:.2f}"]
        print(line(cells), flush=True)


@contextmanager
def timed_launches() -> Iterator[list[tuple[float, float]]]:
    """Collect the times at which each launch of a CUDA graph begins and ends."""
    launches: list[tuple[float, float]] = []
    graphs: Any = torch.cuda.CUDAGraph
    replay = graphs.replay

    def timed(graph: torch.cuda.CUDAGraph) -> None:
        start = perf_counter()
        replay(graph)
        launches.append((start, perf_counter()))

    graphs.replay = timed
    try:
        yield launches
    finally:
        graphs.replay = replay


# ---- claims --------------------------------------------------------------------------------


def figure_2(args: argparse.Namespace) -> Iterator[Claim]:
    """Measure eight devices, where Python is the bottleneck of threads."""
    places = list(penstock.virtual_devices("cuda:0", 8))
    speed = mlp(512, args).speed(places)
    yield Claim("8 devices, 512 rows: times faster than threads", speed.over_threads, 1.7)
    yield Claim("8 devices, 512 rows: of the ceiling", speed.of_the_ceiling, 0.95)
    bench = mlp(128, args)
    threads, graph = bench.step(THREADS, places), bench.step(GRAPH, places)
    yield Claim("8 devices, 128 rows: times faster than threads", threads / graph, 2.5)


def figure_3(args: argparse.Namespace) -> Iterator[Claim]:
    """Measure four devices, where the devices are the bottleneck."""
    speed = mlp(4096, args).speed(list(penstock.virtual_devices("cuda:0", 4)))
    yield Claim("4 devices, 4,096 rows: times faster than threads", speed.over_threads, 1.0)
    yield Claim("4 devices, 4,096 rows: of the ceiling", speed.of_the_ceiling, 0.97)


def figure_4(args: argparse.Namespace) -> Iterator[Claim]:
    """Measure the host time of a replay; the batch is already on the GPU."""
    for ranks, rows in ((8, 128), (8, 512), (4, 4096)):
        host, step = mlp(rows, args).host(penstock.virtual_devices("cuda:0", ranks))
        what = f"{ranks} devices, {rows:,} rows: host {host:.2f} ms, as a share of the step"
        yield Claim(what, host / step, 0.05, at_most=True)


def figure_5(args: argparse.Namespace) -> Iterator[Claim]:
    """Compare a pipe on one device with a plain graph on the same multiprocessors.

    The device is the whole GPU or one group of it. Steps run back to back, as in training, so that
    neither side waits for the host.
    """
    (group,) = penstock.virtual_devices("cuda:0", 1)
    where: list[tuple[str, Any, torch.cuda.Stream]] = [
        ("the whole GPU", "cuda:0", torch.cuda.Stream()),
        (f"one group of {group.sms}", group, group.compute_stream),
    ]
    for rows in (512, 4096):
        bench = mlp(rows, args)
        for name, place, stream in where:
            over = bench.of_pipe(GRAPH, [place], partial(bench.over_plain, stream=stream))
            yield Claim(f"{name}, {rows:,} rows: over a plain graph", over, 1.02, at_most=True)


FIGURES = {2: figure_2, 3: figure_3, 4: figure_4, 5: figure_5}


def told(claims: Iterator[Claim]) -> int:
    """Print the claims as they are measured, and return 1 if one does not hold, else 0."""
    print(head(["what", "measured", "asked", "holds"]), flush=True)
    missed = 0
    for claim in claims:
        print(claim, flush=True)
        missed += not claim.holds
    return min(missed, 1)


# ---- other models --------------------------------------------------------------------------


def transformers(args: argparse.Namespace) -> None:
    """Measure encoder layers with dropout, on micro-batches of four sequences of length 512."""
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(1024, 16, 4096, 0.1, "gelu", batch_first=True, norm_first=True)
        for _ in range(BLOCKS)
    ]
    model = nn.Sequential(*layers).to("cuda:0", torch.bfloat16)
    x = torch.randn(args.chunks * 4, 512, 1024, device="cuda:0", dtype=torch.bfloat16)
    bench = Bench(model, x, args.chunks, args.times)
    print(head(["devices", "naive", "threads", "graph", "x threads", "host"]))
    for ranks in args.devices:
        places = penstock.virtual_devices("cuda:0", ranks)
        naive, threads = (bench.step(way, places) for way in (NAIVE, THREADS))
        host, graph = bench.host(places)
        cells = [
            *(f"{duration:.1f}" for duration in (naive, threads, graph)),
            f"{threads / graph:.2f}",
        ]
        print(line([ranks, *cells, f"{host / graph:.1%}"]), flush=True)


# ---- options -------------------------------------------------------------------------------


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of a micro-batch")
    parser.add_argument("--chunks", type=int, default=CHUNKS)
    parser.add_argument(
        "--times", type=int, default=9, help="timed steps, of which the median is reported"
    )
    parser.add_argument("--figure", type=int, choices=FIGURES)
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--seconds", type=float, default=inf, help="no row begins later")
    parser.add_argument("--transformers", action="store_true")
    args = parser.parse_args(argv)
    args.end = perf_counter() + args.seconds
    return args


def main() -> None:
    args = arguments()
    needs_cuda()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {args.chunks}")
    print(f"micro-batches, medians of up to {args.times} steps\n")
    if args.figure:
        raise SystemExit(told(FIGURES[args.figure](args)))
    others: list[tuple[Any, Callable[[argparse.Namespace], None]]] = [
        (args.host, hosts),
        (args.transformers, transformers),
    ]
    chosen = [show for selected, show in others if selected]
    for show in chosen or [sizes]:
        show(args)


if __name__ == "__main__":
    main()

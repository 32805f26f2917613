"""A whole step in one launch: captured as a CUDA graph, against threads and against the ceiling.

    python benchmarks/graph.py                              blocks: all sizes, about eight minutes
    python benchmarks/graph.py --devices 8 --rows 128 512   some of them
    python benchmarks/graph.py --figure 2                   8 devices, 512 and 128 rows
    python benchmarks/graph.py --figure 3                   4 devices, 4,096 rows
    python benchmarks/graph.py --figure 4                   what the host takes for a replay
    python benchmarks/graph.py --figure 5                   one device, against plain accumulation
    python benchmarks/graph.py --transformers               TransformerEncoderLayer, with dropout
    python benchmarks/graph.py --papers unet                U-Net, resnet101, amoebanet

Eight blocks x + W2 gelu(W1 norm(x)) in bf16, 32 micro-batches, on 2, 4 or 8 virtual GPUs; nothing
is recomputed. Milliseconds of a step, medians in one run:

naive       one group at a time, as a graph: the host does not slow it down, however small it is
threads     1f1b, a thread for each device
graph       1f1b, replayed
torchgpipe  its design: gpipe by threads
unsplit     the model on the whole GPU, gradients accumulated over micro-batches, eagerly
plain graph the same, captured as one CUDA graph

Contention is measured with captured work, too. `host` is what the host takes to ask for a replayed
step of an idle device, as a share of the step; `memory` that of the graph over that of threads: the
peak in tensors, and what is taken from the device. A figure prints what must hold, and ends with 1
if it does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import penstock

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import papers
from benchmarks.bench import GRAPH, NAIVE, THREADS, TORCHGPIPE, Bench
from benchmarks.virtual import blocks_of, head, line, milliseconds, needs_cuda

BLOCKS, WIDTH, CHUNKS = 8, 2048, 32
DEVICES = (2, 4, 8)
ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)

HEADS = ["devices", "rows", "naive", "threads", "graph", "torchgpipe", "unsplit", "plain graph"]
HEADS += ["contention", "ceiling", "x threads", "of the ceiling", "host", "memory"]


class Claim(NamedTuple):
    """Something that must hold of a number that was measured."""

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


def mlp(rows: int, given: argparse.Namespace) -> Bench:
    x = torch.randn(given.chunks * rows, WIDTH, device="cuda:0", dtype=torch.bfloat16)
    return Bench(blocks_of(BLOCKS, WIDTH), x, given.chunks, given.times)


# ---- the table -----------------------------------------------------------------------------


def row(bench: Bench, ranks: int, unsplit: tuple[float, float]) -> str:
    places = penstock.virtual_devices("cuda:0", ranks)
    speed = bench.speed(list(places))
    host, step = bench.host(places)
    tensors, taken = bench.memory(places)
    times = [speed.naive, speed.threads, speed.graph, bench.step(TORCHGPIPE, places), *unsplit]
    times_and = [*(f"{each:.1f}" for each in times), f"{speed.contention:.3f}"]
    ratios = [f"{speed.ceiling:.1f}", f"{speed.over_threads:.2f}", f"{speed.of_the_ceiling:.3f}"]
    shares = [f"{host / step:.1%}", f"{tensors:.2f}, {taken:.2f}"]
    return line([ranks, len(bench.x) // bench.chunks, *times_and, *ratios, *shares])


def sizes(given: argparse.Namespace) -> None:
    print(head(HEADS), flush=True)
    for rows in given.rows:
        bench = mlp(rows, given)
        eager = milliseconds(bench.accumulate, given.times)
        unsplit = eager, bench.plain(torch.cuda.Stream())
        bench.tidy()
        for ranks in given.devices:
            print(row(bench, ranks, unsplit), flush=True)


# ---- what must hold ------------------------------------------------------------------------


def figure_2(given: argparse.Namespace) -> Iterator[Claim]:
    """Eight devices, where Python is what limits threads."""
    places = list(penstock.virtual_devices("cuda:0", 8))
    speed = mlp(512, given).speed(places)
    yield Claim("8 devices, 512 rows: times faster than threads", speed.over_threads, 1.7)
    yield Claim("8 devices, 512 rows: of the ceiling", speed.of_the_ceiling, 0.95)
    bench = mlp(128, given)
    threads, graph = bench.step(THREADS, places), bench.step(GRAPH, places)
    yield Claim("8 devices, 128 rows: times faster than threads", threads / graph, 2.5)


def figure_3(given: argparse.Namespace) -> Iterator[Claim]:
    """Four devices, where the devices are what limits."""
    speed = mlp(4096, given).speed(list(penstock.virtual_devices("cuda:0", 4)))
    yield Claim("4 devices, 4,096 rows: times faster than threads", speed.over_threads, 1.0)
    yield Claim("4 devices, 4,096 rows: of the ceiling", speed.of_the_ceiling, 0.97)


def figure_4(given: argparse.Namespace) -> Iterator[Claim]:
    """The batch is on the GPU already."""
    for ranks, rows in ((8, 128), (8, 512), (4, 4096)):
        host, step = mlp(rows, given).host(penstock.virtual_devices("cuda:0", ranks))
        what = f"{ranks} devices, {rows:,} rows: host {host:.2f} ms, as a share of the step"
        yield Claim(what, host / step, 0.05, at_most=True)


def figure_5(given: argparse.Namespace) -> Iterator[Claim]:
    """One device: all multiprocessors, or those of one group; both sides on the same.

    Steps follow one another, as in training: what the host does meanwhile costs neither side.
    """
    (group,) = penstock.virtual_devices("cuda:0", 1)
    where: list[tuple[str, Any, torch.cuda.Stream]] = [
        ("the whole GPU", "cuda:0", torch.cuda.Stream()),
        (f"one group of {group.sms}", group, group.compute_stream),
    ]
    for rows in (512, 4096):
        bench = mlp(rows, given)
        for name, place, stream in where:
            over = bench.of_pipe(GRAPH, [place], partial(bench.over_plain, stream=stream))
            yield Claim(f"{name}, {rows:,} rows: over a plain graph", over, 1.02, at_most=True)


FIGURES = {2: figure_2, 3: figure_3, 4: figure_4, 5: figure_5}


def told(claims: Iterator[Claim]) -> int:
    """Print them as they come; 1 if one does not hold."""
    print(head(["what", "measured", "asked", "holds"]), flush=True)
    missed = 0
    for claim in claims:
        print(claim, flush=True)
        missed += not claim.holds
    return min(missed, 1)


# ---- other models --------------------------------------------------------------------------


def transformers(given: argparse.Namespace) -> None:
    """Micro-batches of four sequences of 512; random numbers are part of every step."""
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(1024, 16, 4096, 0.1, "gelu", batch_first=True, norm_first=True)
        for _ in range(BLOCKS)
    ]
    model = nn.Sequential(*layers).to("cuda:0", torch.bfloat16)
    x = torch.randn(given.chunks * 4, 512, 1024, device="cuda:0", dtype=torch.bfloat16)
    bench = Bench(model, x, given.chunks, given.times)
    print(head(["devices", "naive", "threads", "graph", "x threads", "host"]))
    for ranks in given.devices:
        places = penstock.virtual_devices("cuda:0", ranks)
        naive, threads = (bench.step(way, places) for way in (NAIVE, THREADS))
        host, graph = bench.host(places)
        cells = [*(f"{each:.1f}" for each in (naive, threads, graph)), f"{threads / graph:.2f}"]
        print(line([ranks, *cells, f"{host / graph:.1%}"]), flush=True)


def of_papers(given: argparse.Namespace) -> None:
    """Recomputation and sizes as in `benchmarks/papers.py`, where the other tables are."""
    print(head(["model", "K", "naive", "threads", "graph", "x threads"]))
    options = ["--chunks", str(given.chunks), "--steps", "3"]
    for model in given.papers:
        naive = float("nan")
        for K in sorted(given.devices, reverse=True):
            ways = (NAIVE, THREADS, GRAPH) if max(given.devices) == K else (THREADS, GRAPH)
            found = []
            for schedule, runtime in ways:
                more = ["--schedule", schedule, "--runtime", runtime]
                args = papers.arguments([*options, *more])
                what = papers.case(model, args)
                found.append(1e3 * papers.measure(what, K, given.chunks, args).seconds)
            *first, threads, graph = found
            naive = first[0] if first else naive  # one at a time takes as long, however many
            cells = [f"{each:.0f}" for each in (naive, threads, graph)]
            print(line([what.label, K, *cells, f"{threads / graph:.2f}"]), flush=True)


# ---- options -------------------------------------------------------------------------------


def arguments(asked: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of a micro-batch")
    parser.add_argument("--chunks", type=int, default=CHUNKS)
    parser.add_argument("--times", type=int, default=9, help="steps, of which the median")
    parser.add_argument("--figure", type=int, choices=FIGURES)
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--papers", nargs="*", choices=papers.SIZES)
    given = parser.parse_args(asked)
    if given.papers == []:
        given.papers = list(papers.SIZES)
    return given


def main() -> None:
    given = arguments()
    needs_cuda()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {given.chunks}")
    print(f"micro-batches, medians of up to {given.times} steps\n")
    if given.figure:
        raise SystemExit(told(FIGURES[given.figure](given)))
    others: list[tuple[Any, Callable[[argparse.Namespace], None]]] = [
        (given.transformers, transformers),
        (given.papers, of_papers),
    ]
    chosen = [show for asked, show in others if asked]
    for show in chosen or [sizes]:
        show(given)


if __name__ == "__main__":
    main()

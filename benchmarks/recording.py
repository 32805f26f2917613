"""What does it cost that every step is timed, action by action?

    python benchmarks/recording.py [--ranks 2]                     CPU ranks, by the clock
    python benchmarks/recording.py --ranks 4 --sms 32  a GPU cut in four, by events or kernels

Blocks of two Linear layers. In every round each pipe takes a step with its places telling the time,
and one with places that tell nothing, in turns; medians of all rounds, until the devices are done.
`host` is how long the call itself takes. The aim: below 2 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import penstock
from penstock import Pipe
from penstock.device.device import Cpu, Gpu
from penstock.device.gpu_timestamps import TimestampedGpu

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.virtual import head, line, loss_of

HEADS = ["runtime", "rows", "ms a step", "untimed", "more", "ms host", "untimed", "µs an action"]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.b(torch.tanh(self.a(x))))


class Seconds(NamedTuple):
    """Of one step."""

    host: float
    whole: float


@contextmanager
def silent(places: Sequence[Any]) -> Iterator[None]:
    """Within, they do not tell the time, nor do those of a step that is captured."""
    nothing: Callable[..., float] = lambda *_: 0.0  # noqa: E731
    for place in places:
        place.now = place.sent = nothing
    stamped: Any = TimestampedGpu
    now, stamped.now = stamped.now, nothing
    try:
        yield
    finally:
        stamped.now = now
        for place in places:
            del place.now, place.sent


def a_step(pipe: Pipe, x: Tensor, synchronize: Callable[[], None]) -> Seconds:
    pipe.zero_grad(set_to_none=False)
    synchronize()
    start = perf_counter()
    pipe.step(x)
    called = perf_counter() - start
    synchronize()
    return Seconds(called, perf_counter() - start)


def measured(
    make: Callable[[], Pipe],
    places: Sequence[Any],
    x: Tensor,
    rounds: int,
    synchronize: Callable[[], None],
) -> tuple[list[Seconds], list[Seconds]]:
    """With the time told, and without: two pipes, as a captured step has its kernels in it."""
    timed, untimed = make(), make()
    found: tuple[list[Seconds], list[Seconds]] = [], []
    for turn in range(rounds + 4):  # the first ones warm up, and capture
        order = (0, 1) if turn % 2 else (1, 0)
        for which in order:
            if which:
                with silent(places):
                    seconds = a_step(untimed, x, synchronize)
            else:
                seconds = a_step(timed, x, synchronize)
            if turn >= 4:
                found[which].append(seconds)
    return found


def row(name: str, rows: int, found: tuple[list[Seconds], list[Seconds]], actions: int) -> str:
    timed, untimed = (
        Seconds(*(statistics.median(column) for column in zip(*each, strict=True)))
        for each in found
    )
    share = timed.whole / untimed.whole - 1
    an_action = (timed.host - untimed.host) / actions * 1e6
    cells = (
        name, rows, f"{timed.whole * 1e3:.2f}", f"{untimed.whole * 1e3:.2f}", f"{share:+.1%}",
        f"{timed.host * 1e3:.2f}", f"{untimed.host * 1e3:.2f}", f"{an_action:+.2f}",
    )  # fmt: skip
    return line(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sms", type=int, default=0, help="a rank is so many multiprocessors")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--chunks", type=int)
    parser.add_argument("--rows", type=int, nargs="+", help="of a micro-batch")
    parser.add_argument("--width", type=int)
    parser.add_argument("--schedule", default="1f1b")
    given = parser.parse_args()
    on_gpu, ranks = given.sms > 0, given.ranks
    chunks = given.chunks or 4 * ranks
    sizes = given.rows or ([128, 512, 4096] if on_gpu else [16, 256])
    width = given.width or (2048 if on_gpu else 256)
    places: list[Cpu | Gpu] = [Cpu() for _ in range(ranks)]
    kind: dict[str, Any] = {}
    machine, runtimes = f"{os.cpu_count()} cores", ["inline", "threads"]
    synchronize: Callable[[], None] = lambda: None  # noqa: E731
    if on_gpu:
        places = list(penstock.virtual_devices("cuda:0", ranks, given.sms))
        kind = {"device": "cuda:0", "dtype": torch.bfloat16}
        machine = f"{torch.cuda.get_device_name()}, {given.sms} multiprocessors a rank"
        runtimes.append("graph")
        synchronize = torch.cuda.synchronize
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {machine}: {ranks} ranks, {given.schedule}, {chunks}")
    print(f"micro-batches, 2 blocks of width {width} a rank, medians of {given.rounds}\n")
    print(head(HEADS))
    for runtime in runtimes:
        for rows in sizes:

            def make(runtime: str = runtime) -> Pipe:
                torch.manual_seed(0)
                model = nn.Sequential(*(Block(width) for _ in range(2 * ranks))).to(**kind)
                return Pipe(
                    model, chunks, "never", stages=[2] * ranks, devices=places,
                    schedule=given.schedule, loss_fn=loss_of, runtime=runtime,
                )  # fmt: skip

            x = torch.randn(chunks * rows, width, **kind)
            found = measured(make, places, x, given.rounds, synchronize)
            actions = sum(map(len, make().forecast().program.lanes))
            print(row(runtime, rows, found, actions), flush=True)


if __name__ == "__main__":
    main()

"""Measure the overhead of timing every action of a step.

    python benchmarks/recording.py [--ranks 2]         CPU ranks, by the host clock
    python benchmarks/recording.py --ranks 4 --sms 32  a GPU split in four, by events or kernels

The model has blocks of two Linear layers. Every round runs a step with timing and a step without.
The table has medians of all rounds, including the time until the devices are done. `host` is the
time of the call itself. The overhead should be below 2 %.
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
from penstock.device.nvidia import TimestampedGpu

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
    """The seconds of one step: the call on the host, and until the devices are done."""

    host: float
    whole: float


@contextmanager
def silent(places: Sequence[Any]) -> Iterator[None]:
    """Disable timestamps on these devices, and in steps that are captured meanwhile."""
    no_time: Callable[..., float] = lambda *_: 0.0  # noqa: E731
    for place in places:
        place.record_timestamp = place.record_send_end = no_time
    stamped: Any = TimestampedGpu
    record_timestamp, stamped.record_timestamp = stamped.record_timestamp, no_time
    try:
        yield
    finally:
        stamped.record_timestamp = record_timestamp
        for place in places:
            del place.record_timestamp, place.record_send_end


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
    """Return the durations of steps with timing and without.

    Each variant has its own pipe, because a captured step includes its timestamp kernels.
    """
    timed, untimed = make(), make()
    durations: tuple[list[Seconds], list[Seconds]] = [], []
    for round_index in range(rounds + 4):  # the first four rounds warm up and capture
        order = (0, 1) if round_index % 2 else (1, 0)
        for variant in order:
            if variant:
                with silent(places):
                    seconds = a_step(untimed, x, synchronize)
            else:
                seconds = a_step(timed, x, synchronize)
            if round_index >= 4:
                durations[variant].append(seconds)
    return durations


def row(name: str, rows: int, durations: tuple[list[Seconds], list[Seconds]], actions: int) -> str:
    timed, untimed = (
        Seconds(*(statistics.median(column) for column in zip(*steps, strict=True)))
        for steps in durations
    )
    share = timed.whole / untimed.whole - 1
    per_action = (timed.host - untimed.host) / actions * 1e6
    cells = (
        name, rows, f"{timed.whole * 1e3:.2f}", f"{untimed.whole * 1e3:.2f}", f"{share:+.1%}",
        f"{timed.host * 1e3:.2f}", f"{untimed.host * 1e3:.2f}", f"{per_action:+.2f}",
    )  # fmt: skip
    return line(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--sms",
        type=int,
        default=0,
        help="multiprocessors per rank of a split GPU; 0 for CPU ranks",
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--chunks", type=int)
    parser.add_argument("--rows", type=int, nargs="+", help="rows of a micro-batch")
    parser.add_argument("--width", type=int)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--runtimes", nargs="+", choices=["inline", "threads", "graph"])
    args = parser.parse_args()
    on_gpu, ranks = args.sms > 0, args.ranks
    chunks = args.chunks or 4 * ranks
    sizes = args.rows or ([128, 512, 4096] if on_gpu else [16, 256])
    width = args.width or (2048 if on_gpu else 256)
    places: list[Cpu | Gpu] = [Cpu() for _ in range(ranks)]
    tensor_options: dict[str, Any] = {}
    machine, runtimes = f"{os.cpu_count()} cores", ["inline", "threads"]
    synchronize: Callable[[], None] = lambda: None  # noqa: E731
    if on_gpu:
        places = list(penstock.virtual_devices("cuda:0", ranks, args.sms))
        tensor_options = {"device": "cuda:0", "dtype": torch.bfloat16}
        machine = f"{torch.cuda.get_device_name()}, {args.sms} multiprocessors a rank"
        runtimes.append("graph")
        synchronize = torch.cuda.synchronize
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {machine}: {ranks} ranks, {args.schedule}, {chunks}")
    print(f"micro-batches, 2 blocks of width {width} a rank, medians of {args.rounds}\n")
    print(head(HEADS))
    for runtime in args.runtimes or runtimes:
        for rows in sizes:

            def make(runtime: str = runtime) -> Pipe:
                torch.manual_seed(0)
                model = nn.Sequential(*(Block(width) for _ in range(2 * ranks))).to(
                    **tensor_options
                )
                return Pipe(
                    model, chunks, "never", stages=[2] * ranks, devices=places,
                    schedule=args.schedule, loss_fn=loss_of, runtime=runtime, audit="off",
                )  # fmt: skip

            x = torch.randn(chunks * rows, width, **tensor_options)
            durations = measured(make, places, x, args.rounds, synchronize)
            actions = sum(map(len, make().forecast().program.lanes))
            print(row(runtime, rows, durations, actions), flush=True)


if __name__ == "__main__":
    main()

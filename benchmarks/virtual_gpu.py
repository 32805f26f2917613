"""A pipeline on virtual GPUs against its ceiling.

    python benchmarks/virtual_gpu.py [--devices 4] [--sms 32] [--chunks 16] [--rows 4096]

Blocks are bf16 MLPs, x + W2 gelu(W1 norm(x)), two a stage. Measured in one run, medians:

naive       the stages one after the other, one group of multiprocessors busy at a time
contention  how fast each group is when all work at once, against one alone (same work)
ideal       the schedule's speed-up over naive on paper: unit costs, no messages
ceiling     ideal x contention: what the machine allows
"""

from __future__ import annotations

import argparse
import copy
import statistics
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

import penstock
from penstock import Pipe, schedules
from penstock.stage.virtual import VirtualGpu


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def loss_of(out: Tensor) -> Tensor:
    return out.float().square().mean()


def milliseconds(run: Callable[[], object], times: int) -> float:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    found = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return float(statistics.median(found))


def contention(places: list[VirtualGpu], stage: nn.Module, x: Tensor) -> float:
    """Time of one group alone over its time while all groups do the same work."""

    def work(place: VirtualGpu, mine: nn.Module, found: list[float]) -> None:
        torch.autograd.set_multithreading_enabled(False)
        with place.entered():
            for turn in range(12):
                if turn == 4:
                    start = torch.cuda.Event(enable_timing=True)
                    start.record()
                loss_of(mine(x)).backward()
            end = torch.cuda.Event(enable_timing=True)
            end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))

    def together(chosen: list[VirtualGpu]) -> float:
        found: list[float] = []
        threads = [
            threading.Thread(target=work, args=(place, copy.deepcopy(stage), found))
            for place in chosen
        ]
        torch.cuda.synchronize()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return statistics.mean(found)

    alone = statistics.median(together(places[:1]) for _ in range(3))
    return alone / statistics.median(together(places) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--sms", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--rows", type=int, default=4096, help="of a micro-batch")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--times", type=int, default=9)
    given = parser.parse_args()
    ranks, chunks = given.devices, given.chunks
    places = penstock.virtual_devices("cuda:0", ranks, given.sms)
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block(given.width) for _ in range(2 * ranks)])
    blocks = blocks.to("cuda:0", torch.bfloat16)
    x = torch.randn(chunks * given.rows, given.width, device="cuda:0", dtype=torch.bfloat16)
    share = contention(places, blocks[:2], x[: given.rows])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {ranks} x {places[0].sms}")
    print(f"multiprocessors, {chunks} micro-batches of {given.rows} rows, width {given.width},")
    print(f"medians of {given.times} steps; contention {share:.3f}\n")
    naive = None
    print("| schedule | checkpoint | ms a step | speed-up | ideal | ceiling | of the ceiling |")
    print("|---|---|---|---|---|---|---|")
    for name, checkpoint in [
        ("naive", "never"),
        ("gpipe", "never"),
        ("1f1b", "never"),
        ("eager-1f1b", "never"),
        ("1f1b", "always"),
        ("loss.backward()", "never"),
    ]:
        taken = measured(blocks, x, chunks, name, checkpoint, places, given.times)
        naive = naive or taken
        ideal = ideal_of(name, checkpoint, ranks, chunks)
        print(
            f"| {name} | {checkpoint} | {taken:.1f} | {naive / taken:.2f} | {ideal:.2f} | "
            f"{ideal * share if name != 'naive' else 1:.2f} | "
            f"{naive / taken / (ideal * share) if name != 'naive' else 1:.3f} |"
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
    """Milliseconds of a step, or of a call and its backward."""
    schedule = name if name in schedules.FAMILIES else "gpipe"
    pipe = Pipe(blocks, chunks, checkpoint, devices=places, schedule=schedule, loss_fn=loss_of)
    called = name != schedule
    taken = milliseconds(lambda: loss_of(pipe(x)).backward() if called else pipe.step(x), times)
    pipe.zero_grad()
    return taken


def ideal_of(name: str, checkpoint: str, ranks: int, chunks: int) -> float:
    """On paper, against naive without recomputation."""

    def makespan(name: str, checkpoint: str) -> float:
        name = name if name in schedules.FAMILIES else "gpipe"
        schedule = schedules.make(name, ranks, chunks)
        schedule = penstock.recompute(schedule, penstock.recompute_mode(checkpoint, chunks))
        return penstock.simulate(penstock.lower(schedule)).makespan

    return makespan("naive", "never") / makespan(name, checkpoint)


if __name__ == "__main__":
    main()

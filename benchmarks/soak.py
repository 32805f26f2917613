"""Train for a long time over two processes, and watch memory and numerical differences.

    torchrun --nproc-per-node 2 -m benchmarks.soak [--steps 2000]

Every step has another batch size, so that the shapes of messages change. Every 10 steps the pipe
evaluates a smaller batch, and every 100 steps it saves. Each rank also trains the unsplit model, in
float64 with SGD and momentum, and compares the losses and its share of the parameters. `memory` is
the resident memory of the process in MiB, and `tensors` counts the tensors that Python can reach.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import Pipe

CHUNKS, WIDTH, LARGEST = 4, 24, 200


class Row(NamedTuple):
    """The state after some number of steps, each value from the worst rank."""

    step: int
    memory: float
    tensors: int
    loss: float  # the largest relative difference so far
    parameters: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"| {self.step} | {self.memory:.1f} | {self.tensors} | {self.loss:.1e} | "
            f"{self.parameters:.1e} | {self.seconds:.1f} |"
        )


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)]
    return nn.Sequential(*layers).double()


def batches(seed: int, largest: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of random sizes, the same on every rank."""
    sizes, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    while True:
        shape = sizes.randint(1, largest), WIDTH
        x, y = (torch.randn(shape, generator=numbers, dtype=torch.float64) for _ in range(2))
        yield x, y


class Soak:
    """A pipe and the unsplit model, trained side by side."""

    def __init__(self, schedule: str, folder: Path) -> None:
        self.folder, self.loss_of = folder, nn.functional.mse_loss
        self.whole = model_of()
        self.pipe = Pipe(
            model_of(),
            CHUNKS,
            schedule=schedule,
            loss_fn=self.loss_of,
            outputs="all",
            group=dist.group.WORLD,
        )
        options = {"lr": 0.05, "momentum": 0.9}
        self.optimizers = [
            torch.optim.SGD(module.parameters(), **options)  # type: ignore[arg-type]
            for module in (self.pipe, self.whole)
        ]
        self.training, self.held_out = batches(1, LARGEST), batches(2, LARGEST // 4)
        self.worst = 0.0
        self.begun = time.monotonic()

    def step(self) -> None:
        """Train both for one step, and compare the losses."""
        x, y = next(self.training)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.loss_of(self.whole(x), y)
        loss.backward()
        self._compare(self.pipe.step(x, target=y).loss, loss.detach())
        for optimizer in self.optimizers:
            optimizer.step()

    def evaluate(self) -> None:
        """Evaluate both on one batch, and compare the outputs and the losses."""
        x, y = next(self.held_out)
        self.pipe.eval()
        self.whole.eval()
        with torch.no_grad():
            out = self.whole(x)
            self._compare(self.pipe(x), out)
            self._compare(self.pipe.step(x, target=y).loss, self.loss_of(out, y))
        self.pipe.train()
        self.whole.train()

    def save(self, step: int) -> None:
        """Save and load again, which must not change any number."""
        self.pipe.save(self.folder, optimizer=self.optimizers[0], extra={"step": step})
        assert self.pipe.load(self.folder, optimizer=self.optimizers[0]) == {"step": step}

    def _compare(self, actual: Tensor, expected: Tensor) -> None:
        self.worst = max(self.worst, off_by(actual, expected))

    def row(self, step: int) -> Row:
        """Return the maxima over all ranks."""
        gc.collect()
        tensors = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
        whole = dict(self.whole.named_parameters())
        parameters = max(off_by(p, whole[name]) for name, p in self.pipe.named_parameters())
        seconds = time.monotonic() - self.begun
        values = torch.tensor([resident(), tensors, self.worst, parameters, seconds]).double()
        dist.all_reduce(values, dist.ReduceOp.MAX)
        memory, count, loss, parameter_difference, seconds = values.tolist()
        return Row(step, memory, int(count), loss, parameter_difference, seconds)


def off_by(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    with torch.no_grad():
        return float((actual - expected).abs().max() / expected.abs().max())


def resident() -> float:
    """Return the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def soak(
    steps: int, schedule: str, folder: Path, evaluate: int, save: int, show: int
) -> Iterator[Row]:
    """Train, and yield a row every `show` steps."""
    both = Soak(schedule, folder)
    for step in range(1, steps + 1):
        both.step()
        if step % evaluate == 0:
            both.evaluate()
        if step % save == 0:
            both.save(step)
        if step % show == 0:
            yield both.row(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--schedule", default="1f1b")
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp(prefix="penstock-soak-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, {args.schedule}, batches of 1 to {LARGEST} rows\n")
        print("| step | memory | tensors | loss off by | parameters off by | seconds |")
        print("|---|---|---|---|---|---|")
    try:
        show = max(1, args.steps // 20)
        for row in soak(args.steps, args.schedule, Path(str(folder[0])), 10, 100, show):
            if dist.get_rank() == 0:
                print(row, flush=True)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(str(folder[0]), ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

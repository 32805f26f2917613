"""Two processes over gloo: Penstock against torch.distributed.pipelining, turn by turn.

    torchrun --nproc-per-node 2 benchmarks/processes.py [--rounds 11]

Same layers, weights, data, cut and chunks, one thread a process, over loopback. In every round
each way takes its turn, so that all meet the same noise; a turn lasts until the slower rank is
done. Before that, loss and gradients of both are compared with the unsplit model's.

heavy   blocks of two Linear(768, 768). `paper`: the step on paper, with what the layers of each
        stage take in a plain loop, both ranks at once, in the same round (I and W: half a backward)
tiny    the same of Linear(8, 8), so that the rest shows. What a step takes longer than on paper,
        by messages
memory  the most receive buffers that are alive at once on a rank, in micro-batches' activations
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Backend, ProcessGroup
from torch.distributed import pipelining as torchs

import penstock
from penstock import Cost, Pipe
from penstock.ir import Program, Send

PAIRS: Mapping[str, Any] = {
    "gpipe": torchs.ScheduleGPipe,
    "1f1b": torchs.Schedule1F1B,
    "interleaved": torchs.ScheduleInterleaved1F1B,
    "interleaved-zb": torchs.ScheduleInterleavedZeroBubble,
    "zb-v": torchs.ScheduleZBVZeroBubble,
}
loss_of = nn.functional.mse_loss


class Sizes(NamedTuple):
    """Of a model and its batch."""

    width: int
    blocks: int
    rows: int  # of a micro-batch
    chunks: int


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(torch.relu(self.one(x)))
        return out


def model_of(sizes: Sizes) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(sizes.width) for _ in range(sizes.blocks)])


def data_of(sizes: Sizes) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    shape = sizes.rows * sizes.chunks, sizes.width
    return torch.randn(shape), torch.randn(shape)


# ---- the contestants ----------------------------------------------------------------------


class Ours:
    """A step of Penstock's."""

    def __init__(self, name: str, sizes: Sizes) -> None:
        self.data = data_of(sizes)
        self.pipe = Pipe(
            model_of(sizes),
            sizes.chunks,
            "never",
            schedule=name,
            loss_fn=loss_of,
            group=dist.group.WORLD,
        )

    @property
    def program(self) -> Program:
        return self.pipe.forecast().program

    def step(self) -> Tensor:
        self.pipe.zero_grad()
        x, y = self.data
        return self.pipe.step(x, target=y).loss

    def gradients(self) -> list[Tensor | None]:
        return [p.grad for p in self.pipe.parameters()]


class Theirs:
    """A step of PyTorch's, of the same stages on the same ranks."""

    def __init__(self, name: str, sizes: Sizes, placement: tuple[int, ...]) -> None:
        (x, y), count = data_of(sizes), len(placement)
        layers = stages_of(model_of(sizes), count)
        own = [at for at, rank in enumerate(placement) if rank == dist.get_rank()]
        device = torch.device("cpu")
        self.stages = [torchs.PipelineStage(layers[at], at, count, device) for at in own]
        single = len(own) == 1
        given: Any = self.stages[0] if single else self.stages
        self.schedule = PAIRS[name](given, sizes.chunks, loss_fn=loss_of)
        self.losses: list[Tensor] = []
        self.inputs = (x,) if 0 in own else ()
        ends = count - 1 in own
        self.options: dict[str, Any] = {"target": y, "losses": self.losses} if ends else {}

    def step(self) -> Tensor | None:
        for stage in self.stages:
            stage.submod.zero_grad()
        self.schedule.step(*self.inputs, return_outputs=False, **self.options)
        return torch.stack(self.losses).mean() if self.losses else None

    def gradients(self) -> list[Tensor | None]:
        return [p.grad for stage in self.stages for p in stage.submod.parameters()]


def stages_of(model: nn.Sequential, count: int) -> list[nn.Sequential]:
    """As many layers in each."""
    size = len(model) // count
    return [model[at * size : (at + 1) * size] for at in range(count)]


class Alone:
    """The layers of this rank's stages in a plain loop, one stage after another."""

    def __init__(self, sizes: Sizes, placement: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.layers = stages_of(model_of(sizes), len(placement))
        self.own = [at for at, rank in enumerate(placement) if rank == dist.get_rank()]
        self.x, self.y = (part.split(sizes.rows) for part in data_of(sizes))

    def step(self) -> Cost:
        """What each stage takes, of all ranks."""
        times = torch.zeros(2, len(self.layers), dtype=torch.float64)
        for at in self.own:
            self.layers[at].zero_grad()
            for x, y in zip(self.x, self.y, strict=True):
                inside = x.detach().requires_grad_(at > 0)
                start = time.perf_counter()
                out = self.layers[at](inside)
                last = at == len(self.layers) - 1
                out = loss_of(out, y) / self.sizes.chunks if last else out
                between = time.perf_counter()
                out.backward(None if last else y)
                times[0, at] += between - start
                times[1, at] += time.perf_counter() - between
        dist.all_reduce(times)
        forward, backward = (times / self.sizes.chunks).tolist()
        halves = [seconds / 2 for seconds in backward]
        return Cost(forward, halves, halves, [1.0] * len(halves))


def check(ours: Ours, theirs: Theirs, sizes: Sizes) -> None:
    """Both compute what the unsplit model does."""
    model, (x, y) = model_of(sizes), data_of(sizes)
    loss = loss_of(model(x), y)
    loss.backward()
    stages = stages_of(model, len(ours.program.schedule.placement))
    own = [stage.stage_index for stage in theirs.stages]
    wanted = [p.grad for at in own for p in stages[at].parameters()]
    for way in (ours, theirs):
        found = way.step()
        if found is not None:
            torch.testing.assert_close(found, loss.detach())
        for mine, right in zip(way.gradients(), wanted, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-6)


# ---- time ---------------------------------------------------------------------------------


class Turn(NamedTuple):
    """What one round took, in seconds."""

    ours: float
    theirs: float
    paper: float


def timed(run: Callable[[], object]) -> float:
    """Until the slower rank is done."""
    dist.barrier()
    start = time.perf_counter()
    run()
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def contest(sizes: Sizes, rounds: int) -> dict[str, tuple[Program, list[Turn]]]:
    """All schedules, all ways, turn by turn."""
    ways: dict[str, tuple[Ours, Theirs, Alone]] = {}
    for name in PAIRS:
        ours = Ours(name, sizes)
        placement = ours.program.schedule.placement
        ways[name] = ours, Theirs(name, sizes, placement), Alone(sizes, placement)
        check(*ways[name][:2], sizes)
    found: dict[str, list[Turn]] = {name: [] for name in PAIRS}
    for at in range(rounds + 2):
        for name, (ours, theirs, alone) in ways.items():
            cost = alone.step()
            paper = penstock.simulate(ours.program, cost).makespan
            turn = Turn(timed(ours.step), timed(theirs.step), paper)
            if at > 1:
                found[name].append(turn)
    return {name: (ways[name][0].program, turns) for name, turns in found.items()}


def heavy(sizes: Sizes, rounds: int) -> list[str]:
    lines = [
        "| schedule | ours, ms | theirs | theirs / ours | on paper | ours: of that | theirs |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (_, turns) in contest(sizes, rounds).items():
        ours, theirs, paper = medians(turns)
        lines.append(
            f"| {name} | {ours * 1e3:.1f} | {theirs * 1e3:.1f} | {ratio(turns, 1, 0):.2f} | "
            f"{paper * 1e3:.1f} | {ratio(turns, 2, 0):.2f} | {ratio(turns, 2, 1):.2f} |"
        )
    return lines


def tiny(sizes: Sizes, rounds: int) -> list[str]:
    lines = [
        "| schedule | messages | on paper, ms | ours | theirs | "
        "ours above that, us a message | theirs | ours / theirs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (program, turns) in contest(sizes, rounds).items():
        sends = sum(isinstance(action, Send) for lane in program.lanes for action in lane)
        ours, theirs, paper = medians(turns)
        over = statistics.median((t.ours - t.paper) / (t.theirs - t.paper) for t in turns)
        lines.append(
            f"| {name} | {sends} | {paper * 1e3:.1f} | {ours * 1e3:.1f} | {theirs * 1e3:.1f} | "
            f"{(ours - paper) / sends * 1e6:.0f} | {(theirs - paper) / sends * 1e6:.0f} | "
            f"{over:.2f} |"
        )
    return lines


def medians(turns: list[Turn]) -> list[float]:
    return [statistics.median(column) for column in zip(*turns, strict=True)]


def ratio(turns: list[Turn], above: int, below: int) -> float:
    return statistics.median(turn[above] / turn[below] for turn in turns)


# ---- memory -------------------------------------------------------------------------------


class Receiving:
    """Counts the bytes of tensors into which somebody has received, as long as they live."""

    def __init__(self) -> None:
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def note(self, tensor: Tensor) -> None:
        if id(tensor) in self._known:
            return
        self._known.add(id(tensor))
        self.alive += tensor.nbytes
        self.peak = max(self.peak, self.alive)
        weakref.finalize(tensor, self._gone, id(tensor), tensor.nbytes)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


@contextmanager
def receiving() -> Iterator[Receiving]:
    """Whatever is received within, over any group of this process."""
    counter = Receiving()

    def counting(recv: Any, group: Any, tensors: list[Tensor], *rest: Any) -> Any:
        for tensor in tensors:
            counter.note(tensor)
        return recv(group, tensors, *rest)

    before = [(kind, kind.recv) for kind in (ProcessGroup, Backend)]
    for kind, recv in before:
        kind.recv = lambda *given, recv=recv: counting(recv, *given)
    try:
        yield counter
    finally:
        for kind, recv in before:
            kind.recv = recv


def memory(sizes: Sizes) -> list[str]:
    lines = ["| schedule | chunks | ours | theirs |", "|---|---|---|---|"]
    for name in PAIRS:
        for chunks in (4, 8, 16, 32):
            same = sizes._replace(chunks=chunks)
            ours = Ours(name, same)
            theirs = Theirs(name, same, ours.program.schedule.placement)
            peaks = [peak_of(way.step, same) for way in (ours, theirs)]
            lines.append(f"| {name} | {chunks} | {peaks[0]:.1f} | {peaks[1]:.1f} |")
    return lines


def peak_of(step: Callable[[], object], sizes: Sizes) -> float:
    """On the worst rank, in a step that is not the first."""
    with receiving() as counter:
        step()
        counter.peak = counter.alive
        step()
    peak = torch.tensor(counter.peak / (4 * sizes.rows * sizes.width))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return float(peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=128, help="of a heavy micro-batch")
    parser.add_argument("--width", type=int, default=768, help="of a heavy model")
    parser.add_argument("--only", choices=("heavy", "tiny", "memory"))
    given = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parts: dict[str, tuple[Sizes, Callable[[Sizes], list[str]]]] = {
        "heavy": (
            Sizes(given.width, 8, given.rows, given.chunks),
            partial(heavy, rounds=given.rounds),
        ),
        "tiny": (Sizes(8, 4, 1, 64), partial(tiny, rounds=given.rounds)),
        "memory": (Sizes(64, 8, 32, 4), memory),
    }
    for name, (sizes, measure) in parts.items():
        if given.only in (None, name):
            lines = measure(sizes)
            if dist.get_rank() == 0:
                load = os.getloadavg()[0]
                print(
                    f"\n{name}: {sizes}, {given.rounds} rounds, torch {torch.__version__}, ", end=""
                )
                print(f"{os.cpu_count()} cores, load {load:.1f}\n", *lines, sep="\n", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

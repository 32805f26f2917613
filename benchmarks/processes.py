"""Compare Penstock with torch.distributed.pipelining in two processes over gloo.

    torchrun --nproc-per-node 2 -m benchmarks.processes [--rounds 11]

Both have the same layers, weights, data, cut and chunks, and one thread per process, on loopback.
Every round runs each variant once, so that all see the same noise. A step lasts until the slower
rank is done. Before the first round, the losses and the gradients of both are checked against the
unsplit model.

heavy   Large layers. The simulated step uses the durations of the same computations in plain
        PyTorch, measured on both ranks at once in the same round, in the order of the schedule. A
        full backward counts as half I, half W. The last columns take the durations from a loop
        with one micro-batch alive instead, which finds more in the caches than any pipeline can.
causes  The same steps of Penstock alone: the milliseconds by which a step is longer than the
        simulated one, by cause, as means over the ranks. See `causes.py`.
tiny    Layers so small that overhead dominates. The first columns have the time above the simulated
        step, per message. The last columns have the time above a simulation with the durations of
        the actions in that very step, so that only the cost of messages is left.
message The CPU time of a message in the thread of its rank, in a step of the tiny model: what gloo
        takes to start the send, to start the receive and to wait; what the operating system takes
        to write to, wait for and read from the pipes beside shared memory; and what Penstock takes
        beside. Other threads of gloo are not counted. CPU time is the same on a busy machine, up to
        caches.
memory  The peak of receive buffers that are alive on a rank, in activations of a micro-batch. What
        is in shared memory counts for its sender, until it knows that the message was received.

Penstock exchanges tensors through shared memory. With PENSTOCK_SHARED_MEMORY=0 it uses gloo, as
torch.distributed.pipelining does.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from benchmarks.causes import CAUSES, find_causes
from benchmarks.contestants import SCHEDULES, Alone, HotLoop, Ours, Sizes, Theirs, check
from torch import Tensor
from torch._C import _distributed_c10d as c10d

import penstock
from penstock.runtime.distributed import shared_memory
from penstock.runtime.distributed.channels import ProcessTransport
from penstock.runtime.distributed.shared_memory import Inbox, Outbox, RecordPipe
from penstock.schedules.ir import Program, Send


class Turn(NamedTuple):
    """Measured and simulated seconds of one round."""

    ours: float
    theirs: float
    paper: float  # simulated with the durations of plain PyTorch in the order of the schedule
    hot_paper: float  # simulated with the durations of the hot loop
    our_paper: float  # simulated with the durations of our actions
    their_paper: float


def timed(run: Callable[[], object]) -> float:
    """Return the seconds until the slower rank is done."""
    dist.barrier()
    start = time.perf_counter()
    run()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def contest(
    sizes: Sizes, rounds: int, ours_only: Collection[str]
) -> dict[str, tuple[Program, list[Turn]]]:
    """Measure all schedules and all variants, in alternation."""
    variants: dict[str, tuple[Ours, Theirs | None, Alone, HotLoop]] = {}
    for name in SCHEDULES:
        ours = Ours(name, sizes)
        placement = ours.program.schedule.placement
        theirs = Theirs(name, sizes, placement) if name not in ours_only else None
        variants[name] = ours, theirs, Alone(sizes, ours.program), HotLoop(sizes, placement)
        check(ours, theirs, sizes)
    turns_by_schedule: dict[str, list[Turn]] = {name: [] for name in SCHEDULES}
    for round_index in range(rounds + 2):
        for name, (ours, theirs, alone, hot_loop) in variants.items():
            for plain in (hot_loop, alone):
                dist.barrier()
                plain.step()
            measured = timed(ours.step), timed(theirs.step) if theirs else math.nan
            costs = [alone.cost(), hot_loop.cost(), ours.cost()]
            if theirs:
                costs.append(theirs.cost())
            simulated = [penstock.simulate(ours.program, cost).makespan for cost in costs]
            if round_index > 1:
                turn = Turn(*measured, *simulated, *[] if theirs else [math.nan])
                turns_by_schedule[name].append(turn)
    return {name: (variants[name][0].program, turns) for name, turns in turns_by_schedule.items()}


def heavy(sizes: Sizes, rounds: int, ours_only: Collection[str]) -> list[str]:
    lines = [
        "| schedule | ours, ms | theirs | theirs / ours | simulated | ours: of that | theirs "
        "| simulated, hot | ours: of that |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (_, turns) in contest(sizes, rounds, ours_only).items():
        ours, theirs, paper, hot_paper, *_ = medians(turns)
        lines.append(
            f"| {name} | {ours * 1e3:.1f} | {theirs * 1e3:.1f} | "
            f"{median(t.theirs / t.ours for t in turns):.2f} | {paper * 1e3:.1f} | "
            f"{median(t.paper / t.ours for t in turns):.3f} | "
            f"{median(t.paper / t.theirs for t in turns):.3f} | {hot_paper * 1e3:.1f} | "
            f"{median(t.hot_paper / t.ours for t in turns):.3f} |"
        )
    return lines


def causes(sizes: Sizes, rounds: int) -> list[str]:
    lines = [
        "| schedule | simulated, ms | measured | "
        + " | ".join(CAUSES)
        + " | other threads | page faults |",
        "|---|---|---|" + "---|" * (len(CAUSES) + 2),
    ]
    variants = {name: Ours(name, sizes) for name in SCHEDULES}
    alone = {name: Alone(sizes, ours.program) for name, ours in variants.items()}
    rows: dict[str, list[Mapping[str, float]]] = {name: [] for name in variants}
    for round_index in range(rounds + 2):
        for name, ours in variants.items():
            dist.barrier()
            alone[name].step()
            row = find_causes(ours.step, ours.program, alone[name].cost())
            if round_index > 1:
                rows[name].append(row)
    for name, found in rows.items():
        columns = ("simulated", "measured", *CAUSES, "threads")
        shown = [median(row[column] * 1e3 for row in found) for column in columns]
        faults = median(row["faults"] for row in found)
        lines.append(
            f"| {name} | " + " | ".join(f"{ms:.1f}" for ms in shown) + f" | {faults:.0f} |"
        )
    return lines


def tiny(sizes: Sizes, rounds: int, ours_only: Collection[str]) -> list[str]:
    lines = [
        "| schedule | messages | layers alone, ms | ours | theirs | above that, us a message: ours "
        "| theirs | ratio | above own actions: ours | theirs | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (program, turns) in contest(sizes, rounds, ours_only).items():
        sends = sum(isinstance(action, Send) for lane in program.lanes for action in lane)
        ours, theirs, paper, _, our_paper, their_paper = medians(turns)
        above = [
            (seconds / sends * 1e6)
            for seconds in (ours - paper, theirs - paper, ours - our_paper, theirs - their_paper)
        ]
        lines.append(
            f"| {name} | {sends} | {paper * 1e3:.1f} | {ours * 1e3:.1f} | {theirs * 1e3:.1f} | "
            f"{above[0]:.0f} | {above[1]:.0f} | {above[0] / above[1]:.2f} | "
            f"{above[2]:.0f} | {above[3]:.0f} | {above[2] / above[3]:.2f} |"
        )
    return lines


def median(numbers: Iterator[float]) -> float:
    return statistics.median(numbers)


def medians(turns: list[Turn]) -> list[float]:
    return [statistics.median(column) for column in zip(*turns, strict=True)]


# ---- one message --------------------------------------------------------------------------


class MessageCost:
    """The CPU time of the thread, by function, and how often each was called."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def timing(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a clock around each call."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - start
                self.calls[name] += 1

        return run


@contextmanager
def clocks() -> Iterator[MessageCost]:
    """Put clocks around the transport, and around what it calls of gloo and of pipes."""
    cost = MessageCost()
    gloo: Any = c10d.ProcessGroupGloo
    calls = SimpleNamespace(**vars(os))  # those of this module alone
    calls.write, calls.read = cost.timing("pipe", os.write), cost.timing("pipe", os.read)
    recv_from = ProcessTransport.recv_from

    def start_recv(*args: Any) -> Any:
        return cost.timing("wait", recv_from(*args))

    replaced: list[tuple[Any, str, Any]] = [
        (ProcessTransport, "send_to", cost.timing("send", ProcessTransport.send_to)),
        (ProcessTransport, "recv_from", cost.timing("recv", start_recv)),
        (gloo, "send", cost.timing("gloo send", gloo.send)),
        (gloo, "recv", cost.timing("gloo recv", gloo.recv)),
        (c10d.Work, "wait", cost.timing("gloo wait", c10d.Work.wait)),
        (shared_memory, "os", calls),
        (RecordPipe, "_wait", cost.timing("pipe", RecordPipe._wait)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield cost
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def message(sizes: Sizes, rounds: int) -> list[str]:
    lines = [
        "| schedule | gloo, us a message: send | recv | wait | pipes, us | calls | Penstock, us "
        "| empty clock |",
        "|---|---|---|---|---|---|---|---|",
    ]
    clock = MessageCost()
    nothing = clock.timing("nothing", lambda: None)
    for _ in range(10_000):
        nothing()
    empty = clock.seconds["nothing"] / 10_000 * 1e6
    for name in SCHEDULES:
        ours = Ours(name, sizes)
        ours.step()
        ours.step()
        rows = []
        for _ in range(rounds):
            with clocks() as cost:
                ours.step()
            sends, recvs = cost.calls["send"], cost.calls["recv"]
            per_call = {
                key: cost.seconds[key] / (sends if "send" in key else recvs) * 1e6
                for key in ("send", "recv", "wait", "gloo send", "gloo recv", "gloo wait")
            }
            gloo = [per_call[f"gloo {key}"] for key in ("send", "recv", "wait")]
            messages = (sends + recvs) / 2
            pipes, calls = cost.seconds["pipe"] / messages * 1e6, cost.calls["pipe"] / messages
            # The inner clocks run inside of the outer ones. Three clocks are outer ones.
            own = sum(per_call[key] for key in ("send", "recv", "wait")) - sum(gloo) - pipes
            own -= (3 + calls) * empty
            rows.append((*gloo, pipes - calls * empty, calls, own))
        columns = [statistics.median(column) for column in zip(*rows, strict=True)]
        *times, calls, own = columns
        cells = [f"{us:.0f}" for us in times] + [f"{calls:.1f}", f"{own:.0f}", f"{empty:.1f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


# ---- memory -------------------------------------------------------------------------------


class Receiving:
    """A counter of the bytes of live tensors that were used as receive buffers.

    `shared` are bytes in the shared memory of messages that this rank has sent, and that it does
    not know to be received.
    """

    def __init__(self) -> None:
        self.alive = self.shared = self.peak = 0
        self._known: set[int] = set()

    def note(self, tensor: Tensor) -> None:
        if id(tensor) not in self._known:
            self._known.add(id(tensor))
            self.alive += tensor.nbytes
            weakref.finalize(tensor, self._gone, id(tensor), tensor.nbytes)
        self.update_peak()

    def update_peak(self) -> None:
        self.peak = max(self.peak, self.alive + self.shared)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


@contextmanager
def receiving() -> Iterator[Receiving]:
    """Count everything that is received in the block, over any group of this process."""
    counter = Receiving()

    def counting(recv: Any, group: Any, tensors: list[Tensor], *rest: Any) -> Any:
        for tensor in tensors:
            counter.note(tensor)
        return recv.__get__(group)(tensors, *rest)

    recv_shared, send_shared = Inbox.recv, Outbox.send

    def counting_recv(self: Inbox, *args: Any) -> Any:
        wait_for_tensors = recv_shared(self, *args)

        def counting_wait() -> list[Tensor]:
            tensors = wait_for_tensors()
            for tensor in tensors:
                counter.note(tensor)
            return tensors

        return counting_wait

    def counting_send(self: Outbox, tag: int, tensors: Sequence[Tensor]) -> Any:
        wait = send_shared(self, tag, tensors)
        # All messages of this benchmark have the same size.
        counter.shared = len(self._sent_blocks) * sum(tensor.nbytes for tensor in tensors)
        counter.update_peak()
        return wait

    kinds: Any = (c10d.ProcessGroup, c10d.Backend)
    before = [(kind, kind.__dict__["recv"]) for kind in kinds]
    for kind, recv in before:
        kind.recv = lambda *args, recv=recv: counting(recv, *args)
    try:
        with (
            patch.object(Inbox, "recv", counting_recv),
            patch.object(Outbox, "send", counting_send),
        ):
            yield counter
    finally:
        for kind, recv in before:
            kind.recv = recv


def memory(sizes: Sizes) -> list[str]:
    lines = ["| schedule | chunks | ours | theirs |", "|---|---|---|---|"]
    for name in SCHEDULES:
        for chunks in (4, 32):
            chunked = sizes._replace(chunks=chunks)
            ours = Ours(name, chunked)
            theirs = Theirs(name, chunked, ours.program.schedule.placement)
            peaks = [peak_of(variant.step, chunked) for variant in (ours, theirs)]
            lines.append(f"| {name} | {chunks} | {peaks[0]:.1f} | {peaks[1]:.1f} |")
    return lines


def peak_of(step: Callable[[], object], sizes: Sizes) -> float:
    """Return the peak of the second step on the worst rank, in activations of a micro-batch."""
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
    parser.add_argument("--rows", type=int, default=128, help="rows of a heavy micro-batch")
    parser.add_argument("--width", type=int, default=768, help="width of the heavy model")
    parser.add_argument("--only", choices=("heavy", "causes", "tiny", "message", "memory"))
    parser.add_argument(
        "--ours",
        nargs="*",
        default=(),
        choices=tuple(SCHEDULES),
        help="schedules without torch.distributed.pipelining, whose zb-v fails in PyTorch 2.11",
    )
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rounds = args.rounds
    links = Ours("gpipe", Sizes(8, 2, 1, 2)).links
    parts: dict[str, tuple[Sizes, Callable[[Sizes], list[str]]]] = {
        "heavy": (
            Sizes(args.width, 8, args.rows, args.chunks),
            partial(heavy, rounds=rounds, ours_only=args.ours),
        ),
        "causes": (Sizes(args.width, 8, args.rows, args.chunks), partial(causes, rounds=rounds)),
        "tiny": (Sizes(8, 4, 1, 64), partial(tiny, rounds=rounds, ours_only=args.ours)),
        "message": (Sizes(8, 4, 1, 64), partial(message, rounds=rounds)),
        "memory": (Sizes(64, 8, 32, 4), memory),
    }
    for name, (sizes, measure) in parts.items():
        if args.only in (None, name):
            before = os.getloadavg()[0]
            lines = measure(sizes)
            if dist.get_rank() == 0:
                print(
                    f"\n{name}: {sizes} rows, {rounds} rounds, torch {torch.__version__}, ", end=""
                )
                print(f"{os.cpu_count()} cores, load before {before:.1f}, ours over {links}\n")
                print(*lines, sep="\n", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

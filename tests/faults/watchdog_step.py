"""A substitute for a pipe's step over a plain gloo group, with faults at several places."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from penstock.errors import ErrorLocation
from penstock.runtime.distributed.failure.watchdog import Watchdog
from penstock.runtime.distributed.links import abort_gloo
from penstock.runtime.distributed.store import open_shared_store
from tests.faults.disposable_ranks import RankContext

HEARTBEAT = 3.0  # where a test waits until a rank is silent, or without progress, for so long
# Everywhere else: a rank makes progress in this time even on a very busy machine.
LONG_HEARTBEAT = 60.0
EXIT_CODE = 3  # of a process that exits by itself
PLACES = ("agreement", "forward", "send", "backward", "end", "between")

Fault = Callable[[RankContext, str], None]


class Burst(Exception):
    """The error that a fault raises."""


def watched(context: RankContext, name: str = "pipe") -> Watchdog:
    store, host = open_shared_store(range(context.size), name)
    wake = partial(abort_gloo, context.group)
    return Watchdog(store, context.rank, context.size, LONG_HEARTBEAT, wake, host)


def nothing(context: RankContext, place: str) -> None:
    pass


def step(watchdog: Watchdog, context: RankContext, number: int, fault: Fault = nothing) -> None:
    """Run an agreement, two micro-batches forward and backward, and a final exchange."""
    rank, last = context.rank, context.size - 1
    with watchdog.guarded(f"step {number}"):
        fault(context, "agreement")
        watchdog.mark_waiting(f"step {number}")
        dist.all_reduce(torch.zeros(1))
        sends: list[tuple[str, int, dist.Work]] = []
        for op, before, after in (("F", rank - 1, rank + 1), ("B", rank + 1, rank - 1)):
            for m in range(2):
                if 0 <= before <= last:
                    watchdog.mark_waiting(f"{before}>{rank}:{m}", before)
                    dist.recv(torch.zeros(4), before, tag=m)
                watchdog.mark_computing(f"{rank}{op}{m}")
                if m == 1:
                    fault(context, "forward" if op == "F" else "backward")
                if 0 <= after <= last:
                    work = dist.isend(torch.zeros(4), after, tag=m)
                    assert work is not None
                    sends.append((f"{rank}>{after}:{m}", after, work))
            fault(context, "send")
        for message, peer, work in sends:
            watchdog.mark_waiting(message, peer)
            work.wait()
        watchdog.mark_waiting("the end")
        dist.all_reduce(torch.zeros(1))
        fault(context, "end")


def run(context: RankContext, fault: Fault, steps: int = 3) -> None:
    """Run some steps. The fault happens in the second."""
    watchdog = watched(context)
    for number in range(steps):
        step(watchdog, context, number, fault if number == 1 else nothing)
        if number == 1:
            fault(context, "between")
    watchdog.close()


class At:
    """A fault at one place on one rank."""

    def __init__(self, rank: int, place: str, fail: Callable[[], object]) -> None:
        self.rank, self.place, self.fail = rank, place, fail

    def __call__(self, context: RankContext, place: str) -> None:
        if (context.rank, place) == (self.rank, self.place):
            self.fail()


def burst() -> None:
    error = Burst("all wrong")
    error.whereabouts = ErrorLocation(1, ("a", "b"), 3, "1F3", "stage 1 (layers a to b: Linear)")  # type: ignore[attr-defined]
    raise error


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(EXIT_CODE)


def stall() -> None:
    time.sleep(600)

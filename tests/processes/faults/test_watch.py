"""A watch on its own: over gloo groups, with a stand-in for a step, in processes that fail."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

from penstock.errors import Whereabouts
from penstock.run.processes.poison import poison
from penstock.run.processes.store import store_of
from penstock.run.processes.watch import Watch
from tests.processes.faults.throwaway import Fate, Stage, perform

HEARTBEAT = 1.0
PLACES = ("agreement", "forward", "send", "backward", "end", "between")

Fault = Callable[[Stage, str], None]


class Burst(Exception):
    """What goes wrong."""


def watched(stage: Stage, name: str = "pipe", heartbeat: float = HEARTBEAT) -> Watch:
    store, host = store_of(stage.group, name)
    wake = partial(poison, stage.group)
    return Watch(store, stage.rank, stage.size, heartbeat, wake, host)


def nothing(stage: Stage, place: str) -> None:
    pass


def step(watch: Watch, stage: Stage, number: int, fault: Fault = nothing) -> None:
    """Agreement, two micro-batches down the ranks and back, and an exchange at the end."""
    rank, last = stage.rank, stage.size - 1
    with watch.guarded(f"step {number}"):
        fault(stage, "agreement")
        watch.waiting(f"step {number}")
        dist.all_reduce(torch.zeros(1))
        sends: list[tuple[str, int, dist.Work]] = []
        for op, before, after in (("F", rank - 1, rank + 1), ("B", rank + 1, rank - 1)):
            for m in range(2):
                if 0 <= before <= last:
                    watch.waiting(f"{before}>{rank}:{m}", before)
                    dist.recv(torch.zeros(4), before, tag=m)
                watch.at(f"{rank}{op}{m}")
                if m == 1:
                    fault(stage, "forward" if op == "F" else "backward")
                if 0 <= after <= last:
                    work = dist.isend(torch.zeros(4), after, tag=m)
                    assert work is not None
                    sends.append((f"{rank}>{after}:{m}", after, work))
            fault(stage, "send")
        for message, peer, work in sends:
            watch.waiting(message, peer)
            work.wait()
        watch.waiting("the end")
        dist.all_reduce(torch.zeros(1))
        fault(stage, "end")
        watch.outside()


def run(stage: Stage, fault: Fault, steps: int = 3) -> None:
    """Some steps; the fault is in the second."""
    watch = watched(stage)
    for number in range(steps):
        step(watch, stage, number, fault if number == 1 else nothing)
        if number == 1:
            fault(stage, "between")
    watch.close()


class At:
    """A fault at one place of one rank."""

    def __init__(self, rank: int, place: str, fail: Callable[[], object]) -> None:
        self.rank, self.place, self.fail = rank, place, fail

    def __call__(self, stage: Stage, place: str) -> None:
        if (stage.rank, place) == (self.rank, self.place):
            stage.tell(fault=time.monotonic())
            self.fail()


def burst() -> None:
    error = Burst("all wrong")
    error.whereabouts = Whereabouts(1, ("a", "b"), 3, "1F3", "stage 1 (layers a to b: Linear)")  # type: ignore[attr-defined]
    raise error


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(3)


def stall() -> None:
    time.sleep(60)


def same_cause(fates: list[Fate], ranks: list[int], kind: str, rank: int, within: float) -> str:
    """Every one of these ranks raised the same RemoteError, in time; its text."""
    began = max(fate.told.get("fault", 0) for fate in fates)
    assert began
    found = [fates[r].told for r in ranks]
    assert [told.get("error") for told in found] == ["RemoteError"] * len(ranks), fates
    assert {(told["fields"]["kind"], told["fields"]["rank"]) for told in found} == {(kind, rank)}
    assert len({told["text"] for told in found}) == 1
    assert all(told["now"] - began < within for told in found), fates
    assert all(fates[r].code not in (0, None) for r in ranks)
    return str(found[0]["text"])


# ---- nothing fails ------------------------------------------------------------------------


def several(stage: Stage) -> None:
    before = threading.active_count()
    watch = watched(stage)
    for number in range(20):
        step(watch, stage, number)
        time.sleep(0.02)
    watch.close()
    assert threading.active_count() == before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1
    again = watched(stage, "another")
    step(again, stage, 0)
    del again
    assert threading.active_count() == before


def test_nothing_is_left_of_a_watch() -> None:
    fates = perform(3, several)
    assert [fate.code for fate in fates] == [0, 0, 0], fates
    assert [fate.written for fate in fates] == ["", "", ""]


# ---- a rank raises ------------------------------------------------------------------------


@pytest.mark.parametrize("hosted", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_error_comes_out_of_every_rank(rank: int, hosted: bool) -> None:
    fates = perform(3, run, At(rank, "forward", burst), hosted=hosted)
    text = same_cause(fates, [0, 1, 2], "raised", rank, within=2)
    assert f"rank {rank} failed, in step 1, in stage 1 (layers a to b: Linear)" in text
    assert "micro-batch 3, action 1F3: " in text
    assert "Burst: all wrong" in text
    assert "in burst" in text  # the traceback
    assert "catch RemoteError on every rank" in text
    fields = fates[0].told["fields"]
    assert (fields["stage"], fields["layers"]) == (1, ("a", "b"))
    assert (fields["microbatch"], fields["action"]) == (3, "1F3")
    assert [fate.told["came_from"] == "Burst" for fate in fates] == [r == rank for r in range(3)]
    assert (
        f"This is rank 2 of 3; it was {'in step 1' if rank != 2 else ''}" in fates[2].told["whole"]
    )


@pytest.mark.parametrize("place", [place for place in PLACES if place != "between"])
def test_an_error_at_each_place(place: str) -> None:
    for rank in (0, 1):
        fates = perform(2, run, At(rank, place, burst))
        same_cause(fates, [0, 1], "raised", rank, within=2)


# ---- a rank dies --------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fail", [kill, leave])
def test_a_rank_that_dies(place: str, fail: Callable[[], None]) -> None:
    for rank in (0, 1):
        fates = perform(2, run, At(rank, place, fail))
        text = same_cause(fates, [1 - rank], "died", rank, within=2 + HEARTBEAT)
        assert f"rank {rank} died, " in text
        assert f"rank {1 - rank} was in step " in text
        assert "waiting for " in text


# ---- a rank stalls ------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["forward", "between"])
def test_a_rank_that_stalls(place: str) -> None:
    for rank in (0, 1):
        fates = perform(2, run, At(rank, place, stall))
        text = same_cause(fates, [1 - rank], "stalled", rank, within=2 + HEARTBEAT)
        assert f"rank {rank} has stalled, " in text
        assert "heartbeat= above 1 seconds" in text
        assert fates[rank].code == 1
        assert text.split(":")[0] in fates[rank].written
        assert "in stall" in fates[rank].written

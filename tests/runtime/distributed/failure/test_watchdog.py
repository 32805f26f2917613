"""A watch on its own, with a stand-in for a pipe's step, in processes that fail."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from penstock.errors import RemoteError, RunError
from penstock.runtime.distributed.failure.abort import abort_gloo
from penstock.runtime.distributed.failure.report import Failure
from penstock.runtime.distributed.failure.watchdog import _CONNECTION_ERROR, HeartbeatMonitor
from penstock.runtime.distributed.store import open_shared_store
from tests.distributed.forks import ENVIRONMENT, store
from tests.faults.checks import SOON
from tests.faults.standin import (
    HEARTBEAT,
    PLACES,
    At,
    Burst,
    burst,
    kill,
    leave,
    run,
    stall,
    step,
    watched,
)
from tests.faults.throwaway import Fate, Stage, perform, perform_all


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


def on_each_of_two(place: str, fail: Callable[[], None]) -> Iterator[tuple[int, list[Fate]]]:
    """The rank that fails, and what became of both."""
    yield from perform_all({rank: (2, run, At(rank, place, fail)) for rank in (0, 1)}).items()


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


def served_by_the_first(stage: Stage, file: str) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{file}", rank=stage.rank, world_size=stage.size)
    assert open_shared_store(range(stage.size), "another").host_rank == 0
    run(stage, At(1, "backward", burst))


def test_a_group_without_a_store_over_tcp_gets_one(tmp_path: Path) -> None:
    fates = perform(2, served_by_the_first, str(tmp_path / "meet"))
    same_cause(fates, [0, 1], "raised", 1, within=SOON)


# ---- a rank raises ------------------------------------------------------------------------


@pytest.mark.parametrize("hosted", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_error_comes_out_of_every_rank(rank: int, hosted: bool) -> None:
    fates = perform(3, run, At(rank, "forward", burst), hosted=hosted)
    text = same_cause(fates, [0, 1, 2], "raised", rank, within=SOON)
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
    for rank, fates in on_each_of_two(place, burst):
        same_cause(fates, [0, 1], "raised", rank, within=SOON)


# ---- a rank dies --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "fail"),
    [*((place, kill) for place in PLACES), ("forward", leave), ("between", leave)],
)
def test_a_rank_that_dies(place: str, fail: Callable[[], None]) -> None:
    for rank, fates in on_each_of_two(place, fail):
        text = same_cause(fates, [1 - rank], "died", rank, within=HEARTBEAT + SOON)
        assert f"rank {rank} died: no heartbeat for " in text
        assert f"rank {1 - rank} was in step " in text
        assert "waiting for " in text


def looks_seldom(stage: Stage) -> None:
    """As on a machine that gives it little time: nobody can be blamed for what it did not see."""
    look = HeartbeatMonitor._check_peers

    def slowly(self: HeartbeatMonitor, store: Store) -> Failure | None:
        time.sleep(1.2)
        return look(self, store)

    patch.object(HeartbeatMonitor, "_check_peers", slowly).start()
    run(stage, At(1, "forward", kill))


def test_a_rank_that_is_held_up_still_finds_who_died() -> None:
    same_cause(perform(2, looks_seldom), [0], "died", 1, within=HEARTBEAT + SOON)


# ---- a rank stalls ------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["forward", "between"])
def test_a_rank_that_stalls(place: str) -> None:
    for rank, fates in on_each_of_two(place, stall):
        text = same_cause(fates, [1 - rank], "stalled", rank, within=HEARTBEAT + SOON)
        assert f"rank {rank} has stalled, " in text
        assert "heartbeat= above 3 seconds" in text
        assert fates[rank].code == 1
        assert text.split(":")[0] in fates[rank].written
        assert "in stall" in fates[rank].written


# ---- a rank leaves, or is told to ----------------------------------------------------------


def leaves_early(stage: Stage, rank: int) -> None:
    watch = watched(stage)
    step(watch, stage, 0)
    if stage.rank == rank:
        watch.close()
        stage.tell(fault=time.monotonic())
        time.sleep(3)  # alive, and done
    else:
        step(watch, stage, 1)


def test_a_rank_that_leaves_in_order() -> None:
    fates = perform(2, leaves_early, 1)
    text = same_cause(fates, [0], "left", 1, within=SOON)
    assert text == (
        "rank 1 has left, after step 0: its program ended, or its pipe was deleted; rank 0 was in "
        "step 1, waiting for step 1 from all ranks. Call the pipe equally often on every rank."
    )
    assert fates[1].code == 0


def interrupted(
    stage: Stage, ranks: list[int], place: str, number: int, pause: float = 5.0
) -> None:
    """Signals come to these ranks while each does something else; all have the time to go on."""
    patch("penstock.runtime.distributed.failure.watchdog._SIGTERM_DELAY", 20.0).start()
    watch = watched(stage, heartbeat=20)
    step(watch, stage, 0)
    stage.interrupt_soon(ranks, number, 0.8)
    if stage.rank in ranks:
        stage.tell(fault=time.monotonic())
    fail = partial(time.sleep, 2.5 if place == "forward" else 0)
    if place == "forward" or stage.rank in ranks:
        step(watch, stage, 1, At(0, "forward", fail))
    else:
        time.sleep(pause)  # the others wait in gloo for this one
        step(watch, stage, 1)


@pytest.mark.parametrize("place", ["forward", "wait"])
def test_ctrl_c_on_all_ranks_ends_all(place: str) -> None:
    ranks = [0, 1, 2] if place == "forward" else [0, 1]
    fates = perform(3, interrupted, ranks, place, signal.SIGINT)
    assert [fates[r].told["error"] for r in ranks] == ["KeyboardInterrupt"] * len(ranks)
    assert all(fate.code not in (0, None) for fate in fates)
    began = min(fates[r].told["fault"] for r in ranks)
    assert all(fates[r].told["now"] - began < SOON for r in ranks)
    assert place == "forward" or fates[2].told["fields"]["kind"] == "interrupted"


def test_ctrl_c_on_one_rank_ends_all() -> None:
    fates = perform(2, interrupted, [0], "forward", signal.SIGINT)
    assert fates[0].told["error"] == "KeyboardInterrupt"
    text = same_cause(fates, [1], "interrupted", 0, within=SOON)
    assert "rank 0 was " in text
    assert "in step 1, at 0F1" in text


def test_a_rank_that_is_told_to_end_while_it_waits() -> None:
    fates = perform(2, interrupted, [0], "wait", signal.SIGTERM, 1.5)
    assert [fate.code for fate in fates] == [-signal.SIGTERM, 0]  # after its step

    fates = perform(2, told_to_end)
    text = same_cause(fates, [0, 1], "interrupted", 0, within=SOON)
    assert "rank 0 was terminated by SIGTERM, in step 1, waiting for step 1 from all ranks" in text


def told_to_end(stage: Stage) -> None:
    watch = watched(stage, heartbeat=20)
    if stage.rank == 0:
        threading.Timer(0.8, os.kill, (os.getpid(), signal.SIGTERM)).start()
        stage.tell(fault=time.monotonic())
    else:
        time.sleep(6)
    step(watch, stage, 1)


# ---- the store goes ------------------------------------------------------------------------


def test_the_host_of_the_store_dies() -> None:
    fates = perform(3, run, At(0, "forward", kill), hosted=True)
    text = same_cause(fates, [1, 2], "died", 0, within=HEARTBEAT + SOON)
    assert "is gone, with rank 0, which hosts it" in text or "rank 0 died" in text


def held_up(stage: Stage) -> None:
    watch = watched(stage)
    step(watch, stage, 0)
    if stage.rank == 0:
        stage.tell(fault=time.monotonic())
    else:
        ctypes.PyDLL(None).usleep(500_000)  # with Python's lock held: nothing else runs here
    step(watch, stage, 1, At(0, "agreement", burst))


def test_the_host_of_the_store_stays_until_all_have_heard() -> None:
    fates = perform(2, held_up, hosted=True)
    same_cause(fates, [0, 1], "raised", 0, within=SOON)


# ---- one is a call ahead -------------------------------------------------------------------


def comes_through(stage: Stage) -> None:
    watch = watched(stage)
    with watch.guarded("step 0"):
        dist.all_reduce(torch.zeros(1))
        if stage.rank == 1:
            time.sleep(0.5)
        watch.mark_computing("its end")
    watch.mark_outside_call()
    stage.tell(through=True)
    step(watch, stage, 1, At(0, "agreement", burst))


def test_who_fails_in_the_next_call_lets_others_finish_this_one() -> None:
    fates = perform(2, comes_through)
    assert [fate.told.get("through") for fate in fates] == [True, True]
    same_cause(fates, [0, 1], "raised", 0, within=SOON)


# ---- after a failure -----------------------------------------------------------------------


def goes_on(stage: Stage) -> None:
    for attempt in range(3):
        watch = watched(stage, f"attempt {attempt}")
        step(watch, stage, 0)
        with pytest.raises(RemoteError, match="all wrong") as caught:
            step(watch, stage, 1, At(attempt, "backward", burst))
        assert caught.value.rank == attempt
        assert watch.failure is not None
        assert watch.closed
        assert [t.name for t in threading.enumerate() if "penstock" in t.name] == []
        again = dist.new_group(list(range(stage.size)))
        dist.distributed_c10d.GroupMember.WORLD = again
    watch = watched(stage, "last")
    step(watch, stage, 0)
    watch.close()


def test_training_goes_on_after_a_failure() -> None:
    fates = perform(3, goes_on)
    assert [fate.code for fate in fates] == [0, 0, 0], fates[0].written


def all_at_once(stage: Stage) -> None:
    run(stage, At(stage.rank, "end", partial(fails_as, stage.rank)))


def fails_as(rank: int) -> None:
    raise Burst(f"on {rank}")


def test_when_all_fail_at_once_one_error_comes_out_of_all() -> None:
    fates = perform(3, all_at_once)
    rank = fates[0].told["fields"]["rank"]
    text = same_cause(fates, [0, 1, 2], "raised", rank, within=SOON)
    assert f"Burst: on {rank}" in text
    assert [fate.told["came_from"] for fate in fates] == ["Burst"] * 3


def hears_between_steps(stage: Stage) -> None:
    watch = watched(stage)
    step(watch, stage, 0)
    if stage.rank == 1:
        stage.tell(fault=time.monotonic())
        step(watch, stage, 1, At(1, "agreement", burst))
    time.sleep(0.5)
    step(watch, stage, 1)


def test_a_rank_between_steps_says_it_at_once_and_raises_at_its_next() -> None:
    fates = perform(2, hears_between_steps)
    same_cause(fates, [0, 1], "raised", 1, within=SOON)
    assert "penstock: rank 0 will stop at its next step: rank 1 failed" in fates[0].written


def poisoned(stage: Stage) -> None:
    abort_gloo(stage.group)
    for attempt in range(2):
        with pytest.raises(RuntimeError) as caught:
            stage.group.send([torch.zeros(1)], 1 - stage.rank, 5 + attempt).wait()
        assert _CONNECTION_ERROR.search(str(caught.value))


def test_what_a_poisoned_group_says_is_known_for_a_lost_connection() -> None:
    fates = perform(2, poisoned)
    assert [fate.code for fate in fates] == [0, 0], fates


# ---- other processes -----------------------------------------------------------------------


def forks(stage: Stage) -> None:
    watch = watched(stage)
    step(watch, stage, 0)
    child = os.fork()
    if not child:
        try:
            with (
                pytest.raises(RunError, match="a forked process cannot take part in it"),
                watch.guarded("x"),
            ):
                pass
            watch.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    step(watch, stage, 1)
    watch.close()


def test_a_fork_has_no_part_in_it() -> None:
    fates = perform(2, forks)
    assert [fate.code for fate in fates] == [0, 0], fates[0].written


PROGRAM = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from tests.faults.standin import Stage, step, watched
rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
stage = Stage(rank, 2, None)
watch = watched(stage)
step(watch, stage, 0)
if rank == 1:
    raise ValueError("no more data")
step(watch, stage, 1)
"""


def test_a_program_that_ends_by_an_error_between_steps_says_which() -> None:
    server = store()
    environment = {**os.environ, **ENVIRONMENT}
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(server.port)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    told = [program.communicate(timeout=120)[1] for program in programs]
    assert [program.returncode for program in programs] == [1, 1], told
    assert "RemoteError: rank 1 failed, after step 0: ValueError: no more data" in told[0]
    assert told[0].count("ValueError: no more data") == 2  # with its traceback
    assert "penstock: rank" not in told[1]

"""The watchdog on its own, with a substitute for a pipe's step, in processes that fail."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from penstock.errors import RemoteError, RunError
from penstock.runtime.distributed.failure.report import Failure
from penstock.runtime.distributed.failure.watchdog import _CONNECTION_ERROR, HeartbeatMonitor
from penstock.runtime.distributed.links import abort_gloo
from penstock.runtime.distributed.store import open_shared_store
from tests.distributed.fork_server import ENVIRONMENT, store
from tests.faults.checks import check_cause
from tests.faults.disposable_ranks import RankContext as Stage
from tests.faults.disposable_ranks import remaining_threads
from tests.faults.disposable_ranks import run_cases as perform_all
from tests.faults.disposable_ranks import run_ranks as perform
from tests.faults.watchdog_step import At, Burst, burst, kill, run, step, watched

# ---- no failure ---------------------------------------------------------------------------


def several(stage: Stage) -> None:
    before = set(threading.enumerate())
    watchdog = watched(stage)
    for number in range(20):
        step(watchdog, stage, number)
        time.sleep(0.02)
    watchdog.close()
    assert remaining_threads(lambda thread: thread not in before) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1
    again = watched(stage, "another")
    step(again, stage, 0)
    del again
    assert remaining_threads(lambda thread: thread not in before) == []


def test_watchdog_leaves_no_threads_or_signal_handlers() -> None:
    fates = perform(3, several)
    assert [fate.code for fate in fates] == [0, 0, 0], fates
    assert [fate.written for fate in fates] == ["", "", ""]


def served_by_the_first(stage: Stage, file: str) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{file}", rank=stage.rank, world_size=stage.size)
    assert open_shared_store(range(stage.size), "another").host_rank == 0
    run(stage, At(1, "backward", burst))


def test_watchdog_opens_a_tcp_store_for_a_group_without_one(tmp_path: Path) -> None:
    fates = perform(2, served_by_the_first, str(tmp_path / "meet"))
    check_cause(fates, [0, 1], "raised", 1)


# ---- a rank raises ------------------------------------------------------------------------


@pytest.mark.parametrize("hosted", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_watchdog_raises_the_error_of_one_rank_on_every_rank(rank: int, hosted: bool) -> None:
    fates = perform(3, run, At(rank, "forward", burst), hosted=hosted)
    text = check_cause(fates, [0, 1, 2], "raised", rank)
    assert f"rank {rank} failed, in step 1, in stage 1 (layers a to b: Linear)" in text
    assert "micro-batch 3, action 1F3: " in text
    assert "Burst: all wrong" in text
    assert "in burst" in text  # part of the traceback
    assert "catch RemoteError on every rank" in text
    fields = fates[0].facts["fields"]
    assert (fields["stage"], fields["layers"]) == (1, ("a", "b"))
    assert (fields["microbatch"], fields["action"]) == (3, "1F3")
    assert [fate.facts["came_from"] == "Burst" for fate in fates] == [r == rank for r in range(3)]
    assert (
        f"This is rank 2 of 3; it was {'in step 1' if rank != 2 else ''}" in fates[2].facts["whole"]
    )


# ---- a rank dies --------------------------------------------------------------------------


def test_watchdog_reports_a_dead_rank() -> None:
    """Other places are those of a pipe's step, in tests/faults/test_every_fault.py."""
    cases = {
        (place, rank): (2, run, At(rank, place, kill))
        for place in ("agreement", "end")
        for rank in (0, 1)
    }
    for (_, rank), fates in perform_all(cases).items():
        text = check_cause(fates, [1 - rank], "died", rank)
        assert f"rank {rank} died: no heartbeat for " in text
        assert f"rank {1 - rank} was in step " in text
        assert "waiting for " in text


def looks_seldom(stage: Stage) -> None:
    """Check the peers rarely, as on a busy machine; a rank must not be diagnosed unseen."""
    look = HeartbeatMonitor._check_peers

    def slowly(self: HeartbeatMonitor, store: Store, has_symptom: bool) -> Failure | None:
        time.sleep(1.2)
        return look(self, store, has_symptom)

    patch.object(HeartbeatMonitor, "_check_peers", slowly).start()
    run(stage, At(1, "forward", kill))


def test_watchdog_that_runs_rarely_still_reports_a_dead_rank() -> None:
    check_cause(perform(2, looks_seldom), [0], "died", 1)


# ---- a rank receives a signal ----------------------------------------------------------------


def interrupted(
    stage: Stage, ranks: list[int], place: str, number: int, pause: float = 5.0
) -> None:
    """Send a signal to these ranks in a given situation; all have enough time to finish."""
    patch("penstock.runtime.distributed.failure.watchdog._SIGTERM_DELAY", 60.0).start()
    watchdog = watched(stage)
    step(watchdog, stage, 0)
    stage.interrupt_soon(ranks, number, 0.8)
    fail = partial(time.sleep, 2.5 if place == "forward" else 0)
    if place == "forward" or stage.rank in ranks:
        step(watchdog, stage, 1, At(0, "forward", fail))
    else:
        time.sleep(pause)  # the others wait in gloo for this rank
        step(watchdog, stage, 1)


@pytest.mark.parametrize("place", ["forward", "wait"])
def test_watchdog_ctrl_c_on_several_ranks_ends_all(place: str) -> None:
    ranks = [0, 1, 2] if place == "forward" else [0, 1]
    fates = perform(3, interrupted, ranks, place, signal.SIGINT)
    assert [fates[r].facts["error"] for r in ranks] == ["KeyboardInterrupt"] * len(ranks)
    assert all(fate.code not in (0, None) for fate in fates)
    assert place == "forward" or fates[2].facts["fields"]["kind"] == "interrupted"


def test_watchdog_sigterm_on_a_waiting_rank() -> None:
    found = perform_all(
        {
            "ends soon": (2, interrupted, [0], "wait", signal.SIGTERM, 1.5),
            "waits long": (2, receives_sigterm),
        }
    )
    # After its step.
    assert [fate.code for fate in found["ends soon"]] == [-signal.SIGTERM, 0]
    fates = found["waits long"]
    text = check_cause(fates, [1], "interrupted", 0)
    assert fates[0].facts["text"] == text
    assert "rank 0 was terminated by SIGTERM, in step 1, waiting for step 1 from all ranks" in text


def receives_sigterm(stage: Stage) -> None:
    watchdog = watched(stage)
    if stage.rank == 0:
        threading.Timer(0.8, os.kill, (os.getpid(), signal.SIGTERM)).start()
    else:
        time.sleep(6)
    step(watchdog, stage, 1)


# ---- the store disappears ------------------------------------------------------------------


def test_watchdog_reports_the_death_of_the_store_host() -> None:
    fates = perform(3, run, At(0, "forward", kill), hosted=True)
    text = check_cause(fates, [1, 2], "died", 0)
    assert "is gone, with rank 0, which hosts it" in text or "rank 0 died" in text


def told_to_end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    burst()


def held_up(stage: Stage) -> None:
    """Let a rank that was told to end wait for longer than its main thread may be stuck."""
    patch("penstock.runtime.distributed.failure.watchdog._MAIN_THREAD_GRACE", 0.1).start()
    watchdog = watched(stage)
    step(watchdog, stage, 0)
    if stage.rank != 0:
        ctypes.PyDLL(None).usleep(500_000)  # holds the GIL, so nothing else runs in this process
    step(watchdog, stage, 1, At(0, "agreement", told_to_end))


def test_store_host_stays_until_all_ranks_have_the_failure() -> None:
    fates = perform(2, held_up, hosted=True)
    check_cause(fates, [0, 1], "raised", 0)


# ---- one rank is a call ahead --------------------------------------------------------------


def comes_through(stage: Stage) -> None:
    watchdog = watched(stage)
    with watchdog.guarded("step 0"):
        dist.all_reduce(torch.zeros(1))
        if stage.rank == 1:
            time.sleep(0.5)
        watchdog.mark_computing("its end")
    stage.report(through=True)
    step(watchdog, stage, 1, At(0, "agreement", burst))


def test_failure_in_the_next_call_lets_others_finish_the_current_one() -> None:
    fates = perform(2, comes_through)
    assert [fate.facts.get("through") for fate in fates] == [True, True]
    check_cause(fates, [0, 1], "raised", 0)


# ---- after a failure -----------------------------------------------------------------------


def goes_on(stage: Stage) -> None:
    for attempt in range(3):
        watchdog = watched(stage, f"attempt {attempt}")
        step(watchdog, stage, 0)
        with pytest.raises(RemoteError, match="all wrong") as caught:
            step(watchdog, stage, 1, At(attempt, "backward", burst))
        assert caught.value.rank == attempt
        assert watchdog.failure is not None
        assert watchdog.closed
        assert remaining_threads(lambda thread: "penstock" in thread.name) == []
        again = dist.new_group(list(range(stage.size)))
        dist.distributed_c10d.GroupMember.WORLD = again
    watchdog = watched(stage, "last")
    step(watchdog, stage, 0)
    watchdog.close()


def test_new_watchdog_works_after_a_failure() -> None:
    fates = perform(3, goes_on)
    assert [fate.code for fate in fates] == [0, 0, 0], fates[0].written


def all_at_once(stage: Stage) -> None:
    run(stage, At(stage.rank, "end", partial(fail_together, stage)))


def fail_together(stage: Stage) -> None:
    """Raise once every rank is here: the failure of the first could interrupt a slow one."""
    meeting = dist.distributed_c10d._get_default_store()
    meeting.set(f"about to fail/{stage.rank}", "")
    meeting.wait([f"about to fail/{rank}" for rank in range(stage.size)])
    raise Burst(f"on {stage.rank}")


def test_simultaneous_failures_raise_the_same_error_on_all_ranks() -> None:
    fates = perform(3, all_at_once)
    rank = fates[0].facts["fields"]["rank"]
    text = check_cause(fates, [0, 1, 2], "raised", rank)
    assert f"Burst: on {rank}" in text
    assert [fate.facts["came_from"] for fate in fates] == ["Burst"] * 3


def hears_between_steps(stage: Stage) -> None:
    watchdog = watched(stage)
    step(watchdog, stage, 0)
    if stage.rank == 1:
        step(watchdog, stage, 1, At(1, "agreement", burst))
    assert watchdog._monitor.failure_known.wait(60)
    watchdog._monitor.wait_for_acknowledgement()  # the failure is printed before
    step(watchdog, stage, 1)


def test_rank_between_steps_prints_a_failure_at_once_and_raises_in_the_next_step() -> None:
    fates = perform(2, hears_between_steps)
    check_cause(fates, [0, 1], "raised", 1)
    assert "penstock: rank 0 will stop at its next step: rank 1 failed" in fates[0].written


def uses_aborted_group(stage: Stage) -> None:
    abort_gloo(stage.group)
    for attempt in range(2):
        with pytest.raises(RuntimeError) as caught:
            stage.group.send([torch.zeros(1)], 1 - stage.rank, 5 + attempt).wait()
        assert _CONNECTION_ERROR.search(str(caught.value))


def test_error_of_an_aborted_gloo_group_is_a_connection_error() -> None:
    fates = perform(2, uses_aborted_group)
    assert [fate.code for fate in fates] == [0, 0], fates


# ---- other processes -----------------------------------------------------------------------


def forks(stage: Stage) -> None:
    watchdog = watched(stage)
    step(watchdog, stage, 0)
    child = os.fork()
    if not child:
        try:
            with (
                pytest.raises(RunError, match="a forked process cannot take part in it"),
                watchdog.guarded("x"),
            ):
                pass
            watchdog.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    step(watchdog, stage, 1)
    watchdog.close()


def test_watchdog_refuses_a_forked_process() -> None:
    fates = perform(2, forks)
    assert [fate.code for fate in fates] == [0, 0], fates[0].written


PROGRAM = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from tests.faults.watchdog_step import RankContext, step, watched
rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
stage = RankContext(rank, 2, None)
watchdog = watched(stage)
step(watchdog, stage, 0)
if rank == 1:
    raise ValueError("no more data")
step(watchdog, stage, 1)
"""


def test_uncaught_error_between_steps_is_reported_by_the_peer() -> None:
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
    outputs = [program.communicate(timeout=300)[1] for program in programs]
    assert [program.returncode for program in programs] == [1, 1], outputs
    assert "RemoteError: rank 1 failed, after step 0: ValueError: no more data" in outputs[0]
    assert outputs[0].count("ValueError: no more data") == 2  # once more in its traceback
    assert "penstock: rank" not in outputs[1]

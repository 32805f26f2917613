"""Other ways to end: signals, ranks that never arrive or leave too early, background saves.

Slow first steps and slow disks are not faults.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed.distributed_c10d import Store

from penstock import RemoteError
from penstock.checkpoint.writer import CheckpointWriter
from penstock.runtime.distributed.failure.report import Failure
from penstock.runtime.distributed.failure.watchdog import HeartbeatMonitor
from penstock.runtime.distributed.session import DistributedEngine
from tests.distributed.test_ranks import gone
from tests.faults.checks import check_cause, check_checkpoint
from tests.faults.disposable_ranks import RankContext, run_cases, run_ranks
from tests.faults.training_run import (
    Fault,
    FaultInjector,
    batch,
    burst,
    inject_into_send_and_save,
    no_fault,
    optimizer_of,
    pipe_of,
    train_with_fault,
    unsplit,
)
from tests.faults.watchdog_step import HEARTBEAT, Burst, kill, stall

ARRIVAL_TIMEOUT = "penstock.runtime.distributed.store.ARRIVAL_TIMEOUT"
SIGTERM_DELAY = "penstock.runtime.distributed.failure.watchdog._SIGTERM_DELAY"

# ---- signals -------------------------------------------------------------------------------


def compute_long(number: int) -> None:
    """Receive a signal in an action that takes long, while the others wait for this rank."""
    threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
    time.sleep(600)


def compute_shortly() -> None:
    """Receive SIGTERM in an action that ends right after it, and have time to end the step."""
    patch(SIGTERM_DELAY, 60.0).start()
    os.kill(os.getpid(), signal.SIGTERM)


def test_ctrl_c_on_one_rank_is_reported_by_its_peer(tmp_path: Path) -> None:
    fail = partial(compute_long, signal.SIGINT)
    given = {
        (place, rank): (2, train_with_fault, Fault(rank, place, fail), tmp_path / f"{place}-{rank}")
        for place in ("forward", "saving")
        for rank in (0, 1)
    }
    for (place, rank), outcomes in run_cases(given).items():
        text = check_cause(outcomes, [1 - rank], "interrupted", rank)
        # The watchdog reports the signal if Python takes long to raise the exception.
        cause = r"(interrupted by KeyboardInterrupt|terminated by SIGINT)"
        assert re.match(rf"rank {rank} was {cause}, in ", text)
        assert outcomes[rank].facts["error"] == "KeyboardInterrupt"
        assert outcomes[rank].code == 128 + signal.SIGINT
        check_checkpoint(tmp_path / f"{place}-{rank}", outcomes)


def interrupted_together(context: RankContext, folder: Path) -> None:
    """Interrupt all ranks at once, as a terminal does, while one computes and the others wait."""
    injector = FaultInjector(context.rank, Fault(1, "forward", stall))
    pipe = pipe_of(injector)
    pipe.save(folder, extra=0)
    injector.step = 1
    x, target = batch(1)
    context.interrupt_soon(range(context.size), signal.SIGINT, 0.3)
    for _ in range(2):
        pipe.step(x, target=target)


def test_ctrl_c_on_all_ranks_raises_keyboard_interrupt_everywhere(tmp_path: Path) -> None:
    outcomes = run_ranks(3, interrupted_together, tmp_path)
    assert [outcome.facts.get("error") for outcome in outcomes] == ["KeyboardInterrupt"] * 3, (
        outcomes
    )
    assert [outcome.code for outcome in outcomes] == [128 + signal.SIGINT] * 3


def test_sigterm_lets_a_short_step_finish_and_ends_a_long_one(tmp_path: Path) -> None:
    """A rank that receives SIGTERM ends after its step if that is short.

    Otherwise all ranks end at once.
    """
    fails: dict[str, Callable[[], object]] = {
        "short": compute_shortly,
        "long": partial(compute_long, signal.SIGTERM),
    }
    given = {
        name: (2, train_with_fault, Fault(1, "forward", fail), tmp_path / name)
        for name, fail in fails.items()
    }
    found = run_cases(given)
    assert found["short"][1].code == -signal.SIGTERM
    text = check_cause(found["short"], [0], "interrupted", 1)
    assert text.startswith("rank 1 was terminated by SIGTERM, after step (call 2). ")
    assert found["long"][1].code == 1
    text = check_cause(found["long"], [0], "interrupted", 1)
    assert text.startswith("rank 1 was terminated by SIGTERM, in step (call 2), at 1F1. ")
    assert text in found["long"][1].written
    for name, outcomes in found.items():
        check_checkpoint(tmp_path / name, outcomes)


def computes_while_another_dies(context: RankContext) -> None:
    """Kill rank 1, then send SIGTERM to rank 0 while it computes, as torchrun does.

    The watchdog of rank 0 runs rarely, as on a busy machine.
    """
    pids = context.gather_pids()
    check = HeartbeatMonitor._check_peers

    def check_slowly(self: HeartbeatMonitor, store: Store, has_symptom: bool) -> Failure | None:
        time.sleep(0.8)
        return check(self, store, has_symptom)

    patch.object(HeartbeatMonitor, "_check_peers", check_slowly).start()

    def die_or_compute(place: str, microbatch: int = 1) -> None:
        if place == "forward" and context.rank == 1:
            kill()
        if place == "forward" and microbatch == 1:
            assert gone(pids[1:])
            os.kill(os.getpid(), signal.SIGTERM)
            assert isinstance(pipe._engine, DistributedEngine)
            while pipe._engine.groups.watchdog.failure is None:
                time.sleep(0.02)

    pipe = pipe_of(die_or_compute)
    x, target = batch(1)
    pipe.step(x, target=target)


def test_rank_that_is_told_to_end_because_another_died_names_that_rank() -> None:
    """It raises the error, or prints it and exits if it takes long to return from its layer."""
    outcome, _ = run_ranks(2, computes_while_another_dies)
    assert outcome.code == 1, outcome
    assert "rank 1 died: no heartbeat for" in outcome.written, outcome


# ---- ranks that do not arrive, or leave ----------------------------------------------------


def fails_in_building(context: RankContext, rank: int) -> None:
    if context.rank == rank:
        raise Burst("no such file")
    pipe_of(no_fault)


@pytest.mark.parametrize("rank", [0, 2])
def test_rank_that_fails_before_constructing_the_pipe(rank: int) -> None:
    outcomes = run_ranks(3, fails_in_building, rank)
    text = check_cause(outcomes, [r for r in range(3) if r != rank], "died", rank)
    assert text.startswith(f"rank {rank} exited before it arrived to create the pipe")
    assert outcomes[rank].facts["error"] == "Burst"


def does_not_come(context: RankContext) -> None:
    """Create the pipe on rank 0 alone. Rank 1 lives on until rank 0 has given up."""
    patch(ARRIVAL_TIMEOUT, 0.5).start()
    store = context.group.get_group_store()
    if context.rank == 1:
        store.wait(["given up"])
        return
    try:
        pipe_of(no_fault)
    finally:
        store.set("given up", "")


def test_rank_that_does_not_arrive_in_time() -> None:
    outcomes = run_ranks(2, does_not_come)
    text = check_cause(outcomes, [0], "left", 1)
    assert text.startswith("rank 1 did not arrive in time to create the pipe")


def one_step_less(context: RankContext, rank: int, pause: float) -> None:
    pipe = pipe_of(no_fault)
    x, target = batch(1)
    pipe.step(x, target=target)
    if context.rank != rank:
        time.sleep(pause)
        pipe.step(x, target=target)


@pytest.mark.parametrize("pause", [0.0, 1.0])  # after a second the connections are closed
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_leaves_one_step_early(rank: int, pause: float) -> None:
    outcomes = run_ranks(2, one_step_less, rank, pause)
    text = check_cause(outcomes, [1 - rank], "left", rank)
    assert text.startswith(f"rank {rank} has left, after step (call 1): its program ended, or its")
    assert "Call the pipe equally often on every rank." in text
    assert outcomes[rank].code == 0


def tries_again(context: RankContext) -> None:
    injector = FaultInjector(context.rank, Fault(1, "backward", kill))
    pipe = pipe_of(injector)
    x, target = batch(1)
    injector.step = 1
    with pytest.raises(RemoteError, match="rank 1 died") as first:
        pipe.step(x, target=target)
    with pytest.raises(RemoteError) as second:
        pipe.step(x, target=target)
    assert str(second.value) == str(first.value)


def test_later_steps_repeat_the_error_of_a_dead_rank() -> None:
    outcomes = run_ranks(2, tries_again)
    assert [outcome.code for outcome in outcomes] == [0, -signal.SIGKILL], outcomes


def counts_restarts_alone(context: RankContext) -> None:
    """Give each rank a different restart count, as on hosts of which one was away for a while."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(context.rank)
    patch(ARRIVAL_TIMEOUT, 60.0).start()
    x, target = batch(0)
    loss = pipe_of(no_fault).step(x, target=target).loss
    torch.testing.assert_close(loss, unsplit()[0], rtol=0, atol=1e-10)


def test_hosts_with_different_restart_counts_can_connect() -> None:
    outcomes = run_ranks(2, counts_restarts_alone)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes


# ---- background saves ----------------------------------------------------------------------


def saves_beside(context: RankContext, fault: Fault, folder: Path) -> None:
    injector = FaultInjector(context.rank, fault)
    inject_into_send_and_save(injector)
    pipe = pipe_of(injector)
    optimizer = optimizer_of(pipe)
    for injector.step in range(2):
        x, target = batch(injector.step)
        optimizer.zero_grad()
        pipe.step(x, target=target)
        optimizer.step()
        saving = pipe.save(folder, optimizer=optimizer, extra=injector.step, background=True)
        if not injector.step:
            saving.wait()
    if fault.fail is kill:
        with pytest.raises(RemoteError, match=f"rank {fault.rank} died") as death:
            saving.wait()
        with pytest.raises(RemoteError) as again:
            pipe.step(x, target=target)
        assert str(again.value) == str(death.value)
        raise again.value
    with pytest.raises(RemoteError, match="failed, so no rank continues with it") as caught:
        saving.wait()
    assert (caught.value.kind, caught.value.rank) == ("raised", fault.rank)
    assert "in burst\n" in caught.value.traceback
    x, target = batch(2)
    optimizer.zero_grad()
    loss = pipe.step(x, target=target).loss  # the failed save does not affect the training
    torch.testing.assert_close(loss, unsplit()[2], rtol=0, atol=1e-10)
    pipe.save(folder, optimizer=optimizer, extra=2)  # raises, because the save before failed


def test_background_save_that_fails(tmp_path: Path) -> None:
    given = {r: (2, saves_beside, Fault(r, "saving", burst), tmp_path / f"{r}") for r in (0, 1)}
    for rank, outcomes in run_cases(given).items():
        text = check_cause(outcomes, [0, 1], "raised", rank)
        assert f"failed, so no rank continues with it:\n  rank {rank}: " in text
        assert "in burst\n" in text
        check_checkpoint(tmp_path / f"{rank}", outcomes)


def test_process_killed_during_a_background_save(tmp_path: Path) -> None:
    given = {r: (2, saves_beside, Fault(r, "saving", kill), tmp_path / f"{r}") for r in (0, 1)}
    for rank, outcomes in run_cases(given).items():
        check_cause(outcomes, [1 - rank], "died", rank)
        check_checkpoint(tmp_path / f"{rank}", outcomes)


# ---- slow, but not faults ------------------------------------------------------------------


def slow(context: RankContext, folder: Path, doing: str) -> None:
    """Let the first step, which may compile, or a save take longer than a heartbeat."""
    nap = partial(time.sleep, 4.0)
    injector = FaultInjector(context.rank, Fault(1, "forward" if doing == "step" else "", nap))
    pipe = pipe_of(injector, heartbeat=HEARTBEAT)
    injector.step = 1
    write = CheckpointWriter.write_data

    def slowly(self: CheckpointWriter, *given: object) -> object:
        if context.rank == 0:
            nap()
        return write(self, *given)  # type: ignore[arg-type]

    x, target = batch(1)
    pipe.step(x, target=target)
    if doing == "save":
        with patch.object(CheckpointWriter, "write_data", slowly):
            pipe.save(folder)
    context.report(came=True)
    injector.fault, injector.triggered = Fault(1, "forward", stall), False
    pipe.step(x, target=target)


def test_slow_first_step_and_slow_save_are_not_stalls(tmp_path: Path) -> None:
    cases = {doing: (2, slow, tmp_path / doing, doing) for doing in ("step", "save")}
    for outcomes in run_cases(cases).values():
        assert [outcome.facts.get("came") for outcome in outcomes] == [True, True], outcomes
        check_cause(outcomes, [0], "stalled", 1)

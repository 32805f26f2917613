"""A store that does not answer, forked workers, signals with a handler, stalls between steps.

The process of the store is stopped here; `python -m tests.faults.cut_hosts` cuts networks.
"""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from penstock import RemoteError, saved
from penstock.runtime.distributed.process_groups import ProcessGroups
from penstock.runtime.distributed.session import DistributedEngine
from tests.distributed.fork_server import forked
from tests.distributed.fork_server import store as served
from tests.faults.checks import check_cause
from tests.faults.disposable_ranks import RankContext, run_cases, run_ranks
from tests.faults.training_run import (
    Fault,
    FaultInjector,
    batch,
    burst,
    no_fault,
    optimizer_of,
    pipe_of,
)
from tests.faults.watchdog_step import HEARTBEAT, LONG_HEARTBEAT, kill, stall

# ---- a store that does not answer -----------------------------------------------------------


def serve(file: str) -> None:
    server = served()
    Path(f"{file}-new").write_text(str(server.port))
    Path(f"{file}-new").rename(file)
    time.sleep(600)


@contextmanager
def store_process(file: Path) -> Iterator[int]:
    """Start a process that serves a store, as torchrun does, and write its port to a file."""
    process = forked().Process(target=serve, args=(str(file),), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        yield process.pid
    finally:
        process.kill()
        process.join()


def loses_the_store(context: RankContext, file: Path, pid: int, doing: str) -> None:
    """Train with a store in another process, which rank 0 stops, until the watchdog notices."""
    while not file.exists():
        time.sleep(0.01)
    dist.destroy_process_group()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    store = TCPStore("127.0.0.1", int(file.read_text()), is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.size)
    pipe = pipe_of(no_fault, heartbeat=LONG_HEARTBEAT if doing == "failing" else HEARTBEAT)
    x, target = batch(0)
    pipe.step(x, target=target)
    if context.rank == 0:
        os.kill(pid, signal.SIGSTOP)
    if doing == "failing" and context.rank == 1:
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)  # rank 0 may still be in its step
        burst()
    while doing != "idle":
        try:
            pipe.step(x, target=target)
        except RemoteError as error:  # threads that wait for the store are left behind
            print(error, flush=True)
            os._exit(1)
        time.sleep(0.05)
    time.sleep(100)


def test_every_rank_reports_a_store_that_does_not_answer(tmp_path: Path) -> None:
    """While the ranks step and while they are idle; while one fails, that one is known, too.

    Idle ranks print the cause and end themselves. Without a deadline they all waited for the
    operating system, for a quarter of an hour.
    """
    with ExitStack() as stores:
        cases = {}
        for doing in ("stepping", "idle", "failing"):
            pid = stores.enter_context(store_process(file := tmp_path / doing))
            cases[doing] = 2, loses_the_store, file, pid, doing
        found = run_cases(cases)
    for doing, outcomes in found.items():
        assert [outcome.code for outcome in outcomes] == [1, 1], outcomes
        for outcome in outcomes[: 1 if doing == "failing" else 2]:
            assert "lost contact with host 127.0.0.1, which holds the store" in outcome.written
        if doing == "failing":
            assert outcomes[1].facts["error"] == "Burst"
        if doing == "idle":
            assert all("in loses_the_store\n    time.sleep(100)" in o.written for o in outcomes)


def freezes_with_the_store(context: RankContext) -> None:
    pipe = pipe_of(no_fault, heartbeat=HEARTBEAT)
    x, target = batch(0)
    pids = context.gather_pids()
    pipe.step(x, target=target)
    if context.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        pipe.step(x, target=target)
    except RemoteError as error:
        print(error, flush=True)
    os.kill(pids[0], signal.SIGKILL)
    os._exit(1)


def test_frozen_rank_that_hosts_the_store_is_named() -> None:
    outcomes = run_ranks(2, freezes_with_the_store, hosted=True, within=100)
    assert [outcome.code for outcome in outcomes] == [-signal.SIGKILL, 1]
    assert "lost contact with host 127.0.0.1 (rank 0), which holds the st" in outcomes[1].written


# ---- keys of other programs in the store ----------------------------------------------------


def forges(context: RankContext, key: str, value: str) -> None:
    """Write to the store of the watchdogs while rank 0 waits for rank 1, then let rank 0 fail."""
    injector = FaultInjector(context.rank, Fault(1, "forward", partial(time.sleep, 1.0)))
    pipe = pipe_of(injector)
    x, target = batch(1)
    pipe.step(x, target=target)
    assert isinstance(pipe._engine, DistributedEngine)
    monitor = pipe._engine.groups.watchdog._monitor
    ends = threading.Event()

    def write() -> None:
        while not ends.wait(0.02):
            monitor._store.set(key, value)

    if context.rank == 0:
        threading.Thread(target=write, daemon=True).start()
    injector.step = 1
    try:
        pipe.step(x, target=target)
        assert all(thread.is_alive() for thread in monitor._threads)
        injector.fault, injector.triggered = Fault(0, "forward", burst), False
        pipe.step(x, target=target)
    finally:
        ends.set()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("wake/1", "", "rank 0 failed, in step (call 3)"),
        ("heartbeat/1", "nonsense", "rank 0 failed, in step (call 3)"),
        ("failure", "nonsense", "Another program has written to the store"),
    ],
)
def test_forged_key_in_the_store_does_not_end_the_watchdog(
    key: str, value: str, expected: str
) -> None:
    outcomes = run_ranks(2, forges, key, value, within=100)
    for outcome in outcomes:
        assert outcome.facts.get("error") == "RemoteError", outcomes
        assert expected in outcome.facts["text"]


# ---- processes that a rank has forked --------------------------------------------------------


def dies_with_a_worker(context: RankContext) -> None:
    """Fork a process, as a DataLoader does, that outlives its rank for a while."""
    injector = FaultInjector(context.rank, Fault(1, "forward", kill))
    pipe = pipe_of(injector)
    x, target = batch(1)
    pipe.step(x, target=target)
    if context.rank == 1 and not os.fork():
        time.sleep(8)
        os._exit(0)
    injector.step = 1
    pipe.step(x, target=target)


def test_killed_rank_is_found_although_its_workers_live() -> None:
    outcomes = run_ranks(2, dies_with_a_worker, within=100)
    text = check_cause(outcomes, [0], "died", 1)
    silence = re.search(r"rank 1 died: no heartbeat for ([0-9.]+) s, ", text)
    assert silence is not None
    assert float(silence[1]) < 6  # its connections closed, before the worker ended


def dies_while_others_connect(context: RankContext, folder: Path) -> None:
    # The thread that connects is left behind, so waiting longer for its end does not help.
    patch("tests.faults.disposable_ranks.THREAD_END", 0.5).start()
    pipe = pipe_of(no_fault, heartbeat=HEARTBEAT)
    x, target = batch(1)
    pipe.step(x, target=target)
    if context.rank == 1:
        patch.object(ProcessGroups, "get_save_channel", lambda *_: kill()).start()
    pipe.save(folder)


def test_rank_that_dies_while_others_connect_to_it_is_named(tmp_path: Path) -> None:
    """The first save opens connections, and the others waited half an hour for the dead rank."""
    outcomes = run_ranks(3, dies_while_others_connect, tmp_path)
    for outcome in (outcomes[0], outcomes[2]):
        assert (outcome.code, outcome.facts["error"]) == (1, "RemoteError"), outcome
        assert "rank 1 died: no heartbeat for" in outcome.facts["text"]
        assert "waiting for a connection from all ranks" in outcome.facts["text"]
        assert outcome.facts["threads"] == ["penstock-connect"]


def signals_a_worker(context: RankContext) -> None:
    pipe = pipe_of(no_fault)
    x, target = batch(1)
    worker = os.fork()
    if not worker:
        time.sleep(60)
        os._exit(1)
    os.kill(worker, signal.SIGTERM)
    assert os.waitpid(worker, 0)[1] == signal.SIGTERM  # it has no handler of ours
    time.sleep(0.5)
    pipe.step(x, target=target)


def test_signals_of_workers_are_their_own() -> None:
    outcomes = run_ranks(2, signals_a_worker, within=100)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes


# ---- a user's own handler for SIGTERM --------------------------------------------------------


def saves_when_preempted(context: RankContext, folder: Path, doing: str) -> None:
    """Set a flag in a handler and save at leisure, as training scripts do."""
    flag = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: flag.set())
    slow = Fault(context.rank, "loss" if doing == "stepping" else "", partial(time.sleep, 4.0))
    injector = FaultInjector(context.rank, slow)
    pipe = pipe_of(injector, heartbeat=LONG_HEARTBEAT)
    optimizer = optimizer_of(pipe)
    context.interrupt_soon(range(context.size), signal.SIGTERM, 1.0)
    if doing == "saving":
        assert flag.wait(60)
    for injector.step in range(2):
        x, target = batch(injector.step)
        optimizer.zero_grad()
        pipe.step(x, target=target)
        optimizer.step()
    time.sleep(2.5 if doing == "saving" else 0)  # longer than a SIGTERM was held back
    assert flag.is_set()
    pipe.save(folder, optimizer=optimizer, extra=1)


def test_own_handler_of_sigterm_is_respected(tmp_path: Path) -> None:
    """The watchdog ended such a rank two seconds after the signal, in its last save."""
    given = {
        doing: (2, saves_when_preempted, tmp_path / doing, doing)
        for doing in ("stepping", "saving")
    }
    for doing, outcomes in run_cases(given).items():
        assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
        assert saved(tmp_path / doing) is not None


# ---- SIGTERM between steps, stalls between steps ---------------------------------------------


def told_to_end_between_steps(context: RankContext) -> None:
    pipe = pipe_of(no_fault)
    x, target = batch(1)
    pipe.step(x, target=target)
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    pipe.step(x, target=target)


def test_sigterm_between_steps_is_not_told_as_a_death() -> None:
    outcomes = run_ranks(2, told_to_end_between_steps, within=100)
    text = check_cause(outcomes, [0], "interrupted", 1)
    assert text.startswith("rank 1 was terminated by SIGTERM, after step (call 1). ")
    assert outcomes[1].code == -signal.SIGTERM


def stalls_between_steps(context: RankContext) -> None:
    """Let rank 1 stall; the launcher ends it as soon as the other rank has exited."""
    pids = context.gather_pids()
    pipe = pipe_of(no_fault, heartbeat=HEARTBEAT)
    x, target = batch(1)
    for _ in range(2):  # the second call is not a first one
        pipe.step(x, target=target)
    if context.rank == 1:
        stall()
    try:
        pipe.step(x, target=target)
    finally:
        os.kill(pids[1], signal.SIGTERM)


def test_rank_that_stalls_between_steps_prints_its_stack() -> None:
    outcomes = run_ranks(2, stalls_between_steps, within=100)
    check_cause(outcomes, [0], "stalled", 1)
    assert "penstock: rank 1 is stuck here:\n" in outcomes[1].written
    assert "in stall\n" in outcomes[1].written


# ---- the same error on each rank -------------------------------------------------------------


def raise_stop() -> None:
    raise StopIteration("no more")


def raise_long_text() -> None:
    raise ValueError("x" * 9_000_000)


def fails_once(context: RankContext, fail: Any) -> None:
    injector = FaultInjector(context.rank, Fault(1, "forward", fail))
    pipe = pipe_of(injector)
    x, target = batch(1)
    pipe.step(x, target=target)
    injector.step = 1
    with pytest.raises(RemoteError) as caught:
        pipe.step(x, target=target)
    context.report(text=str(caught.value), kind=caught.value.kind)


def test_odd_errors_are_the_same_on_every_rank() -> None:
    cases = {fail: (2, fails_once, fail) for fail in (raise_stop, raise_long_text)}
    for outcomes in run_cases(cases).values():
        texts = {outcome.facts["text"] for outcome in outcomes}
        assert len(texts) == 1, outcomes
        (text,) = texts
        assert text.startswith("rank 1 failed, in step (call 2), in stage 1 ")  # the second step
        assert "Every rank of the pipe stopped. Fix the error on rank 1" in text
        assert len(text) < 50_000


def creates(context: RankContext, rank: int, options: dict[str, Any]) -> None:
    pipe_of(no_fault, **(options if context.rank == rank else {}))


def test_wrong_options_of_one_rank_are_told_on_every_rank() -> None:
    odd: tuple[dict[str, Any], ...] = (
        {"heartbeat": math.inf},
        {"heartbeat": "3"},
        {"devices": ["cpu"]},
    )
    cases = {index: (2, creates, index % 2, options) for index, options in enumerate(odd)}
    for index, outcomes in run_cases(cases).items():
        text = check_cause(outcomes, [0, 1], "raised", index % 2)
        assert "heartbeat must be a number of seconds above 0" in text or "devices has 1" in text

"""`Pipe.save_on_preemption`: ranks that receive SIGTERM save at the same step, and resume."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock import ArgumentError, PenstockTypeError, Pipe, RunError, init, saved
from penstock.runtime import signals
from tests.faults.checks import check_cause
from tests.faults.disposable_ranks import RankContext, RankOutcome, run_cases, run_ranks
from tests.faults.training_run import CHUNKS, batch, model_of, no_fault, optimizer_of, pipe_of

STEPS, PREEMPTED = 6, 3


def losses_of(pipe: Pipe, folder: Path, preempt: Any, accumulate: int = 1) -> list[float]:
    """Train from the last checkpoint on, and return the losses. `preempt` is called in step 3."""
    optimizer = optimizer_of(pipe)
    begin = pipe.load(folder, optimizer=optimizer) if saved(folder) else 0
    losses: list[float] = []
    pipe.save_on_preemption(folder, optimizer, extra=lambda: begin + len(losses))
    for step in range(begin, STEPS):
        x, target = batch(step)
        losses.append(float(pipe.step(x, target=target).loss))
        if step == PREEMPTED:
            preempt()
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def expected(accumulate: int = 1) -> list[float]:
    model = model_of()
    optimizer = optimizer_of(model)
    losses = []
    for step in range(STEPS):
        x, target = batch(step)
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        losses.append(float(loss.detach()))
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def trains(context: RankContext, folder: Path, preempted: list[int], dp: int = 1) -> None:
    loss = nn.functional.mse_loss
    pipe = pipe_of(no_fault) if dp == 1 else Pipe(model_of(), CHUNKS, mesh=init(dp), loss_fn=loss)

    def preempt() -> None:
        if context.rank in preempted:
            os.kill(os.getpid(), signal.SIGTERM)

    context.report(losses=losses_of(pipe, folder, preempt))


def check_resumed(outcomes: list[RankOutcome], accumulate: int = 1) -> None:
    assert [outcome.code for outcome in outcomes] == [0] * len(outcomes), outcomes
    right = expected(accumulate)
    for outcome in outcomes:
        losses = outcome.facts["losses"]
        torch.testing.assert_close(losses, right[STEPS - len(losses) :], rtol=0, atol=1e-12)


def test_all_ranks_save_at_the_same_step_and_resume(tmp_path: Path) -> None:
    """One rank, and one rank of one replica receive SIGTERM; all of them: random_kills.py."""
    cases = {
        "last": (2, trains, tmp_path / "last", [1]),
        "replica": (4, trains, tmp_path / "replica", [3], 2),
    }
    for outcomes in run_cases(cases).values():
        assert [outcome.code for outcome in outcomes] == [143] * len(outcomes), outcomes
        assert all("Everything is saved in " in outcome.written for outcome in outcomes)
    again = {name: (*given[:3], [], *given[4:]) for name, given in cases.items()}
    for outcomes in run_cases(again).values():
        check_resumed(outcomes)
        assert {len(outcome.facts["losses"]) for outcome in outcomes} <= {1, 2}


def accumulates(context: RankContext, folder: Path) -> None:
    pipe = pipe_of(no_fault)

    def preempt() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    context.report(losses=losses_of(pipe, folder, preempt, accumulate=3))


def test_accumulated_gradients_are_used_before_the_save(tmp_path: Path) -> None:
    """Step 3 is the first of three whose gradients are added: the ranks save after step 5."""
    outcomes = run_ranks(2, accumulates, tmp_path)
    check_resumed(outcomes, accumulate=3)  # the run was over before
    assert saved(tmp_path) is None


def too_slow(context: RankContext, folder: Path) -> None:
    pipe = pipe_of(no_fault)
    pipe.save_on_preemption(folder, within=1.0)
    x, target = batch(0)
    pipe.step(x, target=target)
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    pipe.step(x, target=target)


def test_rank_that_cannot_save_in_time_ends_all(tmp_path: Path) -> None:
    outcomes = run_ranks(2, too_slow, tmp_path, within=60)
    text = check_cause(outcomes, [0], "interrupted", 1)
    assert "could not end its step and save within 1 s" in text
    assert outcomes[1].code not in (0, None)


def local_pipe() -> Pipe:
    return Pipe(model_of(), CHUNKS, stages=2, devices=["cpu"] * 2, loss_fn=nn.functional.mse_loss)


def test_pipe_in_one_process_saves_on_preemption(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="143"):
        losses_of(local_pipe(), tmp_path, lambda: signal.raise_signal(signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    try:
        losses = losses_of(local_pipe(), tmp_path, lambda: None)
    finally:
        signals.end_preemption()
    torch.testing.assert_close(losses, expected()[PREEMPTED + 1 :], rtol=0, atol=1e-12)


def test_save_on_preemption_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    pipe = local_pipe()
    with pytest.raises(ArgumentError, match="within must be a number of seconds above 0, not 0"):
        pipe.save_on_preemption(tmp_path, within=0)
    with pytest.raises(ArgumentError, match="keep=0 is not a number of checkpoints"):
        pipe.save_on_preemption(tmp_path, keep=0)
    with pytest.raises(PenstockTypeError, match="int cannot be called"):
        pipe.save_on_preemption(tmp_path, extra=3)  # type: ignore[arg-type]
    previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with pytest.raises(RunError, match="has a handler of its own for it"):
            pipe.save_on_preemption(tmp_path)
    finally:
        signal.signal(signal.SIGTERM, previous)

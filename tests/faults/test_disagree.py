"""Ranks that make different calls all raise an error that says how, and nothing is sent.

forward, backward, loss    a different batch, mode or target, detected before the step
send                       a message with other sizes than in the calls before
between                    a different call, or an extra one
saving                     a different folder, or a save on one rank only
making                     a different model, or an invalid one
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock import Pipe, RemoteError
from tests.distributed.ranks import ranks
from tests.faults.checks import SOON
from tests.faults.course import Fault, Trap, batch, burst, model_of, no_trap, pipe_of
from tests.faults.test_going_on import caught, check_right

Odd = Callable[[Pipe, Path], object]  # what one rank does while the others take a step


def step(pipe: Pipe, folder: Path) -> None:
    x, target = batch(1)
    pipe.step(x, target=target)


def other_batch(pipe: Pipe, folder: Path) -> None:
    x, target = batch(2)
    pipe.step(x, target=target)


def other_size(pipe: Pipe, folder: Path) -> None:
    x, target = batch(1)
    pipe.step(x[:4], target=target[:4])


def other_target(pipe: Pipe, folder: Path) -> None:
    x, target = batch(1)
    pipe.step(x, target=target + 1)


def no_backward(pipe: Pipe, folder: Path) -> None:
    with torch.no_grad():
        step(pipe, folder)


def evaluation(pipe: Pipe, folder: Path) -> None:
    pipe.eval()
    try:
        step(pipe, folder)
    finally:
        pipe.train()


def forward(pipe: Pipe, folder: Path) -> None:
    with torch.no_grad():
        pipe(batch(1)[0])


def save(pipe: Pipe, folder: Path) -> None:
    pipe.save(folder)


def save_elsewhere(pipe: Pipe, folder: Path) -> None:
    pipe.save(folder / "elsewhere")


def save_beside(pipe: Pipe, folder: Path) -> None:
    pipe.save(folder, background=True)


STEPS: dict[Odd, str] = {
    other_batch: "sample values of tensor 0: ",
    other_size: "inputs: float64[",
    other_target: "sample values of tensor 1: ",
    no_backward: "gradients: ",
    evaluation: "training mode: ",
    forward: "the call: ",
    save: "the call: ",
}
SAVES: dict[Odd, str] = {save_elsewhere: "folder: ", save_beside: "background: "}


def disagreements(folder: Path) -> list[RemoteError]:
    trap = Trap(dist.get_rank(), Fault(-1, "", burst))
    pipe = pipe_of(trap)
    found = []
    for common, odds in ((step, STEPS), (save, SAVES)):
        for odd in odds:
            for rank in range(dist.get_world_size()):
                mine = odd if dist.get_rank() == rank else common
                error, took = caught(partial(mine, pipe, folder), trap)
                assert took < SOON
                check_right(pipe)
                found.append(error)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_disagreeing_calls_raise_the_same_error_on_all_ranks(size: int, tmp_path: Path) -> None:
    found = ranks(size).run(disagreements, tmp_path / "saves")
    for errors in zip(*found, strict=True):
        assert {str(error) for error in errors} == {str(errors[0])}
        assert {(error.kind, error.rank) for error in errors} == {("disagreed", None)}
    lines = [line for line in (*STEPS.values(), *SAVES.values()) for _ in range(size)]
    for error, line in zip(found[0], lines, strict=True):
        assert f"\n  {line}" in str(error), error
    assert not (tmp_path / "saves").exists()


class Growing(nn.Module):
    """A layer whose output has more rows in each call, whatever its input."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.repeat(self.calls, 1) if self.calls > 3 else x


def grows() -> RemoteError:
    pipe = Pipe(
        nn.Sequential(nn.Linear(4, 4), Growing(), nn.Linear(4, 4), nn.Linear(4, 4)).double(),
        3,
        "never",
        stages=[2, 2],
        group=dist.group.WORLD,
        loss_fn=lambda y: y.sum(),
    )
    pipe.step(batch(1)[0])
    trap = Trap(dist.get_rank(), Fault(-1, "", burst))
    return caught(lambda: pipe.step(batch(1)[0]), trap)[0]


def test_message_with_changed_sizes_is_refused() -> None:
    found = ranks(2).run(grows)
    assert {(error.kind, error.rank) for error in found} == {("raised", 0)}
    assert "create the pipe with shapes='sent'" in str(found[1])


# ---- constructing a pipe -------------------------------------------------------------------


def makes(rank: int, odd: Callable[[], Pipe]) -> RemoteError:
    mine = dist.get_rank() == rank
    began = time.monotonic()
    with pytest.raises(RemoteError) as found:
        odd() if mine else pipe_of(no_trap)
    assert time.monotonic() - began < SOON
    check_right(pipe_of(no_trap))
    return found.value


def other_model() -> Pipe:
    model = model_of()
    model.append(nn.Tanh())
    return Pipe(model, 3, schedule="1f1b", group=dist.group.WORLD)


def no_model() -> Pipe:
    return Pipe(nn.Linear(2, 2), 3, group=dist.group.WORLD)


@pytest.mark.parametrize("rank", [0, 1])
def test_constructing_a_pipe_with_different_models_is_refused(rank: int) -> None:
    found = ranks(2).run(makes, rank, other_model)
    assert {(error.kind, error.rank) for error in found} == {("disagreed", None)}
    assert "layer 6: " in str(found[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_error_while_constructing_a_pipe_is_raised_on_all_ranks(rank: int) -> None:
    found = ranks(2).run(makes, rank, no_model)
    assert {(error.kind, error.rank) for error in found} == {("raised", rank)}
    assert "in making the pipe (call 1), at its beginning: " in str(found[1 - rank])

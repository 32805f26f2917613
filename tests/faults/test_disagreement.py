"""Ranks that make different calls all raise an error that says how, and nothing is sent.

forward, backward, loss    a different batch, mode or target, detected before the step
send                       a message with other sizes than in the calls before
between                    a different call, or an extra one
saving                     a different folder, or a save on one rank only
making                     a different model, or an invalid one
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from penstock import Pipe, RemoteError
from tests.distributed.ranks import ranks
from tests.faults.test_recovery import caught, check_right
from tests.faults.training_run import (
    Fault,
    FaultInjector,
    batch,
    burst,
    model_of,
    no_fault,
    pipe_of,
)

Odd = Callable[[Pipe, Path], object]  # what one rank does while the others take a step


def step(pipe: Pipe, folder: Path, seed: int = 1, rows: int = 6, shift: float = 0.0) -> None:
    x, target = batch(seed)
    pipe.step(x[:rows], target=target[:rows] + shift)


def step_without_gradients(pipe: Pipe, folder: Path) -> None:
    with torch.no_grad():
        step(pipe, folder)


def evaluation_step(pipe: Pipe, folder: Path) -> None:
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


# the call of one rank while the others take a step, or save; and the line of the error about it
STEPS: list[tuple[Odd, str]] = [
    (partial(step, seed=2), "sample values of tensor 0: "),
    (partial(step, rows=4), "inputs: float64["),
    (partial(step, shift=1.0), "sample values of tensor 1: "),
    (step_without_gradients, "gradients: "),
    (evaluation_step, "training mode: "),
    (forward, "the call: "),
    (save, "the call: "),
]
SAVES: list[tuple[Odd, str]] = [
    (lambda pipe, folder: pipe.save(folder / "elsewhere"), "folder: "),
    (lambda pipe, folder: pipe.save(folder, background=True), "background: "),
]


def disagreements(folder: Path) -> list[RemoteError]:
    injector = FaultInjector(dist.get_rank(), Fault(-1, "", burst))
    pipe = pipe_of(injector)
    found = []
    for common, odds in ((step, STEPS), (save, SAVES)):
        for odd, _ in odds:
            for rank in range(dist.get_world_size()):
                mine = odd if dist.get_rank() == rank else common
                found.append(caught(partial(mine, pipe, folder), injector))
                check_right(pipe)
    return found


def test_disagreeing_calls_raise_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    found = ranks(3).run(disagreements, tmp_path / "saves")
    for errors in zip(*found, strict=True):
        assert {str(error) for error in errors} == {str(errors[0])}
        assert {(error.kind, error.rank) for error in errors} == {("disagreed", None)}
    lines = [line for _, line in (*STEPS, *SAVES) for _ in range(3)]
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
    injector = FaultInjector(dist.get_rank(), Fault(-1, "", burst))
    return caught(lambda: pipe.step(batch(1)[0]), injector)


def test_message_with_changed_sizes_is_refused() -> None:
    found = ranks(2).run(grows)
    assert {(error.kind, error.rank) for error in found} == {("raised", 0)}
    assert "create the pipe with shapes='sent'" in str(found[1])


# ---- constructing a pipe -------------------------------------------------------------------


def makes(rank: int, odd: Callable[[], Pipe]) -> RemoteError:
    mine = dist.get_rank() == rank
    with pytest.raises(RemoteError) as found:
        odd() if mine else pipe_of(no_fault)
    check_right(pipe_of(no_fault))
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


def other_seed() -> Pipe:
    model = model_of()
    with torch.no_grad():
        model[4].linear.weight.uniform_()  # type: ignore[union-attr,operator]
    return Pipe(model, 3, schedule="1f1b", group=dist.group.WORLD)


@pytest.mark.parametrize("rank", [0, 1])
def test_other_first_weights_on_one_rank_are_refused(rank: int) -> None:
    """Another seed: the ranks trained stages of different models in silence."""
    found = ranks(2).run(makes, rank, other_seed)
    assert {(error.kind, error.rank) for error in found} == {("disagreed", None)}
    assert "1 of 12 parameters differ, the first one is '4.linear.weight'" in str(found[0])


def builds_its_own_layers() -> None:
    """Build only the layers of this rank, and the others on the meta device."""
    model = model_of()
    for index, layer in enumerate(model):
        if (index < 3) == (dist.get_rank() == 1):
            layer.to("meta")
    check_right(Pipe(model, 3, stages=[3, 3], loss_fn=mse_loss, group=dist.group.WORLD))


def test_layers_of_other_ranks_may_be_on_the_meta_device() -> None:
    ranks(2).run(builds_its_own_layers)


@pytest.mark.parametrize("rank", [0, 1])
def test_error_while_constructing_a_pipe_is_raised_on_all_ranks(rank: int) -> None:
    found = ranks(2).run(makes, rank, no_model)
    assert {(error.kind, error.rank) for error in found} == {("raised", rank)}
    assert "in making the pipe (call 1), at its beginning: " in str(found[1 - rank])

"""Checkpoints of pipes under several processes, resumed with another number of ranks.

The numbers are compared with those of one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.optim import AdamW, Optimizer

from penstock import Pipe, RemoteError
from tests.checkpoint.saved_models import differences, state_of
from tests.distributed.ranks import ranks

STEPS = 5


def build() -> nn.Sequential:
    """Return a model whose first and last layer share a weight."""
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(5), nn.Linear(5, 5)).double()
    model[7].weight = model.get_parameter("0.0.weight")
    return model


def piped(model: nn.Sequential) -> Pipe:
    options: dict[str, Any] = {"chunks": 1, "loss_fn": nn.MSELoss()}
    if not distributed.is_initialized():
        return Pipe(model, stages=1, devices=["cpu"], **options)
    return Pipe(model, group=distributed.group.WORLD, schedule="interleaved", **options)


def learned(pipe: Pipe, optimizer: Optimizer, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        losses.append(pipe.step(x, target=x.sin()).loss)
        optimizer.step()
    return losses


def train_and_save(folder: Path, background: bool) -> list[Tensor]:
    pipe = piped(build())
    optimizer = AdamW(pipe.parameters(), lr=0.05)
    losses = learned(pipe, optimizer, range(2))
    handle = pipe.save(folder, optimizer=optimizer, extra=2, background=background)
    losses += learned(pipe, optimizer, range(2, 3))  # trains while the save may still be running
    handle.wait()
    return losses


def resume(folder: Path) -> tuple[list[Tensor], dict[str, Any]]:
    with torch.device("meta"):
        model = build()
    pipe = piped(model)
    optimizer = AdamW(pipe.parameters(), lr=0.5)
    step = pipe.load(folder, optimizer=optimizer)
    return learned(pipe, optimizer, range(step, STEPS)), state_of(pipe, optimizer)


def train_uninterrupted() -> tuple[list[Tensor], dict[str, Any]]:
    pipe = piped(build())
    optimizer = AdamW(pipe.parameters(), lr=0.05)
    return learned(pipe, optimizer, range(STEPS)), state_of(pipe, optimizer)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (3, 1), (1, 4)])
def test_resume_with_another_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    losses, state = train_uninterrupted()
    first = (
        ranks(before).run(train_and_save, tmp_path, before == 4)
        if before > 1
        else [train_and_save(tmp_path, True)]
    )
    found = ranks(after).run(resume, tmp_path) if after > 1 else [resume(tmp_path)]
    for mine in first:
        torch.testing.assert_close(mine, losses[:3], rtol=0, atol=1e-12)
    for mine, held in found:
        torch.testing.assert_close(mine, losses[2:], rtol=0, atol=1e-12)
        for name, value in held.items():
            torch.testing.assert_close(value, state[name], rtol=0, atol=1e-12)


def refused(folder: Path) -> str:
    """Save with an optimizer of another model on rank 0; return the error of this rank."""
    pipe = piped(build())
    held: Any = pipe.parameters() if distributed.get_rank() else [nn.Parameter(torch.ones(3))]
    try:
        pipe.save(folder, optimizer=AdamW(held))
    except RemoteError as error:
        return str(error)
    return "nothing was raised"


def test_save_with_wrong_optimizer_on_one_rank_raises_on_all_ranks(tmp_path: Path) -> None:
    messages = ranks(2).run(refused, tmp_path)
    assert all(
        "a parameter of shape (3,) that does not belong to the pipe" in one for one in messages
    )
    assert not any(tmp_path.iterdir())


def held_bytes() -> tuple[int, int]:
    """Return the bytes that this rank holds of a model built on meta, and the model's bytes."""
    with torch.device("meta"):
        model = build()
    total = sum(t.nbytes for t in model.state_dict().values())
    pipe = piped(model)
    return sum(t.nbytes for t in (*pipe.parameters(), *pipe.buffers())), total


def test_meta_init_gives_equal_weights_for_any_number_of_ranks_and_only_local_stages() -> None:
    found = ranks(4).run(held_bytes)
    assert all(0 < held < 0.5 * total for held, total in found)
    two, three = (ranks(n).run(first_weights) for n in (2, 3))
    held = (two, three, [first_weights()])
    merged = [{k: v for one in those for k, v in one.items()} for those in held]
    assert set(merged[0]) == set(build().state_dict())
    assert differences(merged[0], merged[1]) == []
    assert differences(merged[0], merged[2]) == []
    assert all(
        torch.equal(one["7.weight"], merged[0]["0.0.weight"]) for one in two if "7.weight" in one
    )


def first_weights() -> dict[str, Tensor]:
    with torch.device("meta"):
        model = build()
    torch.manual_seed(8)
    return {name: t.detach().clone() for name, t in piped(model).state_dict().items()}

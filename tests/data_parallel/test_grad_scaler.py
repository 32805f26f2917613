"""Tests that, under GradScaler, all ranks take the step of the optimizer or all skip it."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from penstock.data_parallel.grad_scaler import propagate_overflow
from tests.data_parallel.replicated import WRAPS, Everyone, half, mesh, model, pipe_of, whole
from tests.distributed.ranks import ranks
from tests.support import batch, closely


def over_ranks(spoiled: float | None, where: int) -> tuple[bool, float, list[bool]]:
    """Return whether the scale shrank, the scale, and which parameters are unchanged.

    Each rank has its own parameters, in two optimizers.
    """
    rank = dist.get_rank()
    parameters = [nn.Parameter(torch.ones(2 + rank)) for _ in range(3)]
    for parameter in parameters[:2]:
        parameter.grad = torch.full_like(parameter, 1e38)  # finite, though their squares are not
    if spoiled is not None and rank == where:
        assert parameters[1].grad is not None
        parameters[1].grad[1] = spoiled
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    propagate_overflow(parameters, Everyone())
    optimizers = [torch.optim.SGD([parameter], lr=1.0) for parameter in parameters[:2]]
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() < 8.0, scaler.get_scale(), [bool((p == 1).all()) for p in parameters]


@pytest.mark.parametrize("where", [0, 2])
@pytest.mark.parametrize("spoiled", [inf, -inf, nan])
def test_grad_scaler_overflow_on_one_rank_skips_the_step_on_all(spoiled: float, where: int) -> None:
    for shrunk, scale, unchanged in ranks(3).run(over_ranks, spoiled, where):
        assert shrunk
        assert scale == 4.0
        assert unchanged == [True, True, True]


def test_grad_scaler_steps_with_finite_gradients() -> None:
    for shrunk, _, unchanged in ranks(3).run(over_ranks, None, 0):
        assert not shrunk
        assert unchanged == [False, False, True]


def no_gradients_here() -> list[float]:
    parameter = nn.Parameter(torch.ones(2))
    if dist.get_rank() == 0:
        parameter.grad = torch.tensor([inf, 1.0])
    elif dist.get_rank() == 1:
        parameter.grad = torch.ones(2)
    propagate_overflow([parameter] if dist.get_rank() < 2 else [], Everyone())
    return [] if parameter.grad is None else parameter.grad.tolist()


def test_grad_scaler_on_a_rank_without_gradients() -> None:
    assert ranks(3).run(no_gradients_here) == [[inf, 1.0], [inf, 1.0], []]


def beside_parts() -> list[float]:
    """Return the gradient of a plain parameter beside a sharded one that overflows on one rank."""
    parted = nn.Parameter(distribute_tensor(torch.zeros(4), mesh(), [Shard(0)]))
    plain = nn.Parameter(torch.zeros(2))
    parted.grad = distribute_tensor(torch.tensor([1.0, 1.0, 1.0, nan]), mesh(), [Shard(0)])
    plain.grad = torch.ones(2)
    propagate_overflow([parted, plain], None)
    return plain.grad.tolist()


def test_grad_scaler_overflow_in_one_shard_reaches_all_ranks() -> None:
    assert ranks(2).run(beside_parts) == [[inf, 1.0], [inf, 1.0]]


def trained(wrap: str) -> list[str]:
    """Run a step that overflows on one replica, then accumulate over two steps that do not."""
    expected, pipe = model(), pipe_of(model(), wrap, "zb-h1")
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (expected, pipe)]
    wrong = []
    for steps in (["inf"], ["a", "b"]):
        for kind in steps:
            x, y = batch(16)
            if kind == "inf":
                x[0, 0] = inf
            loss = nn.functional.mse_loss(expected(x), y)
            scalers[0].scale(loss).backward()
            pipe.step(half(x), target=half(y), scaler=scalers[1])
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if scalers[0].get_scale() != scalers[1].get_scale():
            wrong.append(f"scale {scalers[1].get_scale()}, not {scalers[0].get_scale()}")
        for (name, mine), theirs in zip(
            pipe.named_parameters(), expected.parameters(), strict=True
        ):
            full = whole(mine.detach())
            assert full is not None
            wrong += [] if closely(full, theirs.detach()) else [name]
    return wrong


@pytest.mark.parametrize("wrap", WRAPS)
def test_grad_scaler_trains_replicas_as_the_unsplit_model(wrap: str) -> None:
    assert ranks(2).run(trained, wrap) == [[], []]

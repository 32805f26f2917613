"""Tests that, under GradScaler, all ranks take the step of the optimizer or all skip it."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from penstock import Pipe
from penstock.data_parallel.grad_scaler import propagate_overflow
from tests.data_parallel.replicas import (
    STAGE_FNS,
    WRAPS,
    Everyone,
    check_on_ranks,
    half,
    mesh,
    model,
    pipe_of,
    whole,
)
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
    parted = nn.Parameter(distribute_tensor(torch.zeros(4), mesh()["dp"], [Shard(0)]))
    plain = nn.Parameter(torch.zeros(2))
    parted.grad = distribute_tensor(torch.tensor([1.0, 1.0, 1.0, nan]), mesh()["dp"], [Shard(0)])
    plain.grad = torch.ones(2)
    propagate_overflow([parted, plain], None)
    return plain.grad.tolist()


def test_grad_scaler_overflow_in_one_shard_reaches_all_ranks() -> None:
    assert ranks(2).run(beside_parts) == [[inf, 1.0], [inf, 1.0]]


# ---- steps of replicas --------------------------------------------------------------------


def one_row_overflows(output: Tensor) -> Tensor:
    return (output * torch.tensor([inf, 1.0])).sum()


def shard_is_finite() -> bool:
    """Run a step that overflows in the first row of a weight, which the first rank has."""
    layers = nn.Sequential(nn.Linear(2, 2, bias=False))
    pipe = Pipe(
        layers, stages=1, devices=["cpu"], stage_fn=STAGE_FNS["fsdp"], loss_fn=one_row_overflows
    )
    pipe.step(torch.ones(2, 2), scaler=torch.amp.GradScaler("cpu"))
    (weight,) = pipe.parameters()
    return bool(weight.grad.to_local().isfinite().all())  # type: ignore[union-attr]


def test_grad_scaler_overflow_in_one_shard_of_a_step_reaches_all_ranks() -> None:
    assert ranks(2).run(shard_is_finite) == [False, False]


class _SetGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, torch.full_like(ctx.saved_tensors[0], ctx.gradient), None


class GradientSetter(nn.Module):
    """A layer with a weight whose gradient can be set, without effect on other gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2).double())
        self.gradient = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _SetGradient.apply(x, self.weight, self.gradient)  # type: ignore[no-untyped-call]
        return y


def models_with_setters() -> tuple[nn.Sequential, list[GradientSetter]]:
    """Return a model with one such layer on each rank."""
    layers, found = model(), [GradientSetter(), GradientSetter()]
    layers[1] = nn.Sequential(nn.ReLU(), found[0])
    layers[4] = nn.Sequential(nn.Tanh(), found[1])
    return layers, found


def scaled(wrap: str | None, where: int) -> list[str]:
    """Let one rank overflow, then accumulate two steps that do not."""
    (expected, known), (layers, own) = models_with_setters(), models_with_setters()
    pipe = pipe_of(layers, wrap, "zb-h1")
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (expected, pipe)]
    wrong = []
    for overflows in ([True], [False, False]):
        for overflow in overflows:
            x, y = batch(16)
            known[0].gradient = inf if overflow else 0.0
            here = overflow and dist.get_rank() == where
            own[mesh().get_local_rank("pp")].gradient = inf if here else 0.0
            scalers[0].scale(nn.functional.mse_loss(expected(x), y)).backward()
            pipe.step(half(x), target=half(y), scaler=scalers[1])
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if scalers[0].get_scale() != scalers[1].get_scale():
            wrong.append(f"scale {scalers[1].get_scale()}, not {scalers[0].get_scale()}")
        theirs = dict(expected.named_parameters())
        for name, parameter in pipe.named_parameters():
            full = whole(parameter.detach())
            assert full is not None
            wrong += [] if closely(full, theirs[name].detach()) else [name]
    return wrong


@pytest.mark.parametrize(
    ("size", "wrap", "where"),
    [*((2, wrap, 1) for wrap in WRAPS), (4, None, 0), (4, None, 3), (4, "ddp", 3), (4, "fsdp", 0)],
)
def test_grad_scaler_overflow_on_one_rank_skips_the_step_on_all_replicas(
    size: int, wrap: str | None, where: int
) -> None:
    check_on_ranks(size, scaled, wrap, where)

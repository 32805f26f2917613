"""Layers and calls of PyTorch that once ended in an error of its own."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Pipe, RunError
from tests.support import same_gradients

WIDTH = 4


class GradientInside(nn.Module):
    """Computes the gradient of an energy for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        def energy(row: Tensor) -> Tensor:
            return torch.tanh(self.linear.weight @ row).sum()

        return cast(Tensor, torch.vmap(torch.func.grad(energy))(x))


class SparseBuffer(nn.Module):
    """Multiplies by a sparse matrix, as a graph convolution does."""

    graph: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("graph", torch.eye(WIDTH, dtype=torch.float64).roll(1, 0).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, torch.sparse.mm(self.graph, self.linear(x).t())).t()


class Blocks(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("balance", ["time", "memory"])
@pytest.mark.parametrize("block", [GradientInside, SparseBuffer])
def test_measured_cut(block: type[nn.Module], balance: str, checkpoint: str) -> None:
    """torch.func refuses saved-tensor hooks, and sparse tensors have neither bytes nor `equal`."""
    torch.manual_seed(0)
    model, x = Blocks(block), torch.randn(6, WIDTH).double()
    options: dict[str, Any] = {"stages": 2, "devices": ["cpu"] * 2, "balance": balance}
    for pipe in (
        Pipe(copy.deepcopy(model), 3, checkpoint, example=x, **options),
        Pipe(nn.Sequential(*copy.deepcopy(model).blocks), 3, checkpoint, example=x, **options),
    ):
        model.zero_grad()
        for _ in range(2):
            pipe.step(x, target=x, loss_fn=functional.mse_loss)
            functional.mse_loss(model(x), x).backward()
        assert same_gradients(pipe, model)


def test_batched_gradients_are_refused() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, stages=2, devices=["cpu"] * 2)
    x = torch.randn(4, 4)
    with pytest.raises(RunError, match="many gradients at once"):
        torch.autograd.functional.jacobian(pipe, x, vectorize=True)
    output = pipe(x.requires_grad_())
    with pytest.raises(RunError, match="many gradients at once"):
        torch.autograd.grad(output, x, torch.ones(3, 4, 4), is_grads_batched=True)
    assert torch.autograd.functional.jacobian(pipe, x).shape == (4, 4, 4, 4)

"""`penstock.compat.fairscale`: its `Pipe` has the interface of torchgpipe's `GPipe`."""

from __future__ import annotations

import copy

import pytest
import torch
from penstock.compat.fairscale.nn import Pipe
from penstock.compat.fairscale.nn.pipe import balance, batchnorm, skip
from torch import nn

from penstock.compat import fairscale
from penstock.compat.torchgpipe import GPipe


def test_fairscale_pipe_is_importable_from_three_modules() -> None:
    assert fairscale.nn.Pipe is fairscale.nn.pipe.Pipe is fairscale.Pipe is Pipe
    assert Pipe.__name__ == "Pipe"
    assert not issubclass(Pipe, GPipe)


def test_fairscale_submodules() -> None:
    assert balance.balance_by_time.__name__ == "balance_by_time"
    assert {"skippable", "stash", "pop", "Namespace", "verify_skippables"} <= set(skip.__all__)
    assert batchnorm.__all__ == ["DeferredBatchNorm"]


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_fairscale_pipe_equals_the_plain_model(checkpoint: str) -> None:
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    plain = copy.deepcopy(layers)
    pipe = Pipe(layers, balance=[1, 2], devices=["cpu", "cpu"], chunks=4, checkpoint=checkpoint)
    assert list(pipe.state_dict()) == [
        "partitions.0.0.weight",
        "partitions.0.0.bias",
        "partitions.1.2.weight",
        "partitions.1.2.bias",
    ]
    x = torch.randn(9, 3, dtype=torch.float64)
    pipe(x).pow(2).sum().backward()
    plain(x).pow(2).sum().backward()
    for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-10)


def test_fairscale_pipe_with_a_shared_layer() -> None:
    class Tied(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x)
            return out

    linear = nn.Linear(2, 2, dtype=torch.float64)
    pipe = Pipe(nn.Sequential(Tied(linear), Tied(linear)), [1, 1], devices=["cpu"] * 2, chunks=2)
    x = torch.randn(4, 2, dtype=torch.float64)
    (expected,) = torch.autograd.grad(linear(linear(x)).sum(), [linear.weight])
    pipe(x).sum().backward()
    assert linear.weight.grad is not None
    torch.testing.assert_close(linear.weight.grad, expected, rtol=0, atol=1e-10)

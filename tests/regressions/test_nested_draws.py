"""A pipe inside a pipe, whose model draws a number that two of its stages use.

The inner model was traced inside a cell of the outer pipe, where draws are redirected. The tracer
did not notice them, and each stage drew a number of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock import Pipe


class AddAndRemove(nn.Module):
    """A model that adds a random number on its first stage and removes it on its last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
        for block in self.blocks:
            nn.init.eye_(block.weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        number = torch.rand([], dtype=x.dtype)
        x = self.blocks[0](x + number)
        last: Tensor = self.blocks[1](x - number)
        return last


def test_nested_pipe_traced_inside_a_cell_draws_once() -> None:
    x = torch.rand(6, 4).double()
    inner = Pipe(
        AddAndRemove().double(), 1, stages=2, devices=["cpu"] * 2, example=x, runtime="inline"
    )
    outer = Pipe(
        nn.Sequential(nn.Dropout(0.0), inner),
        2,
        stages=[1, 1],
        devices=["cpu"] * 2,
        runtime="inline",
    )
    assert torch.allclose(outer(x), x, rtol=0, atol=1e-12)

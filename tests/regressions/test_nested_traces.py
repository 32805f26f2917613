"""A pipe of any model inside a recomputed stage of another pipe.

The first forward of a stage that will be recomputed copies what its layers have in attributes, to
find what they change. Of the inner pipe, this was the trace of its model, with all variables of the
module that defines the model. The recomputation then found copies of objects that the trace
compares by identity, and failed: "returned tensor, but the trace has tensor".
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipe
from tests.support import each_runtime, same_gradients


class CountsCopies:
    """An object that counts how often it is copied."""

    copies = 0

    def __copy__(self) -> CountsCopies:
        CountsCopies.copies += 1
        return self


TABLE: list[Any] = [CountsCopies(), torch.tanh]


class Model(nn.Module):
    """A model that is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(TABLE[1](self.first(x)))
        return y


@each_runtime
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_nested_traced_pipe_in_a_recomputed_stage(checkpoint: str, runtime: str) -> None:
    model = nn.Sequential(Model(), nn.Linear(4, 4)).double()
    layers = copy.deepcopy(model)
    x, y = torch.rand(2, 8, 4, dtype=torch.float64)
    options: dict[str, Any] = {"stages": 2, "devices": ["cpu"] * 2, "runtime": runtime}
    inner = Pipe(layers[0], 2, example=x[:4], **options)
    outer = Pipe(nn.Sequential(inner, layers[1]), 2, checkpoint, audit="off", **options)
    CountsCopies.copies = 0
    for _ in range(2):
        loss = outer.step(x, target=y, loss_fn=nn.functional.mse_loss).loss
        expected = nn.functional.mse_loss(model(x), y)
        expected.backward()
        assert torch.allclose(loss, expected.detach(), rtol=0, atol=1e-12)
    assert same_gradients(layers, model)
    assert not CountsCopies.copies

"""Batches whose rows are not on dim 0: `Chunk(x, dim=1)`, because time steps come first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import AuditError, Chunk, Pipe
from tests.oracle import closely
from tests.support import same_gradients

TIME, ROWS, WIDTH = 5, 8, 6

pytestmark = pytest.mark.usefixtures("double")


class Layers(nn.Module):
    """A model with a bias of zeros: the gradients of rows are compared as well."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.second.weight)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x + self.second(self.first(x).tanh()))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": encoder,
    "layers": lambda: Layers(lambda x: x),
    "last step": lambda: Layers(lambda x: x[-1]),  # whose rows are on dim 0
    "rows first": lambda: Layers(lambda x: x.transpose(0, 1)),
    "several": lambda: Layers(lambda x: (x[-1], x)),
}


def measure(output: Any) -> Tensor:
    outputs = output if isinstance(output, tuple) else (output,)
    return torch.stack([x.square().mean() for x in outputs]).sum()


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("build", MODELS.values(), ids=list(MODELS))
def test_gradients_of_rows_that_are_on_another_dim(
    build: Callable[[], nn.Module], chunks: int
) -> None:
    model = build()
    unsplit = copy.deepcopy(model)
    x = torch.randn(TIME, ROWS, WIDTH)
    pipe = Pipe(model, chunks=chunks, stages=2, devices=["cpu"] * 2, example=Chunk(x, dim=1))
    for _ in range(2):
        expected, loss = measure(unsplit(x)), measure(pipe(Chunk(x, dim=1)))
        assert closely(loss, expected)
        expected.backward()
        loss.backward()
    assert same_gradients(model, unsplit)


def test_backward_that_mixes_rows_on_another_dim_is_found() -> None:
    def normalise(x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient / gradient.norm(dim=1, keepdim=True))
        return x

    x = torch.randn(TIME, ROWS, WIDTH)
    pipe = Pipe(Layers(normalise), chunks=2, stages=2, devices=["cpu"] * 2, example=Chunk(x, dim=1))
    with pytest.raises(AuditError, match="the gradient of"):
        pipe(Chunk(x, dim=1)).square().mean().backward()

"""Errors of layers that run on the whole batch, and not on a micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipe

ROWS, WIDTH = 8, 4


class Windows(nn.Module):
    """A layer that fails on fewer numbers than its window has."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * x.flatten().unfold(0, self.size, 1).sum()


def build(size: int) -> Pipe:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Windows(size), nn.Linear(WIDTH, WIDTH))
    return Pipe(model, 4, stages=2, devices=["cpu"] * 2, loss_fn=nn.MSELoss())


def find_notes(size: int, door: str) -> str:
    pipe, x = build(size), torch.randn(ROWS, WIDTH)
    with pytest.raises(RuntimeError, match="maximum size") as caught:
        pipe.step(x, target=x) if door == "step" else pipe(x)
    return "\n".join(getattr(caught.value, "__notes__", [str(caught.value)]))


@pytest.mark.parametrize("door", ["step", "call"])
def test_layer_that_needs_more_rows_is_explained(door: str) -> None:
    hint = "runs on the whole batch of 8 rows, and not on a micro-batch of 2"
    assert hint in find_notes(3 * WIDTH, door)


@pytest.mark.parametrize("door", ["step", "call"])
def test_layer_that_runs_on_no_batch_is_not_explained_by_its_rows(door: str) -> None:
    assert "runs on the whole batch" not in find_notes(100 * WIDTH, door)

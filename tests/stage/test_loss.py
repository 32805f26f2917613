"""Tests of how a `loss_fn` counts its targets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Pipe, Weighted
from penstock.errors import RunError
from tests.support import closely

LossFn = Callable[[Tensor, Tensor], Any]
CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 1.0, 1.0], dtype=torch.float64)


class InAModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(ignore_index=0)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = 2 * self.inner(output, target)
        return loss


UNEVEN: dict[str, LossFn] = {
    "ignore_index": lambda y, t: functional.cross_entropy(y, t, ignore_index=0),
    "class weights": lambda y, t: functional.cross_entropy(y, t, weight=CLASS_WEIGHTS),
    "in a module": InAModule(),
    "shifted": lambda y, t: functional.cross_entropy(y, (t + 1) % 4, ignore_index=1),
    "nll_loss": lambda y, t: functional.nll_loss(y.log_softmax(1), t, ignore_index=0),
}
EVEN: dict[str, LossFn] = {
    "all counted": lambda y, t: functional.cross_entropy(y, t),
    "nothing ignored": lambda y, t: functional.cross_entropy(y, t, ignore_index=7),
    "known": partial(functional.cross_entropy, ignore_index=0),
    "known module": nn.CrossEntropyLoss(ignore_index=0),
    "weighted": lambda y, t: Weighted(
        functional.cross_entropy(y, t, ignore_index=0), (t != 0).sum()
    ),
}
TARGET = torch.tensor([0, 0, 1, 2, 0, 1, 3, 3])


def pipe_of(model: nn.Module, loss_fn: LossFn, reduction: str | None = None) -> Pipe:
    return Pipe(
        model, 4, stages=2, devices=["cpu"] * 2, loss_fn=loss_fn, reduction=reduction
    )  # fmt: skip


@pytest.mark.parametrize("kind", UNEVEN)
def test_loss_fn_that_counts_targets_unevenly_is_refused(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    with pytest.raises(RunError, match="a cross-entropy in loss_fn counts more targets, or"):
        pipe_of(model, UNEVEN[kind]).step(x, target=TARGET)
    pipe_of(model, UNEVEN[kind], "sum").step(x, target=TARGET)
    pipe_of(model, UNEVEN[kind]).step(x, target=torch.arange(1, 3).repeat(4))


@pytest.mark.parametrize("kind", EVEN)
def test_loss_fn_that_counts_all_targets_or_is_known_is_exact(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    expected = EVEN[kind](model(x), TARGET)
    found = pipe_of(model, EVEN[kind]).step(x, target=TARGET).loss
    assert closely(found, (expected[0] if isinstance(expected, Weighted) else expected).detach())

"""Tests of a unit that several stages call: each has a copy with the same parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock import Pipe


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.dropout(self.linear(x))
        return found


class Again(nn.Module):
    """A model whose first unit is its last one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Noisy(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(self.outer(self.inner(x)))
        return found


def test_copy_of_a_shared_unit_follows_train_and_eval() -> None:
    """The copy kept on applying dropout after `eval()`."""
    torch.manual_seed(0)
    model, x = Again(), torch.ones(6, 4)
    pipe = Pipe(model, 2, stages=[1, 1, 1], example=x, runtime="inline")
    with torch.no_grad():
        for mode in (False, True, False):
            pipe.train(mode)
            alike = torch.allclose(pipe(x), model.eval()(x))
            model.train(mode)
            assert alike is not mode

"""Tests of `check` for models that draw from `random` in training."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from penstock import check


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * random.random() if self.training else y


class NoiseBetweenUnits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noise() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = x * random.random() if self.training else x
        return x


@pytest.mark.parametrize("model", [nn.Sequential(Noise(), Noise(), Noise()), NoiseBetweenUnits()])
def test_check_repeats_the_random_numbers_of_cells(model: nn.Module) -> None:
    state = random.getstate()
    report = check(model, torch.randn(5, 4), stages=3, schedules=["1f1b", "zb-h1"], quiet=True)
    assert report.ok, str(report)
    assert random.getstate() == state

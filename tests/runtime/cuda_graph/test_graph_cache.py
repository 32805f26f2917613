"""Captured steps equal inline steps under every schedule, on the host with an emulated graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.schedules import FAMILIES
from tests.gpu.support import Bottom, Top
from tests.runtime.cuda_graph.support import batch, emulate, pipe_pair, recordings

SCHEDULES = [name for name, family in FAMILIES.items() if family.trains]


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)


def layers(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    drop = [nn.Dropout(dropout)] if dropout else []
    parts = [Top(8), nn.ReLU(inplace=True), *drop, nn.Linear(8, 8), nn.BatchNorm1d(8)]
    more = [nn.ReLU(inplace=True), nn.Linear(8, 8), Bottom(), nn.Linear(8, 4)]
    return nn.Sequential(*parts, *more).double()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_captured_steps_equal_inline_steps_under_every_schedule(
    schedule: str, mode: str, dropout: float
) -> None:
    ranks = 4 // FAMILIES[schedule].stages_per_rank
    pair = pipe_pair(layers(dropout), schedule=schedule, checkpoint=mode, devices=["cpu"] * ranks)
    for number in range(5):
        if number != 3:  # gradients accumulate once
            pair.each(nn.Module.zero_grad)
        x, y = batch(number)
        pair.step(x, target=y, seed=number)
    assert recordings(pair.graph) == [4]

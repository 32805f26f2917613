"""A plan that was made in one process runs over processes, and equals the unsplit model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn.functional import mse_loss

import penstock
from penstock import ArgumentError, Pipe, Plan
from tests.distributed.ranks import ranks
from tests.properties.memory_caps import Stack
from tests.support import batch, plain


def make(kind: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    if kind == "sequential":
        return plain(), *batch(16)
    torch.manual_seed(0)
    x = torch.randn(16, 16, dtype=torch.float64)
    return Stack(16, 4, {3: 0}, 0.0).double(), x, -x


def train(kind: str, path: str) -> float:
    model, x, y = make(kind)
    pipe = Pipe(
        model,
        group=distributed.group.WORLD,
        plan=Plan.load(path),
        example=None if kind == "sequential" else x,
        loss_fn=mse_loss,
    )
    return pipe.step(x, target=y).loss.item()


@pytest.mark.parametrize("kind", ["sequential", "traced"])
def test_plan_over_processes_equals_the_model(kind: str, tmp_path: Path) -> None:
    model, x, y = make(kind)
    path = str(tmp_path / "plan.json")
    options = {"solver_seconds": 0.0, "chunks": 4, "schedules": ["1f1b", "zb-h1"]}
    penstock.plan(model, x, devices=2, **options).save(path)  # type: ignore[arg-type]
    expected = mse_loss(model(x), y).item()
    assert ranks(2).run(train, kind, path) == [pytest.approx(expected, rel=1e-12)] * 2
    with pytest.raises(ArgumentError, match="the plan is for 2 devices, but there are 3"):
        Pipe(model, plan=Plan.load(path), example=x, devices=["cpu"] * 3)

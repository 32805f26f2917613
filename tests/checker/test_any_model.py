"""Tests of `penstock.check` for models that are not a Sequential.

They have keyword inputs, compute their own loss, or draw random numbers between units.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock import CutError, Report
from penstock.checker.report import Refused

WAYS: dict[str, Any] = {
    "stages": 3,
    "chunks": 3,
    "schedules": ["1f1b", "zb-h1"],
    "runtimes": ["inline"],
    "quiet": True,
}


def checked(model: nn.Module, *inputs: Any, **options: Any) -> Report:
    return penstock.check(model, *inputs, **{**WAYS, **options})


class Net(nn.Module):
    """A model that draws between units, ties its ends, and returns a loss if it gets labels."""

    def __init__(self, chance: float = 0.3) -> None:
        super().__init__()
        self.chance = chance
        self.embed = nn.Embedding(12, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, scale: float = 1.0, labels: Tensor | None = None) -> Any:
        first = x = functional.dropout(self.embed(ids), self.chance, self.training)
        for block in self.blocks:
            x = functional.dropout(torch.tanh(block(x)), self.chance, self.training)
        # This dropout runs on another stage than the unit that produced its input.
        x = x * scale + functional.dropout(first, self.chance, self.training)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


IDS = torch.arange(35).reshape(7, 5) % 12


IGNORED = IDS.clone()
IGNORED[0] = -100
IGNORED[3, 2:] = -100


def cross_entropy(output: Any, target: Tensor) -> Tensor:
    return functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


@pytest.mark.parametrize(
    ("chance", "inputs", "options"),
    [
        (0.3, {"ids": IDS, "labels": IDS}, {}),  # the loss is inside the model
        (0.0, {"ids": IDS}, {"scale": 2.0, "labels": IGNORED}),
        (0.3, {"ids": IDS, "labels": IGNORED}, {}),
        (0.3, IDS, {"target": IDS, "loss_fn": cross_entropy}),
        (0.3, IDS, {}),  # no loss
        (0.0, {"ids": IDS, "labels": IDS}, {"units": nn.Linear, "stages": 2}),
    ],
)
def test_check_of_a_traced_model(chance: float, inputs: Any, options: dict[str, Any]) -> None:
    report = checked(Net(chance), inputs, **options)
    assert report.ok, str(report)
    assert "units; 7 rows" in report.model


def test_check_of_a_unit_that_runs_on_two_stages() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2))

        def forward(self, x: Tensor) -> Any:
            return self.one(self.two(self.one(x)))

    report = checked(Twice(), torch.randn(6, 6), stages=[1, 1, 1])
    assert report.ok, str(report)


def test_check_names_the_line_that_prevents_a_cut() -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

        def forward(self, x: Tensor) -> Any:
            for layer in self.layers:
                x = layer(x)
                x = x if x.mean() > 0 else -x
            return x

    with pytest.raises(
        CutError, match=r"test_any_model\.py:\d+, in forward, __bool__ reads a value"
    ):
        checked(Decides(), torch.randn(6, 6))


def test_check_finds_a_stage_with_wrong_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check reports a stage that changes the values it sends."""
    from penstock.model.traced.stage_forward import StageForward

    computed = StageForward.__call__

    def losing(self: StageForward, arrived: Any) -> Any:
        found = computed(self, arrived)
        return {
            dst: tuple(v * 1.001 if isinstance(v, Tensor) else v for v in values)
            for dst, values in found.items()
        }

    monkeypatch.setattr(StageForward, "__call__", losing)
    report = checked(Net(0.0), {"ids": IDS, "labels": IDS}, schedules=["1f1b"])
    assert not report.ok


def test_check_refuses_only_the_schedules_that_do_not_fit() -> None:
    report = checked(Net(0.0), {"ids": IDS, "labels": IDS}, schedules=["1f1b", "zb-v"])
    assert [type(run.result) is Refused for run in report.rows] == [False, False, True, True]
    assert report.ok

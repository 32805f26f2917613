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


def test_check_with_keyword_inputs_and_a_loss_inside_the_model() -> None:
    report = checked(Net(), {"ids": IDS, "labels": IDS})
    assert report.ok, str(report)
    assert "stages of 2 + 2 + 2 units; 7 rows" in report.model


def test_check_takes_a_dict_as_keyword_inputs() -> None:
    assert checked(Net(0.0), IDS, scale=2.0, labels=IDS, schedules=["1f1b"]).ok
    assert checked(Net(0.0), {"ids": IDS}, scale=2.0, labels=IDS, schedules=["1f1b"]).ok


def test_check_weighs_micro_batches_with_ignored_labels() -> None:
    labels = IDS.clone()
    labels[0] = -100
    labels[3, 2:] = -100
    for chance in (0.0, 0.3):
        report = checked(Net(chance), {"ids": IDS, "labels": labels})
        assert report.ok, str(report)


def test_check_with_and_without_a_loss_function() -> None:
    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())

    assert checked(Net(), IDS, target=IDS, loss_fn=loss_fn).ok
    assert checked(Net(), IDS).ok


def test_check_of_a_unit_that_runs_on_two_stages() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2))

        def forward(self, x: Tensor) -> Any:
            return self.one(self.two(self.one(x)))

    report = checked(Twice(), torch.randn(6, 6), stages=[1, 1, 1])
    assert report.ok, str(report)


def test_check_with_the_units_argument() -> None:
    report = checked(Net(0.0), {"ids": IDS, "labels": IDS}, units=nn.Linear, stages=2)
    assert report.ok


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


def test_check_leaves_the_model_and_the_random_state() -> None:
    model = Net()
    state, random = model.state_dict(), torch.get_rng_state()
    before = {name: value.clone() for name, value in state.items()}
    checked(model, {"ids": IDS, "labels": IDS}, schedules=["1f1b"])
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


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

"""A captured step against one that is not: on the host, with an emulated recording."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipe, pop, skippable, stash
from penstock.run.capture import captures, choosing
from penstock.schedules import FAMILIES
from tests.run.capture.emulated import EmulatedRecording

SCHEDULES = [name for name, family in FAMILIES.items() if family.trains]


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "_against", lambda places, replicas: None)
    monkeypatch.setattr(captures.Captures.__init__, "__defaults__", (EmulatedRecording,))


@skippable(stash=["long"])
class Top(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        yield stash("long", x)
        return self.linear(x)


@skippable(pop=["long"])
class Bottom(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("long"))


def layers(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    drop = [nn.Dropout(dropout)] if dropout else []
    parts = [Top(), nn.ReLU(inplace=True), *drop, nn.Linear(8, 8), nn.BatchNorm1d(8)]
    more = [nn.ReLU(inplace=True), nn.Linear(8, 8), Bottom(), nn.Linear(8, 4)]
    return nn.Sequential(*parts, *more).double()


def batch(seed: int, rows: int = 11) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=made, dtype=torch.float64)
    return x, torch.randn(rows, 4, generator=made, dtype=torch.float64)


def pipe_of(model: nn.Sequential, runtime: str, **options: Any) -> Pipe:
    given: dict[str, Any] = {
        "chunks": 4,
        "stages": 4,
        "devices": ["cpu"] * 4,
        "schedule": "1f1b",
    } | options
    return Pipe(model, runtime=runtime, loss_fn=nn.functional.mse_loss, **given)


def same(pipe: Pipe, other: Pipe) -> None:
    for (name, a), (_, b) in zip(pipe.named_parameters(), other.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name  # type: ignore[arg-type]
    for (name, x), (_, y) in zip(pipe.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_same_as_step_by_step(schedule: str, mode: str, dropout: float) -> None:
    ranks = 4 // FAMILIES[schedule].stages_per_rank
    given = {"schedule": schedule, "checkpoint": mode, "devices": ["cpu"] * ranks}
    pipe, other = (pipe_of(layers(dropout), r, **given) for r in ("graph", "inline"))
    ran = []
    for number in range(5):
        if number != 3:  # in one, they add up
            pipe.zero_grad()
            other.zero_grad()
        x, y = batch(number)
        torch.manual_seed(number)
        found = pipe.step(x, target=y)
        state = torch.get_rng_state()
        torch.manual_seed(number)
        expected = other.step(x, target=y)
        assert torch.equal(found.loss, expected.loss)
        assert torch.equal(state, torch.get_rng_state())
        same(pipe, other)
        ran.append(str(found.ran))
    assert ran == ["graph"] * 5

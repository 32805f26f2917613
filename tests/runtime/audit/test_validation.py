"""Validation: `pipe.step` without gradients, where no graph shows what the means count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import AuditError, PenstockError, Pipe
from penstock.runtime.audit.rows import RowsCheck
from tests.oracle import closely

ROWS, WIDTH = 12, 4
IGNORED = -100
Loss = Callable[[Tensor, Tensor], Tensor]

pytestmark = pytest.mark.usefixtures("double")


class OwnLoss(nn.Module):
    """A model that returns a number."""

    def __init__(self, loss: Loss, mixes_rows: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.loss, self.mixes_rows = loss, mixes_rows

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.first(x).tanh()
        if self.mixes_rows and not self.training:
            x = x - x.mean(0)
        return {"loss": self.loss(self.second(x), y)}


def numbers(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(ROWS, WIDTH, generator=generator) for name in ("x", "y")}


def labels(seed: int, has_ignored: bool) -> Any:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(WIDTH, (ROWS,), generator=generator)
    if has_ignored:
        y[[1, 2, 7]] = IGNORED
    return {"x": torch.randn(ROWS, WIDTH, generator=generator), "y": y}


def make(model: nn.Module, batch: Any, **options: Any) -> Pipe:
    return Pipe(
        model,
        chunks=4,
        stages=2,
        devices=["cpu"] * 2,
        example=batch,
        balance="parameters",
        audit="first",
        reduction="mean",
        **options,
    ).eval()


def compute_accuracy(x: Tensor, y: Tensor) -> Tensor:
    counts = y != IGNORED
    return ((x.argmax(1) == y) & counts).sum().to(x) / counts.sum()


OF_NUMBERS: dict[str, Loss] = {
    "masked mean": lambda x, y: (x - y).square()[y > 0].mean(),
    "sum by the sum of a mask": lambda x, y: ((x - y).square() * (y > 0)).sum() / (y > 0).sum(),
    "root": lambda x, y: functional.mse_loss(x, y).sqrt(),
    "free bits": lambda x, y: (x - y).square().mean(0).clamp(min=1.5).sum(),
    "largest": lambda x, y: (x - y).abs().max(),
}
WITH_LABELS: dict[str, Loss] = {
    "perplexity": lambda x, y: functional.cross_entropy(x, y).exp(),
    "accuracy": compute_accuracy,
    "two means": lambda x, y: functional.cross_entropy(x, y) + x.square().mean(),
}
each_mode = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


@each_mode
@pytest.mark.parametrize("loss", OF_NUMBERS.values(), ids=list(OF_NUMBERS))
def test_own_loss_that_is_no_mean_over_rows_is_refused(loss: Loss, mode: Any) -> None:
    pipe = make(OwnLoss(loss), numbers(1))
    with mode(), pytest.raises(PenstockError, match=r"of the batch|not a mean over"):
        pipe.step(**numbers(1))


@each_mode
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("loss", WITH_LABELS.values(), ids=list(WITH_LABELS))
def test_own_loss_that_counts_labels_is_refused(loss: Loss, later: bool, mode: Any) -> None:
    """Labels may be ignored in a later batch for the first time."""
    model = OwnLoss(loss)
    pipe = make(model, labels(1, not later))
    with mode(), pytest.raises(PenstockError, match=r"of the batch|not a mean over"):  # noqa: PT012
        for seed in range(2):
            pipe.step(**labels(seed, seed > 0 or not later))


@pytest.mark.parametrize("outputs", [False, True])
def test_layer_that_mixes_rows_in_validation_is_refused(outputs: bool) -> None:
    pipe = make(OwnLoss(functional.mse_loss, mixes_rows=True), numbers(1))
    with torch.no_grad(), pytest.raises(AuditError, match="of the batch"):
        pipe.step(**numbers(1), outputs=outputs)


def test_layer_before_a_loss_function_that_mixes_rows_in_validation_is_refused() -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if self.training else x - x.mean(0)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Centred(), nn.Linear(WIDTH, WIDTH))
    pipe = Pipe(
        model, chunks=4, stages=2, devices=["cpu"] * 2, loss_fn=nn.MSELoss(), audit="first"
    ).eval()
    batch = numbers(1)
    with torch.no_grad(), pytest.raises(AuditError, match="of the batch"):
        pipe.step(batch["x"], target=batch["y"])


@each_mode
def test_validation_is_compared_once(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = OwnLoss(functional.mse_loss)
    counts = []
    compare = RowsCheck.compare_rows

    def count(self: RowsCheck, *args: Any) -> str | None:
        counts.append(1)
        return compare(self, *args)

    monkeypatch.setattr(RowsCheck, "compare_rows", count)
    pipe = make(model, numbers(1))
    with mode():
        for seed in range(4):
            expected = model(**numbers(seed))["loss"]
            assert closely(pipe.step(**numbers(seed)).loss, expected)
    assert len(counts) == 1

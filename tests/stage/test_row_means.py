"""Losses that are proved to be means over rows by their operations, and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.stage.row_means import RowMeanProver

ROWS, CLASSES = 6, 5
BATCHES: dict[str, tuple[Tensor, Any]] = {  # outputs and targets
    "classes": (torch.randn(ROWS, CLASSES), torch.randint(CLASSES, (ROWS,))),
    "weighted": (
        torch.randn(ROWS, CLASSES),
        (torch.randint(CLASSES, (ROWS,)), torch.ones(ROWS)),
    ),
    "numbers": (torch.randn(ROWS, CLASSES), torch.rand(ROWS, CLASSES)),
    "tokens": (torch.randn(ROWS, 4, CLASSES), torch.randint(CLASSES, (ROWS, 4))),
}
WEIGHTS, LEARNED = torch.rand(CLASSES), nn.Parameter(torch.rand(3))
F = functional


def each(y: Tensor, t: Tensor) -> Tensor:
    return functional.cross_entropy(y, t, reduction="none")


def log(loss: Tensor) -> Tensor:
    loss.item()
    return loss


def choose(y: Tensor, t: Tensor) -> Tensor:
    loss = functional.mse_loss(y, t)
    return loss if t.std() > 5 else 2 * loss


def is_singular(t: Tensor) -> bool:
    try:
        torch.linalg.inv(t.T @ t)
    except RuntimeError:
        return True
    return False


PROVED: list[tuple[str, Callable[..., Any]]] = [
    ("classes", F.cross_entropy),
    ("classes", lambda y, t: F.cross_entropy(y, t, weight=WEIGHTS, label_smoothing=0.1)),
    ("classes", lambda y, t: F.cross_entropy(y, t) + 0.1 * LEARNED.square().sum()),
    ("classes", lambda y, t: F.cross_entropy(y * LEARNED[0].exp(), t) * LEARNED[1]),
    ("classes", lambda y, t: ((1 - torch.exp(-each(y, t))) ** 2 * each(y, t)).mean()),
    ("classes", lambda y, t: each(y, t)[t != 0].mean()),
    ("classes", lambda y, t: -F.log_softmax(y, 1).gather(1, t[:, None]).squeeze(1).mean()),
    ("classes", lambda y, t: torch.stack([F.cross_entropy(y, t), y.abs().mean()]).sum()),
    ("weighted", lambda y, t: (each(y, t[0]) * t[1]).mean()),
    ("numbers", nn.MSELoss()),
    ("numbers", lambda y, t: F.mse_loss(y, t) * torch.tensor(2.0).to(y)),
    ("numbers", lambda y, t: F.mse_loss(y, t) * torch.tensor(2.0).type_as(y)),
    ("numbers", lambda y, t: F.mse_loss(y, t) * torch.tensor(2).to(t.device)),
    ("numbers", lambda y, t: F.binary_cross_entropy_with_logits(y, t, pos_weight=WEIGHTS)),
    ("numbers", lambda y, t: F.kl_div(F.log_softmax(y, 1), t, reduction="batchmean")),
    ("numbers", lambda y, t: (1 - (y.sigmoid() * t).sum(1) / (y + t).sum(1)).mean()),
    ("numbers", lambda y, t: (1 - F.cosine_similarity(y, t)).mean()),
    ("numbers", lambda y, t: F.mse_loss(y, t) + torch.linalg.inv(torch.eye(2).to(y)).sum()),
    ("tokens", lambda y, t: F.cross_entropy(y.view(-1, CLASSES), t.view(-1))),
    ("tokens", lambda y, t: F.cross_entropy(y[:, :-1].transpose(1, 2), t[:, 1:])),
]


@pytest.mark.parametrize(("batch", "loss_fn"), PROVED)
def test_mean_over_rows_is_proved(batch: str, loss_fn: Callable[..., Any]) -> None:
    assert is_proved(batch, loss_fn)


UNPROVED: list[tuple[str, Callable[..., Any]]] = [
    ("classes", lambda y, t: (F.cross_entropy(y, t) - 0.9).abs()),
    ("classes", lambda y, t: F.cross_entropy(y, t).clamp(min=0.1)),
    ("classes", lambda y, t: each(y, t).sort().values[:3].mean()),
    ("classes", lambda y, t: torch.quantile(each(y, t), 0.5)),
    ("classes", lambda y, t: each(y, t)[..., :3].mean()),
    ("numbers", lambda y, t: F.mse_loss(y[numpy.arange(len(y))], t)),
    ("numbers", lambda y, t: F.mse_loss(y, t[numpy.arange(len(t))[::-1].copy()])),
    ("numbers", lambda y, t: (y - t).square()[numpy.ones(y.shape, dtype=bool)].mean()),
    ("numbers", lambda y, t: F.mse_loss(y[:, numpy.arange(3)], t[:, :3])),
    ("classes", lambda y, t: each(y, t).nanmean()),
    ("numbers", lambda y, t: F.mse_loss(y, t) * (2 if is_singular(t) else 1)),
    ("classes", lambda y, t: each(y, t).mean() * y.sum()),
    ("classes", lambda y, t: 1 / each(y, t).mean()),
    ("classes", lambda y, t: F.cross_entropy(y, t, weight=1.0 / torch.bincount(t, minlength=5))),
    ("classes", lambda y, t: F.cross_entropy(y, t) / t.float().sum().item()),
    ("classes", lambda y, t: (each(y, t) * torch.arange(ROWS)).mean()),
    ("classes", lambda y, t: F.cross_entropy(y @ y.T, torch.arange(ROWS))),
    # Python could go by the number.
    ("classes", lambda y, t: log(y.mean()) * 2),
    ("classes", lambda y, t: log(F.cross_entropy(y, t))),
    ("numbers", choose),
    ("weighted", lambda y, t: (each(y, t[0]) * (t[1] / t[1].sum())).sum()),
    ("weighted", lambda y, t: (each(y, t[0]) * t[1].div_(t[1].sum())).sum()),
    ("weighted", lambda y, t: (each(y, t[0]) * torch.softmax(t[1], 0)).sum()),
    ("numbers", lambda y, t: F.l1_loss(y[:, :1], t[:, 0])),  # rows combined with rows
    ("numbers", lambda y, t: y.std()),
    ("numbers", lambda y, t: (y[:5].T * t[:5]).mean()),
    # A sum may be 0 in the first steps, so that nothing shows by what it should be divided.
    ("classes", lambda y, t: each(y, t).sum() / len(t)),
    ("numbers", lambda y, t: F.mse_loss(y, t) + 0.01 * F.relu((y - t).abs() - 4).sum()),
    ("numbers", lambda y, t: F.mse_loss(y, t) + F.mse_loss(y, t, reduction="sum")),
    ("numbers", nn.MSELoss(reduction="sum")),
]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(("batch", "loss_fn"), UNPROVED)
def test_other_loss_is_not_proved(batch: str, loss_fn: Callable[..., Any]) -> None:
    assert not is_proved(batch, loss_fn)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_target_with_one_row_for_all_is_not_proved() -> None:
    output, target = torch.randn(ROWS, CLASSES, requires_grad=True) * 1, torch.rand(1, CLASSES)
    with RowMeanProver(output, target) as prover:
        loss = F.mse_loss(output, target)
    assert not prover.proves(loss)


def test_tensor_that_a_layer_has_left_is_not_proved() -> None:
    left = torch.zeros(3, requires_grad=True) * 2
    assert not is_proved("numbers", lambda y, t: F.mse_loss(y, t) + left.sum())


SUMS: list[tuple[str, Callable[..., Any]]] = [
    ("classes", lambda y, t: F.cross_entropy(y, t, reduction="sum")),
    ("numbers", nn.MSELoss(reduction="sum")),
    ("numbers", lambda y, t: (y - t).square().sum() + y.abs().sum()),
    ("numbers", lambda y, t: torch.stack([(y - t).square().sum(), y.abs().sum()]).sum()),
    ("numbers", lambda y, t: (y - t).square().sum().to(torch.float64)),
]
OTHER_SUMS: list[tuple[str, Callable[..., Any]]] = [
    # What is added counts once for each micro-batch.
    ("numbers", lambda y, t: (y - t).square().sum() + 0.5 * LEARNED.square().sum()),
    ("numbers", lambda y, t: (y - t).square().sum() + 1.0),
    ("numbers", lambda y, t: torch.stack([(y - t).square().sum(), LEARNED[0]]).sum()),
    ("numbers", lambda y, t: (y - t).square().sum() + y.abs().mean()),
    ("numbers", lambda y, t: (y - t).square().sum() / len(y)),
    ("numbers", lambda y, t: torch.stack([(y - t).square().sum(), y.abs().sum()]).mean()),
    ("numbers", F.mse_loss),
]


@pytest.mark.parametrize(("batch", "loss_fn"), SUMS)
def test_sum_over_rows_is_proved(batch: str, loss_fn: Callable[..., Any]) -> None:
    assert is_proved(batch, loss_fn, is_sum=True)


@pytest.mark.parametrize(("batch", "loss_fn"), OTHER_SUMS)
def test_sum_of_more_than_rows_is_not_proved(batch: str, loss_fn: Callable[..., Any]) -> None:
    assert not is_proved(batch, loss_fn, is_sum=True)


def is_proved(batch: str, loss_fn: Callable[..., Any], is_sum: bool = False) -> bool:
    output, target = BATCHES[batch]
    output = output.clone().requires_grad_() * 1  # it has a graph, as the output of a layer does
    with RowMeanProver(output, target) as prover:
        loss = loss_fn(output, target)
    return bool(prover.proves(loss, is_sum))

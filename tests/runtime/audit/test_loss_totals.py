"""Losses with a sum or a mean over rows that is 0 in the first steps, which shows nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import AuditError, Pipe

ROWS, WIDTH = 8, 4
LossFn = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def violations(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().sub(8).relu()


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square()


def add_sums(output: Tensor, target: Tensor) -> Tensor:
    total: Any = sum([squares(output, target).sum(), violations(output, target).sum()])
    assert isinstance(total, Tensor)
    return total


class Centred(nn.Module):
    """A sum with a penalty on a parameter of the loss that is 0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        distances = (output - target - self.center).square().sum()
        return 0.1 * distances + 0.5 * self.center.square().sum()


AVERAGED: dict[str, LossFn] = {
    "sum": lambda y, t: squares(y, t).mean() + 0.01 * violations(y, t).sum(),
    "sum over a number": lambda y, t: squares(y, t).mean() + violations(y, t).sum() / 8,
    "sum of PyTorch's": lambda y, t: (
        squares(y, t).mean() + functional.mse_loss(violations(y, t), 0 * t, reduction="sum")
    ),
    "mean times the rows": lambda y, t: squares(y, t).mean() + violations(y, t).mean() * len(y),
}
SUMMED: dict[str, LossFn] = {
    "mean": lambda y, t: squares(y, t).sum() + violations(y, t).mean(),
    "sum over the rows": lambda y, t: squares(y, t).sum() + violations(y, t).sum() / len(y),
    "sum over a tensor": lambda y, t: (
        squares(y, t).sum() + violations(y, t).sum() / torch.ones(len(y)).sum()
    ),
}
RIGHT: dict[str, tuple[LossFn, str]] = {
    "sum over the rows": (
        lambda y, t: squares(y, t).mean() + violations(y, t).sum() / len(y),
        "mean",
    ),
    "mean of violations": (lambda y, t: squares(y, t).mean() + violations(y, t).mean(), "mean"),
    "sums": (add_sums, "sum"),
    "named operands": (lambda y, t: torch.mean(input=squares(y, t)), "mean"),
}


def build(loss_fn: LossFn, reduction: str) -> Pipe:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    options: dict[str, Any] = {"stages": 2, "devices": ["cpu"] * 2, "schedule": "1f1b"}
    return Pipe(model, 4, loss_fn=loss_fn, reduction=reduction, **options)


def train(pipe: Pipe, scale: float) -> None:
    pipe.step(torch.randn(ROWS, WIDTH), target=scale * torch.randn(ROWS, WIDTH))


CASES = [(name, loss_fn, "mean") for name, loss_fn in AVERAGED.items()]
CASES += [(name, loss_fn, "sum") for name, loss_fn in SUMMED.items()]


@pytest.mark.parametrize(
    ("loss_fn", "reduction"), [case[1:] for case in CASES], ids=[f"{c[2]}-{c[0]}" for c in CASES]
)
def test_total_that_begins_later_and_is_divided_wrongly_is_found(
    loss_fn: LossFn, reduction: str
) -> None:
    pipe = build(loss_fn, reduction)
    for _ in range(2):
        train(pipe, 0.2)
    with pytest.raises(AuditError, match="the loss of the whole batch is"):
        train(pipe, 20)


@pytest.mark.parametrize("name", RIGHT)
def test_total_that_begins_later_and_is_divided_rightly_is_accepted(name: str) -> None:
    pipe = build(*RIGHT[name])
    for scale in (0.2, 0.2, 20, 20):
        train(pipe, scale)


def test_penalty_on_the_parameters_of_a_summed_loss_is_found() -> None:
    loss_fn = Centred()
    pipe = build(loss_fn, "sum")
    train(pipe, 1)
    with torch.no_grad():
        loss_fn.center.fill_(1.0)
    with pytest.raises(AuditError, match="the loss of the whole batch is"):
        train(pipe, 1)

"""Losses of which the first steps show nothing: sums that are 0, weights of rows that are equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import AuditError, Pipe
from penstock.runtime.audit.rows import RowsCheck

ROWS, WIDTH = 8, 4
EQUAL, UNEQUAL = [1] * ROWS, list(range(1, ROWS + 1))
LossFn = Callable[[Tensor, Tensor], Tensor]

pytestmark = pytest.mark.usefixtures("double")


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


# ---- weights of rows in the target ---------------------------------------------------------------


def weigh(output: Tensor, target: Any) -> Tensor:
    entries = target["weights"]
    weights = [entries[i] for i in range(ROWS)] if isinstance(entries, dict) else entries.entries
    losses = [
        functional.mse_loss(row, wanted) * weight
        for row, wanted, weight in zip(output, target["rows"], weights, strict=False)
    ]
    return torch.stack(losses).sum() / len(output)


TARGETS: dict[str, Callable[[Sequence[int]], Any]] = {
    "dict": lambda values: dict(enumerate(values)),
    "object": lambda values: SimpleNamespace(entries=values),
}


@pytest.mark.parametrize("name", TARGETS)
def test_weights_by_row_in_a_target_that_differ_later_are_found(name: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    pipe = Pipe(model, 4, stages=2, devices=["cpu"] * 2, loss_fn=weigh)

    def step(values: Sequence[int]) -> None:
        rows = torch.randn(ROWS, WIDTH)
        pipe.step(rows, target={"rows": rows.clone(), "weights": TARGETS[name](values)})

    for _ in range(2):
        step(EQUAL)
    with pytest.raises(AuditError, match="the loss of the whole batch is"):
        step(UNEQUAL)


def test_number_in_an_object_of_the_target_is_accepted() -> None:
    def scale(output: Tensor, target: Any) -> Tensor:
        losses = [*map(functional.mse_loss, output, target["rows"])]
        total: Tensor = torch.stack(losses).sum() / len(output) * target["options"].scale
        return total

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    pipe = Pipe(model, 4, stages=2, devices=["cpu"] * 2, loss_fn=scale)
    for number in range(1, 5):
        rows = torch.randn(ROWS, WIDTH)
        options = SimpleNamespace(scale=number)
        pipe.step(rows, target={"rows": rows.clone(), "options": options})


def test_target_that_a_loss_changes_in_place_is_accepted_and_changed_once() -> None:
    def shrink(output: Tensor, target: Tensor) -> Tensor:
        target.mul_(0.5)
        return functional.mse_loss(output, target)

    pipe = build(shrink, "mean")
    target = torch.randn(ROWS, WIDTH)
    expected = 0.25 * target
    for _ in range(2):
        pipe.step(torch.randn(ROWS, WIDTH), target=target)
    assert torch.equal(target, expected)


# ---- the model's own loss ------------------------------------------------------------------------


def hinge(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().sub(8).relu()


def pairs(output: Tensor, target: Tensor) -> Tensor:
    errors = (output - target)[:, 0]
    return (errors[:, None] - errors[None]).abs().sub(8).relu()


class OwnLoss(nn.Module):
    """A model that computes its loss, with a term that is 0 for small targets."""

    def __init__(self, penalty: LossFn) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.penalty = penalty

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        output = self.last(torch.tanh(self.first(x)))
        return functional.mse_loss(output, target) + self.penalty(output, target)


OWN: dict[str, LossFn] = {
    "sum": lambda y, t: 0.01 * hinge(y, t).sum(),
    "root": lambda y, t: (hinge(y, t).square().mean() + 1e-12).sqrt(),
    "pairs": lambda y, t: pairs(y, t).mean(),
    "covariance": lambda y, t: ((y - t).T @ (y - t) / len(y)).abs().sub(20).relu().mean(),
    "masked": lambda y, t: (y - t).masked_fill((y - t).abs() < 8, 0).square().sum(),
    "chosen": lambda y, t: torch.where((y - t).abs() > 8, y.square(), 0 * y).sum(),
}
OWN_RIGHT: dict[str, LossFn] = {
    "sum over the rows": lambda y, t: hinge(y, t).sum() / len(y),
    "mean": lambda y, t: hinge(y, t).mean(),
}


def run_own(pipe: Pipe, scale: float, door: str) -> None:
    x, target = torch.randn(ROWS, WIDTH), scale * torch.randn(ROWS, WIDTH)
    if door == "step":
        pipe.step(x, target)
    else:
        pipe(x, target).backward()


def build_own(penalty: LossFn) -> Pipe:
    example = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    return Pipe(OwnLoss(penalty), 4, stages=2, devices=["cpu"] * 2, example=example)


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("name", OWN)
def test_term_of_the_own_loss_that_begins_later_is_found(name: str, door: str) -> None:
    pipe = build_own(OWN[name])
    for _ in range(4):
        run_own(pipe, 0.2, door)
    with pytest.raises(AuditError, match=r"depends on how (it|the batch) is split"):
        run_own(pipe, 20, door)


def test_violation_of_one_row_in_the_first_step_is_found() -> None:
    pipe = build_own(OWN["sum"])
    target = torch.zeros(ROWS, WIDTH)
    target[5] = 20  # no row of which a loss may count more
    with pytest.raises(AuditError, match="depends on how it is split"):
        pipe.step(torch.randn(ROWS, WIDTH), target)


@pytest.mark.parametrize("name", OWN_RIGHT)
def test_term_of_the_own_loss_that_is_a_mean_is_accepted(name: str) -> None:
    pipe = build_own(OWN_RIGHT[name])
    for scale in (0.2, 0.2, 20, 20, 0.2, 40):
        run_own(pipe, scale, "step")


def test_gate_of_the_own_loss_is_compared_each_time_that_its_part_has_doubled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []
    compare = RowsCheck.compare_all_microbatches

    def count(check: RowsCheck) -> str | None:
        compared.append(check)
        return compare(check)

    monkeypatch.setattr(RowsCheck, "compare_all_microbatches", count)
    pipe = build_own(lambda y, t: hinge(y, t).sum(1).mean() + 0 * hinge(y, t).sum())
    numbers = []
    for scale in (0.2, 20, 20, 0.2, 20, 20):
        torch.manual_seed(1)
        run_own(pipe, scale, "step")
        numbers.append(len(compared))
    assert numbers == [0, 1, 1, 1, 1, 1]

"""Layers that take values from other rows with a small probability, as swap noise and mixup do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import AuditError
from tests.runtime.audit.test_rows import Layer, layers, made, run

Function = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def mix_up(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x.flip(0)


def mix_up_some(x: Tensor) -> Tensor:
    return torch.where(torch.rand(len(x), 1) < 0.3, mix_up(x), x)


MIXING: dict[str, Function] = {
    "swapped numbers": lambda x: torch.where(
        torch.rand_like(x) < 0.15, x[torch.randperm(len(x))], x
    ),
    "rows": mix_up_some,
    "shuffled rows": lambda x: x + x[torch.rand(len(x)).argsort()],
    "rows in a random order": lambda x: x + x[torch.randn(len(x)).sort().indices],
    "all rows": lambda x: mix_up(x) if torch.rand(()) < 0.3 else x,
    "large numbers": lambda x: torch.where(torch.rand(len(x), 1) > 0.85, mix_up(x), x),
    "uniform_": lambda x: mix_up(x) if torch.empty(()).uniform_(-1, 1) < -0.8 else x,
}
BY_ROW: dict[str, Function] = {
    "noise": lambda x: x + 0.1 * torch.rand_like(x),
    "skipped rows": lambda x: torch.where(torch.rand(len(x), 1) < 0.1, torch.zeros_like(x), x),
    "half of the rows": lambda x: torch.where(torch.rand(len(x), 1) < 0.5, -x, x),
    "tenth of the rows": lambda x: torch.where(torch.rand(len(x), 1) > 0.99, -x, x),
    "rows below one number": lambda x: torch.where(torch.rand(len(x), 1) < torch.rand(1), -x, x),
    "numbers in a random order": lambda x: x[:, torch.rand(x.shape[1]).argsort()],
    "skipped layer": lambda x: x * 0.5 if torch.rand(()) < 0.1 else x,
    "gumbel": lambda x: x - (-torch.rand_like(x).clamp(1e-9, 1 - 1e-9).log()).log(),
    "dropout": nn.Dropout(0.2),
}


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("function", MIXING.values(), ids=list(MIXING))
def test_rows_that_are_mixed_with_a_small_probability_are_found(
    function: Function, door: str
) -> None:
    torch.manual_seed(0)
    pipe = made(layers(Layer(function)))
    with pytest.raises(AuditError, match="parts of the batch"):
        run(pipe, door)


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("function", BY_ROW.values(), ids=list(BY_ROW))
def test_draws_for_each_row_by_itself_are_left_alone(
    function: Function, door: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    pipe = made(layers(Layer(function)))
    with caplog.at_level(logging.WARNING, "penstock"):
        for seed in range(2):
            run(pipe, door, seed)
    assert not caplog.records

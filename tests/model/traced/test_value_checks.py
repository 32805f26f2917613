"""Functions and units that raise for some contents of tensors, such as negative variances."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional

from penstock import Pipe
from tests.support import closely, each_door, same_gradients


class LossUnit(nn.Module):
    """A unit that gets variances from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(4, 4), nn.GaussianNLLLoss()

    def forward(self, mean: Tensor, y: Tensor, variance: Tensor) -> Any:
        return self.loss(self.linear(mean), y, variance)


class SamplingUnit(nn.Module):
    """A unit that gets the deviations of a distribution, which it checks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, mean: Tensor, y: Tensor, variance: Tensor) -> Tensor:
        density: Tensor = Normal(self.linear(mean), variance).log_prob(y)
        return -density.mean()


class Heads(nn.Module):
    """A model of means and variances."""

    def __init__(self, loss: Callable[..., Tensor] | nn.Module) -> None:
        super().__init__()
        self.mean, self.variance, self.loss = nn.Linear(4, 4), nn.Linear(4, 4), loss

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        mean = self.mean(x)
        return {"loss": self.loss(mean, y, self.variance(mean).exp())}


LOSSES: dict[str, Callable[[], Any]] = {
    "function": lambda: functional.gaussian_nll_loss,
    "with a constant": lambda: lambda m, y, v: functional.gaussian_nll_loss(m, y, v, full=True),
    "of each number": lambda: (
        lambda m, y, v: functional.gaussian_nll_loss(m, y, v, reduction="none").mean()
    ),
    "of a computed target": lambda: (
        lambda m, y, v: functional.gaussian_nll_loss(m, y + 0 * m.detach(), v)
    ),
    "one variance for a row": lambda: lambda m, y, v: functional.gaussian_nll_loss(m, y, v.mean(1)),
    "module": nn.GaussianNLLLoss,
    "unit": LossUnit,
    "distribution in a unit": SamplingUnit,
}


@each_door
@pytest.mark.parametrize("build", LOSSES.values(), ids=list(LOSSES))
def test_losses_that_check_variances_are_equal(build: Callable[[], Any], door: str) -> None:
    torch.manual_seed(0)
    model = Heads(build()).double()
    unsplit = copy.deepcopy(model)
    batch: Any = {name: torch.randn(8, 4, dtype=torch.float64) for name in ("x", "y")}
    pipe = Pipe(
        model, 2, stages=2, devices=["cpu"] * 2, example=batch, balance="parameters", audit="first"
    )
    for _ in range(2):
        expected = unsplit(**batch)["loss"]
        expected.backward()
        if door == "step":
            loss = pipe.step(**batch).loss
        else:
            loss = pipe(**batch)["loss"]
            loss.backward()
        assert closely(loss, expected)
    assert same_gradients(pipe, unsplit)


def test_negative_variance_is_the_error_of_the_model() -> None:
    torch.manual_seed(0)
    model = Heads(lambda m, y, v: functional.gaussian_nll_loss(m, y, v - 100))
    batch: Any = {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}
    pipe = Pipe(model, 2, stages=2, devices=["cpu"] * 2, example=batch, balance="parameters")
    with pytest.raises(ValueError, match="var has negative entr"):
        pipe.step(**batch)

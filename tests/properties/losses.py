"""The losses of random models, and the weights of their micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Weighted
from tests.properties.layers import WIDTH
from tests.properties.models import unpacked


@dataclass(frozen=True)
class Loss:
    """A loss_fn for outputs in some form, its targets, and the weight of a micro-batch."""

    function: Callable[[str], Callable[..., Any]]
    target: Callable[[int], Any]
    weight: Callable[[Any], float] | None = None  # None: by rows
    reduction: str | None = None
    returned: bool = False  # whether the loss_fn returns its weight


def numbers(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, dtype=torch.float64)


def masked(rows: int) -> dict[str, Any]:
    """Return targets in which some rows count twice and some not at all; the last row counts."""
    counts = torch.randint(0, 3, (rows,))
    counts[: rows // 2] *= int(torch.rand(()) < 0.5)
    counts[-1] = 1
    return {"y": numbers(rows), "counts": counts, "none": None, "times": 2}


def classes(rows: int) -> Tensor:
    found = torch.randint(0, WIDTH, (rows,))
    found[torch.rand(rows) < 0.7] = -100
    found[-1] = 1
    return found


def _squares(form: str) -> Callable[..., Any]:
    return lambda output, y: functional.mse_loss(unpacked(form, output), y)


def _sum(form: str) -> Callable[..., Any]:
    return lambda output, y: (unpacked(form, output) - y).square().sum()


def _mean_of_counted(form: str, output: Any, target: dict[str, Any]) -> Weighted:
    """Return the weighted mean and its weight; the mean is NaN where no row counts."""
    each = (unpacked(form, output) - target["y"]).square().mean(1) * target["times"]
    counts = target["counts"]
    return Weighted((each * counts).sum() / counts.sum(), counts.sum())


def _weighted(form: str) -> Callable[..., Any]:
    return lambda output, target: _mean_of_counted(form, output, target)


def _dict(form: str) -> Callable[..., Any]:
    def loss_fn(output: Any, target: dict[str, Any]) -> dict[str, Any]:
        loss, weight = _mean_of_counted(form, output, target)
        rows = unpacked(form, output).sum(1)
        return {"loss": loss, "weight": weight, "twice": 2 * loss, "rows": rows, "name": "n"}

    return loss_fn


def _metrics(form: str) -> Callable[..., Any]:
    def loss_fn(output: Any, y: Tensor) -> dict[str, Any]:
        x = unpacked(form, output)
        return {"loss": functional.mse_loss(x, y), "mean": x.mean(), "tree": {"rows": [x[:, 0]]}}

    return loss_fn


def _counted(target: Any) -> float:
    return float(target["counts"].sum())


LOSSES = {
    "mean": Loss(_squares, numbers),
    "module": Loss(lambda form: nn.MSELoss(), numbers),
    "sum": Loss(_sum, numbers, lambda target: 1.0, "sum"),
    "weighted": Loss(_weighted, masked, _counted, returned=True),
    "dict": Loss(_dict, masked, _counted, returned=True),
    "metrics": Loss(_metrics, numbers),
    "classes": Loss(
        lambda form: functional.cross_entropy, classes, lambda target: float((target >= 0).sum())
    ),
}
PLAIN = ("module", "classes")  # losses that take the output as it is
MEANS = ("mean", "module", "metrics")  # means over rows

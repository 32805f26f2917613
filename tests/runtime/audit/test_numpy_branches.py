"""Layers that hand many numbers to NumPy or to Python, and compute with the results.

In the first step no row is far from the others, so that nothing shows.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import AuditError, Pipe
from penstock.runtime.audit.rows import RowsCheck
from tests.oracle import closely
from tests.support import same_gradients

ROWS, WIDTH = 16, 6
Function = Callable[[Tensor], Tensor]

pytestmark = pytest.mark.usefixtures("double")


def find_norms(x: Tensor) -> Tensor:
    norms: Tensor = x.detach().norm(dim=1)
    return norms


def scale_with_numpy(x: Tensor) -> Tensor:
    norms = find_norms(x).numpy()
    weights = numpy.where(norms > 3 * numpy.median(norms), 0.1, 1.0)
    return x * torch.from_numpy(weights)[:, None]


def scale_with_array_protocol(x: Tensor) -> Tensor:
    norms = numpy.asarray(find_norms(x))
    return x * torch.as_tensor(numpy.where(norms > 3 * numpy.median(norms), 0.1, 1.0))[:, None]


def scale_with_list(x: Tensor) -> Tensor:
    norms = find_norms(x).tolist()
    limit = 3 * statistics.median(norms)
    return x * torch.tensor([0.1 if norm > limit else 1.0 for norm in norms])[:, None]


def scale_with_numbers(x: Tensor) -> Tensor:
    norms = [norm.item() for norm in find_norms(x)]
    limit = 3 * statistics.median(norms)
    return x * torch.tensor([0.1 if norm > limit else 1.0 for norm in norms])[:, None]


def scale_all_with_numpy(x: Tensor) -> Tensor:
    """Decide for all rows at once, in Python."""
    norms = find_norms(x).numpy()
    return x * 0.1 if numpy.max(norms) > 3 * numpy.median(norms) else x * 1.0


MIXING: dict[str, Function] = {
    "numpy": scale_with_numpy,
    "array protocol": scale_with_array_protocol,
    "list": scale_with_list,
    "numbers": scale_with_numbers,
    "branch": scale_all_with_numpy,
}


class Layer(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def build(function: Function) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(function), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))


def build_rows(has_outliers: bool, seed: int) -> Tensor:
    """Return rows of about one size. Outliers fill the second micro-batch of four."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).sign()
    return x * (1 + 9 * ((torch.arange(ROWS) // 4 == 1) & has_outliers))[:, None]


def run(pipe: Any, door: str, x: Tensor) -> Tensor:
    target = torch.ones(ROWS, 2)
    loss: Tensor
    if door == "step":
        loss = pipe.step(x, target=target, loss_fn=nn.MSELoss()).loss
    else:
        loss = functional.mse_loss(pipe(x), target)
        loss.backward()
    return loss.detach()


def make(model: nn.Module) -> Pipe:
    return Pipe(model, chunks=4, stages=2, devices=["cpu"] * 2, audit="first")


@pytest.mark.parametrize("outlier_step", [1, 2, 3, 6])
@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("function", MIXING.values(), ids=list(MIXING))
def test_rows_that_numpy_mixes_are_found_in_the_step_in_which_it_matters(
    function: Function, door: str, outlier_step: int
) -> None:
    model = build(function)
    unsplit = copy.deepcopy(model)
    pipe = make(model)
    for step in range(outlier_step):
        x = build_rows(False, step)
        expected = functional.mse_loss(unsplit(x), torch.ones(ROWS, 2))
        assert closely(run(pipe, door, x), expected.detach())
    with pytest.raises(AuditError, match="go by numbers that they read from their rows"):
        run(pipe, door, build_rows(True, 9))


def count_batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    compare = RowsCheck.compare_all_microbatches

    def count(self: RowsCheck) -> str | None:
        counts.append(1)
        return compare(self)

    monkeypatch.setattr(RowsCheck, "compare_all_microbatches", count)
    return counts


def test_arrays_that_are_the_same_for_all_microbatches_cost_one_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = torch.linspace(0.5, 1, WIDTH)
    counts = count_batches(monkeypatch)
    pipe = make(build(lambda x: x * torch.from_numpy(table.sin().numpy().cumsum())))
    for step in range(6):
        run(pipe, "step", build_rows(False, step) * torch.rand(ROWS, WIDTH))
    assert len(counts) <= 1


def test_lists_of_whole_numbers_are_compared_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of rows are read by many models, and mix no rows."""

    def zero_tails(x: Tensor) -> Tensor:
        lengths = (x > 0).sum(1).tolist()
        masks = [torch.arange(WIDTH) < length for length in lengths]
        return x * torch.stack(masks)

    counts = count_batches(monkeypatch)
    model = build(zero_tails)
    unsplit = copy.deepcopy(model)
    pipe = make(model)
    for step in range(24):
        x = build_rows(False, step)
        functional.mse_loss(unsplit(x), torch.ones(ROWS, 2)).backward()
        run(pipe, "step", x)
    assert same_gradients(pipe, unsplit)
    assert len(counts) <= 10

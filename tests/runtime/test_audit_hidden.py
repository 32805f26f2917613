"""Rows that depend on each other where the first rows, or the first step, do not show it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

from penstock import AuditError, Pipe, PipeSequential
from tests.support import same_gradients

ROWS, WIDTH = 8, 4
Function = Callable[..., Tensor]
each_door = pytest.mark.parametrize("door", ["call", "step"])


class Applies(nn.Module):
    """A layer that computes a function of its output and of the other inputs."""

    def __init__(self, function: Function, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH, dtype=dtype), function

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return self.function(self.linear(x), *others)


class Traced(nn.Module):
    """The same layer in a model that is traced."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        output: Tensor = self.last(self.layer(x, *others))
        return output


def loss_fn(output: Tensor) -> Tensor:
    return (output - 1).abs().square().mean()


def build(layer: nn.Module, *example: Any, is_traced: bool = False) -> tuple[Pipe, nn.Module]:
    """Return a pipe with a layer in it, and the unsplit model."""
    torch.manual_seed(0)
    dtype = next(layer.parameters()).dtype
    last = nn.Linear(WIDTH, WIDTH, dtype=dtype)
    model = Traced(layer) if is_traced else PipeSequential(layer, last)
    given = {"example": example, "balance": "parameters"} if is_traced else {}
    pipe = Pipe(
        copy.deepcopy(model),
        chunks=3,
        stages=2,
        devices=["cpu"] * 2,
        schedule="1f1b",
        loss_fn=loss_fn,
        **given,
    )
    return pipe, model


def rows(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=dtype)


def train(pipe: nn.Module, door: str, *inputs: Any) -> None:
    if door == "step":
        pipe.step(*inputs)
    else:
        loss_fn(pipe(*inputs)).backward()


# ---- numbers that the audit has to compare --------------------------------------------------


@each_door
def test_complex_rows_that_mix_are_found(door: str) -> None:
    pipe, _ = build(Applies(lambda y: y - y.mean(0), torch.complex128))
    with pytest.raises(AuditError, match="depends on how"):
        train(pipe, door, rows(torch.complex128))


@each_door
def test_complex_outputs_of_real_rows_that_mix_are_found(door: str) -> None:
    torch.manual_seed(0)
    layer = Applies(lambda y: torch.complex(y, 2 * y).sub(y.mean(0)))
    pipe = Pipe(
        nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), layer),
        chunks=3,
        stages=2,
        devices=["cpu"] * 2,
        loss_fn=loss_fn,
    )
    with pytest.raises(AuditError, match="depends on how"):
        train(pipe, door, rows())


def test_complex_model_is_audited_and_equal(caplog: pytest.LogCaptureFixture) -> None:
    pipe, model = build(Applies(torch.tanh, torch.complex128))
    x = rows(torch.complex128)
    pipe.step(x)
    loss_fn(model(x)).backward()
    assert same_gradients(pipe, model)
    assert not caplog.records


def test_observer_that_starts_at_infinity_is_audited() -> None:
    """The audit looks for counters among the buffers, and infinity is no whole number."""
    layer = Applies(FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255))
    pipe, _ = build(layer.float())
    with pytest.raises(AuditError, match="min_val"):
        pipe.step(rows(torch.float32))


# ---- numbers that a row takes from the others -----------------------------------------------


@each_door
@pytest.mark.parametrize("is_traced", [False, True])
def test_slice_that_ends_at_a_number_of_the_batch_is_found(is_traced: bool, door: str) -> None:
    lengths = torch.tensor([2] * (ROWS - 1) + [4])  # the last micro-batch is longer
    layer = Applies(lambda y, n: y * torch.ones(9, dtype=y.dtype)[: n.max()].sum())
    pipe, _ = build(layer, rows(), lengths, is_traced=is_traced)
    with pytest.raises(AuditError, match="depends on how"):
        train(pipe, door, rows(), lengths)


def test_slice_that_ends_at_a_number_and_makes_no_difference_is_equal() -> None:
    lengths = torch.tensor([2, 2, 2, 3, 3, 3, 4, 4])

    def sum_slots(y: Tensor, n: Tensor) -> Tensor:
        slots = y[:, None] * torch.ones(9, 1, dtype=y.dtype)
        is_used = torch.arange(9) < n[:, None]
        return (slots * is_used[..., None])[:, : n.max()].sum(1)

    pipe, model = build(Applies(sum_slots))
    for _ in range(3):
        x = rows()
        pipe.step(x, lengths)
        loss_fn(model(x, lengths)).backward()
    assert same_gradients(pipe, model)

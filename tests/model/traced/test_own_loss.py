"""Tests of losses that the model computes itself: how those of micro-batches combine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Pipe
from penstock.errors import RunError
from tests.support import closely, each_door, same_gradients


class Returns(nn.Module):
    """A model whose forward ends in a function of the last activations and of a whole number."""

    def __init__(self, end: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.end = end

    def forward(self, x: Tensor, num_items_in_batch: Any = None) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.end(x, num_items_in_batch)


COMBINED: dict[str, tuple[Callable[..., Any], Any]] = {
    "sum": (lambda x, _: x.square().sum(), None),
    "negative sum": (lambda x, _: -x.square().sum(), None),
    "sum with the output": (lambda x, _: (x.sum().double(), x), None),
    "sum of a loss function": (
        lambda x, _: functional.mse_loss(x, x.detach() * 2, reduction="sum"),
        None,
    ),
    "count": (lambda x, _: (x > 0).sum(), None),
    "sum of means over rows": (lambda x, _: x.square().mean(0).sum(), None),
    "sum of parts of a mean": (lambda x, _: (x.square() / len(x)).sum(), None),
    "sum over a constant": (lambda x, _: 0.5 * x.square().sum() / 28, None),
    "mean": (lambda x, _: x.square().mean(), None),
    "sum by the rows": (lambda x, _: x.square().sum() / len(x), None),
    "num_items_in_batch": (lambda x, n: x.square().sum() / n, 24),
    "num_items_in_batch, a tensor": (
        lambda x, n: x.square().sum() / n.to(x.dtype),
        torch.tensor(24),
    ),
}


@each_door
@pytest.mark.parametrize("kind", COMBINED)
def test_own_loss_of_the_batch_is_that_of_the_unsplit_model(kind: str, door: str) -> None:
    torch.manual_seed(0)
    (end, number), x = COMBINED[kind], torch.randn(7, 4, dtype=torch.float64)
    if kind == "count" and door == "step":
        pytest.skip("a count is not a loss")
    model, inputs = Returns(end).double(), {"x": x, "num_items_in_batch": number}
    reference = copy.deepcopy(model)
    pipe = Pipe(model, 3, stages=3, devices=["cpu"] * 3, example=inputs)

    def first(output: Any) -> Tensor:
        loss: Tensor = output[0] if isinstance(output, tuple) else output
        return loss

    expected = first(reference(**inputs))
    found = pipe.step(**inputs).loss if door == "step" else first(pipe(**inputs))
    assert closely(found.detach(), expected.detach())
    if expected.requires_grad:
        expected.backward()
        if door == "call":
            found.backward()
        assert same_gradients(model, reference)


@each_door
@pytest.mark.parametrize(
    ("end", "number", "message"),
    [
        (lambda x, _: x.max(), None, r"the model returns one number, computed by max"),
        (lambda x, _: x.norm() * 2, None, r"the model returns one number, computed by norm"),
        (lambda x, n: x.square().mean() / n, 24, "num_items_in_batch was given, but it is not"),
    ],
)
def test_own_loss_that_does_not_combine_is_refused(
    end: Callable[..., Any], number: Any, message: str, door: str
) -> None:
    inputs = {"x": torch.randn(4, 4), "num_items_in_batch": number}
    model = Returns(end)
    pipe = Pipe(model, 2, stages=3, devices=["cpu"] * 3, example=inputs)
    with pytest.raises(RunError, match=message):
        pipe.step(**inputs) if door == "step" else pipe(**inputs)
    pipe = Pipe(model, 2, stages=3, devices=["cpu"] * 3, example=inputs, reduction="mean")
    assert pipe.step(**inputs).loss.isfinite()
    pipe = Pipe(model, 1, stages=3, devices=["cpu"] * 3, example=inputs)
    assert closely(pipe(**inputs).detach(), model(**inputs).detach())


class Criterion(nn.Module):
    """A loss that is a unit: it has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.scale * x, y)


class Labelled(nn.Module):
    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.criterion, self.loss = Criterion(), loss

    def forward(self, x: Tensor, answers: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": self.loss(self, x, answers), "x": x}


UNEVEN: dict[str, Callable[..., Tensor]] = {
    "with a penalty": lambda model, x, y: (
        functional.cross_entropy(x, y) + model.blocks[0].weight.square().sum()
    ),
    "two of them": lambda _, x, y: (
        functional.cross_entropy(x, y.clamp(0)) + functional.cross_entropy(x, y)
    ),
    "in a unit": lambda model, x, y: model.criterion(x, y),
    "mask": lambda _, x, y: (x.square().mean(1) * (y > 0)).sum() / (y > 0).sum(),
}


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
@pytest.mark.parametrize("way", ["step", "call", "without a graph"])
@pytest.mark.parametrize("kind", UNEVEN)
def test_own_loss_that_counts_targets_unevenly_is_refused(
    kind: str, way: str, checkpoint: str
) -> None:
    """The labels need not be called so, and the first micro-batches may count all of them."""
    if kind == "mask" and (
        way == "without a graph" or (way, checkpoint) == ("call", "except_last")
    ):
        pytest.skip("without a graph only cross-entropies are seen")
    x, model = torch.randn(8, 4).double(), Labelled(UNEVEN[kind]).double()
    y = torch.tensor([2, 3, 2, 3, 2, -100, 2, 3])
    pipe = Pipe(
        model,
        4,
        checkpoint,
        stages=2,
        devices=["cpu"] * 2,
        example=(x, y),
        balance="parameters",
        audit="off",
    )
    call: Callable[..., Any] = pipe if way == "call" else pipe.step
    with torch.set_grad_enabled(way != "without a graph"):
        with pytest.raises(RunError, match="the loss is not a mean over the rows of a micro-batch"):
            call(x, y)
        found = call(x, y.clamp(2))
        loss = found["loss"] if way == "call" else found.loss
        assert closely(loss.detach(), model(x, y.clamp(2))["loss"].detach())


class TakesLabels(Returns):
    """A model that takes the number of items, as BERT and T5 do, and ignores it."""

    def __init__(self) -> None:
        super().__init__(lambda x, _: x)

    def forward(self, x: Tensor, num_items_in_batch: Any = None, labels: Any = None) -> Any:
        x = super().forward(x)
        return x if labels is None else functional.cross_entropy(x, labels)


@each_door
def test_mean_cross_entropy_may_ignore_num_items_in_batch(door: str) -> None:
    model = TakesLabels().double()
    labels = torch.tensor([0, -100, 1, 3, -100, 2])  # of two rows, micro-batches count 1, 2 and 1
    inputs: dict[str, Any] = {"x": torch.randn(6, 4).double(), "labels": labels}
    expected = model(**inputs)
    inputs["num_items_in_batch"] = torch.tensor(17)
    pipe = Pipe(model, 3, stages=3, devices=["cpu"] * 3, example=inputs)
    loss = pipe.step(**inputs).loss if door == "step" else pipe(**inputs)
    assert closely(loss.detach(), expected.detach())
    # Without labels there is no loss, which the number could divide.
    del inputs["labels"]
    assert closely(pipe(**inputs).detach(), model(inputs["x"]).detach())


class WithPenalty(nn.Module):
    """A model whose loss has a term that is computed from the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(6, 6)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks[0](x)
        y = self.blocks[2](torch.tanh(self.blocks[1](hidden)))
        loss: Tensor = functional.mse_loss(y, x) + 0.1 * hidden.square().sum(1).mean()
        return loss


@each_door
def test_term_of_an_earlier_stage_beside_a_micro_batch_of_one_row(door: str) -> None:
    """One row is cut elsewhere: its mean was on the last stage, and counted as one more term."""
    model = WithPenalty().double()
    unsplit, x = copy.deepcopy(model), torch.randn(7, 6).double()
    pipe = Pipe(model, 4, stages=[1, 2], devices=["cpu"] * 2, example=x)
    loss = pipe.step(x).loss if door == "step" else pipe(x)
    expected = unsplit(x)
    expected.backward()
    if door != "step":
        loss.backward()
    assert closely(loss, expected)
    assert same_gradients(model, unsplit)

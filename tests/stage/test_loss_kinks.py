"""Losses with a kink of means over rows: micro-batches on different sides of it, or on one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import AuditError, Pipe, RunError
from penstock.stage.loss_terms import Gates, find_loss_terms
from tests.oracle import closely

ROWS, WIDTH = 12, 4
Loss = Callable[[Tensor, Tensor], Tensor]

pytestmark = pytest.mark.usefixtures("double")


def per_column(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().mean(-2)


LEVEL = 1.5  # the error of some micro-batches is below it, and that of others above

KINKS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "maximum": lambda x, y, level: torch.maximum(
        functional.mse_loss(x, y), level * functional.l1_loss(x, y)
    ),
    "minimum": lambda x, y, level: torch.minimum(
        functional.mse_loss(x, y), level * functional.l1_loss(x, y)
    ),
    "fmax": lambda x, y, level: torch.fmax(
        functional.mse_loss(x, y), level * functional.l1_loss(x, y)
    ),
    "where": lambda x, y, level: torch.where(
        functional.mse_loss(x, y) > level, functional.mse_loss(x, y), functional.l1_loss(x, y)
    ),
    "masked_fill": lambda x, y, level: functional.mse_loss(x, y).masked_fill(
        functional.mse_loss(x, y) > level, 0.0
    ),
    "stack max": lambda x, y, level: torch.stack(
        [functional.mse_loss(x, y), level * functional.l1_loss(x, y)]
    ).max(),
    "stack max over dim 0": lambda x, y, level: (
        torch.stack([functional.mse_loss(x, y), level * functional.l1_loss(x, y)]).max(0).values
    ),
    "stack amin": lambda x, y, level: torch.stack(
        [functional.mse_loss(x, y), level * functional.l1_loss(x, y)]
    ).amin(),
    "sorted": lambda x, y, level: (
        torch.stack([functional.mse_loss(x, y), level * functional.l1_loss(x, y)]).sort().values
        @ torch.tensor([0.3, 0.7])
    ),
    "topk": lambda x, y, level: (
        torch.stack([functional.mse_loss(x, y), level * functional.l1_loss(x, y)])
        .topk(1)
        .values.sum()
    ),
    "relu in a sum": lambda x, y, level: (functional.mse_loss(x, y) - level).relu().sum(),
    "relu in a mean": lambda x, y, level: ((x - y).square().mean() - level).relu()[None].mean(),
    "leaky": lambda x, y, level: functional.leaky_relu(functional.mse_loss(x, y) - level),
    "threshold": lambda x, y, level: functional.threshold(functional.mse_loss(x, y), level, level),
    "hardtanh": lambda x, y, level: functional.hardtanh(functional.mse_loss(x, y), 0.0, level),
    "both sides of hardtanh": lambda x, y, level: functional.hardtanh(
        functional.mse_loss(x, y), level, 4 * level
    ),
    "both sides of a clamp": lambda x, y, level: functional.mse_loss(x, y).clamp(level, 4 * level),
    "columns in the largest": lambda x, y, level: (
        torch.stack([per_column(x, y).clamp(min=level).sum(), 0 * functional.mse_loss(x, y)])
        .topk(1)
        .values[0]
    ),
    "softshrink": lambda x, y, level: functional.softshrink(functional.mse_loss(x, y), level),
    "clamp by a tensor": lambda x, y, level: torch.clamp_min(
        functional.mse_loss(x, y), torch.tensor(level)
    ),
    "columns": lambda x, y, level: torch.maximum(per_column(x, y), torch.tensor(level)).sum(),
    "columns of both": lambda x, y, level: torch.maximum(
        per_column(x, y), level * (x - y).abs().mean(0)
    ).sum(),
    "largest column": lambda x, y, level: per_column(x, y).clamp(min=level).max(),
}


class OwnLoss(nn.Module):
    """A model that returns its own loss."""

    def __init__(self, loss: Callable[[Tensor, Tensor, float], Tensor], level: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.loss, self.level = loss, level

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = x + 0.1 * self.second(self.first(x).tanh())
        return {"loss": self.loss(x, y, self.level), "output": x}


def build_batch(sizes: list[float]) -> dict[str, Tensor]:
    """Return a batch whose micro-batches of 3 rows have errors of these sizes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    scale = torch.tensor(sizes).repeat_interleave(ROWS // len(sizes))[:, None]
    return {"x": x, "y": x + scale * (1 + 0.1 * torch.rand(ROWS, WIDTH, generator=generator))}


def build_pipe(model: nn.Module, batch: dict[str, Tensor]) -> Pipe:
    return Pipe(
        model,
        chunks=4,
        stages=2,
        devices=["cpu"] * 2,
        balance="parameters",
        example=batch,
        reduction="mean",
    )


def run(pipe: Any, door: str, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = pipe.step(**batch).loss if door == "step" else pipe(**batch)["loss"]
    if door == "call":
        loss.backward()
    return loss.detach()


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("loss", KINKS.values(), ids=list(KINKS))
def test_microbatches_on_different_sides_of_a_kink_are_refused(loss: Any, door: str) -> None:
    """The first step is on one side. There it is a mean over rows."""
    torch.manual_seed(0)
    model = OwnLoss(loss, LEVEL)
    if loss is KINKS["largest column"]:
        model.level = 0.0
    unsplit = copy.deepcopy(model)
    batch = build_batch([3.0, 3.0, 3.0, 3.0])
    pipe = build_pipe(model, batch)
    if loss is not KINKS["largest column"]:
        assert closely(run(pipe, door, batch), unsplit(**batch)["loss"])
    with pytest.raises((RunError, AuditError), match=r"kink of a mean|not a mean over|depends on"):
        run(pipe, door, build_batch([3.0, 0.3, 3.0, 0.3]))


@pytest.mark.parametrize("size", [3.0, 0.3])
@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("loss", [v for k, v in KINKS.items() if k != "largest column"])
def test_microbatches_on_one_side_of_a_kink_are_equal(loss: Any, door: str, size: float) -> None:
    torch.manual_seed(0)
    model = OwnLoss(loss, LEVEL)
    unsplit = copy.deepcopy(model)
    batch = build_batch([size] * 4)
    expected = unsplit(**batch)["loss"]
    expected.backward()
    assert closely(run(build_pipe(model, batch), door, batch), expected.detach())
    for ours, theirs in zip(model.parameters(), unsplit.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) or size == 0.3
        if ours.grad is not None and theirs.grad is not None:
            assert closely(ours.grad, theirs.grad)


def test_activations_behind_a_mean_over_time_are_no_kinks() -> None:
    """Rows are on dim 1, and dim 0 is that of time."""

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            x = self.first(x).transpose(0, 1).mean(0)
            return {"loss": functional.l1_loss(self.second(torch.relu(x)), y), "output": x}

    torch.manual_seed(0)
    model = TimeFirst()
    unsplit = copy.deepcopy(model)
    batch = {"x": torch.randn(ROWS, 5, WIDTH), "y": torch.randn(ROWS, WIDTH)}
    expected = unsplit(**batch)["loss"]
    assert closely(run(build_pipe(model, batch), "step", batch), expected.detach())


ROW_LOSSES: dict[str, Loss] = {
    "number of a row": lambda x, y: torch.stack([(1 - s).relu() for s in (x * y).sum(1)]).mean(),
    "unbind": lambda x, y: (
        sum(((1 - s).relu() for s in (x * y).sum(1).unbind()), x.new_zeros(())) / len(x)
    ),
    "sum of a row": lambda x, y: torch.stack(
        [(1 - (x[i] * y[i]).sum()).relu() for i in range(len(x))]
    ).mean(),
    "norm of a row": lambda x, y: torch.stack(
        [((x[i] - y[i]).norm() - 3).relu() for i in range(len(x))]
    ).mean(),
    "where": lambda x, y: torch.stack(
        [torch.where(y[i, 0] > 0, x[i].norm(), x[i].sum().exp()) for i in range(len(x))]
    ).mean(),
}


@pytest.mark.parametrize("loss", ROW_LOSSES.values(), ids=list(ROW_LOSSES))
def test_kinks_in_a_loop_over_rows_are_no_kinks_of_a_mean(loss: Loss) -> None:
    """They were refused, as each row is a number."""
    torch.manual_seed(0)
    model = OwnLoss(lambda x, y, _: loss(x, y), 0.0)
    unsplit = copy.deepcopy(model)
    batch = {"x": torch.randn(ROWS, WIDTH), "y": 2 * torch.randn(ROWS, WIDTH)}
    expected = unsplit(**batch)["loss"]
    assert closely(run(build_pipe(model, batch), "step", batch), expected.detach())


def test_kink_of_rows_and_a_learned_number_behind_the_cut_is_no_kink_of_a_mean() -> None:
    """What the last stage receives has rows. It was taken for a constant beside the margin."""

    class Margin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            self.head = Hinge()

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"loss": self.head(self.body(x), y)}

    class Hinge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.margin = nn.Parameter(torch.tensor(0.1))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.margin - x * y).relu().mean()

    torch.manual_seed(0)
    model = Margin()
    unsplit = copy.deepcopy(model)
    batch = {"x": torch.randn(ROWS, WIDTH), "y": torch.randn(ROWS, WIDTH).sign()}
    pipe = Pipe(
        model, chunks=4, stages=[2, 1], devices=["cpu"] * 2, example=batch, reduction="mean"
    )
    expected = unsplit(**batch)["loss"]
    assert closely(run(pipe, "step", batch), expected.detach())


def test_loop_over_rows_that_the_last_stage_receives_has_no_kinks_of_means() -> None:
    """Without a layer in between, they are leaves of its graph, as parameters are."""

    def loss(y: Tensor, t: Tensor) -> Tensor:
        y = y.masked_fill(t > 0, 0.0)
        return torch.stack([row.sum().relu().exp() for row in y]).mean()

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Identity())
    x, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    expected = loss(layers(x), target)
    pipe = Pipe(layers, 4, stages=[2, 1], devices=["cpu"] * 2, loss_fn=loss, audit="off")
    assert closely(pipe.step(x, target=target).loss, expected.detach())


@pytest.mark.parametrize("function", [torch.max, torch.amin, torch.median])
def test_term_that_selects_an_entry_is_no_sum(function: Callable[[Tensor], Tensor]) -> None:
    """Such a loss is audited again now and then, as nothing shows whether it is a mean."""
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    terms = find_loss_terms(function(x.square().sum(1))).terms
    assert [term.is_sum for term in terms if term.name.startswith(("Max", "Amin", "Median"))] == [
        False
    ]


@pytest.mark.parametrize(
    "name", ["both sides of hardtanh", "both sides of a clamp", "columns in the largest"]
)
def test_sides_of_a_kink_are_compared_without_an_audit(name: str) -> None:
    """A number below both limits of a clamp counted as one above: both have the slope 0."""
    torch.manual_seed(0)
    batch = build_batch([3.0, 0.3, 3.0, 0.3])
    pipe = Pipe(
        OwnLoss(KINKS[name], LEVEL),
        chunks=4,
        stages=2,
        devices=["cpu"] * 2,
        balance="parameters",
        example=batch,
        reduction="mean",
        audit="off",
    )
    with pytest.raises(RunError, match="different sides"):
        run(pipe, "step", batch)


def test_gates_are_looked_for_below_sums_and_not_below_layers() -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    hinge = x.sub(2).relu()
    layer = nn.Linear(WIDTH, WIDTH)(x.relu())
    assert not find_loss_terms(layer.square().sum(), Gates.ALL).gates
    assert not find_loss_terms(hinge.mean(), Gates.UNPROVEN).gates
    assert not find_loss_terms(hinge.sum()).gates
    for loss, gates in ((hinge.sum(), Gates.UNPROVEN), (hinge.mean(), Gates.ALL)):
        (part,) = find_loss_terms(loss, gates).gates
        assert part == (x > 2).double().mean()

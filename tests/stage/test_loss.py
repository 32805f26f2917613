"""Tests of how a `loss_fn` counts its targets, and of losses that need no proof."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Pipe, Weighted
from penstock.errors import RunError
from penstock.stage import loss_terms
from penstock.stage.loss import TargetCounter, is_entry_mean, resolve_reduction
from penstock.stage.loss_hints import explain_loss_call
from penstock.stage.row_means import RowMeanProver
from tests.support import closely

LossFn = Callable[[Tensor, Tensor], Any]
LEARNED = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 1.0, 1.0], dtype=torch.float64)


class InAModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(ignore_index=0)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = 2 * self.inner(output, target)
        return loss


UNEVEN: dict[str, LossFn] = {
    "ignore_index": lambda y, t: functional.cross_entropy(y, t, ignore_index=0),
    "class weights": lambda y, t: functional.cross_entropy(y, t, weight=CLASS_WEIGHTS),
    "in a module": InAModule(),
    "shifted": lambda y, t: functional.cross_entropy(y, (t + 1) % 4, ignore_index=1),
    "nll_loss": lambda y, t: functional.nll_loss(y.log_softmax(1), t, ignore_index=0),
    "label smoothing": lambda y, t: functional.cross_entropy(
        y, t, ignore_index=0, label_smoothing=0.1
    ),
    "with a second term": lambda y, t: (
        functional.cross_entropy(y, t, ignore_index=0) + 0.1 * y.square().mean()
    ),
    "two of them": lambda y, t: (
        (functional.cross_entropy(y, t) + functional.cross_entropy(y, t, ignore_index=0)) / 2
    ),
    "in a stack": lambda y, t: torch.stack(
        [y.square().mean(), functional.cross_entropy(y, t, ignore_index=0)]
    ).mean(),
    "pixels": lambda y, t: functional.cross_entropy(
        y.view(-1, 2, 2), (t % 2)[:, None].expand(-1, 2), ignore_index=0
    ),
    "mask": lambda y, t: (y.square().mean(1) * (t != 0)).sum() / (t != 0).sum(),
    "mask, a number": lambda y, t: (y.square().mean(1) * (t != 0)).sum() / (t != 0).sum().item(),
    "mask, where": lambda y, t: torch.where(
        (t != 0).any(), (y.square().mean(1) * (t != 0)).sum() / (t != 0).sum(), 0.0
    ),
    "selected rows": lambda y, t: y[t != 0].square().mean(),
    "selected rows, mse_loss": lambda y, t: functional.mse_loss(y[t != 0], 2 * y[t != 0].detach()),
    "factor": lambda y, t: y.square().mean() * (t != 0).double().mean(),
    "a term in some micro-batches": lambda y, t: (
        y.square().mean() + (y.abs().mean() if (t == 0).any() else 0)
    ),
}
EVEN: dict[str, LossFn] = {
    "terms": lambda y, t: (
        functional.cross_entropy(y, t) + 0.5 * y.square().sum() / len(y) + y.abs().mean(0).sum()
    ),
    "rows one by one": lambda y, t: (
        sum(functional.cross_entropy(*pair) for pair in zip(y, t, strict=True)) / len(y)
    ),
    "class probabilities": lambda y, t: functional.cross_entropy(
        y, functional.one_hot(t, 4).double()
    ),
    "learned weight": lambda y, t: LEARNED * y.square().mean() + LEARNED.exp(),
    "all counted": lambda y, t: functional.cross_entropy(y, t),
    "nothing ignored": lambda y, t: functional.cross_entropy(y, t, ignore_index=7),
    "known": partial(functional.cross_entropy, ignore_index=0),
    "known module": nn.CrossEntropyLoss(ignore_index=0),
    "weighted": lambda y, t: Weighted(
        functional.cross_entropy(y, t, ignore_index=0), (t != 0).sum()
    ),
}
TARGET = torch.tensor([0, 0, 1, 2, 0, 1, 3, 3])


def pipe_of(model: nn.Module, loss_fn: LossFn, reduction: str | None = None) -> Pipe:
    return Pipe(
        model, 4, stages=2, devices=["cpu"] * 2, loss_fn=loss_fn, reduction=reduction
    )  # fmt: skip


@pytest.mark.parametrize("kind", UNEVEN)
def test_loss_fn_that_counts_targets_unevenly_is_refused(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    with pytest.raises(RunError, match="the loss is not a mean over the rows of a micro-batch"):
        pipe_of(model, UNEVEN[kind]).step(x, target=TARGET)
    pipe_of(model, UNEVEN[kind], "sum").step(x, target=TARGET)
    pipe_of(model, UNEVEN[kind]).step(x, target=torch.arange(1, 3).repeat(4))


@pytest.mark.parametrize("kind", ["ignore_index", "class weights", "in a module", "two of them"])
def test_loss_fn_without_gradients_that_counts_targets_unevenly_is_refused(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    with torch.no_grad(), pytest.raises(RunError, match="averages over targets that count"):
        pipe_of(model, UNEVEN[kind]).step(x, target=TARGET)


def test_numbers_on_a_device_are_compared_at_the_end_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_terms, "is_on_device", lambda number: True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    for kind in ("ignore_index", "label smoothing", "mask"):
        with pytest.raises(RunError, match="the loss is not a mean over the rows of a micro-batch"):
            pipe_of(model, UNEVEN[kind]).step(x, target=TARGET)
        pipe_of(model, EVEN["terms"]).step(x, target=TARGET)


def test_error_names_what_a_loss_divides_by() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    pipe = pipe_of(model, UNEVEN["mask"])
    message = (
        r"a sum in it \(SumBackward\) is divided by 2 in micro-batch 3 and by 1 in micro-batch 2"
    )
    with pytest.raises(RunError, match=message):
        pipe.step(torch.randn(8, 4, dtype=torch.float64), target=TARGET)


@pytest.mark.parametrize("row_count", [8, 7])
@pytest.mark.parametrize("kind", EVEN)
def test_loss_fn_that_counts_all_targets_or_is_known_is_exact(kind: str, row_count: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    x, target = torch.randn(row_count, 4, dtype=torch.float64), TARGET[:row_count]
    expected = EVEN[kind](model(x), target)
    found = pipe_of(model, EVEN[kind]).step(x, target=target).loss
    assert closely(found, (expected[0] if isinstance(expected, Weighted) else expected).detach())


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.register_forward_hook(lambda m, args, loss: loss * 2),
        lambda module: module.register_forward_pre_hook(lambda m, args: args),
        lambda module: setattr(module, "forward", lambda y, t: (y - 1).square().mean()),
    ],
    ids=["hook", "pre-hook", "forward"],
)
def test_targets_of_a_changed_cross_entropy_are_not_counted(change: Callable[..., Any]) -> None:
    """Its penalties, say, are means over something else."""
    loss_fn = nn.CrossEntropyLoss()
    assert resolve_reduction(loss_fn, None).target_counter is not None
    change(loss_fn)
    assert resolve_reduction(loss_fn, None).target_counter is None


@pytest.mark.parametrize("is_module", [False, True])
def test_microbatch_whose_classes_have_weight_0_is_refused_with_label_smoothing(
    is_module: bool,
) -> None:
    """Its targets add to the loss of the batch, but its own loss is a number divided by 0."""
    weights = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    options: Any = {"weight": weights, "label_smoothing": 0.1}
    loss_fn: Any = (
        nn.CrossEntropyLoss(**options)
        if is_module
        else partial(functional.cross_entropy, **options)
    )
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    pipe = Pipe(model, 2, stages=2, devices=["cpu"] * 2, loss_fn=loss_fn)
    x = torch.rand(4, 4, dtype=torch.float64)
    expected = loss_fn(model(x), torch.tensor([0, 1, 0, 2]))
    assert closely(pipe.step(x, target=torch.tensor([0, 1, 0, 2])).loss, expected.detach())
    with pytest.raises(RunError, match="all targets of a micro-batch have a class weight of 0"):
        pipe.step(x, target=torch.tensor([0, 0, 1, 2]))
    ignored = torch.tensor([-100, -100, 1, 2])
    expected = loss_fn(model(x), ignored)
    assert closely(pipe.step(x, target=ignored).loss, expected.detach())


def test_weight_0_under_label_smoothing_makes_a_captured_loss_nan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host cannot read the weight in a capture, which would fail for all targets."""
    monkeypatch.setattr("penstock.stage.loss.is_captured", lambda device: True)
    count = TargetCounter(class_weights=torch.tensor([0.0, 1.0]), smooths_labels=True)
    assert count(torch.tensor([0, 0])).isnan()
    assert count(torch.tensor([0, 1])) == 1
    assert count(torch.tensor([-100, -100])) == 0


class SmoothedLoss(nn.Module):
    """A model that returns its own loss, with class weights and label smoothing."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("weights", torch.tensor([0.0, 1.0, 1.0, 1.0]))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.second(self.first(x).tanh())
        loss = functional.cross_entropy(logits, y, weight=self.weights, label_smoothing=0.1)
        return {"loss": loss}


@pytest.mark.parametrize("door", ["step", "call"])
def test_microbatch_whose_classes_have_weight_0_is_refused_in_a_loss_of_the_model(
    door: str,
) -> None:
    """In later steps its part of the loss was left out."""
    torch.manual_seed(0)
    model = SmoothedLoss().double()
    unsplit = copy.deepcopy(model)
    x, y = torch.rand(4, 4, dtype=torch.float64), torch.tensor([1, 2, 3, 2])
    batch = {"x": x, "y": y}
    pipe = Pipe(model, 2, stages=2, devices=["cpu"] * 2, example=batch, audit="off")

    def run(targets: Tensor) -> Tensor:
        if door == "step":
            return pipe.step(x=x, y=targets).loss.detach()
        loss: Tensor = pipe(x=x, y=targets)["loss"]
        return loss.detach()

    for targets in (y, torch.tensor([0, 1, 0, 2])):
        assert closely(run(targets), unsplit(x, targets)["loss"].detach())
    with pytest.raises(RunError, match="all targets of a micro-batch have a class weight of 0"):
        run(torch.tensor([0, 0, 1, 2]))


def test_target_counter_leaves_ignored_targets_out() -> None:
    target = torch.tensor([0, 1, 3, -100])
    assert TargetCounter()(target) == 3
    assert TargetCounter(ignore_index=1)(target) == 3
    assert TargetCounter(-100, CLASS_WEIGHTS)(target) == 7
    assert TargetCounter(1, CLASS_WEIGHTS)(torch.tensor([0, 1, 3])) == 2


# ---- losses of PyTorch that need no proof -------------------------------------------------------


def with_hook(loss_fn: nn.Module) -> nn.Module:
    loss_fn.register_forward_hook(lambda module, args, output: output.square())
    return loss_fn


def with_forward(loss_fn: nn.Module) -> nn.Module:
    loss_fn.forward = lambda y, t: (y - t).std()
    return loss_fn


class OtherLoss(nn.MSELoss):
    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return (y - t).std()


ENTRY_LOSSES = [
    functional.mse_loss,
    functional.l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy_with_logits,
    nn.MSELoss(),
    nn.MSELoss(reduction="sum"),
    nn.SmoothL1Loss(),
    nn.BCELoss(),
    nn.BCEWithLogitsLoss(),
]


@pytest.mark.parametrize("loss_fn", ENTRY_LOSSES)
def test_entry_mean_is_one_that_its_operations_prove(loss_fn: Callable[..., Any]) -> None:
    output, target = torch.rand(6, 3, requires_grad=True) * 1, torch.rand(6, 3)
    assert is_entry_mean(loss_fn, output, (target,))
    with RowMeanProver(output, target) as prover:
        loss = loss_fn(output, target)
    assert prover.proves(loss, is_sum=getattr(loss_fn, "reduction", "mean") == "sum")


@pytest.mark.parametrize(
    "loss_fn",
    [
        None,
        torch.dist,
        nn.KLDivLoss(),
        partial(functional.mse_loss, reduction="mean"),
        lambda y, t: functional.mse_loss(y, t),
        OtherLoss(),
        with_hook(nn.MSELoss()),
        with_forward(nn.MSELoss()),
        nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)),
    ],
)
def test_other_losses_are_followed(loss_fn: Callable[..., Any] | None) -> None:
    assert not is_entry_mean(loss_fn, torch.rand(6, 3), (torch.rand(6, 3),))


def test_hook_of_all_modules_makes_a_loss_followed() -> None:
    arguments = torch.rand(6, 3), (torch.rand(6, 3),)
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert not is_entry_mean(nn.MSELoss(), *arguments)
    finally:
        handle.remove()
    assert is_entry_mean(nn.MSELoss(), *arguments)


@pytest.mark.parametrize(
    ("output", "targets"),
    [
        (torch.rand(6, 1), (torch.rand(6),)),
        (torch.rand(6), (torch.rand(1),)),
        (torch.rand(()), (torch.rand(()),)),
        (torch.rand(6), ()),
        (torch.rand(6), ((torch.rand(6), torch.rand(6)),)),
        ((torch.rand(6),), (torch.rand(6),)),
        (nn.Parameter(torch.rand(6)), (torch.rand(6),)),
    ],
)
def test_arguments_that_may_mix_rows_make_a_loss_followed(output: Any, targets: Any) -> None:
    assert not is_entry_mean(functional.mse_loss, output, targets)


@pytest.mark.parametrize(
    ("loss_fn", "output", "target", "hint"),
    [
        (
            functional.binary_cross_entropy_with_logits,
            torch.randn(4, 1),
            torch.ones(4),
            r"pass target\.unsqueeze\(-1\)",
        ),
        (
            functional.cross_entropy,
            torch.randn(4, 3),
            torch.tensor([0, -1, 2, 1]),
            "labels go down to -1, and classes are numbered from 0",
        ),
        (
            functional.cross_entropy,
            torch.randn(4, 3),
            torch.rand(4, 5),
            "target has 5 columns, and the output 3",
        ),
    ],
    ids=["one output", "label below 0", "other classes"],
)
def test_error_of_a_loss_names_the_mistake(
    loss_fn: Callable[..., Any], output: Tensor, target: Tensor, hint: str
) -> None:
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        loss_fn(output, target)
    assert re.search(hint, explain_loss_call(loss_fn, output, (target,)))

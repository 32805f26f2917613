"""Branches on numbers of the rows, selections among rows, late hooks, and what hooks keep."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import AuditError, Pipe
from penstock.runtime.audit_rows import RowsCheck
from penstock.stage.branches import RowWatch
from tests.support import same_gradients

WIDTH, ROWS = 6, 16
each_door = pytest.mark.parametrize("door", ["call", "step"])


def rows(shift: float | Tensor = 0.0) -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64) + shift


class Branching(nn.Module):
    """A layer that computes a function of its input and of a linear layer of it."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.linear(x))


class Blocks(nn.Module):
    """A model that is traced."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([layer, nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


def build(layer: nn.Module, is_traced: bool = False, **options: Any) -> tuple[Pipe, nn.Module]:
    """Return a pipe with a layer in it, and the unsplit model."""
    torch.manual_seed(0)
    whole = Blocks(layer) if is_traced else nn.Sequential(layer, nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model = whole.double()
    given = {"chunks": 4, "stages": 2, "loss_fn": functional.mse_loss, **options}
    if is_traced:
        given["example"] = rows()
    return Pipe(copy.deepcopy(model), devices=["cpu"] * 2, **given), model


def train(pipe: Pipe, x: Tensor, door: str) -> None:
    if door == "step":
        pipe.step(x, target=torch.zeros_like(x))
    else:
        functional.mse_loss(pipe(x), torch.zeros_like(x)).backward()


def by_mean(x: Tensor, y: Tensor) -> Tensor:
    return y * 2 if x.mean() > 0 else y


def by_number(x: Tensor, y: Tensor) -> Tensor:
    return y * (2 if x.mean().item() > 0 else 3)


def by_list(x: Tensor, y: Tensor) -> Tensor:
    is_positive: Any = x.mean().gt(0).tolist()
    return y.sin() if is_positive else y.cos()


def by_shape(x: Tensor, y: Tensor) -> Tensor:
    return y * 2 if len(x[x.mean(1) > 0]) == len(x) else y


def by_choice(x: Tensor, y: Tensor) -> Tensor:
    return functional.linear(y, torch.ones_like(y[0]).diag() * int(x.mean() > 0))


@each_door
@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("function", [by_mean, by_number, by_list, by_shape, by_choice])
def test_branch_that_micro_batches_take_differently_later(
    function: Callable[[Tensor, Tensor], Tensor], is_traced: bool, door: str
) -> None:
    """All rows went one way in the steps that were audited, and each micro-batch its own later."""
    pipe, _ = build(Branching(function), is_traced)
    for _ in range(3):
        train(pipe, rows(9.0), door)
    sides = 9.0 * torch.arange(ROWS, dtype=torch.float64).sub(7.5).sign()[:, None]
    for _ in range(2):  # not only once
        with pytest.raises(AuditError, match=r"as `if x.mean\(\) > 0` does.* went different ways"):
            train(pipe, rows(sides), door)
    train(pipe, rows(9.0), door)


def test_branch_on_the_text_of_a_number() -> None:
    pipe, _ = build(Branching(lambda x, y: y if "-" in f"{x.mean():.3f}" else y * 2))
    for _ in range(3):
        train(pipe, rows(9.0), "step")
    sides = 9.0 * torch.arange(ROWS, dtype=torch.float64).sub(7.5).sign()[:, None]
    with pytest.raises(AuditError, match="went different ways"):
        train(pipe, rows(sides), "step")


def test_branch_on_a_sum_of_the_whole_batch() -> None:
    """The sum of a micro-batch is below the threshold, and that of the batch above."""
    pipe, _ = build(Branching(lambda x, y: y * 2 if x.sum() > 300 else y))
    with pytest.raises(AuditError, match="depends on how it is split"):
        train(pipe, rows(9.0), "step")


@each_door
def test_branch_that_makes_no_difference_is_compared_seldom(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask is skipped where it masks nothing, as in many transformers."""
    pipe, model = build(Branching(lambda x, y: y.masked_fill(x < -5, 0.0) if (x < -5).any() else y))
    compared = count_whole_batches(monkeypatch)
    for index in range(12):
        x = rows()
        x[index, 0] = -6.0
        train(pipe, x, door)
        functional.mse_loss(model(x), torch.zeros_like(x)).backward()
    assert same_gradients(pipe, model)
    assert len(compared) == 2  # in the first step, and when the ways first differed


def by_packed_positions(x: Tensor, y: Tensor) -> Tensor:
    """Read a number that is not computed from the rows, as the masks of transformers do."""
    positions = torch.arange(WIDTH).unsqueeze(0).expand(len(x), -1)
    return y if (positions.diff() == 1).all() else y * 2


def by_heads(x: Tensor, y: Tensor) -> Tensor:
    """Select from a dim that is not that of the rows, as attention does."""
    query, key = torch.stack([y, x]).unbind(0)
    table = torch.arange(2.0 * ROWS, dtype=x.dtype)[:WIDTH]
    return query * key.tanh() + table


def count_whole_batches(monkeypatch: pytest.MonkeyPatch) -> list[RowsCheck]:
    compared, compare = list[RowsCheck](), RowsCheck.compare_all_microbatches

    def count(check: RowsCheck) -> str | None:
        compared.append(check)
        return compare(check)

    monkeypatch.setattr(RowsCheck, "compare_all_microbatches", count)
    return compared


@each_door
@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("function", [by_packed_positions, by_heads])
def test_numbers_and_dims_that_are_not_of_the_rows_cost_no_forward_of_the_batch(
    function: Callable[[Tensor, Tensor], Tensor],
    is_traced: bool,
    door: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, model = build(Branching(function), is_traced)
    compared = count_whole_batches(monkeypatch)
    for _ in range(2):
        x = rows()
        train(pipe, x, door)
        functional.mse_loss(model(x), torch.zeros_like(x)).backward()
    assert same_gradients(pipe, model)
    assert not compared


def by_arange(x: Tensor) -> bool:
    return bool(torch.arange(len(x)).sum() > 50)


def by_written_zeros(x: Tensor) -> bool:
    total = torch.zeros(2, dtype=x.dtype)
    total[:1][0] = x.sum()
    return bool(total.sum() > 300)


def by_data_of_zeros(x: Tensor) -> bool:
    total = torch.zeros((), dtype=x.dtype)
    total.data.add_(x.sum())
    return bool(total > 300)


def by_norm(x: Tensor) -> bool:
    mean = torch.zeros(WIDTH, dtype=x.dtype)
    functional.batch_norm(x * len(x), mean, torch.ones_like(mean), training=True, momentum=1.0)
    return bool(mean.sum() > 300)


@each_door
@pytest.mark.parametrize("decide", [by_arange, by_written_zeros, by_data_of_zeros, by_norm])
def test_number_that_the_rows_reach_in_other_ways(
    decide: Callable[[Tensor], bool], door: str
) -> None:
    """It is the same for a micro-batch and for two rows, and another one for the whole batch."""
    pipe, _ = build(Branching(lambda x, y: y * 2 if decide(x) else y))
    with pytest.raises(AuditError, match="depends on how"):
        train(pipe, rows(9.0), door)


def test_numbers_that_are_drawn_are_not_constant() -> None:
    """The watch calls a number constant only if it is the same in every forward."""
    for draw in (torch.bernoulli, torch.rand_like, functional.dropout, torch.empty_like):
        with RowWatch() as watch:
            bool((draw(torch.full((4,), 0.5)) > 0).any())
        assert watch.reads_rows, draw
    with RowWatch() as watch:
        bool((torch.full((4,), 0.5) > 0).any())
    assert not watch.reads_rows
    assert watch.reads == [("__bool__", True)]


class OwnLoss(nn.Module):
    """A model with a loss of its own, which is a function of the losses of its rows."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.function(x.square().mean(1)).mean()


@each_door
@pytest.mark.parametrize(
    "function",
    [
        lambda losses: losses.topk(min(4, len(losses))).values,
        lambda losses: losses.sort(descending=True).values[:4],
        lambda losses: losses[:4],
        lambda losses: losses.narrow(0, 0, min(4, len(losses))),
        lambda losses: losses.split(4)[0],
        lambda losses: torch.stack(list(losses)[:4]),
    ],
)
def test_own_loss_that_selects_rows(function: Callable[[Tensor], Tensor], door: str) -> None:
    """Of two rows, and of two micro-batches, it is the mean of all of them."""
    torch.manual_seed(0)
    model = OwnLoss(function).double()
    pipe = Pipe(model, chunks=8, stages=2, devices=["cpu"] * 2, example=rows())
    with pytest.raises(
        AuditError, match=r"8 parts of the batch.* same rows together.*depends on how"
    ):
        pipe.step(rows()) if door == "step" else pipe(rows()).backward()


@each_door
def test_own_loss_that_depends_on_more_rows_than_two_micro_batches_have(door: str) -> None:
    """Later audits compare the whole batch."""
    torch.manual_seed(0)
    model = OwnLoss(lambda losses: losses if len(losses) <= 4 else 2 * losses).double()
    pipe = Pipe(model, chunks=8, stages=2, devices=["cpu"] * 2, example=rows(), audit=2)

    def train_own_loss() -> None:
        pipe.step(rows()) if door == "step" else pipe(rows()).backward()

    train_own_loss()
    with pytest.raises(AuditError, match="depends on how"):
        train_own_loss()


class LateHook(nn.Module):
    """A model that registers a hook in its first forward."""

    def __init__(self, register: Callable[[nn.Linear], object]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register, self.is_done = register, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_done:
            self.register(self.first)
            self.is_done = True
        output: Tensor = self.last(self.first(x).tanh())
        return output


def hook_forward(layer: nn.Linear) -> None:
    layer.register_forward_hook(lambda _, inputs, output: output * 2)


def hook_gradient(layer: nn.Linear) -> None:
    layer.weight.register_hook(lambda gradient: gradient * 2)


@each_door
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("register", [hook_forward, hook_gradient])
def test_hook_that_is_registered_in_the_first_forward(
    register: Callable[[nn.Linear], object], chunks: int, door: str
) -> None:
    """Each stage registered one of its own."""
    model = LateHook(register).double()
    pipe = Pipe(
        model, chunks, "never", stages=2, devices=["cpu"] * 2, loss_fn=functional.mse_loss,
        example=rows(), balance="parameters",
    )  # fmt: skip
    with pytest.raises(AuditError, match=r"the forward adds or removes hooks of 'first"):
        train(pipe, rows(), door)


@each_door
def test_hook_that_a_layer_registers_on_its_child(door: str) -> None:
    pipe, model = build(LateHook(hook_forward), checkpoint="never")
    for _ in range(2):
        x = rows()
        train(pipe, x, door)
        functional.mse_loss(model(x), torch.zeros_like(x)).backward()
    assert same_gradients(pipe, model)


@pytest.mark.parametrize("detaches", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("layer", "is_refused"), [(0, True), (1, True), (2, False)])
def test_loss_that_reads_what_a_hook_has_kept(
    layer: int, is_refused: bool, schedule: str, detaches: bool
) -> None:
    """It was of another micro-batch, by chance. In the last stage it is of the same."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
    kept: dict[str, Tensor] = {}

    def keep(_: nn.Module, inputs: Any, output: Tensor) -> None:
        kept["features"] = output.detach() if detaches else output

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) * kept["features"]).square().mean()

    layers = copy.deepcopy(model)
    for sequential in (model, layers):
        sequential[layer].register_forward_hook(keep)
    pipe = Pipe(
        layers, 4, "never", stages=2, devices=["cpu"] * 2, loss_fn=loss_fn, schedule=schedule
    )
    x, target = rows(), rows()
    if is_refused:
        with pytest.raises(AuditError, match="loss_fn reads what layers of an earlier stage"):
            pipe.step(x, target=target)
        return
    for _ in range(2):
        pipe.step(x, target=target)
        loss_fn(model(x), target).backward()
    assert same_gradients(pipe, model)


@each_door
@pytest.mark.parametrize("uses_float32", [False, True])
def test_rounding_of_float32_inside_a_float64_model(uses_float32: bool, door: str) -> None:
    """A product of other shapes rounds differently: a false alarm. Without float32 it is one."""

    def scale(x: Tensor, y: Tensor) -> Tensor:
        y = y * (1 + 1e-7 * len(y))  # as large as the rounding of float32
        return y + (1e-30 * y).float().double() if uses_float32 else y

    pipe, _ = build(Branching(scale))
    if uses_float32:
        train(pipe, rows(), door)
        return
    with pytest.raises(AuditError, match="depends on how"):
        train(pipe, rows(), door)

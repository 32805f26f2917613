"""Rows that depend on each other where the first rows, or the first step, do not show it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional

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
    given: dict[str, Any] = {"example": example, "balance": "parameters"} if is_traced else {}
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


def train(pipe: Pipe, door: str, *inputs: Any) -> None:
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


def add_group(y: Tensor, group: Tensor) -> Tensor:
    is_beside = group[:, None] == group[None]
    return y + is_beside.to(y.dtype) @ y


def add_group_by_index(y: Tensor, group: Tensor) -> Tensor:
    return y + torch.zeros(9, WIDTH, dtype=y.dtype).index_add(0, group, y)[group]


def scale_by_longest(y: Tensor, length: Tensor) -> Tensor:
    return y / length.max()


@each_door
@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize(
    ("function", "ids"),
    [
        (add_group, [0, 1, 2, 3, 0, 1, 2, 3]),
        (add_group, [0, 1, 2, 3, 4, 5, 6, 0]),
        (add_group_by_index, [1, 2, 3, 4, 5, 6, 7, 1]),
        (scale_by_longest, [3, 3, 3, 3, 3, 3, 3, 5]),
    ],
)
def test_rows_that_an_id_relates_are_found(
    function: Function, ids: list[int], is_traced: bool, door: str
) -> None:
    """The related rows are in different micro-batches, and far from the first ones."""
    pipe, _ = build(Applies(function), rows(), torch.tensor(ids), is_traced=is_traced)
    with pytest.raises(AuditError, match="depends on how"):
        train(pipe, door, rows(), torch.tensor(ids))


@each_door
def test_rows_of_a_group_that_the_model_computes_are_found(door: str) -> None:
    def add_cluster(y: Tensor, cluster: Tensor) -> Tensor:
        return add_group_by_index(y, cluster.argmax(1))

    pipe, _ = build(Applies(add_cluster))
    clusters = functional.one_hot(torch.tensor([1, 2, 3, 4, 5, 6, 7, 1]), 9).double()
    with pytest.raises(AuditError, match="depends on how"):
        train(pipe, door, rows(), clusters)


@pytest.mark.parametrize("ids", [[0, 1, 2, 3, 4, 5, 6, 0], [2] * 8, list(range(8))])
def test_ids_that_relate_no_rows_are_equal(ids: list[int]) -> None:
    table = torch.randn(9, WIDTH, dtype=torch.float64)
    pipe, model = build(Applies(lambda y, index: y * table[index]))
    x = rows()
    pipe.step(x, torch.tensor(ids))
    loss_fn(model(x, torch.tensor(ids))).backward()
    assert same_gradients(pipe, model)


# ---- weights that are 0 at first ------------------------------------------------------------


class ZeroGate(nn.Module):
    """A branch that mixes rows, behind a gate that opens in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.gate = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * cast(Tensor, self.linear(x)).mean(0)


class ZeroBranch(nn.Module):
    """The same with a last layer that is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.linear(x - x.mean(0)))


@each_door
@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("layer", [ZeroGate, ZeroBranch])
def test_weight_of_zero_does_not_hide_mixed_rows(
    layer: Callable[[], nn.Module], is_traced: bool, door: str
) -> None:
    """The results are right in the first step. The gradient of the gate is not."""
    pipe, _ = build(layer(), rows(), is_traced=is_traced)
    with pytest.raises(AuditError, match="weights that are very small so far"):
        train(pipe, door, rows())


@each_door
def test_head_of_zeros_does_not_hide_mixed_rows(door: str) -> None:
    pipe, _ = build(Applies(lambda y: y - y.mean(0)))
    nn.init.zeros_(pipe[1].weight)
    run = partial(pipe.step, target=rows(), loss_fn=functional.mse_loss)
    with pytest.raises(AuditError, match="weights that are very small so far"):
        (pipe if door == "call" else run)(rows())


def test_weight_of_zero_in_a_loss_does_not_hide_mixed_rows() -> None:
    class Balanced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, output: Tensor) -> Tensor:
            return output.square().mean() + self.factor * output.var(0).sum()

    pipe, _ = build(Applies(torch.tanh))
    with pytest.raises(AuditError, match=r"Balanced\.factor"):
        pipe.step(rows(), loss_fn=Balanced())


@each_door
def test_two_weights_of_zero_are_looked_at_when_they_have_moved(door: str) -> None:
    """The gradient of the gate is 0 as long as the head is."""
    pipe, _ = build(ZeroGate())
    nn.init.zeros_(pipe[1].weight)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)

    def train_on() -> None:
        for _ in range(8):
            train(pipe, door, rows())
            optimizer.step()

    with pytest.raises(AuditError):
        train_on()


def test_weights_of_zero_without_mixed_rows_are_equal() -> None:
    pipe, model = build(Applies(torch.tanh))
    for head in (pipe[1], model[1]):  # type: ignore[index]
        nn.init.zeros_(head.weight)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pipe, model)]
    for _ in range(6):
        x = rows()
        pipe.zero_grad()
        model.zero_grad()
        pipe.step(x)
        loss_fn(model(x)).backward()
        assert same_gradients(pipe, model)
        for optimizer in optimizers:
            optimizer.step()


# ---- outputs --------------------------------------------------------------------------------


class WithTable(nn.Module):
    """A model that returns one of its weights with its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.last = nn.Linear(WIDTH, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.last(self.first(x)), self.last.weight


@pytest.mark.parametrize("is_traced", [False, True])
def test_table_that_would_be_joined_as_rows_is_found(is_traced: bool) -> None:
    """Each micro-batch has three rows, and so has the weight."""
    model = WithTable() if is_traced else nn.Sequential(nn.Identity(), WithTable())
    example: dict[str, Any] = {"example": torch.ones(9, WIDTH).double(), "balance": "parameters"}
    pipe = Pipe(model, 3, stages=2, devices=["cpu"] * 2, **(example if is_traced else {}))
    with pytest.raises(AuditError, match=r"the output\[1\] of shape \(3, 4\) has no rows"):
        pipe(torch.randn(9, WIDTH).double())
    output, weights = pipe(torch.randn(8, WIDTH).double())
    assert output.shape == (8, 3)
    assert [weight.shape for weight in weights] == [(3, WIDTH)] * 3


def _compute_first_loss(output: Any) -> Tensor:
    return functional.mse_loss(output[0], torch.zeros_like(output[0]))


@pytest.mark.parametrize("has_grad", [True, False])
@pytest.mark.parametrize("is_traced", [False, True])
def test_table_among_the_outputs_of_a_step_is_found(is_traced: bool, has_grad: bool) -> None:
    """The loss does not depend on it, and a step without `outputs=True` does not join it."""
    model = WithTable() if is_traced else nn.Sequential(nn.Identity(), WithTable())
    example: dict[str, Any] = {"example": torch.ones(9, WIDTH).double(), "balance": "parameters"}
    pipe = Pipe(model, 3, stages=2, devices=["cpu"] * 2, **(example if is_traced else {}))
    options: dict[str, Any] = {"loss_fn": _compute_first_loss}
    with torch.set_grad_enabled(has_grad):
        pipe.step(torch.randn(9, WIDTH).double(), **options)
        for _ in range(2):  # also after the error
            with pytest.raises(AuditError, match=r"the output\[1\] of shape \(3, 4\) has no rows"):
                pipe.step(torch.randn(9, WIDTH).double(), outputs=True, **options)
        result = pipe.step(torch.randn(8, WIDTH).double(), outputs=True, **options)
    assert [weight.shape for weight in result.outputs[1]] == [(3, WIDTH)] * 3


class WithCentred(WithTable):
    """A model that returns its output, and the same in relation to the other rows."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output = super().forward(x)[0]
        return output, output.detach() - output.detach().mean(0)


@pytest.mark.parametrize("has_grad", [True, False])
def test_output_of_a_step_that_mixes_rows_is_found(has_grad: bool) -> None:
    """The loss does not depend on it."""
    example: dict[str, Any] = {"example": torch.ones(9, WIDTH).double(), "balance": "parameters"}
    pipe = Pipe(WithCentred(), 3, stages=2, devices=["cpu"] * 2, **example)
    options: dict[str, Any] = {"loss_fn": _compute_first_loss}
    with torch.set_grad_enabled(has_grad):
        pipe.step(torch.randn(9, WIDTH).double(), **options)
        with pytest.raises(AuditError, match="depends on how the batch is split"):
            pipe.step(torch.randn(9, WIDTH).double(), outputs=True, **options)


@pytest.mark.parametrize("count", [8, 9])
def test_loss_of_outputs_whose_rows_are_on_another_dim(count: int) -> None:
    """The target has its rows on dim 0 all the same."""

    class Transposed(WithTable):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)[0].t()

    def compute_loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output.t(), target)

    torch.manual_seed(0)
    x, y = torch.randn(count, WIDTH).double(), torch.randn(count, 3).double()
    model = Transposed()
    pipe = Pipe(
        copy.deepcopy(model), 3, stages=2, devices=["cpu"] * 2, example=x, balance="parameters"
    )
    result = pipe.step(x, target=y, loss_fn=compute_loss, outputs=True)
    compute_loss(model(x), y).backward()
    assert same_gradients(pipe, model)
    assert torch.allclose(result.outputs, model(x))

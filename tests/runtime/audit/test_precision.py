"""Rows are compared in enough precision: rounding hides no dependence, and is not taken for one."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import AuditError, Pipe
from penstock.runtime.audit.precision import (
    WideMode,
    find_repetition_rounding,
    find_split_tolerance,
    widen,
)
from penstock.runtime.audit.reference import Reference

WIDTH, ROWS = 8, 8
LOW = [torch.bfloat16, torch.float16]


class Layer(nn.Module):
    """A function of the rows, with parameters before and after it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.after(self.function(self.before(x)))
        return output


class Recurrent(nn.Module):
    """An LSTM, which keeps a list of its parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.function = nn.LSTM(WIDTH, WIDTH, batch_first=True), function

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.inner(x[:, None])
        return self.function(output[:, 0])


class Outside(nn.Module):
    """A parameter and a buffer that no unit has."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.head = Layer(function), nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x + self.shift)) * self.get_buffer("scale")
        output: Tensor = self.head(x)
        return output


def mix_a_little(x: Tensor) -> Tensor:
    return x + 3e-4 * x.mean(0)


def mix_in_16_bits(x: Tensor) -> Tensor:
    return x + 0.02 * x.mean(0)


def divide_by_size(x: Tensor) -> Tensor:
    return x / x.numel()


def build(model: nn.Module, dtype: torch.dtype, **options: Any) -> Pipe:
    x = torch.randn(ROWS, WIDTH).to(dtype)
    if not isinstance(model, nn.Sequential):
        options |= {"example": (x,), "balance": "parameters"}
    return Pipe(
        model.to(dtype),
        stages=2,
        devices=["cpu"] * 2,
        **{"chunks": 2, "loss_fn": nn.MSELoss(), "audit": "first", **options},
    )


def take_step(pipe: Pipe, dtype: torch.dtype, seed: int = 1) -> float:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(ROWS, WIDTH, generator=generator).to(dtype) for _ in range(2))
    return pipe.step(x, target=y).loss.item()


def sequential(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH), nn.Tanh())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("function", [divide_by_size, mix_a_little])
def test_rows_that_are_mixed_a_little_are_found_in_float32(function: Any, seed: int) -> None:
    torch.manual_seed(seed)
    pipe = build(sequential(Layer(function)), torch.float32)
    for _ in range(2):
        with pytest.raises(AuditError, match="combine to"):
            take_step(pipe, torch.float32, seed)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("build_model", [Layer, Recurrent, Outside])
def test_rows_that_are_mixed_a_little_are_found_in_16_bits(
    build_model: Any, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    inner = build_model(mix_in_16_bits)
    pipe = build(inner if build_model is Outside else sequential(inner), dtype)
    with pytest.raises(AuditError, match="combine to"):
        take_step(pipe, dtype)


class Scaled(nn.Module):
    """A parameter with an attribute of the user."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        setattr(self.weight, "scale", 2.0)  # noqa: B010 (mypy knows no such attribute)

    def forward(self, x: Tensor) -> Tensor:
        scale: float = getattr(self.weight, "scale")  # noqa: B009
        return mix_in_16_bits(x) @ self.weight * scale


@pytest.mark.parametrize("dtype", LOW)
def test_wide_parameters_have_the_attributes_of_the_user(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = sequential(Scaled()).to(dtype)
    weight = model[1].weight
    setattr(weight, "scale", 2.0)  # noqa: B010 (`to` may have replaced it)
    pipe = build(model, dtype)
    with pytest.raises(AuditError, match="combine to"):
        take_step(pipe, dtype)


@pytest.mark.parametrize("door", ["step", "call"])
def test_rows_that_are_mixed_a_little_are_found_under_autocast(door: str) -> None:
    torch.manual_seed(0)
    pipe = build(sequential(Layer(mix_in_16_bits)), torch.float32)
    x = torch.randn(ROWS, WIDTH)
    run = partial(pipe.step, x, target=0.1 * x) if door == "step" else partial(pipe, x)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(AuditError, match="split"):
        run()


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
@pytest.mark.parametrize("build_model", [Layer, Recurrent, Outside])
def test_rows_that_are_not_mixed_raise_nothing_and_leave_no_trace(
    build_model: Any, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    inner = build_model(torch.sin)
    model = (inner if build_model is Outside else sequential(inner)).to(dtype)
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict().items()}
    hooks = [list(m._forward_pre_hooks) for m in model.modules()]
    pipe = build(model, dtype)
    take_step(pipe, dtype)
    assert "was not compared" not in caplog.text
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == before[name][0].data_ptr()
        assert torch.equal(tensor, before[name][1])
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None and g.dtype == dtype for g in gradients)
    assert hooks == [list(m._forward_pre_hooks) for m in model.modules()]


def test_rounding_is_told_from_rows_that_are_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards of other numbers of rows differ, but not in float64."""
    original = Reference.run_forward

    def run_forward(self: Reference, batch: Any, *args: Any, **kwargs: Any) -> Any:
        (x,), _, _ = batch
        if self._wide_dtype is not torch.float64 and len(x) == 2:
            x.mul_(1.5)
        return original(self, batch, *args, **kwargs)

    monkeypatch.setattr(Reference, "run_forward", run_forward)
    take_step(build(sequential(Layer(torch.sin)), torch.float32), torch.float32)
    monkeypatch.setattr(Reference, "in_precision", None)  # it fails
    with pytest.raises(AuditError, match="combine to"):
        take_step(build(sequential(Layer(torch.sin)), torch.float32), torch.float32)


def ask_for_dtype(x: Tensor) -> Tensor:
    """Compute as models do that name their dtypes."""
    scores = functional.softmax(x.float(), dim=-1, dtype=torch.float32).to(x.dtype)
    weight = torch.eye(WIDTH, dtype=torch.bfloat16) + torch.zeros(WIDTH, WIDTH).bfloat16()
    return (scores.bfloat16() @ weight).to(x.dtype) + x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_that_asks_for_dtypes_computes_in_a_wide_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    take_step(build(sequential(Layer(ask_for_dtype)), dtype), dtype)
    pipe = build(sequential(Layer(lambda x: mix_in_16_bits(ask_for_dtype(x)))), dtype)
    with pytest.raises(AuditError, match="combine to"):
        take_step(pipe, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_that_computes_in_one_dtype_only_is_compared_in_it(dtype: torch.dtype) -> None:
    weight = numpy.eye(WIDTH, dtype=numpy.float32)  # no tensor that could be converted

    def multiply(x: Tensor) -> Tensor:
        assert x.dtype == dtype
        return x @ torch.from_numpy(weight).to(dtype)

    take_step(build(sequential(Layer(multiply)), dtype), dtype)
    pipe = build(sequential(Layer(lambda x: multiply(x) * (20 / len(x)) ** 3)), dtype)
    with pytest.raises(AuditError, match="combine to"):
        take_step(pipe, dtype)


def test_wide_mode() -> None:
    x, half = torch.rand(4), torch.rand(4).bfloat16()
    with WideMode(torch.float64):
        assert x.double().float().dtype == torch.float64
        assert x.double().to(torch.float32).dtype == torch.float64
        assert functional.softmax(x.double(), 0, dtype=torch.float32).dtype == torch.float64
        assert torch.zeros(3).dtype == torch.float64
        assert torch.arange(3).half().dtype == torch.float64
        assert torch.arange(3).to(torch.int32).dtype == torch.int32
        assert x.exp().dtype == torch.float32  # it could be anything
    with WideMode(torch.float32), pytest.raises(TypeError, match=r"to computes in torch.bfloat16"):
        x.to(half)


class Gate(nn.Module):
    """A branch with a weight, as LayerScale has it, in which rows are mixed."""

    def __init__(self, weight: float, share: float) -> None:
        super().__init__()
        self.weight, self.share = nn.Parameter(torch.full((WIDTH,), weight)), share

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * (x + self.share * x.mean(0))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", [0.0, 1e-6, 1e-4])
def test_small_weight_hides_nothing(
    weight: float, dtype: torch.dtype, checkpoint: str, seed: int
) -> None:
    torch.manual_seed(seed)
    take_step(build(sequential(Gate(weight, 0.0)), dtype, checkpoint=checkpoint), dtype, seed)
    pipe = build(sequential(Gate(weight, 0.1)), dtype, checkpoint=checkpoint)
    with pytest.raises(AuditError, match=r"is not the sum of those for two parts|combine to"):
        take_step(pipe, dtype, seed)


def test_wide_parameters_are_those_of_one_unit_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, counts = sequential(nn.Linear(WIDTH, WIDTH)).to(torch.bfloat16), set[int]()
    linear = functional.linear

    def count_wide(*args: Any) -> Tensor:
        counts.add(sum(p.dtype == torch.float32 for p in model.parameters()))
        output: Tensor = linear(*args)
        return output

    monkeypatch.setattr(functional, "linear", count_wide)
    take_step(build(model, torch.bfloat16), torch.bfloat16)
    assert counts == {0, 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_that_is_a_mean_only_roughly_is_found(dtype: torch.dtype) -> None:
    """The operations of the loss prove nothing, so that each step compares the whole batch."""

    def compute_loss(output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = functional.mse_loss(output, target)
        loss += 1e-3 * output.detach().norm() / ROWS
        return loss

    pipe = build(sequential(nn.Linear(WIDTH, WIDTH)), dtype, loss_fn=compute_loss)
    with pytest.raises(AuditError, match="combine to"):
        take_step(pipe, dtype)
    pipe = build(sequential(nn.Linear(WIDTH, WIDTH)), dtype, loss_fn=compute_mean)
    take_step(pipe, dtype)


def compute_mean(output: Tensor, target: Tensor) -> Tensor:
    """Return a mean over rows, by operations that do not prove it."""
    return torch.einsum("rc,rc->r", output - target, output - target).unfold(0, 1, 1).mean()


class Follows(nn.Module):
    """A layer that computes with a mean of the rows that it has seen so far."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.register_buffer("seen", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.get_buffer("seen")
        output = x * seen.clone()
        with torch.no_grad():
            seen.lerp_(x.detach().mean(0).abs(), self.share)
        return output


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02), (torch.float16, 0.005)]
)
def test_state_with_which_later_rows_compute_a_little_is_found(
    dtype: torch.dtype, share: float
) -> None:
    torch.manual_seed(0)
    pipe = build(sequential(Follows(share)), dtype)
    with pytest.raises(AuditError, match="that of the next one computes with it"):
        take_step(pipe, dtype)


def test_numbers_in_an_error_have_the_digits_in_which_they_differ() -> None:
    torch.manual_seed(0)
    pipe = build(sequential(Gate(1e-4, 0.1)), torch.float64)
    with pytest.raises(AuditError) as info:
        take_step(pipe, torch.float64)
    found = re.search(r"combine to ([\d.]+), but .* together is ([\d.]+)\. ", str(info.value))
    assert found is not None
    assert found[1] != found[2]
    assert len(found[1]) < 14


def test_tolerances() -> None:
    assert widen(torch.zeros(1), torch.float64).dtype == torch.float64
    assert widen(torch.zeros(1, dtype=torch.float64), torch.float32).dtype == torch.float64
    assert widen(torch.zeros(1, dtype=torch.int8), torch.float32).dtype == torch.int8
    assert find_split_tolerance(torch.float64, False, 1e-9) == 1e-8
    assert find_split_tolerance(torch.float64, False, 1e-9, is_strict=True) == 1e-8
    assert find_split_tolerance(torch.float64, True, 1e-9) == 2e-3
    assert find_split_tolerance(torch.float32, False, 2e-4) == 2e-3
    assert find_split_tolerance(torch.float32, True, 2e-4, is_strict=True) == 3e-6
    assert find_repetition_rounding(2e-4) == 1e-5
    assert find_repetition_rounding(1e-9) == 1e-9
    assert find_repetition_rounding(0.02) == 0.02
    # With TF32, which has the rounding of float16.
    assert find_split_tolerance(torch.float32, True, 0.02, is_strict=True) == 0.02

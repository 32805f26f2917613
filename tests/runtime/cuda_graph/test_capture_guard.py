"""The capture guard by itself: `meta` is the captured device, and `cpu` is the host."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.errors import MissingExtra
from penstock.runtime.cuda_graph.capture_guard import (
    CaptureError,
    CaptureGuard,
    ConstantFillMode,
    is_capturing,
    locate_capture_errors,
)
from penstock.runtime.cuda_graph.graph_rng import HostRngGuard

META = frozenset({"meta"})
HOST = frozenset({"cpu"})


def there(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def guarded(do: Callable[[], Any], kinds: frozenset[str] = META) -> Any:
    with ConstantFillMode(kinds), CaptureGuard(kinds):
        return do()


on_the_host = torch.ones(3)


@pytest.mark.parametrize(
    "do",
    [
        lambda: there(3) + 1,
        lambda: there(3) @ there(3, 4),
        lambda: there(3) * 0.5,
        lambda: torch.zeros(3, device="meta"),
        lambda: torch.tensor(0.5, device="meta") * there(3),
        lambda: torch.tensor([1.0, 2.0, 3.0], device="meta") * there(3),
        lambda: torch.as_tensor(2, device="meta"),
        lambda: torch.tensor(0.5).to("meta") * there(3),
        lambda: torch.tensor(0.5) * there(3),
        lambda: torch.arange(3).to("meta") + there(3),
        lambda: (torch.arange(4) * 2.0 + 1).to("meta", torch.float64),
        lambda: torch.full((3,), 2.0).to("meta"),
        lambda: there(3).to(torch.float64),
        lambda: there(5)[torch.arange(3, device="meta")],
        lambda: there(5, 2).index_select(0, torch.arange(3, device="meta")),
        lambda: there(3).new_tensor([1.0, 2.0, 3.0]),
        lambda: there(3).new_zeros(4),
        lambda: torch.ones_like(there(3)),
        lambda: there(3).masked_fill(there(3).bool(), 0.0),
        lambda: torch.where(there(3) > 0, there(3), 0.0),
        lambda: float(torch.tensor(2.0).sqrt()) * there(3),
        lambda: torch.nn.functional.scaled_dot_product_attention(
            there(1, 2, 4, 8), there(1, 2, 4, 8), there(1, 2, 4, 8)
        ),
        lambda: there(3).clone().detach().requires_grad_().square().sum().backward(),
        lambda: torch.repeat_interleave(
            there(3), torch.ones(3, dtype=torch.int64, device="meta"), output_size=3
        ),
    ],
)
def test_capture_guard_accepts_operations_that_a_replay_repeats(do: Callable[[], Any]) -> None:
    made = guarded(do)
    assert made is None or made.device.type == "meta"


@pytest.mark.parametrize(
    ("do", "text"),
    [
        (lambda: there(3).sum().item(), "waits for a value on the device .aten._local"),
        (lambda: bool(there(3).any()), "waits for a value on the device"),
        (lambda: there(3).nonzero(), "waits for a value on the device .aten.nonzero"),
        (lambda: there(3)[there(3) > 0], "waits for a value on the device .*aten.index.Tensor"),
        (lambda: torch.masked_select(there(3), there(3) > 0), "waits"),
        (lambda: torch.repeat_interleave(torch.ones(3, dtype=int, device="meta")), "waits"),  # type: ignore[call-overload]
        (lambda: torch.unique(there(3)), "waits"),
        (lambda: there(3).tolist(), "waits|copies"),
        (lambda: on_the_host.to("meta"), "a tensor in host memory .*in a buffer"),
        (lambda: on_the_host.to("meta", torch.float64), "a tensor in host memory"),
        (lambda: there(3).copy_(on_the_host), "a tensor in host memory"),
        (lambda: on_the_host + 1, "a tensor in host memory"),
        (lambda: there(3).to("cpu"), "copies between the host and the device"),
        (lambda: torch.zeros(3).copy_(there(3)), "copies between the host and the device"),
        (lambda: torch.arange(100).to("meta"), "copies 100 numbers from host memory"),
        (lambda: torch.tensor(np.ones(3), device="meta"), "a tensor from a NumPy array"),
        (lambda: torch.from_numpy(np.ones(3)).to("meta"), "a tensor in host memory"),
        (lambda: torch.rand(3, device="meta"), "draws random numbers, but drew none"),
        (lambda: torch.rand(3), "draws random numbers"),
        (lambda: torch.randperm(3), "draws random numbers"),
        (lambda: nn.Dropout()(there(3)), "draws random numbers"),
        (
            lambda: torch.rand(3, generator=torch.Generator()).to("meta"),
            "from its own torch.Generator, .* Draw without a generator",
        ),
    ],
)
def test_capture_guard_refuses_operations_that_a_replay_would_not_repeat(
    do: Callable[[], Any], text: str
) -> None:
    with pytest.raises(CaptureError, match=text):
        guarded(do)


def test_constant_fill_mode_creates_tensors_from_python_numbers() -> None:
    """Each number is filled in separately, with the right position and dtype."""
    for made, expected in (
        (lambda: torch.tensor([[1, 2], [3, 4]], device="cpu"), torch.tensor([[1, 2], [3, 4]])),
        (lambda: torch.tensor(0.5, device="cpu", dtype=torch.float64), torch.tensor(0.5).double()),
        (lambda: torch.tensor([True, False], device="cpu"), torch.tensor([True, False])),
        (lambda: torch.tensor([], device="cpu"), torch.tensor([])),
    ):
        found = guarded(made, HOST)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    like = torch.ones(2, dtype=torch.float64)
    made_like = guarded(lambda: like.new_tensor([1, 2]), HOST)
    assert torch.equal(made_like, torch.tensor([1.0, 2.0], dtype=torch.float64))
    learned = guarded(lambda: torch.tensor([1.0], device="cpu", requires_grad=True), HOST)
    assert learned.requires_grad
    assert learned.is_leaf


def test_capture_guard_allows_registered_and_shared_generators() -> None:
    guard, mine = CaptureGuard(HOST), torch.Generator()
    guard.register_generator(mine)
    with guard:
        torch.rand(3, generator=mine)
        with guard.allow_shared_generator():
            torch.rand(3)
        with pytest.raises(CaptureError, match="draws random numbers"):
            torch.rand(3)
        assert is_capturing()
    assert not is_capturing()


def test_capture_error_names_the_layer_and_the_line() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    model = nn.Sequential(nn.ReLU(), nn.Sequential(Inner()))
    names = {module: name for name, module in model.named_modules()}
    with (
        pytest.raises(
            CaptureError, match=r"^layer 1.0 \(Inner\), .*test_capture_guard.py:\d+: it waits"
        ),
        locate_capture_errors(lambda: names),
        CaptureGuard(HOST),
    ):
        model(torch.ones(3))
    with (
        pytest.raises(CaptureError, match=r"^.*test_capture_guard.py:\d+: ValueError: no") as found,
        locate_capture_errors(lambda: names),
    ):
        raise ValueError("no")
    assert found.value.is_transient
    assert isinstance(found.value.__cause__, ValueError)
    with (
        pytest.raises(CaptureError, match="RuntimeError: operation not permitted") as found,
        locate_capture_errors(lambda: names),
    ):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")
    assert not found.value.is_transient
    assert "more" not in str(found.value)


@pytest.mark.parametrize(
    ("error", "is_transient"),
    [
        (torch.AcceleratorError("CUDA error: invalid argument"), False),
        (RuntimeError("Cannot call current_seed during CUDA graph capture."), False),
        (MissingExtra("cuda-bindings", "cuda", "a timeline"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_the_capture_itself_are_not_transient(
    error: Exception, is_transient: bool
) -> None:
    with pytest.raises(CaptureError) as caught, locate_capture_errors(dict):
        raise error
    assert caught.value.is_transient == is_transient


def test_host_rng_guard_detects_and_restores_random_and_numpy() -> None:
    for draw, name in ((random.random, "random"), (np.random.rand, "numpy.random")):
        host = HostRngGuard()
        host.check_unchanged()
        first = draw()
        with pytest.raises(CaptureError, match=f"draws from {name} in every step"):
            host.check_unchanged()
        host.restore()
        host.check_unchanged()
        assert draw() == first

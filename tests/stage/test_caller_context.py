from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipe
from penstock.stage.caller_context import CallerContext
from tests.support import Watch, each_checkpoint, each_runtime, same_gradients

CPU = frozenset({"cpu"})
FACTOR = ContextVar("factor", default=1.0)


def state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.get_default_dtype(),
    )


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": torch.enable_grad,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "switched off": lambda: torch.autocast("cpu", enabled=False),
}


@each_runtime
@pytest.mark.parametrize("mode", MODES)
def test_layers_run_under_the_autocast_and_grad_modes_of_the_caller(
    mode: str, runtime: str
) -> None:
    seen = []
    layers = [Watch(lambda x: seen.append(state())) for _ in range(2)]
    pipe = Pipe(nn.Sequential(*layers), 2, "never", stages=2, runtime=runtime)
    x = torch.zeros(4, 1)
    with MODES[mode]():
        here = state()
        pipe(x)
    assert seen == [here] * 4
    pipe(x)
    assert seen[4:] == [state()] * 4


@each_runtime
def test_recomputation_runs_under_the_autocast_mode_of_its_forward(runtime: str) -> None:
    seen = []
    linear = nn.Linear(2, 2)
    layers = nn.Sequential(linear, Watch(lambda x: seen.append((x.dtype, *state()[2:]))))
    pipe = Pipe(layers, 2, "always", stages=2, runtime=runtime)
    with torch.autocast("cpu", torch.bfloat16):
        y = pipe(torch.zeros(4, 2))
    y.float().sum().backward()
    assert seen == [(torch.bfloat16, True, torch.bfloat16, torch.float32)] * 4


@each_runtime
def test_layer_that_enters_no_grad_itself(runtime: str) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y: Tensor = x + self.linear(x)
            return y

    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), Frozen(), nn.Linear(2, 2)), 2, stages=3)
    y = pipe(torch.ones(4, 2))
    y.sum().backward()
    grads = [p.grad for p in pipe.parameters()]
    assert [g is None or not g.any() for g in grads] == [True, True, True, True, False, False]


def test_default_dtype_of_the_caller_applies_in_stages() -> None:
    seen = []
    pipe = Pipe(nn.Sequential(Watch(lambda x: seen.append(torch.zeros(1).dtype))), 2)
    torch.set_default_dtype(torch.float64)
    try:
        pipe(torch.zeros(2, 1))
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen == [torch.float64, torch.float64]


@each_runtime
@each_checkpoint
def test_layers_and_their_recomputation_see_the_context_variables_of_the_caller(
    checkpoint: str, runtime: str
) -> None:
    seen = []
    layers = [Watch(lambda x: seen.append(FACTOR.get())) for _ in range(2)]
    model = nn.Sequential(nn.Linear(1, 1), *layers)
    pipe = Pipe(model, 2, checkpoint, stages=[2, 1], runtime=runtime)
    token = FACTOR.set(3.0)
    try:
        loss = pipe(torch.zeros(4, 1)).sum()
    finally:
        FACTOR.reset(token)
    loss.backward()  # outside of the context
    assert set(seen) == {3.0}
    pipe(torch.zeros(4, 1))
    assert set(seen[-4:]) == {1.0}


LOCAL = threading.local()


class ReadsLocal(nn.Linear):
    """A layer that reads thread-local values in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__(1, 1)
        self.how, self.local, local = how, LOCAL, LOCAL
        self.read: Callable[[], float] = lambda: getattr(local, "factor", 1.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "global":
            factor = getattr(LOCAL, "factor", 1.0)
        else:
            factor = self.read() if self.how == "closure" else getattr(self.local, "factor", 1.0)
        return super().forward(x) * factor


@each_runtime
@each_checkpoint
@pytest.mark.parametrize("how", ["global", "closure", "attribute"])
def test_layers_and_their_recomputation_see_the_thread_local_values_of_the_caller(
    how: str, checkpoint: str, runtime: str
) -> None:
    """Worker threads had values of their own, and found the defaults."""
    model, unsplit = (nn.Sequential(ReadsLocal(how), ReadsLocal(how)).double() for _ in range(2))
    unsplit.load_state_dict(model.state_dict())
    x = torch.randn(4, 1).double()
    pipe = Pipe(model, 2, checkpoint, stages=2, devices=["cpu"] * 2, runtime=runtime)
    try:
        for factor in (None, 3.0, None, 2.0):
            if factor is not None:
                LOCAL.factor = factor
            else:
                vars(LOCAL).pop("factor", None)
            outputs = pipe(x), unsplit(x)
            LOCAL.factor = 7.0  # a recomputation sees the value of its forward
            for output in outputs:
                output.sum().backward()
            assert torch.allclose(*outputs, rtol=1e-10)
            assert same_gradients(model, unsplit)
            assert LOCAL.factor == 7.0
    finally:
        vars(LOCAL).pop("factor", None)


@each_runtime
@each_checkpoint
def test_loss_function_sees_the_thread_local_values_of_the_caller(
    checkpoint: str, runtime: str
) -> None:
    """The loss was right until the value of the caller was not the default any more."""
    local = threading.local()
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).double()
    pipe = Pipe(model, 2, checkpoint, stages=2, devices=["cpu"] * 2, runtime=runtime)
    x = torch.randn(4, 1).double()
    for factor in (1.0, 3.0):
        local.factor = factor
        result = pipe.step(x, loss_fn=lambda y: y.mean() * getattr(local, "factor", 1.0))
        assert torch.allclose(result.loss, model(x).mean() * factor, rtol=1e-10)


# ---- CallerContext itself -----------------------------------------------------------------


def test_caller_context_captures_the_modes_of_the_current_thread() -> None:
    here = CallerContext.current(CPU)
    assert (
        here.grad_enabled,
        here.inference_mode,
        here.autocast_dtypes,
        here.is_grad_mode_only,
    ) == (True, False, (), True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        here = CallerContext.current(CPU)
    assert (here.grad_enabled, here.autocast_dtypes, here.is_grad_mode_only) == (
        False,
        (("cpu", torch.bfloat16),),
        False,
    )
    assert not here.autocast_cache_enabled


def test_caller_context_is_applied_for_forward() -> None:
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"), hooks:
        context = CallerContext.current(CPU)
    assert not torch.is_autocast_enabled("cpu")
    with context.apply_for_forward():
        assert torch.is_autocast_enabled("cpu")
        assert torch.zeros(1).device == torch.device("meta")
        torch.ones(1, requires_grad=True, device="cpu").exp()
    assert len(packed) == 1
    assert torch.zeros(1).device == torch.device("cpu")

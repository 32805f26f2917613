"""Hooks on accumulated gradients in a step: they may read gradients, and mask them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Pipe, RunError
from tests.support import same_gradients

WIDTH = 4


def clip(parameter: Any) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


def halve(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


def replace_by_sign(parameter: Any) -> None:
    parameter.grad = parameter.grad.sign()


def take_away(parameter: Any) -> None:
    parameter.grad = None


def keep_largest(parameter: Any) -> None:
    """Set other entries to 0 for each micro-batch."""
    parameter.grad[parameter.grad.abs() < parameter.grad.abs().median()] = 0


def mask(parameter: Any) -> None:
    parameter.grad[::2] = 0


def read(parameter: Any) -> None:
    assert parameter.grad.isfinite().all()


Hook = Callable[[Any], None]


def build(schedule: str, chunks: int, hook: Hook, **options: Any) -> tuple[Pipe, nn.Module]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4)]
    model = nn.Sequential(layers[0], nn.Tanh(), *layers[1:])
    options = {"stages": 2, "devices": ["cpu"] * 2, "loss_fn": functional.mse_loss, **options}
    pipe = Pipe(copy.deepcopy(model), chunks, schedule=schedule, **options)
    for module in (pipe, model):
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
    return pipe, model


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, WIDTH).double(), torch.randn(8, WIDTH).double()


each_schedule = pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])


@each_schedule
@pytest.mark.parametrize("hook", [clip, halve, replace_by_sign, take_away, keep_largest])
def test_hook_that_changes_the_gradient_is_refused(hook: Hook, schedule: str) -> None:
    pipe, _ = build(schedule, 3, hook)
    x, y = batch()
    with pytest.raises(RunError, match=r"changes the \.grad of a parameter of stage"):
        pipe.step(x, target=y)


@pytest.mark.parametrize("hook", [clip, halve, replace_by_sign, keep_largest])
def test_hook_that_changes_the_gradient_is_equal_where_it_runs_once(hook: Hook) -> None:
    x, y = batch()
    for chunks, door in ((1, "step"), (3, "call")):
        pipe, model = build("1f1b", chunks, hook)
        functional.mse_loss(model(x), y).backward()
        if door == "step":
            pipe.step(x, target=y)
        else:
            functional.mse_loss(pipe(x), y).backward()
        assert same_gradients(pipe, model)


@each_schedule
@pytest.mark.parametrize("hook", [mask, read])
def test_hook_that_masks_or_reads_the_gradient_is_equal(hook: Hook, schedule: str) -> None:
    pipe, model = build(schedule, 3, hook)
    for _ in range(2):
        x, y = batch()
        functional.mse_loss(model(x), y).backward()
        pipe.step(x, target=y)
        assert same_gradients(pipe, model)


def test_hooks_keep_their_order() -> None:
    seen: list[str] = []
    pipe, _ = build("1f1b", 2, lambda _: seen.append("first"))
    for parameter in pipe.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append("second"))
    x, y = batch()
    pipe.step(x, target=y)
    assert seen == ["first", "second"] * (len(seen) // 2)
    assert all(len(p._post_accumulate_grad_hooks or {}) == 2 for p in pipe.parameters())


def test_hook_of_a_sparse_gradient_may_read_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)).double()
    pipe = Pipe(copy.deepcopy(model), 2, stages=2, devices=["cpu"] * 2, loss_fn=functional.mse_loss)
    words, y = torch.tensor([0, 1, 2, 1]), torch.randn(4, WIDTH).double()
    for module in (pipe, model):
        module.get_parameter("0.weight").register_post_accumulate_grad_hook(lambda _: None)
    pipe.step(words, target=y)
    functional.mse_loss(model(words), y).backward()
    weights = [m.get_parameter("0.weight").grad for m in (pipe, model)]
    torch.testing.assert_close(*[weight.to_dense() for weight in weights if weight is not None])


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
def test_hook_of_a_tied_parameter_is_refused_with_one_micro_batch(devices: list[str]) -> None:
    """Two stages add to the gradient, one after the other."""
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2)]
    layers[1].weight = layers[0].weight
    layers[0].weight.register_post_accumulate_grad_hook(clip)
    pipe = Pipe(nn.Sequential(*layers), stages=2, devices=devices, loss_fn=functional.mse_loss)
    x, y = batch()
    with pytest.raises(RunError, match="each stage that uses the parameter"):
        pipe.step(x, target=y)

"""Hooks on gradients of parameters in a step: they run once, with the gradient of the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional

import penstock
from penstock import Pipe, RunError
from tests.support import closely, same_gradients

WIDTH = 4


# ---- after the gradient is accumulated ---------------------------------------------------------


def clip(parameter: Any) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


def halve(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


def replace_by_sign(parameter: Any) -> None:
    parameter.grad = parameter.grad.sign()


def keep_largest(parameter: Any) -> None:
    parameter.grad[parameter.grad.abs() < parameter.grad.abs().median()] = 0


def mask(parameter: Any) -> None:
    parameter.grad[::2] = 0


def read(parameter: Any) -> None:
    assert parameter.grad.isfinite().all()


Hook = Callable[[Any], Any]


def build(
    schedule: str,
    chunks: int,
    hook: Hook,
    kind: str = "register_post_accumulate_grad_hook",
    **options: Any,
) -> tuple[Pipe, nn.Module]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4)]
    model = nn.Sequential(layers[0], nn.Tanh(), *layers[1:])
    options = {"stages": 2, "devices": ["cpu"] * 2, "loss_fn": functional.mse_loss, **options}
    pipe = Pipe(copy.deepcopy(model), chunks, schedule=schedule, **options)
    for module in (pipe, model):
        for parameter in module.parameters():
            getattr(parameter, kind)(hook)
    return pipe, model


def batch(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    return torch.randn(8, WIDTH).double(), scale * torch.randn(8, WIDTH).double()


each_schedule = pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])


@each_schedule
@pytest.mark.parametrize("hook", [clip, halve, replace_by_sign, keep_largest, mask, read])
def test_hook_that_changes_the_accumulated_gradient(hook: Hook, schedule: str) -> None:
    """The second step adds to the gradient that the hook has left in the first one."""
    for chunks, door in ((1, "step"), (3, "step"), (3, "call")):
        pipe, model = build(schedule, chunks, hook)
        for _ in range(2):
            x, y = batch()
            functional.mse_loss(model(x), y).backward()
            if door == "step":
                pipe.step(x, target=y)
            else:
                functional.mse_loss(pipe(x), y).backward()
            assert same_gradients(pipe, model)


@each_schedule
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_optimizer_that_steps_in_the_backward(schedule: str, checkpoint: str) -> None:
    def step(parameter: Any) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    pipe, model = build(schedule, 3, step, checkpoint=checkpoint)
    for _ in range(3):
        x, y = batch()
        functional.mse_loss(model(x), y).backward()
        pipe.step(x, target=y)
    assert all(map(closely, pipe.parameters(), model.parameters()))
    assert all(parameter.grad is None for parameter in pipe.parameters())


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
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hook_of_a_tied_parameter_sees_the_sum_of_its_stages(
    kind: str, chunks: int, devices: list[str]
) -> None:
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2)]
    layers[1].weight = layers[0].weight
    model = nn.Sequential(*layers)
    piped = copy.deepcopy(model)
    for module in (model, piped):
        hook: Any = clip if "post" in kind else lambda gradient: gradient.clamp(-0.01, 0.01)
        getattr(module[0].weight, kind)(hook)
    pipe = Pipe(piped, chunks, stages=2, devices=devices, loss_fn=functional.mse_loss)
    x, y = batch()
    pipe.step(x, target=y)
    functional.mse_loss(model(x), y).backward()
    assert same_gradients(pipe, model)


# ---- before the gradient is accumulated --------------------------------------------------------


@each_schedule
@pytest.mark.parametrize("runtime", ["threads", "inline"])
def test_clip_that_begins_in_a_later_step(schedule: str, runtime: str) -> None:
    def clip_by_value(gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.5, 0.5)

    pipe, model = build(schedule, 3, clip_by_value, "register_hook", runtime=runtime)
    for scale in (1e-3, 1.0, 100.0):
        x, y = batch(scale)
        functional.mse_loss(model(x), y).backward()
        pipe.step(x, target=y)
        assert same_gradients(pipe, model)
    assert max(float(p.grad.abs().max()) for p in pipe.parameters() if p.grad is not None) > 0.4


def test_decay_of_a_bias_that_is_zero_at_first() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
    nn.init.zeros_(model.get_parameter("0.bias"))
    pipe = Pipe(copy.deepcopy(model), 4, stages=2, devices=["cpu"] * 2, loss_fn=functional.mse_loss)
    for module in (pipe, model):
        bias = module.get_parameter("0.bias")
        bias.register_hook(lambda gradient, bias=bias: gradient + 0.5 * bias.detach())
    for _ in range(3):
        x, y = batch()
        for module in (pipe, model):
            module.zero_grad()
        pipe.step(x, target=y)
        functional.mse_loss(model(x), y).backward()
        assert same_gradients(pipe, model)
        with torch.no_grad():
            for parameter in (*pipe.parameters(), *model.parameters()):
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.5)


def test_hook_that_reads_a_variable_of_the_script() -> None:
    decay = 0.0
    pipe, model = build("1f1b", 4, lambda g: g.sign() * decay + g, "register_hook")
    for decay in (0.0, 0.5):  # noqa: B007 (the hook reads it)
        x, y = batch()
        pipe.step(x, target=y)
        functional.mse_loss(model(x), y).backward()
        assert same_gradients(pipe, model)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_see_the_final_scale_of_a_loss_with_weights(kind: str) -> None:
    def weigh(output: Tensor, target: Tensor) -> penstock.Weighted:
        weight = (target[:, 0] > 0).sum() + 1.0
        return penstock.Weighted(functional.mse_loss(output, target), weight)

    hook: Hook = clip if "post" in kind else lambda gradient: gradient.clamp(-0.01, 0.01)
    pipe, model = build("1f1b", 4, hook, kind, loss_fn=weigh)
    for _ in range(2):
        x, y = batch()
        pipe.step(x, target=y)
        pairs = [
            weigh(model(rows), part) for rows, part in zip(x.chunk(4), y.chunk(4), strict=True)
        ]
        total = sum(pair.weight for pair in pairs)
        torch.stack([pair.loss * pair.weight / total for pair in pairs]).sum().backward()
        assert same_gradients(pipe, model)


def test_hook_of_several_parameters_runs_once() -> None:
    pipe, model = build("zb-h1", 3, lambda _: None)
    seen: dict[nn.Module, list[Any]] = {pipe: [], model: []}
    for module, calls in seen.items():
        register_multi_grad_hook(list(module.parameters()), calls.append)
    x, y = batch()
    pipe.step(x, target=y)
    functional.mse_loss(model(x), y).backward()
    ((found,), (expected,)) = seen.values()
    assert all(map(closely, found, expected))


def test_hooks_run_in_the_order_of_a_backward() -> None:
    """A hook of several gradients changed one in place before it was in `.grad`, and not after."""
    pipe, model = build("1f1b", 3, lambda _: None)
    orders: dict[nn.Module, list[str]] = {pipe: [], model: []}
    for module, order in orders.items():
        for name, parameter in module.named_parameters():
            if name.endswith("weight"):
                parameter.register_hook(lambda _, order=order, name=name: order.append(name))
        weights = [p for name, p in module.named_parameters() if name.endswith("weight")]
        register_multi_grad_hook([weights[-1], weights[0]], lambda grads: grads[0].mul_(2))
    x, y = batch()
    pipe.step(x, target=y)
    functional.mse_loss(model(x), y).backward()
    assert orders[pipe] == orders[model] == sorted(orders[pipe], reverse=True)
    assert same_gradients(pipe, model)


def test_hook_of_a_recurrent_layer() -> None:
    """Its forward computes with a list of the parameters that it keeps."""

    class Recurrent(nn.LSTM):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x)[0]

    model = nn.Sequential(Recurrent(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 1)).double()
    pipe = Pipe(copy.deepcopy(model), 4, stages=2, devices=["cpu"] * 2, loss_fn=functional.mse_loss)
    for module in (pipe, model):
        module.get_parameter("0.weight_ih_l0").register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    x, y = torch.randn(8, 3, WIDTH).double(), torch.randn(8, 3, 1).double()
    pipe.step(x, target=y)
    functional.mse_loss(model(x), y).backward()
    assert same_gradients(pipe, model)


def test_failed_step_puts_hooks_and_gradients_back() -> None:
    seen: list[Tensor] = []
    pipe, _ = build("1f1b", 2, seen.append, "register_hook")
    x, y = batch()
    pipe.step(x, target=y)
    gradients = [(p.grad, None if p.grad is None else p.grad.clone()) for p in pipe.parameters()]
    count = len(seen)

    def fail(output: Tensor, target: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pipe.step(x, target=y, loss_fn=fail)
    for parameter, (gradient, before) in zip(pipe.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert gradient is not None
        assert before is not None
        assert torch.equal(gradient, before)
    pipe.step(x, target=y)
    assert len(seen) == 2 * count == 2 * len(gradients)


def test_hook_that_a_layer_registers_in_its_forward_is_refused() -> None:
    class Hooks(nn.Linear):
        is_late = False

        def forward(self, x: Tensor) -> Tensor:
            if self.is_late:
                self.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
            return super().forward(x)

    layer = Hooks(WIDTH, WIDTH, dtype=torch.float64)
    layer.weight.register_hook(lambda gradient: 0.5 * gradient)
    pipe = Pipe(nn.Sequential(layer), 2, devices=["cpu"], loss_fn=functional.mse_loss, audit="off")
    x, y = batch()
    pipe.step(x, target=y)
    layer.is_late = True
    with pytest.raises(RunError, match="has registered a hook on its parameter of shape"):
        pipe.step(x, target=y)
    assert len(layer.weight._backward_hooks or {}) == 1

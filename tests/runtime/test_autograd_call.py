"""`pipe(x)` behaves like the model, and its output can be used like the model's output."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Pipe, RunError
from tests.support import (
    Do,
    batch,
    both,
    closely,
    each_checkpoint,
    each_runtime,
    network,
    same_gradients,
    without_gc,
)

# ---- forwards and backwards in any order --------------------------------------------------


@each_runtime
@each_checkpoint
@pytest.mark.parametrize("first", [0, 1])
def test_two_forwards_before_a_backward(first: int, checkpoint: str, runtime: str) -> None:
    model, pipe = both(checkpoint=checkpoint, runtime=runtime)
    (x, target), (y, other) = batch(7), batch(4)
    for module in (model, pipe):
        losses = [
            functional.mse_loss(module(x), target), functional.mse_loss(module(2 * y), other)
        ]  # fmt: skip
        losses[first].backward()
        losses[1 - first].backward()
    assert same_gradients(pipe, model)


@each_runtime
@each_checkpoint
def test_one_backward_through_two_pipe_calls(checkpoint: str, runtime: str) -> None:
    """Both forwards contribute to one loss, as in contrastive learning."""
    model, pipe = both(checkpoint=checkpoint, runtime=runtime)
    x, _ = batch(7)
    for module in (model, pipe):
        (module(x) * module(x.flip(1))).sum().backward()
    assert same_gradients(pipe, model)


@each_checkpoint
def test_parameters_with_one_gradient_in_common(checkpoint: str) -> None:
    """Autograd returns one tensor as the gradient of both terms of an addition."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.ones(6).double()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.a + self.b)

    model, pipe = both(nn.Sequential(Sums(), Sums()), checkpoint=checkpoint, stages=2, chunks=4)
    for module in (model, pipe):
        module(batch(8)[0]).sum().backward()
    assert same_gradients(pipe, model)


@each_runtime
@each_checkpoint
def test_pipe_between_other_modules(checkpoint: str, runtime: str) -> None:
    _, pipe = both(checkpoint=checkpoint, runtime=runtime)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 6), pipe, nn.Linear(3, 2)).double()
    reference = nn.Sequential(
        copy.deepcopy(model[0]), nn.Sequential(*copy.deepcopy(list(pipe))), copy.deepcopy(model[2])
    )
    x = torch.randn(5, 2, dtype=torch.float64)
    for module in (model, reference):
        module(x).square().sum().backward()
    assert same_gradients(model, reference)


def test_backward_through_a_slice_of_the_output() -> None:
    model, pipe = both(checkpoint="always")
    x, _ = batch(7)
    for module in (model, pipe):
        module(x)[1, :2].sum().backward()
    assert same_gradients(pipe, model)


@each_checkpoint
def test_backward_through_one_of_several_outputs(checkpoint: str) -> None:
    """Unused outputs, and layers used only by them, get no gradient."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 1), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"a": self.a(x), "b": self.b(x), "mean": x.mean()}

    pipe = Pipe(nn.Sequential(nn.Linear(6, 6), Two()), 2, checkpoint, stages=2)
    found = pipe(torch.randn(4, 6))
    assert [mean.shape for mean in found["mean"]] == [(), ()]
    (found["a"].sum() + found["mean"][0]).backward()
    assert pipe[0].weight.grad is not None
    assert pipe[1].a.weight.grad is not None
    assert pipe[1].b.weight.grad is None


# ---- frozen parameters and inputs with gradients ------------------------------------------


@each_runtime
@each_checkpoint
def test_pipe_without_parameters(checkpoint: str, runtime: str) -> None:
    pipe = Pipe(
        nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Softmax(1)), 3, checkpoint, stages=[1, 1, 1],
        runtime=runtime,
    )  # fmt: skip
    x = torch.randn(5, 2, 2, dtype=torch.float64)
    assert not pipe(x).requires_grad
    x.requires_grad_()
    found = torch.autograd.grad(pipe(x).square().sum(), x)
    wanted = torch.autograd.grad(x.tanh().flatten(1).softmax(1).square().sum(), x)
    assert closely(found[0], wanted[0])


@each_checkpoint
def test_integer_inputs_and_outputs(checkpoint: str) -> None:
    choose = Do(lambda x: (x, x.argmax(1)))
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3), choose).double()
    pipe = Pipe(copy.deepcopy(model), 2, checkpoint, stages=3)
    x = torch.arange(7)
    y, choice = pipe(x)
    assert not choice.requires_grad
    assert torch.equal(choice, model(x)[1])
    y.sum().backward()
    model(x)[0].sum().backward()
    assert same_gradients(pipe, model)


# ---- without gradients --------------------------------------------------------------------


@each_runtime
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_pipe_call_under_no_grad_and_inference_mode(mode: Any, runtime: str) -> None:
    model, pipe = both(checkpoint="always", runtime=runtime)
    x, _ = batch(7)
    with mode():
        y = pipe(x)
    assert not y.requires_grad
    assert closely(y.clone(), model(x).detach())
    pipe(x).square().mean().backward()


@each_runtime
def test_eval_mode_trains_without_dropout_and_statistics(runtime: str) -> None:
    model = network()
    pipe = Pipe(copy.deepcopy(model), 3, stages=[5, 5], runtime=runtime)
    x, _ = batch(7)
    before = copy.deepcopy(pipe.state_dict())
    for module in (model, pipe):
        module.eval()
        module(x).square().sum().backward()
    assert same_gradients(pipe, model)
    assert all(torch.equal(pipe.state_dict()[name], before[name]) for name in before)


# ---- hooks --------------------------------------------------------------------------------


def test_hooks_on_the_pipe() -> None:
    _, pipe = both()
    calls = []
    pipe.register_forward_pre_hook(lambda module, given: calls.append("before"))
    pipe.register_forward_hook(lambda module, given, found: calls.append("after"))
    pipe.register_full_backward_hook(lambda module, of_inputs, of_outputs: calls.append("back"))
    x = batch(7)[0].requires_grad_()
    pipe(x).sum().backward()
    assert calls == ["before", "after", "back"]


@each_runtime
def test_hooks_on_layers_run_once_per_cell(runtime: str) -> None:
    _, pipe = both(checkpoint="never", runtime=runtime)
    rows: dict[str, list[int]] = {"forward": [], "backward": []}
    pipe[2].register_forward_hook(lambda module, given, found: rows["forward"].append(len(found)))
    pipe[2].register_full_backward_hook(
        lambda module, of_inputs, of_outputs: rows["backward"].append(len(of_outputs[0]))
    )
    pipe(batch(7)[0]).sum().backward()
    assert rows == {"forward": [3, 3, 1], "backward": [1, 3, 3]}


@each_runtime
@each_checkpoint
def test_post_accumulate_grad_hooks_run_once_per_backward(checkpoint: str, runtime: str) -> None:
    """Optimizers and wrappers with such hooks see the whole gradient, in the calling thread."""
    model, pipe = both(checkpoint=checkpoint, runtime=runtime)
    seen = []
    for parameter in pipe.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x, _ = batch(7)
    for module in (model, pipe):
        module(x).sum().backward()
    assert len(seen) == len(list(pipe.parameters()))
    assert same_gradients(pipe, model)


def test_second_backward_is_refused() -> None:
    _, pipe = both()
    loss = pipe(batch(4)[0]).sum()
    loss.backward()
    with pytest.raises(RunError, match=r"a second time. The first backward freed the saved"):
        loss.backward()


def test_hook_on_a_parameter_without_a_gradient_is_refused() -> None:
    """Such a hook got None, which few hooks expect. Of a tied weight, one use is enough."""
    layers = [nn.Linear(4, 4), Do(lambda x: x * 2), nn.Linear(4, 4)]
    tied, unused = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    layers[0].weight = layers[1].weight = tied
    layers[1].unused = unused
    pipe = Pipe(nn.Sequential(*layers), 2, stages=3, devices=["cpu"] * 3)
    tied.register_hook(lambda gradient: gradient * 0)
    pipe(torch.ones(4, 4)).sum().backward()
    assert tied.grad is not None
    assert not tied.grad.any()
    unused.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(RunError, match=r"a parameter of shape \(4,\) has a hook, but no gradient"):
        pipe(torch.ones(4, 4)).sum().backward()
    pipe.step(torch.ones(4, 4), loss_fn=torch.sum)


# ---- memory -------------------------------------------------------------------------------


def test_retain_graph_keeps_saved_tensors_until_the_last_backward() -> None:
    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark = Mark()
            marks.append(weakref.ref(ctx.mark))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    class Mark: ...

    marks: list[weakref.ref[Mark]] = []
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), Do(Saves.apply)), 2, "never", stages=2)
    with without_gc():
        loss = pipe(torch.randn(4, 3)).sum()
        loss.backward(retain_graph=True)
        assert [mark() is None for mark in marks] == [False, False]
        loss.backward()
        assert [mark() is None for mark in marks] == [True, True]


class WithView(nn.Module):
    """A layer that returns a tensor, a part of its rows, and the same without a gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * 2
        return y, y[:, :2], y.detach()


@each_runtime
@each_checkpoint
@pytest.mark.parametrize("trains", [False, True])
def test_outputs_that_share_memory_are_changed_in_place(
    trains: bool, checkpoint: str, runtime: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), WithView()).double()
    pipe = Pipe(copy.deepcopy(model), 3, checkpoint, stages=2, devices=["cpu"] * 2, runtime=runtime)
    x = torch.randn(7, 4, dtype=torch.float64)
    results = []
    for module in (model, pipe):
        with torch.set_grad_enabled(trains):
            whole, part, constant = module(x)
            whole.mul_(3.0)
            loss = part.square().sum() + (whole * constant).sum()
        if trains:
            loss.backward()
        results.append(loss.detach())
    assert torch.allclose(results[0], results[1], rtol=1e-12)
    assert not trains or same_gradients(pipe, model)


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        torch.rand(1)
        return gradient


def test_draws_of_a_backward_do_not_make_a_stage_a_stage_that_draws() -> None:
    """Only forwards and recomputations have random numbers of their own."""

    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = DrawsInBackward.apply(super().forward(x))  # type: ignore[no-untyped-call]
            return out

    pipe = Pipe(nn.Sequential(Noisy(2, 2)), 2, "never", devices=["cpu"], audit="off")
    for _ in range(2):
        pipe(torch.ones(4, 2)).sum().backward()
    (stage,) = pipe._placed_partition.partition.stages
    assert [behavior.draws_random for behavior in stage._behaviors.values()] == [False]

"""`pipe(x)` behaves like the model, and its output can be used like the model's output."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import NoChunk, Pipe
from tests.support import (
    Do,
    batch,
    closely,
    each_checkpoint,
    each_runtime,
    network,
    plain,
    without_gc,
)


def both(checkpoint: str = "except_last", **options: Any) -> tuple[nn.Sequential, Pipe]:
    model = plain()
    return model, Pipe(copy.deepcopy(model), 3, checkpoint, **{"stages": 4, **options})


def same_gradients(pipe: nn.Module, model: nn.Module) -> bool:
    pairs = zip(pipe.parameters(), model.parameters(), strict=True)
    return all(
        (p.grad is None and q.grad is None)
        or (p.grad is not None and q.grad is not None and closely(p.grad, q.grad))
        for p, q in pairs
    )


# ---- forwards and backwards in any order --------------------------------------------------


@each_runtime
@each_checkpoint
@pytest.mark.parametrize("first", [0, 1])
def test_two_forwards_before_a_backward(first: int, checkpoint: str, runtime: str) -> None:
    model, pipe = both(checkpoint, runtime=runtime)
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
    model, pipe = both(checkpoint, runtime=runtime)
    x, _ = batch(7)
    for module in (model, pipe):
        (module(x) * module(x.flip(1))).sum().backward()
    assert same_gradients(pipe, model)


@each_runtime
@each_checkpoint
def test_pipe_between_other_modules(checkpoint: str, runtime: str) -> None:
    _, pipe = both(checkpoint, runtime=runtime)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 6), pipe, nn.Linear(3, 2)).double()
    reference = nn.Sequential(
        copy.deepcopy(model[0]), nn.Sequential(*copy.deepcopy(list(pipe))), copy.deepcopy(model[2])
    )
    x = torch.randn(5, 2, dtype=torch.float64)
    for module in (model, reference):
        module(x).square().sum().backward()
    assert same_gradients(model, reference)


def test_second_backward_without_retain_graph_is_refused() -> None:
    _, pipe = both()
    loss = pipe(batch(7)[0]).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"backward through a pipe a second time.*retain_graph"):
        loss.backward()


def test_gradients_accumulate_over_pipe_calls() -> None:
    model, pipe = both()
    x, target = batch(7)
    for module in (model, pipe):
        for _ in range(3):
            functional.mse_loss(module(x), target).backward()
    assert same_gradients(pipe, model)


def test_backward_through_a_slice_of_the_output() -> None:
    model, pipe = both("always")
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
@pytest.mark.parametrize("frozen", [(0,), (2, 3), (0, 2, 3)])
@pytest.mark.parametrize("learns", [False, True])
def test_frozen_parameters(
    learns: bool, frozen: tuple[int, ...], checkpoint: str, runtime: str
) -> None:
    model, pipe = both(checkpoint, runtime=runtime)
    grads = []
    for module in (model, pipe):
        for at in frozen:
            module[at].requires_grad_(False)
        x = batch(7)[0].requires_grad_(learns)
        y = module(x)
        assert y.requires_grad == (learns or len(frozen) < 3)
        if y.requires_grad:
            y.square().sum().backward()
        grads.append(x.grad)
    assert same_gradients(pipe, model)
    assert (grads[0] is None) == (grads[1] is None) == (not learns)
    if learns:
        assert grads[0] is not None
        assert grads[1] is not None
        assert closely(grads[0], grads[1])


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
def test_gradient_flows_to_what_computed_the_input(checkpoint: str) -> None:
    model, pipe = both(checkpoint)
    x, _ = batch(7)
    scale = torch.ones(6, dtype=torch.float64, requires_grad=True)
    gradients = [torch.autograd.grad(module(x * scale).sum(), scale)[0] for module in (model, pipe)]
    assert closely(*gradients)


@each_checkpoint
def test_several_inputs_of_which_some_require_grad(checkpoint: str) -> None:
    def mixed(a: Tensor, index: Tensor, weights: Tensor, flag: str) -> Tensor:
        assert flag == "same"
        return a * weights.sum() + index[:, None]

    pipe = Pipe(nn.Sequential(Do(mixed), nn.Tanh()), 2, checkpoint, stages=2)
    a = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, dtype=torch.float64, requires_grad=True)
    index = torch.arange(5)
    found = torch.autograd.grad(pipe(a, index, NoChunk(weights), "same").sum(), [a, weights])
    wanted = torch.autograd.grad(mixed(a, index, weights, "same").tanh().sum(), [a, weights])
    assert all(map(closely, found, wanted))


@each_checkpoint
def test_integer_inputs_and_outputs(checkpoint: str) -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3), Do(lambda x: (x, x.argmax(1))))
    pipe = Pipe(copy.deepcopy(model), 2, checkpoint, stages=3)
    x = torch.arange(7)
    y, choice = pipe(x)
    assert not choice.requires_grad
    assert torch.equal(choice, model(x)[1])
    y.sum().backward()
    model(x)[0].sum().backward()
    for p, q in zip(pipe.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)).double()
    pipe = Pipe(copy.deepcopy(model), 3, stages=2)
    x = torch.tensor([1, 2, 1, 5, 5])
    for module in (model, pipe):
        module(x).square().sum().backward()
    found, wanted = pipe[0].weight.grad, model[0].weight.grad
    assert isinstance(wanted, Tensor)
    assert found.is_sparse
    assert closely(found.to_dense(), wanted.to_dense())


# ---- without gradients --------------------------------------------------------------------


@each_runtime
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_pipe_call_under_no_grad_and_inference_mode(mode: Any, runtime: str) -> None:
    model, pipe = both("always", runtime=runtime)
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
    _, pipe = both("never", runtime=runtime)
    rows: dict[str, list[int]] = {"forward": [], "backward": []}
    pipe[2].register_forward_hook(lambda module, given, found: rows["forward"].append(len(found)))
    pipe[2].register_full_backward_hook(
        lambda module, of_inputs, of_outputs: rows["backward"].append(len(of_outputs[0]))
    )
    pipe(batch(7)[0]).sum().backward()
    assert rows == {"forward": [3, 3, 1], "backward": [1, 3, 3]}


def tripled(module: nn.Module, gradients: Any) -> Any:
    return (gradients[0] * 3,)


def test_hooks_may_change_outputs_and_gradients_of_a_layer() -> None:
    model, pipe = both("always")
    x, _ = batch(7)
    for module in (model, pipe):
        module[1].register_forward_hook(lambda module, given, found: found * 2)
        module[2].register_full_backward_pre_hook(tripled)
        module(x).sum().backward()
    assert same_gradients(pipe, model)


@each_runtime
@each_checkpoint
def test_post_accumulate_grad_hooks_run_once_per_backward(checkpoint: str, runtime: str) -> None:
    """Optimizers and wrappers with such hooks see the whole gradient, in the calling thread."""
    model, pipe = both(checkpoint, runtime=runtime)
    seen = []
    for parameter in pipe.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x, _ = batch(7)
    for module in (model, pipe):
        module(x).sum().backward()
    assert len(seen) == len(list(pipe.parameters()))
    assert same_gradients(pipe, model)


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

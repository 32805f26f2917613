"""Tests of parameters, modules and buffers that ranks share. features/ has exactness."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Pipe, RunError
from penstock.stage import parameter_proxies
from tests.features.rows import KINDS, WIDTH, WORDS, Adds, language, one_block
from tests.features.rows import of_words as cross_entropy
from tests.support import (
    Do,
    bitwise,
    closely,
    differences,
    each_checkpoint,
    each_runtime,
    run_in_threads,
    same_gradients,
    trained,
    whole,
)

each_kind = pytest.mark.parametrize("kind", KINDS)


def tokens(rows: int = 7) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(0, WORDS, (rows, 3)), torch.randint(0, WORDS, (rows, 3))


def piped(model: nn.Sequential, ranks: int = 4, **options: Any) -> Pipe:
    given = {
        "chunks": 3,
        "stages": {2: [3, 5], 4: [2, 2, 2, 2]}[ranks],
        "loss_fn": cross_entropy,
        **options,
    }
    return Pipe(copy.deepcopy(model), **given)


@each_kind
@each_checkpoint
def test_tied_weights_with_retain_graph(checkpoint: str, kind: str) -> None:
    model = language(kind)
    pipe = piped(model, checkpoint=checkpoint)
    x, target = tokens()
    for module in (model, pipe):
        loss = cross_entropy(module(x), target)
        loss.backward(retain_graph=True)
        loss.backward()
    assert same_gradients(pipe, model)


def test_tied_weights_with_autograd_grad() -> None:
    model = language()
    pipe = piped(model)
    x, target = tokens()
    found, wanted = (
        torch.autograd.grad(cross_entropy(m(x), target), list(m.parameters()))
        for m in (pipe, model)
    )
    assert all(map(closely, found, wanted))
    assert all(p.grad is None for p in pipe.parameters())


@each_runtime
def test_tied_weight_gradients_are_bitwise_reproducible(runtime: str) -> None:
    """The caller adds the gradients rank by rank, whichever rank is ready first."""
    found = []
    for _ in range(5):
        pipe = Pipe(one_block(), 3, stages=8, runtime=runtime, loss_fn=functional.mse_loss)
        y = torch.linspace(-1, 1, 42, dtype=torch.float64).view(7, 6)
        pipe.step(y, target=y)
        found.append([p.grad for p in pipe.parameters() if p.grad is not None])
    for gradients in found[1:]:
        assert all(map(bitwise, found[0], gradients))


def test_weight_tied_after_the_pipe_was_made() -> None:
    model = language()
    head = nn.Linear(WIDTH, WORDS).double()
    pipe = Pipe(nn.Sequential(*list(copy.deepcopy(model))[:-1], head), 3, stages=4)
    pipe.load_state_dict(model.state_dict())
    head.weight = pipe[0].weight
    x, target = tokens()
    expected = whole(model, x, target, cross_entropy)
    pipe.step(x, target=target, loss_fn=cross_entropy)
    assert pipe[0].weight.grad is not None
    gradient = expected.gradients["0.weight"]
    assert gradient is not None
    assert closely(pipe[0].weight.grad, gradient)


def test_module_shared_after_the_pipe_was_made() -> None:
    model = language("module")
    pipe = piped(model)
    pipe[7].embedding = copy.deepcopy(pipe[0])  # separate
    x, target = tokens()
    pipe.step(x, target=target)
    pipe.zero_grad()
    pipe[7].embedding = pipe[0]  # shared again
    expected = whole(model, x, target, cross_entropy)
    assert differences(trained(pipe, x, target, "step"), expected, closely) == []


@each_runtime
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_tied_weight_is_copied_once_per_device_and_call(
    frozen: bool, elsewhere: bool, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    class Sees(Adds):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.block.get_parameter("weight").data_ptr())
            return super().forward(x)

    if elsewhere:
        monkeypatch.setattr(
            parameter_proxies, "move_to_device", lambda tensor, device: tensor.clone()
        )
    block = nn.Linear(6, 6).requires_grad_(not frozen)
    model = nn.Sequential(Sees(block), nn.Linear(6, 6), Sees(block), Sees(block))
    pipe = Pipe(model, 2, stages=4, devices=["cpu", "cpu"], runtime=runtime, audit="off")
    pipe(torch.randn(4, 6))  # the first call also finds out which outputs are detached
    seen.clear()
    pipe(torch.randn(4, 6))  # stage 0 and 2 on the first rank, stage 3 on the second
    owners = block.weight.data_ptr()
    assert len(seen) == 6
    assert seen.count(owners) == (4 if elsewhere else 6)
    assert len(set(seen)) == (2 if elsewhere else 1)


# ---- hooks --------------------------------------------------------------------------------


@each_kind
@each_runtime
def test_hooks_of_tied_weights_see_the_summed_gradient_in_a_call(runtime: str, kind: str) -> None:
    model = language(kind)
    pipe = piped(model, runtime=runtime)
    seen: dict[nn.Module, list[Tensor]] = {model: [], pipe: []}
    x, target = tokens()
    for module, found in seen.items():
        weight = module.get_parameter("0.weight")
        weight.register_hook(lambda g, found=found: (found.append(g.clone()), g / 2)[1])
        weight.register_post_accumulate_grad_hook(
            lambda p, found=found: found.append(p.grad.clone())
        )
        cross_entropy(module(x), target).backward()
    assert len(seen[pipe]) == 2
    assert all(map(closely, seen[pipe], seen[model]))
    assert same_gradients(pipe, model)


@each_runtime
def test_hooks_of_tied_weights_see_the_summed_gradient_in_a_step(runtime: str) -> None:
    model = one_block()
    pipe = Pipe(
        copy.deepcopy(model), 3, stages=[3, 3, 2], runtime=runtime, loss_fn=functional.mse_loss
    )
    seen: list[Tensor] = []
    threads = []

    def halved(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        threads.append(threading.current_thread())
        return gradient / 2

    model.get_parameter("0.block.0.weight").register_hook(lambda gradient: gradient / 2)
    pipe[0].block[0].weight.register_hook(halved)
    x, target = torch.randn(7, 6, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64)
    pipe.step(x, target=target)
    whole(model, x, target, functional.mse_loss)
    assert threads == [threading.current_thread()]
    assert same_gradients(pipe, model)
    assert closely(seen[0] / 2, pipe[0].block[0].weight.grad)


def test_hooks_of_a_shared_module_run_on_every_stage() -> None:
    model = one_block()
    pipe = Pipe(model, 2, stages=[4, 4], runtime="inline", audit="off")
    calls: list[type[nn.Module]] = []
    model.get_submodule("0.block").register_forward_hook(
        lambda m, given, made: calls.append(type(m))
    )
    with torch.no_grad():
        pipe(torch.randn(4, 6, dtype=torch.float64))
    assert calls == [nn.Sequential] * 16


@each_kind
def test_tied_modules_are_unchanged_after_a_step(kind: str) -> None:
    model = language(kind)
    held = [(m, dict(m._parameters), dict(m._modules)) for m in model.modules()]
    pipe = Pipe(model, 3, stages=4, loss_fn=cross_entropy)
    x, target = tokens()
    pipe.step(x, target=target)
    cross_entropy(pipe(x), target).backward()
    assert list(pipe) == list(model)
    for module, parameters, modules in held:
        assert module._parameters == parameters
        assert module._modules == modules


def test_proxies_are_removed_after_a_failure() -> None:
    model = language("module")
    fails = [True]

    def burst(x: Tensor) -> Tensor:
        if fails:
            raise ZeroDivisionError("here")
        return x

    layers = [*list(model)[:-1], nn.Sequential(model[-1], Do(burst))]
    pipe = Pipe(nn.Sequential(*layers), 3, stages=4, loss_fn=cross_entropy)
    x, target = tokens()
    with pytest.raises(ZeroDivisionError):
        pipe.step(x, target=target)
    assert pipe[7][0].embedding is pipe[0]
    fails.clear()
    pipe.zero_grad()
    pipe.step(x, target=target)
    whole_model = language("module")
    whole(whole_model, x, target, cross_entropy)
    assert same_gradients(pipe, whole_model)


@each_kind
def test_threads_share_one_pipe_with_tied_weights(kind: str) -> None:
    """A thread that starts a call must not take the proxies of another call for parameters.

    There were also two sets of worker threads if the first calls came at the same time, and two
    ranks started on different calls, so that each waited for the other.
    """
    model = language(kind)
    pipe = piped(model)
    x, target = tokens()
    times = 10

    def train() -> None:
        for _ in range(times):
            pipe.step(x, target=target)

    run_in_threads(train, 3)
    whole(model, x, target, cross_entropy)
    assert same_gradients(pipe, model, times=3 * times)


def test_tied_weight_changed_between_forward_and_backward_is_refused() -> None:
    """The error is that of the unsplit model, also through a proxy."""
    model = language()
    pipe = piped(model, checkpoint="never")
    x, target = tokens()
    for module in (model, pipe):
        loss = cross_entropy(module(x), target)
        with torch.no_grad():
            module.get_parameter("0.weight").mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("deferred", [False, True])
def test_batch_norm_shared_by_ranks_is_refused_in_training(deferred: bool) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6)
    model = nn.Sequential(norm, nn.Linear(6, 6), nn.Sequential(norm)).double()
    pipe = Pipe(copy.deepcopy(model), 2, deferred_batch_norm=deferred, stages=3)
    x = torch.randn(6, 6, dtype=torch.float64)
    with pytest.raises(RunError, match="but layers of several stages share it"):
        pipe(x)
    fresh = Pipe(copy.deepcopy(model), 2, deferred_batch_norm=deferred, stages=3).eval()
    assert closely(fresh(x), model.eval()(x))


# ---- state dicts, copies and norms --------------------------------------------------------


@each_kind
def test_state_dict_of_tied_weights_equals_the_unsplit_model(kind: str) -> None:
    model = language(kind)
    pipe = piped(model)
    assert [n for n, _ in pipe.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in pipe.named_modules()] == [n for n, _ in model.named_modules()]
    assert list(pipe.state_dict()) == list(model.state_dict())
    x, target = tokens()
    pipe.step(x, target=target)
    torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    saved = io.BytesIO()
    torch.save(pipe.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved)
    tied = [tensor for tensor in state.values() if tensor.shape == (WORDS, WIDTH)]
    assert len(tied) == 2
    assert tied[0].data_ptr() == tied[1].data_ptr()  # saved once
    other = piped(model, ranks=2)
    other.load_state_dict(state)
    assert closely(other(x), pipe(x))


@each_kind
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))], ids=["copy", "pickle"]
)
def test_copied_or_pickled_pipe_keeps_tied_weights(
    copied: Callable[[Pipe], Pipe], kind: str
) -> None:
    model = language(kind)
    pipe = copied(piped(model, loss_fn=None))
    x, target = tokens()
    assert len(list(pipe.parameters())) == len(list(model.parameters()))
    pipe.step(x, target=target, loss_fn=cross_entropy)
    whole(model, x, target, cross_entropy)
    assert same_gradients(pipe, model)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_clip_grad_norm_counts_a_tied_parameter_once(max_norm: float, norm_type: float) -> None:
    model = language()
    pipe = piped(model)
    x, target = tokens()
    whole(model, x, target, cross_entropy)
    pipe.step(x, target=target)
    wanted = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    assert closely(pipe.clip_grad_norm_(max_norm, norm_type), wanted)
    assert same_gradients(pipe, model)


def test_clip_grad_norm_that_is_not_finite() -> None:
    pipe = piped(language())
    pipe[2].weight.grad = torch.full((WIDTH, WIDTH), float("nan"), dtype=torch.float64)
    assert pipe.clip_grad_norm_(1.0).isnan()
    with pytest.raises(RuntimeError, match="non-finite"):
        pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)

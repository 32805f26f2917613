"""Where captured steps leave gradients, and what the caller may do with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.cuda_graph.support import (
    batch,
    captures_of,
    pipe_pair,
    recordings,
    same_state,
    stack,
)


@pytest.mark.parametrize("zero", ["none", "to_none", "to_zero"])
def test_captured_gradients_are_zeroed_or_accumulated(zero: str) -> None:
    pair = pipe_pair(stack())
    for number in range(5):
        if zero != "none":
            pair.each(lambda pipe: pipe.zero_grad(set_to_none=zero == "to_none"))
        pair.train(1, number)
    assert recordings(pair.graph) == [4]


def test_gradient_without_other_references_becomes_the_grad_buffer() -> None:
    """Such a gradient was copied before and after each replay.

    That happened on PyTorch versions that count references differently.
    """
    pair = pipe_pair(stack())
    pair.train(1, 0)
    kept = pair.graph[0].weight.grad
    places = [p.grad.data_ptr() for p in pair.graph.parameters() if p.grad is not None]
    pair.train(2, 1)
    (captured,) = captures_of(pair.graph)._history.graphs.values()
    buffers = [captured.grad_buffers[p].tensor for p in pair.graph.parameters()]
    assert [buffer.data_ptr() == place for buffer, place in zip(buffers, places, strict=True)] == [
        p.grad is not kept for p in pair.graph.parameters()
    ]
    assert pair.graph[0].weight.grad is kept


@pytest.mark.parametrize("since", [0, 1, 3])
def test_grad_tensor_assigned_by_the_caller_is_kept(since: int) -> None:
    pair = pipe_pair(stack())
    pair.train(since)
    own = {}
    for pipe in pair.both:
        for p in pipe.parameters():
            p.grad = own[p] = torch.ones_like(p)
    for number in range(since, since + 4):
        pair.train(1, number)
        assert all(p.grad is own[p] for pipe in pair.both for p in pipe.parameters())
    views = {}
    flat = torch.zeros(sum(p.numel() for p in pair.graph.parameters()), dtype=torch.float64)
    for p, part in zip(
        pair.graph.parameters(),
        flat.split([p.numel() for p in pair.graph.parameters()]),
        strict=True,
    ):
        p.grad = views[p] = part.view_as(p)
    pair.inline.zero_grad()
    pair.train(2, 10)
    assert all(p.grad is views[p] for p in pair.graph.parameters())


def test_gradients_kept_by_the_caller_are_not_overwritten() -> None:
    pair = pipe_pair(stack())
    kept: list[tuple[list[Tensor], list[Tensor]]] = []
    for number in range(6):
        pair.each(nn.Module.zero_grad)
        pair.train(1, number)
        found = [p.grad for p in pair.graph.parameters() if p.grad is not None]
        kept.append((found, [g.clone() for g in found]))
    for found, copies in kept:
        assert all(map(torch.equal, found, copies))
    assert recordings(pair.graph) == [5]


def test_gradients_of_an_early_step_kept_by_the_caller_are_not_overwritten() -> None:
    pair = pipe_pair(stack())
    for number in range(5):
        pair.train(1, number)
        if number == 1:
            kept = [p.grad for p in pair.graph.parameters() if p.grad is not None]
            copies = [g.clone() for g in kept]
            pair.each(nn.Module.zero_grad)
    assert all(map(torch.equal, kept, copies))


@pytest.mark.parametrize("view", [Tensor.detach, lambda g: g[:1], lambda g: g.numpy()])
@pytest.mark.parametrize("since", [0, 2])
def test_views_of_gradients_kept_by_the_caller_are_not_overwritten(view: Any, since: int) -> None:
    """The views own their memory from then on; later steps are captured again and replayed."""
    pair = pipe_pair(stack())
    kept: list[Any] = []
    for number in range(8):
        pair.each(nn.Module.zero_grad)
        pair.train(1, number)
        if since <= number < since + 2:
            found = [view(p.grad) for p in pair.graph.parameters()]
            kept += [(one, one.clone() if isinstance(one, Tensor) else one.copy()) for one in found]
    assert all((one == copied).all() for one, copied in kept)
    assert recordings(pair.graph) == [{0: 6, 2: 4}[since]]


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.used(x)


def test_unused_parameters_have_no_gradient() -> None:
    pair = pipe_pair(stack(Unused().double()))
    pair.train(4)
    names = [name for name, p in pair.graph.named_parameters() if p.grad is None]
    assert names == ["1.unused.weight", "1.unused.bias"]


def test_freezing_parameters_between_captured_steps() -> None:
    pair = pipe_pair(stack())
    for number, frozen in enumerate([False, False, True, True, True, False, True, False]):
        for pipe in pair.both:
            pipe[1].weight.requires_grad_(not frozen)
        if number % 2:
            pair.each(nn.Module.zero_grad)
        pair.train(1, number)
    assert len(recordings(pair.graph)) == 2


def test_replacing_parameter_data_or_parameters_between_captured_steps() -> None:
    pair = pipe_pair(stack())
    for number in range(8):
        if number == 3:
            for pipe in pair.both:
                pipe[1].weight.data = pipe[1].weight.data * 2
        if number == 6:
            for pipe in pair.both:
                pipe[2].weight = nn.Parameter(pipe[2].weight.detach() * 2)
        pair.train(1, number)
    assert len(recordings(pair.graph)) == 3


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_between_captured_steps(assign: bool) -> None:
    pair = pipe_pair(stack(nn.BatchNorm1d(8)))
    pair.train(3)
    torch.manual_seed(5)
    other = {
        name: torch.rand_like(v) if v.is_floating_point() else v.clone()
        for name, v in pair.graph.state_dict().items()
    }
    for pipe in pair.both:
        copied = {name: value.clone() for name, value in other.items()}
        pipe.load_state_dict(copied, assign=assign)
    pair.train(3, 3)
    assert len(recordings(pair.graph)) == 1 + assign


def test_casting_the_pipe_between_captured_steps() -> None:
    pair = pipe_pair(stack())
    pair.train(2)
    pair.each(lambda pipe: pipe.float())
    pair.each(nn.Module.zero_grad)
    for number in range(3):
        x, y = batch(number)
        pair.step(x.float(), target=y.float())
    pair.each(lambda pipe: pipe.double())
    pair.each(nn.Module.zero_grad)
    pair.train(3, 2)


def test_replacing_a_submodule_between_captured_steps() -> None:
    pair = pipe_pair(stack(Unused().double()))
    pair.train(3)
    for pipe in pair.both:
        torch.manual_seed(3)
        pipe[1].used = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double()
    pair.train(4, 3)
    assert sum(recordings(pair.graph)) == 5


def test_captured_parameter_hooks_run_once() -> None:
    """A hook sees the gradient of the batch, also if it is registered between captured steps."""
    pair = pipe_pair(stack())
    pair.train(2)
    for pipe in pair.both:
        pipe[1].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    pair.train(3, 2)
    for pipe in pair.both:
        pipe[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
    pair.train(3, 5)
    assert len(recordings(pair.graph)) == 3


def test_optimizer_step_after_captured_steps() -> None:
    pair = pipe_pair(stack())
    optimizers = [torch.optim.Adam(pipe.parameters(), 0.01) for pipe in pair.both]
    for number in range(5):
        pair.train(1, number)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_state(*pair.both)


def test_captured_pipes_that_share_parameters() -> None:
    model = stack()
    one, two = pipe_pair(model), pipe_pair(model, chunks=2)
    shared = type(one)(one.graph, one.inline)
    again = two.graph
    for name in "0123":
        again[int(name)].weight = one.graph[int(name)].weight
        again[int(name)].bias = one.graph[int(name)].bias
        two.inline[int(name)].weight = one.inline[int(name)].weight
        two.inline[int(name)].bias = one.inline[int(name)].bias
    for number in range(6):
        shared.train(1, number)
        two.train(1, number)
        if number == 3:
            one.each(nn.Module.zero_grad)
    assert recordings(one.graph) == recordings(two.graph) == [5]


def test_captured_steps_mixed_with_other_runtimes_and_pipe_calls() -> None:
    pair = pipe_pair(stack(nn.BatchNorm1d(8)))
    for number, runtime in enumerate(["graph", "graph", "threads", "graph", "inline", "graph"]):
        pair.graph.runtime = runtime
        x, y = batch(number)
        pair.step(x, target=y, ran=runtime)
        for pipe in pair.both:
            (pipe(x) - y).square().mean().backward()
        same_state(*pair.both)
        if number == 3:
            pair.each(nn.Module.zero_grad)
    assert recordings(pair.graph) == [3]

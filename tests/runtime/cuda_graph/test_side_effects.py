"""Side effects of layers in captured steps: Python state, tensors that come and go, hooks."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from penstock.runtime.cuda_graph.capture_guard import is_capturing
from tests.runtime.cuda_graph.support import batch, pipe_pair, recordings, stack, steps


class Counts(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.calls = where, 0
        self.table, self.log = {"calls": 0}, [0]

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "attribute":
            self.calls += 1
        elif self.where == "dict":
            self.table["calls"] += 1
        elif self.where == "list":
            self.log.append(self.log[-1] + 1)
        elif self.where == "random":
            x = x * random.random()
        return x * (self.calls + self.table["calls"] + self.log[-1] + 1)


@pytest.mark.parametrize("where", ["attribute", "dict", "list", "random"])
def test_python_state_changed_in_every_step_falls_back_to_threads(where: str) -> None:
    pair = pipe_pair(stack(Counts(where)), "auto", chunks=1)
    names = {"attribute": "'calls'", "dict": "'table'", "list": "'log'"}
    what = f"layer 1 .Counts.: it changes its attribute {names.get(where)}"
    steps(pair, "ggtt", "draws from random" if where == "random" else what)


def test_python_state_changed_by_a_failed_capture_is_restored() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.on, self.calls = False, 0

        def forward(self, x: Tensor) -> Tensor:
            if is_capturing():
                self.calls += 1
            return x

    pair = pipe_pair(stack(Sometimes()), "auto", chunks=1)
    x, y = batch(0)
    pair.step(x, target=y)
    with pytest.warns(match=r"layer 1 \(Sometimes\): it changes its attribute 'calls'"):
        pair.step(x, target=y, ran="threads")
    assert pair.graph[1].calls == 0


class Grows(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach().mean()[None]])
        return x


class KeepsGraph(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return self.last


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [torch.ones(8, dtype=torch.float64, requires_grad=True)]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.hidden[0]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Grows, r"layer 1 \(Grows\): its 'seen' is another tensor .*keep its shape"),
        (KeepsGraph, r"layer 1 \(KeepsGraph\): it stores a tensor with an autograd history"),
        (Unregistered, "a layer uses a tensor of shape .8,. that requires grad but is not"),
    ],
)
def test_tensors_that_a_replay_cannot_update_fall_back_to_threads(
    make: Callable[[], nn.Module], text: str
) -> None:
    pair = pipe_pair(stack(make()), "auto")
    steps(pair, "gttt" if make is Unregistered else "ggtt", text)
    if make is Unregistered:
        assert torch.equal(pair.graph[1].hidden[0].grad, pair.inline[1].hidden[0].grad)


@pytest.mark.parametrize("zero", [False, True])
def test_sparse_gradients_fall_back_to_threads(zero: bool) -> None:
    model = nn.Sequential(nn.Embedding(10, 8, sparse=True), *stack()).double()
    pair = pipe_pair(model, "auto")
    text = "the gradient of 0.weight is a Tensor with layout torch.sparse"
    for number in range(4):
        if zero:
            pair.each(nn.Module.zero_grad)
        ids = torch.randint(10, (11,), generator=torch.Generator().manual_seed(number))
        known = number != (2 if zero else 1)
        with nullcontext() if known else pytest.warns(match=text):
            pair.graph.step(ids, target=batch(number)[1])
        pair.inline.step(ids, target=batch(number)[1])
        mine, other = (pipe[0].weight.grad for pipe in pair.both)
        assert mine.is_sparse
        assert torch.equal(mine.to_dense(), other.to_dense())


def test_captured_hook_that_consumes_the_gradient() -> None:
    """The hook updates the parameter during the backward, as an optimizer in the backward does."""
    pair = pipe_pair(stack(), "auto", chunks=1)

    def take(p: Tensor) -> None:
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)  # type: ignore[arg-type]
        p.grad = None

    for pipe in pair.both:
        pipe[3].weight.register_post_accumulate_grad_hook(take)
    pair.train(4)


def test_hook_that_consumes_the_gradient_only_during_capture_falls_back_to_threads() -> None:
    pair = pipe_pair(stack(), "auto")

    def take(p: Tensor) -> None:
        if is_capturing():
            p.grad = None

    for pipe in pair.both:
        pipe[3].weight.register_post_accumulate_grad_hook(take)
    steps(pair, "gttt", "the gradient of 3.weight is replaced instead of being added to .grad")


def test_layer_that_builds_a_table_in_its_first_step_is_captured_later() -> None:
    """The layer caches a table for the longest input so far; later steps are captured."""

    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.longest, self.table = 0, torch.ones(1, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > self.longest:
                self.longest = len(x)
                self.table = torch.arange(len(x), dtype=x.dtype)
            return x + self.table[: len(x), None]

    pair = pipe_pair(stack(Lazy()))
    pair.train(5)
    assert recordings(pair.graph) == [3]

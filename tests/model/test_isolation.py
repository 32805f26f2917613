"""Tests that an isolated step undoes all changes to modules, which stay the same objects."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.isolation import isolated_step


class Busy(nn.Module):
    """A module that changes all of its state in its forward."""

    mean: Tensor
    replaced: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.plain = torch.zeros(2)
        self.calls, self.seen = 0, [[1], [2]]
        self.table: dict[str, Any] = {"last": None}
        self.recent, self.kinds = deque([0], maxlen=3), {"a"}
        self.notes = SimpleNamespace(count=0)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        self.mean += 1
        self.replaced = self.replaced + 1
        self.plain.add_(1)
        self.calls += 1
        self.seen[0].append(3)
        self.seen.append([4])
        self.table["last"], self.table["new"] = x, 1
        self.recent.append(1)
        self.kinds.add("b")
        self.notes.count += 1
        self.late = 1
        noise = torch.rand(2, generator=self.generator) + torch.rand(2) + random.random()
        y: Tensor = self.linear(x) + noise
        return y


def state(model: Busy) -> list[Any]:
    held = (model.mean, model.replaced, model.plain, model.generator.get_state())
    counted = (model.calls, model.seen, model.table, [*model.recent], model.kinds)
    drawn = torch.get_rng_state().tolist(), random.getstate()
    more = model.notes.count, hasattr(model, "late"), *drawn
    return repr([[t.tolist() for t in held], counted, more])  # type: ignore[return-value]


def test_isolated_step_restores_all_state_in_the_same_objects() -> None:
    model = Busy()
    x = torch.ones(1, 2)
    objects = [model.seen, model.seen[0], model.table, model.notes, model.mean, model.replaced]
    gradient = model.linear.weight.grad = torch.ones(2, 2)
    before = state(model)
    with isolated_step(list(model.modules()), (x,)) as (given,):
        for _ in range(2):
            model(given).sum().backward()
        assert state(model) != before
        assert model.linear.bias.grad is not None
    assert state(model) == before
    assert x.tolist() == [[1, 1]]
    now = [model.seen, model.seen[0], model.table, model.notes, model.mean, model.replaced]
    assert all(a is b for a, b in zip(now, objects, strict=True))
    assert model.linear.weight.grad is gradient
    assert gradient.tolist() == [[1, 1], [1, 1]]
    assert model.linear.bias.grad is None


def test_isolated_step_restores_state_after_an_error() -> None:
    model = Busy()
    before = state(model)
    try:
        with isolated_step(list(model.modules()), torch.ones(1, 2)) as given:
            model(given)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert state(model) == before


def test_isolated_step_runs_no_optimizer_in_backward_hooks() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 1.0)
    handle = layer.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    before = layer.weight.detach().clone()
    with isolated_step([layer], torch.ones(1, 2)) as given:
        layer(given).sum().backward()
    assert torch.equal(layer.weight, before)
    layer(torch.ones(1, 2)).sum().backward()
    assert not torch.equal(layer.weight, before)
    after = layer.weight.detach().clone()
    handle.remove()
    layer(torch.ones(1, 2)).sum().backward()
    assert torch.equal(layer.weight, after)


def test_isolated_step_gives_no_gradient_to_producers_of_its_inputs() -> None:
    before = nn.Linear(2, 2)
    x = before(torch.ones(1, 2))
    layer = nn.Linear(2, 2)
    with isolated_step([layer], x) as given:
        assert given.requires_grad
        layer(given).sum().backward()
    assert before.weight.grad is None


def test_isolated_step_restores_embeddings_with_max_norm() -> None:
    layer = nn.Embedding(4, 3, max_norm=0.1)
    before = layer.weight.detach().clone()
    with isolated_step([layer], torch.tensor([0, 1])) as given:
        layer(given).sum().backward()
        assert not torch.equal(layer.weight, before)
    assert torch.equal(layer.weight, before)

"""Tests that isolation undoes all changes to modules, which stay the same objects."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock import Pipe, split
from penstock.model.isolation import isolated_step
from penstock.model.profiler import profile_call


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
        self.own, self.array = random.Random(0), np.zeros(2)
        self.numpy_generator = np.random.default_rng(0)

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
        self.linear.eval()
        self.linear.register_buffer("more", torch.ones(1))
        self.array += self.own.random() + self.numpy_generator.random() + np.random.random()
        noise = torch.rand(2, generator=self.generator) + torch.rand(2) + random.random()
        y: Tensor = self.linear(x) + noise
        return y


def state(model: Busy) -> list[Any]:
    held = (model.mean, model.replaced, model.plain, model.generator.get_state())
    counted = (model.calls, model.seen, model.table, [*model.recent], model.kinds)
    drawn = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()
    own = model.own.getstate(), model.numpy_generator.bit_generator.state, model.array.tolist()
    linear = model.linear.training, sorted(model.linear._buffers)
    more = model.notes.count, hasattr(model, "late"), *drawn, *own, *linear
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


@pytest.mark.parametrize("fails", [False, True])
def test_profiler_restores_all_state_in_the_same_objects(fails: bool) -> None:
    model = Busy()
    if fails:
        model.linear.register_forward_hook(lambda *_: 1 / 0)
    objects = [model.seen, model.table, model.notes, model.linear, model._buffers, model.mean]
    before = state(model)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        profile_call(model, (torch.ones(1, 2),))
    assert state(model) == before
    now = [model.seen, model.table, model.notes, model.linear, model._buffers, model.mean]
    assert all(a is b for a, b in zip(now, objects, strict=True))


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


# ---- previews -------------------------------------------------------------------------------
#
# A forward may write anything: an EMA of a codebook, a counter, a frozen flag. `penstock.split`
# changed the parameters of such a model, and its random state.


def write_if_positive(layer: Any, x: Tensor) -> None:
    if x.detach().sum().item() > -1e9:  # reads a value, so the layer cannot run on fake tensors
        layer.codebook.data.mul_(0.99)


@torch.no_grad()
def copy_under_no_grad(layer: Any, x: Tensor) -> None:
    layer.codebook.copy_(layer.codebook * 0.9 + x.detach().mean())


@torch.no_grad()
def add_a_number(layer: Any, x: Tensor) -> None:
    layer.codebook.add_(1)


def replace_data(layer: Any, x: Tensor) -> None:
    layer.codebook.data = layer.codebook.data * 0.5


def replace_parameter(layer: Any, x: Tensor) -> None:
    layer.codebook = nn.Parameter(layer.codebook.detach() * 0.5)


def write_buffer_and_attribute(layer: Any, x: Tensor) -> None:
    layer.usage += 1
    layer.calls += 1
    if not isinstance(layer, Around):  # between units, this is refused
        layer.plain.add_(1)


def write_gradient(layer: Any, x: Tensor) -> None:
    if layer.codebook.grad is not None:
        layer.codebook.grad.add_(1)


def draw(layer: Any, x: Tensor) -> None:
    random.random()
    np.random.random()
    torch.rand(1)


WRITES: list[Callable[[Any, Tensor], object]] = [
    lambda layer, x: layer.codebook.data.mul_(0.99).add_(0.01),
    copy_under_no_grad,
    add_a_number,
    write_if_positive,
    replace_data,
    replace_parameter,
    lambda layer, x: layer.codebook.requires_grad_(False),
    write_buffer_and_attribute,
    write_gradient,
    lambda layer, x: layer.linear.eval(),
    lambda layer, x: layer.linear.register_forward_hook(lambda *_: None),
    draw,
]


class Codebook(nn.Module):
    """A layer that calls `write` in its forward."""

    usage: Tensor

    def __init__(self, write: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.write, self.calls, self.plain = write, 0, torch.zeros(3)
        self.codebook = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("usage", torch.zeros(3))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x)
        y: Tensor = self.linear(x) + self.codebook.sum()
        return y


class Around(Codebook):
    """A model whose own forward writes, around its units."""

    def __init__(self, write: Callable[[Any, Tensor], object]) -> None:
        super().__init__(write)
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x)
        y: Tensor = self.linear(self.first(x)) + self.codebook.sum()
        return y


class Inside(nn.Module):
    """A model with a unit that writes."""

    def __init__(self, write: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), Codebook(write)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


def layered(write: Callable[[Any, Tensor], object]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Codebook(write))


def everything(model: nn.Module) -> list[Any]:
    tensors = [
        (name, id(t), t.data_ptr(), t.requires_grad, t.tolist(), id(t.grad), repr(t.grad))
        for name, t in (*model.named_parameters(), *model.named_buffers())
    ]
    attributes = [(name, repr(vars(module))) for name, module in model.named_modules()]
    generators = torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())
    return [tensors, attributes, generators]


@pytest.mark.filterwarnings("ignore:the forward changes")
@pytest.mark.parametrize("build", [layered, Inside, Around])
@pytest.mark.parametrize("write", WRITES)
def test_previews_and_profiling_leave_no_trace(
    build: Callable[..., nn.Module], write: Callable[[Any, Tensor], object]
) -> None:
    model, x = build(write), torch.ones(4, 4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = everything(model)
    split(model, 2, x, balance="parameters")
    assert everything(model) == before
    split(model, 2, x, balance="time")
    assert everything(model) == before
    Pipe(model, stages=2, chunks=2, devices=["cpu", "cpu"], example=x)
    assert everything(model) == before


@pytest.mark.filterwarnings("ignore:the forward changes")
@pytest.mark.parametrize(
    ("build", "write"), [*product((layered, Inside), WRITES), (Around, write_buffer_and_attribute)]
)
def test_pipe_memory_leaves_no_trace(
    build: Callable[..., nn.Module], write: Callable[[Any, Tensor], object]
) -> None:
    model, x = build(write), torch.ones(4, 4)
    pipe = Pipe(model, 2, "never", stages=2, devices=["cpu"] * 2, example=x, loss_fn=nn.MSELoss())
    before = everything(model)
    pipe.memory(x, target=x)
    assert everything(model) == before


def test_trace_of_a_meta_buffer_keeps_real_parameters() -> None:
    """The buffer of a parent is initialized for the trace, by `reset_parameters`."""

    class Model(Inside):
        shift: Tensor

        def __init__(self) -> None:
            super().__init__(lambda layer, x: None)
            self.scale = nn.Parameter(torch.ones(4))
            self.register_buffer("shift", torch.zeros(4, device="meta"))

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.scale.fill_(7)
                self.shift.fill_(0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale + self.shift)

    model = Model()
    split(model, 2, torch.ones(4, 4), balance="parameters")
    assert model.scale.tolist() == [1] * 4

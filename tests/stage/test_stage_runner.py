"""Tests of layers that work in place or write into their buffers.

The results are exact, or the layer is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import NoChunk, Pipe, pop, skippable, stash
from penstock.errors import RunError
from tests.pairs import each_pair
from tests.support import (
    CHECKPOINTS,
    DOORS,
    RUNTIMES,
    Do,
    Outcome,
    batch,
    closely,
    differences,
    each_checkpoint,
    each_door,
    each_runtime,
    same_gradients,
    trained,
    whole,
)

IN_PLACE = r"in.?place"


def linear() -> nn.Module:
    return nn.Linear(6, 6)


class AddOne(nn.Module):
    """Adds one: in place, or out of place as a reference."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1) if self.in_place else x + 1


class AddToView(AddOne):
    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            x[:, :2].add_(1)
            return x
        return torch.cat([x[:, :2] + 1, x[:, 2:]], 1)


class AddToFirst(AddOne):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(both[0]) * both[1]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


@skippable(stash=["far"])
class StashFresh(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("far", x * 2)
        return x


@skippable(stash=["far"])
class StashSame(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("far", x)
        return x


@skippable(pop=["far"])
class PopAndAdd(AddOne):
    def forward(self, x: Tensor) -> Any:
        far: Tensor = yield pop("far")
        return x * (far.add_(1) if self.in_place else far + 1)


Build = Callable[[bool], list[nn.Module]]

ALLOWED: dict[str, Build] = {  # plain PyTorch trains these, too
    "in the middle": lambda i: [linear(), AddOne(i), linear()],
    "twice": lambda i: [linear(), AddOne(i), AddOne(i), linear()],
    "at the end": lambda i: [linear(), AddOne(i)],
    "the input": lambda i: [AddOne(i), linear()],
    "a view": lambda i: [linear(), AddToView(i), linear()],
    "one of two": lambda i: [Pair(), AddToFirst(i), linear()],
    "a skip": lambda i: [linear(), StashFresh(), linear(), PopAndAdd(i)],
}
REFUSED: dict[str, Build] = {  # with at least one partition or checkpoint mode
    "after tanh": lambda i: [linear(), nn.Tanh(), AddOne(i), linear()],
    "what is stashed": lambda i: [linear(), StashSame(), AddOne(i), PopAndAdd(False)],
    "a stash of others": lambda i: [linear(), StashSame(), linear(), PopAndAdd(i)],
}


def reference(build: Build) -> tuple[nn.Sequential, nn.Sequential]:
    """Return the in-place model and an out-of-place one with the same weights."""
    torch.manual_seed(0)
    model, other = nn.Sequential(*build(True)), nn.Sequential(*build(False))
    other.load_state_dict(model.state_dict())
    return model.double(), other.double()


def expected(model: nn.Sequential, other: nn.Sequential) -> Outcome:
    """Return the outcome of the in-place model, or of the other if PyTorch refuses it."""
    x, target = batch(7)
    try:
        return whole(copy.deepcopy(model), x, target.repeat(1, 2), functional.mse_loss)
    except RuntimeError:
        return whole(copy.deepcopy(other), x, target.repeat(1, 2), functional.mse_loss)


def found(pipe: Pipe, door: str) -> Outcome:
    x, target = batch(7)
    pipe.zero_grad()
    return trained(pipe, x, target.repeat(1, 2), door)


@each_pair(runtime=RUNTIMES, checkpoint=CHECKPOINTS, door=DOORS, case=ALLOWED)
def test_in_place_layers_are_exact(case: str, door: str, checkpoint: str, runtime: str) -> None:
    """Each layer is a stage, so that each one is first in its stage.

    Three steps are run because a stage learns from the first one whether it works in place.
    """
    model, other = reference(ALLOWED[case])
    right = expected(other, other)
    assert differences(expected(model, other), right, closely) == []
    pipe = Pipe(
        model, 3, checkpoint, stages=len(model), runtime=runtime, loss_fn=functional.mse_loss
    )
    for _ in range(3):
        assert differences(found(pipe, door), right, closely) == []


@each_runtime
@each_checkpoint
@pytest.mark.parametrize("case", ALLOWED)
def test_in_place_layers_with_retain_graph_backwards(
    case: str, checkpoint: str, runtime: str
) -> None:
    """Each recomputation starts from the original inputs, not from those the last one changed."""
    model, other = reference(ALLOWED[case])
    pipe = Pipe(model, 3, checkpoint, stages=len(model), runtime=runtime)
    x, _ = batch(7)
    loss = pipe(x.clone()).square().sum()
    parameters = [list(module.parameters()) for module in (pipe, other)]
    wanted = torch.autograd.grad(other(x).square().sum(), parameters[1])
    for _ in range(3):
        given = torch.autograd.grad(loss, parameters[0], retain_graph=True)
        assert all(map(closely, given, wanted))


@each_pair(runtime=RUNTIMES, checkpoint=CHECKPOINTS, door=DOORS, cut=[1, 2, None], case=REFUSED)
def test_in_place_layers_are_exact_or_refused(
    case: str, cut: int | None, door: str, checkpoint: str, runtime: str
) -> None:
    model, other = reference(REFUSED[case])
    right = expected(model, other)
    pipe = Pipe(
        model, 3, checkpoint, stages=cut or len(model), runtime=runtime, loss_fn=functional.mse_loss
    )
    for _ in range(3):
        try:
            outcome = found(pipe, door)
        except RuntimeError as error:
            assert "place" in str(error)  # noqa: PT017 (an error is one of two right answers)
        else:
            assert differences(outcome, right, closely) == []


@each_runtime
@each_checkpoint
def test_no_chunk_tensor_changed_in_place_is_refused(checkpoint: str, runtime: str) -> None:
    def add(x: Tensor, mask: Tensor) -> Tensor:
        return x + mask.add_(1)

    pipe = Pipe(nn.Sequential(Do(add), linear()), 3, checkpoint, stages=2, runtime=runtime)
    with pytest.raises(
        RuntimeError, match=r"a shared tensor .*given to several stages or micro-batches"
    ):
        pipe(torch.randn(6, 6), NoChunk(torch.zeros(6)))


@each_runtime
@each_checkpoint
@each_door
def test_input_that_requires_grad_changed_in_place_is_refused(
    door: str, checkpoint: str, runtime: str
) -> None:
    pipe = Pipe(
        nn.Sequential(AddOne(True), linear()), 2, checkpoint, stages=2, runtime=runtime,
        loss_fn=torch.sum,
    )  # fmt: skip
    x = torch.randn(6, 6, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"in place.* belongs to the caller and needs"):
        pipe.step(x) if door == "step" else pipe(x)


@each_runtime
@each_checkpoint
@pytest.mark.parametrize("which", ["x", "whole"])
def test_input_changed_in_place_before_backward_is_refused(
    which: str, checkpoint: str, runtime: str
) -> None:
    layers = nn.Sequential(Do(lambda x, whole: x * whole), linear())
    pipe = Pipe(layers, 2, checkpoint, stages=2, runtime=runtime)
    x, weight = torch.randn(6, 6), torch.randn(6)
    y = pipe(x, NoChunk(weight))
    (x if which == "x" else weight).add_(1)
    with pytest.raises(RuntimeError, match="an input of the pipe has been changed in place after"):
        y.sum().backward()
    pipe(x, NoChunk(weight)).sum().backward()


@each_runtime
@each_checkpoint
def test_output_of_a_pipe_may_be_changed_in_place(checkpoint: str, runtime: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double()
    pipe = Pipe(copy.deepcopy(model), 2, checkpoint, stages=2, runtime=runtime)
    x, _ = batch(5)
    pipe(x).mul_(3).sum().backward()
    (3 * model(x)).sum().backward()
    assert same_gradients(pipe, model)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_layer_that_is_switched_to_work_in_place_later(checkpoint: str) -> None:
    layers = nn.Sequential(linear(), AddOne(False), linear()).double()
    model = copy.deepcopy(layers)
    pipe = Pipe(layers, 2, checkpoint, stages=3)
    for in_place in (False, True):
        for module in (pipe[1], model[1]):
            assert isinstance(module, AddOne)
            module.in_place = in_place
        x, _ = batch(4)
        pipe(x).sum().backward()
        model(x).sum().backward()
    assert same_gradients(pipe, model)


@pytest.mark.parametrize("door", ["call", "step"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_layer_that_works_in_place_for_some_inputs_is_refused(checkpoint: str, door: str) -> None:
    """A stage that never worked in place makes no copies of its inputs, and gets leaves.

    If it starts to, PyTorch raised an error of its own. The step can be repeated.
    """
    layers = nn.Sequential(linear(), Do(lambda x: x.add_(1) if x.sum() > 0 else x + 1), linear())
    pipe = Pipe(layers, 1, checkpoint, stages=3, loss_fn=functional.mse_loss, audit="off")

    def train(x: Tensor) -> None:
        if door == "step":
            pipe.step(x, target=torch.zeros(4, 6))
        else:
            pipe(x).sum().backward()

    with torch.no_grad():
        next(layers.parameters()).fill_(1.0)
    train(-torch.ones(4, 6))
    with pytest.raises(RunError, match=r"changed their input in place, which they had not done be"):
        train(torch.ones(4, 6))
    if checkpoint == "never":
        train(torch.ones(4, 6))


def test_error_of_a_layer_is_raised_unchanged_beside_leaves() -> None:
    layers = nn.Sequential(linear(), Do(lambda x: x.view(7, -1) if x.sum() > 0 else x), linear())
    pipe = Pipe(layers, 1, "never", stages=3, audit="off")
    with torch.no_grad():
        next(layers.parameters()).fill_(1.0)
    pipe(-torch.ones(4, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        pipe(torch.ones(4, 6)).sum().backward()


class LateNoise(nn.Module):
    """A layer whose noise is switched on later, as in a training schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.std = 0.0
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x) if self.std else torch.zeros_like(x)
        self.seen.append(noise.detach())
        return x + self.std * noise


@each_checkpoint
@pytest.mark.parametrize("door", ["call", "step"])
def test_noise_that_is_switched_on_later(checkpoint: str, door: str) -> None:
    """The stage was known not to draw, and its recomputation drew other numbers."""
    noise = LateNoise()
    pipe = Pipe(
        nn.Sequential(nn.Linear(6, 6), noise, nn.Linear(6, 3)).double(),
        2,
        checkpoint,
        stages=[2, 1],
        loss_fn=functional.mse_loss,
    )
    x, target = batch(4)
    for std in (0.0, 0.0, 0.5, 1.0):
        noise.std = std
        noise.seen.clear()
        if door == "step":
            pipe.step(x, target=target)
        else:
            functional.mse_loss(pipe(x), target).backward()
    assert len({tuple(seen.flatten().tolist()) for seen in noise.seen}) == 2


class AsksForGradient(nn.Module):
    """A layer that goes by whether its input requires a gradient, as some quantizers do."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.9 * x if x.requires_grad else x + 0.1


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_input_requires_grad_in_calls_without_gradients(mode: Any, chunks: int) -> None:
    model = nn.Sequential(AsksForGradient(), nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = Pipe(model, chunks, stages=2, devices=["cpu"] * 2, audit="off")
    for requires_grad in (True, False):
        x = torch.randn(4, 4, requires_grad=requires_grad)
        with mode():
            assert torch.equal(pipe(x), model(x))

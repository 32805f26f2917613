"""Layers that work in place, and layers that write into their buffers: right, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import NoChunk, Pipe, pop, skippable, stash
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
    trained,
    whole,
)

IN_PLACE = r"in.?place"


def linear() -> nn.Module:
    return nn.Linear(6, 6)


class AddOne(nn.Module):
    """Adds one: in place, or, as a reference, not."""

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

ALLOWED: dict[str, Build] = {  # by plain PyTorch
    "in the middle": lambda i: [linear(), AddOne(i), linear()],
    "twice": lambda i: [linear(), AddOne(i), AddOne(i), linear()],
    "at the end": lambda i: [linear(), AddOne(i)],
    "the input": lambda i: [AddOne(i), linear()],
    "a view": lambda i: [linear(), AddToView(i), linear()],
    "one of two": lambda i: [Pair(), AddToFirst(i), linear()],
    "a skip": lambda i: [linear(), StashFresh(), linear(), PopAndAdd(i)],
}
REFUSED: dict[str, Build] = {  # for at least one way to cut or to recompute
    "after tanh": lambda i: [linear(), nn.Tanh(), AddOne(i), linear()],
    "what is stashed": lambda i: [linear(), StashSame(), AddOne(i), PopAndAdd(False)],
    "a stash of others": lambda i: [linear(), StashSame(), linear(), PopAndAdd(i)],
}


def reference(build: Build) -> tuple[nn.Sequential, nn.Sequential]:
    """The model, in place, and the same with the same numbers, not in place."""
    torch.manual_seed(0)
    model, other = nn.Sequential(*build(True)), nn.Sequential(*build(False))
    other.load_state_dict(model.state_dict())
    return model.double(), other.double()


def expected(model: nn.Sequential, other: nn.Sequential) -> Outcome:
    """What the model gives, if PyTorch lets it; else what is meant."""
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
def test_layers_may_work_in_place(case: str, door: str, checkpoint: str, runtime: str) -> None:
    """Each layer a stage, so that each in turn is the first; three times, as habits are learned."""
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
def test_in_place_and_then_backward_again(case: str, checkpoint: str, runtime: str) -> None:
    """Each recomputation begins with the inputs as they came, not as the last one left them."""
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
def test_what_is_not_right_is_refused(
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
def test_a_stashed_tensor_that_a_later_stage_changes(checkpoint: str, runtime: str) -> None:
    layers = [linear(), StashSame(), AddOne(True), PopAndAdd(False)]
    pipe = Pipe(nn.Sequential(*layers), 3, checkpoint, stages=4, runtime=runtime)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"a shared tensor .* in place. It was stashed"):
            pipe(torch.randn(6, 6)).sum().backward()


@each_runtime
@each_checkpoint
def test_a_tensor_for_all_micro_batches_is_not_changed(checkpoint: str, runtime: str) -> None:
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
def test_an_input_that_needs_a_gradient_is_not_changed(
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
def test_an_input_changed_after_the_forward(which: str, checkpoint: str, runtime: str) -> None:
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
def test_the_output_may_be_changed(checkpoint: str, runtime: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    pipe = Pipe(copy.deepcopy(model), 2, checkpoint, stages=2, runtime=runtime)
    x = torch.randn(5, 6)
    pipe(x).mul_(3).sum().backward()
    (3 * model(x)).sum().backward()
    for p, q in zip(pipe.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [("always", "which they had not done before"), ("never", "in-place")],
)
def test_a_layer_that_begins_to_work_in_place(checkpoint: str, message: str) -> None:
    """What a stage was seen to do saves copies; when it does otherwise, that is refused."""
    layers = nn.Sequential(linear(), AddOne(False), linear())
    pipe = Pipe(layers, 2, checkpoint, stages=3)
    pipe(torch.randn(4, 6)).sum().backward()
    pipe[1].in_place = True
    with pytest.raises(RuntimeError, match=message):
        pipe(torch.randn(4, 6)).sum().backward()


# ---- buffers ------------------------------------------------------------------------------


class Counts(nn.Module):
    """Counts its forwards in a buffer, which matters to what it gives."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.count: Tensor
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("nothing", None)
        self.replaces = replaces
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if self.replaces:
            self.count = self.count + 1
        else:
            self.count.add_(1)
        y: Tensor = self.linear(x) * self.count.clone()
        return y


@each_runtime
@each_checkpoint
@each_door
@pytest.mark.parametrize("replaces", [False, True], ids=["written", "replaced"])
def test_a_recomputation_reads_the_buffers_that_its_forward_read(
    replaces: bool, door: str, checkpoint: str, runtime: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Counts(replaces), Counts(replaces), nn.Linear(6, 3).double())
    x, target = batch(7)

    def pipe(checkpoint: str) -> Pipe:
        copied = copy.deepcopy(model)
        return Pipe(copied, 3, checkpoint, stages=3, runtime=runtime, loss_fn=functional.mse_loss)

    one, other = pipe(checkpoint), pipe("never")
    for step in range(1, 3):
        outcome = trained(one, x, target, door)
        assert outcome.buffers["0.count"] == 3 * step
        assert differences(outcome, trained(other, x, target, door)) == []


class Normalizes(nn.Module):
    """As timm's norms: PyTorch writes the statistics, and their versions do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.spread: Tensor
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("spread", torch.ones(6, dtype=torch.float64))
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        shift = self.mean.clone()
        x = functional.batch_norm(self.linear(x), self.mean, self.spread, training=self.training)
        return x + shift


@each_checkpoint
@each_door
def test_a_recomputation_writes_no_statistics_a_second_time(door: str, checkpoint: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Normalizes(), Normalizes(), nn.Linear(6, 3).double())
    x, target = batch(9)

    def pipe(checkpoint: str) -> Pipe:
        return Pipe(copy.deepcopy(model), 3, checkpoint, stages=3, loss_fn=functional.mse_loss)

    one, other = pipe(checkpoint), pipe("never")
    for _ in range(2):
        expected = trained(other, x, target, door)
        assert differences(trained(one, x, target, door), expected) == []

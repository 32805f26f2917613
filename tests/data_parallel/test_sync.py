"""Stages in DistributedDataParallel, replicate, fully_shard: as the unsplit model, reduced once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock import PenstockError, Pipe
from tests.data_parallel.replicated import (
    ROUNDED,
    SHARDED,
    WRAPS,
    counted,
    differing,
    half,
    mean_over_replicas,
    model,
    pipe_of,
)
from tests.distributed.ranks import ranks
from tests.support import SCHEDULES, Fails, batch, closely

LEARNING = 4  # layers of the model


def two_steps(schedule: str, checkpoint: str) -> list[str]:
    wrong = []
    for wrap in WRAPS:
        expected = model()
        pipe = pipe_of(model(), wrap, schedule, checkpoint=checkpoint)
        for rows in (16, 12):  # the second step adds to the first
            x, y = batch(rows)
            loss = nn.functional.mse_loss(expected(x), y)
            loss.backward()
            with counted() as found:
                result = pipe.step(half(x), target=half(y))
            wrong += [f"{wrap}: {name}" for name in differing(pipe, expected)]
            if not closely(mean_over_replicas(result.loss), loss.detach()):
                wrong.append(f"{wrap}: the loss")
            stages = len(pipe.forecast().program.schedule.placement)
            expecting = stages if wrap == "fsdp" else LEARNING if wrap in SHARDED else 0
            if found.scattered != expecting or (wrap not in SHARDED and found.everything != 1):
                wrong.append(f"{wrap}: {found.scattered} scattered, {found.everything} in all")
    return wrong


@pytest.mark.parametrize(("at", "schedule"), [*enumerate(SCHEDULES)])
def test_gradients_are_those_of_the_whole_batch_reduced_once(at: int, schedule: str) -> None:
    checkpoint = ("never", "always")[at % 2]
    assert ranks(2).run(two_steps, schedule, checkpoint) == [[], []]


def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A mean over the rows whose first target is positive, and how many they are."""
    counts = (target[:, 0] > 0).double()
    per_row = (output - target).square().mean(dim=1)
    return (per_row * counts).sum() / counts.sum().clamp(min=1), counts.sum()


def roughly(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def weights_and_waiting(wrap: str) -> list[str]:
    """Two steps that do not reduce and one that does; then one more."""
    expected, pipe = model(), pipe_of(model(), wrap, "zb-h1", loss_fn=weighted)
    wrong = []
    for at in range(4):
        x, y = batch(16)
        y = y.roll(at, dims=0)
        for mine, theirs in zip(x.chunk(2), y.chunk(2), strict=True):  # each replica has its mean
            (weighted(expected(mine), theirs)[0] / 2).backward()
        with pipe.no_sync() if at < 2 else nullcontext(), counted() as found:
            pipe.step(half(x), target=half(y))
        if at >= 2:
            same = roughly if wrap == ROUNDED else closely
            wrong += [f"after step {at}: {name}" for name in differing(pipe, expected, same)]
        elif found.scattered or ("fsdp" not in wrap and found.everything):
            wrong.append(f"step {at} has reduced")
    return wrong


@pytest.mark.parametrize("wrap", [*WRAPS, ROUNDED])
def test_weights_of_the_loss_and_steps_that_wait(wrap: str) -> None:
    assert ranks(2).run(weights_and_waiting, wrap) == [[], []]


class Chosen(nn.Module):
    """Uses one of three weights: the first on one replica, the second on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(8).double() for _ in range(3))
        self.at = 0

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = x * self.weights[self.at]
        return chosen


def with_choice() -> nn.Sequential:
    layers = model()
    layers[4] = Chosen()
    return layers


def unused_parameters(wrap: str) -> list[str]:
    expected, layers = with_choice(), with_choice()
    pipe = pipe_of(layers, wrap, "zb-v")
    x, y = batch(16)
    for at, (mine, theirs) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
        expected[4].at = at  # type: ignore[assignment]
        (nn.functional.mse_loss(expected(mine), theirs) / 2).backward()
    layers[4].at = dist.get_rank()  # type: ignore[assignment]
    pipe.step(half(x), target=half(y))
    return differing(pipe, expected)


@pytest.mark.parametrize("wrap", ["ddp", "ddp, unused", "replicate"])
def test_parameters_that_some_replicas_use(wrap: str) -> None:
    assert ranks(2).run(unused_parameters, wrap) == [[], []]


def with_statistics() -> nn.Sequential:
    layers = model()
    layers[4] = nn.BatchNorm1d(8).double()
    return layers


def buffers_of_the_first(wrap: str) -> list[str]:
    """As DistributedDataParallel itself does: what the first replica has, before each step."""
    pipe = pipe_of(with_statistics(), wrap, "1f1b", chunks=1)
    theirs = DistributedDataParallel(with_statistics())
    for _ in range(2):
        x, y = batch(16)
        nn.functional.mse_loss(theirs(half(x)), half(y)).backward()
        pipe.step(half(x), target=half(y))
    expected = dict(theirs.module.named_buffers())
    assert len(expected) == 3
    return [name for name, b in pipe.named_buffers() if not closely(b, expected[name])]


def test_buffers_are_those_of_the_first_replica() -> None:
    assert ranks(2).run(buffers_of_the_first, "ddp") == [[], []]


def evaluation(wrap: str) -> list[str]:
    expected, pipe = model(), pipe_of(model(), wrap)
    x, y = batch(16)
    wrong = []
    for _ in range(2):
        with torch.no_grad():
            found = pipe.eval()(half(x)), pipe.step(half(x), target=half(y)).loss
        pipe.train()
        output = expected(half(x))
        loss = nn.functional.mse_loss(output, half(y))
        wrong += [
            name
            for name, a, b in zip(("output", "loss"), found, (output, loss), strict=True)
            if not closely(a, b)
        ]
        kinds = {hasattr(p, "full_tensor") for p in pipe.parameters()}
        wrong += [] if kinds == {wrap in SHARDED} else [f"at rest: {kinds}"]
        nn.functional.mse_loss(expected(x), y).backward()
        pipe.step(half(x), target=half(y))
        wrong += differing(pipe, expected)
    return wrong


@pytest.mark.parametrize("wrap", WRAPS)
def test_evaluation_between_steps(wrap: str) -> None:
    assert ranks(2).run(evaluation, wrap) == [[], []]


def a_step_that_fails(wrap: str, where: str) -> list[str]:
    expected, layers = model(), model()
    layers[4] = Fails()
    expected[4] = nn.Identity()
    layers[4].broken = False  # type: ignore[assignment]
    pipe = pipe_of(layers, wrap, "1f1b")
    x, y = batch(16)
    pipe.step(half(x), target=half(y))
    if where == "backward":
        layers[4].broken = True  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        pipe.step(half(x), target=half(y), loss_fn=fails if where == "loss" else None)
    layers[4].broken = False  # type: ignore[assignment]
    pipe.zero_grad()
    pipe.step(half(x), target=half(y))
    nn.functional.mse_loss(expected(x), y).backward()
    return differing(pipe, expected)


def fails(output: Tensor, target: Tensor) -> Tensor:
    raise ZeroDivisionError


@pytest.mark.parametrize("where", ["loss", "backward"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_step_after_one_that_failed(wrap: str, where: str) -> None:
    assert ranks(2).run(a_step_that_fails, wrap, where) == [[], []]


def refusals() -> list[str]:
    """What each of these comes to."""
    told = []

    def tell(act: Callable[[], object]) -> None:
        try:
            act()
            told.append("nothing")
        except PenstockError as error:
            told.append(str(error))

    def wrapped(**options: Any) -> Callable[[nn.Module, int], nn.Module]:
        return lambda module, _: DistributedDataParallel(module, **options)

    def hooked(module: nn.Module, _: int) -> nn.Module:
        found = DistributedDataParallel(module)
        found.register_comm_hook(None, lambda state, bucket: None)
        return found

    sparse = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    x, y = batch(8)
    tell(lambda: pipe_of(model(), "ddp")(x))
    tell(lambda: pipe_of(model(), "fsdp", runtime="threads").step(x, target=y))
    tell(lambda: Pipe(model(), stages=2, stage_fn=wrapped(static_graph=True)))
    tell(lambda: Pipe(model(), stages=2, stage_fn=hooked))
    tell(lambda: Pipe(sparse, stages=2, stage_fn=wrapped()))
    return told


def test_what_cannot_be_is_refused() -> None:
    for call, threads, *wrappers in ranks(2).run(refusals):
        assert "Train with pipe.step(x, target=y)" in call
        assert "ranks 0, 1 communicate in one process group" in threads
        assert "replicate with static_graph=True. A pipe" in wrappers[0]
        assert "with a communication hook or mixed_precision. A pipe" in wrappers[1]
        assert "with a layer with sparse=True. A pipe" in wrappers[2]

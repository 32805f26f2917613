"""Losses, weights, metrics, outputs and grad scalers of captured steps."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.runtime.cuda_graph.support import batch, pipe_pair, recordings, same_state, stack


def classes(seed: int, rows: int = 11) -> tuple[Tensor, Tensor]:
    """Return a batch with some ignored targets, which differ from batch to batch."""
    x, _ = batch(seed, rows)
    made = torch.Generator().manual_seed(seed)
    target = torch.randint(4, (rows,), generator=made)
    target[torch.rand(rows, generator=made) < 0.3] = -100
    return x, target


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 0.5, 0.1], dtype=torch.float64)])
def test_captured_cross_entropy_with_ignored_targets(weight: Tensor | None, schedule: str) -> None:
    pair = pipe_pair(stack(), loss_fn=nn.CrossEntropyLoss(weight), schedule=schedule)
    for number in range(5):
        x, target = classes(number)
        pair.step(x, target=target)
    assert recordings(pair.graph) == [4]
    if weight is not None:
        weight.mul_(2.0)[0] = 3.0
        x, target = classes(7)
        pair.step(x, target=target)
        weight[1] = 2.0
        weight[0] = 1.0


def counted(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    counts = target != -100
    loss = functional.cross_entropy(output, target)
    right = (output.argmax(-1) == target).double().sum() / counts.sum()
    return {"loss": loss, "weight": counts.sum(), "right": right, "each": output.argmax(-1)}


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_captured_loss_weights_and_metrics(checkpoint: str) -> None:
    pair = pipe_pair(stack(), loss_fn=counted, checkpoint=checkpoint)
    kept: list[tuple[Any, Any]] = []
    for number in range(5):
        if number == 3:
            pair.each(nn.Module.zero_grad)
        x, target = classes(number)
        found = pair.step(x, target=target, outputs=True)
        now = (found.loss, found.metrics["right"], found.metrics["each"], found.outputs)
        kept.append((now, tuple(t.clone() for t in now)))
    assert recordings(pair.graph) == [4]
    for found, copies in kept:
        assert all(map(torch.equal, found, copies))


def test_captured_sum_reduction() -> None:
    pair = pipe_pair(stack(), loss_fn=nn.MSELoss(reduction="sum"))
    pair.train(4)
    pair.each(lambda pipe: setattr(pipe, "reduction", "mean"))
    pair.train(3)
    assert recordings(pair.graph) == [3, 2]


def test_captured_grad_scaler() -> None:
    pair = pipe_pair(stack().float())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for number in range(5):
        pair.each(nn.Module.zero_grad)
        x, y = (t.float() for t in batch(number))
        pair.step(x, target=y, scaler=scaler)
        scaler.update(2.0 ** (number + 2))
    x, y = (t.float() for t in batch(9))
    pair.step(x, target=y)
    assert recordings(pair.graph) == [4]


def test_captured_loss_fn_recreated_for_each_step() -> None:
    """A bound method, a partial and a lambda are new objects in each step."""

    class Trainer:
        factor = 2.0

        def loss(self, output: Tensor, target: Tensor) -> Tensor:
            return self.factor * functional.mse_loss(output, target)

    pair, trainer = pipe_pair(stack()), Trainer()
    for number in range(4):
        x, y = batch(number)
        pair.step(x, target=y, loss_fn=trainer.loss)
        pair.step(x, target=y, loss_fn=partial(functional.mse_loss, reduction="mean"))
        pair.step(x, target=y, loss_fn=lambda o, t: functional.mse_loss(o, t))
    assert recordings(pair.graph) == [3, 3, 3]
    trainer.factor = 3.0
    x, y = batch(9)
    pair.step(x, target=y, loss_fn=trainer.loss)


@pytest.mark.parametrize("factor", [2.0, torch.tensor(2.0, dtype=torch.float64)])
def test_captured_loss_fn_with_closure_values(factor: Any) -> None:
    pair = pipe_pair(stack())
    for number in range(6):
        if number >= 3:
            factor = factor + 1 if number == 3 else factor
        mine = factor
        x, y = batch(number)
        pair.step(x, target=y, loss_fn=lambda o, t: mine * functional.mse_loss(o, t))  # noqa: B023
    assert sum(recordings(pair.graph)) == 4


def test_captured_loss_fn_with_a_target_in_its_closure() -> None:
    """The tensor is a new one in each step; no step may be replayed with an old one."""
    pair = pipe_pair(stack(), loss_fn=None)
    for number in range(6):
        x, y = batch(number, 12)
        rows = y[:3]
        pair.step(x, loss_fn=lambda o: functional.mse_loss(o, rows))  # noqa: B023


def test_captured_loss_module_whose_attributes_change() -> None:
    class Scaled(nn.Module):
        weight: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.power = 2
            self.register_buffer("weight", torch.ones(4, dtype=torch.float64))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return ((output - target).abs() ** self.power * self.weight).mean()

    loss_fn = Scaled()
    pair = pipe_pair(stack(), loss_fn=loss_fn)
    for number in range(8):
        loss_fn.power = 3 if number in (3, 4, 6) else 2
        loss_fn.weight.mul_(1.1)
        pair.train(1, number)
    assert sum(recordings(pair.graph)) == 6


class Follows(nn.Module):
    """A loss that keeps a mean of its values in a buffer that it replaces."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = functional.mse_loss(output, target)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss + self.mean * output.mean()


class Counts(nn.Module):
    """A loss that depends on a Python number which it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return self.calls * functional.mse_loss(output, target)


class Learns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(self.scale * output, target)


@pytest.mark.parametrize(
    ("make", "ran", "text"),
    [
        (Follows, "ggggg", ""),
        (Counts, "ggttt", "Counts: it changes its attribute 'calls' in every step"),
        (Learns, "gtttt", "a layer uses a tensor of shape .. that requires grad but"),
    ],
)
def test_captured_loss_module_with_state(make: type[nn.Module], ran: str, text: str) -> None:
    """A buffer that the loss replaced had no static tensor, so each capture was used only once."""
    pair, losses = pipe_pair(stack(), "auto", loss_fn=None, chunks=1), (make(), make())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for number, runtime in enumerate(ran):
            x, y = batch(number)
            mine, other = (
                pipe.step(x, target=y, loss_fn=loss_fn)
                for pipe, loss_fn in zip(pair.both, losses, strict=True)
            )
            assert torch.equal(mine.loss, other.loss)
            assert mine.ran.runtime[0] == runtime
            same_state(*pair.both)
            same_state(*losses)
    assert [bool(re.search(text, str(one.message))) for one in found] == [True] * bool(text)
    assert recordings(pair.graph) == ([] if text else [4])


def test_captured_loss_modules_are_freed() -> None:
    pair = pipe_pair(stack(), loss_fn=None)
    kept = []
    for number in range(4):
        loss_fn = nn.SmoothL1Loss()
        kept.append(weakref.ref(loss_fn))
        x, y = batch(number)
        pair.graph.step(x, target=y, loss_fn=loss_fn)
    gc.collect()
    # the last one is still part of the snapshot
    assert [ref() is None for ref in kept] == [True, True, True, False]


def test_captured_steps_without_gradients() -> None:
    pair = pipe_pair(stack(nn.Dropout(0.3)))
    for number in range(7):
        x, y = batch(number)
        with torch.set_grad_enabled(number % 2 == 0):
            pair.step(x, target=y, seed=number, outputs=True)
    assert sorted(recordings(pair.graph)) == [2, 3]

"""Captured steps compute what inline steps compute: module state, random numbers, precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.stage.deferred_batchnorm import DeferredStatsBatchNorm
from tests.runtime.cuda_graph.support import batch, pipe_pair, recordings, stack


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_captured_deferred_batchnorm_when_chunks_change(checkpoint: str) -> None:
    pair = pipe_pair(stack(DeferredStatsBatchNorm(8)), checkpoint=checkpoint)
    for number in range(8):
        pair.each(lambda pipe: setattr(pipe, "chunks", 2 if number in (3, 4, 6) else 4))  # noqa: B023
        pair.step(*batch(number)[:1], target=batch(number)[1])
        assert dict(pair.graph.named_buffers())["1.num_batches_tracked"] == number + 1
    assert sum(recordings(pair.graph)) == 6


def test_captured_autocast() -> None:
    pair = pipe_pair(stack().float(), checkpoint="always")
    for number in range(4):
        x, y = batch(number)
        with torch.autocast("cpu", torch.bfloat16):
            found = pair.step(x.float(), target=y.float(), outputs=True)
        assert found.outputs.dtype == torch.bfloat16
        for pipe in pair.both:
            torch.optim.SGD(pipe.parameters(), 0.1).step()
            pipe.zero_grad()
    x, y = batch(9)
    pair.step(x.float(), target=y.float())
    assert sum(recordings(pair.graph)) == 3


def test_captured_autocast_casts_weights_in_every_replay() -> None:
    """PyTorch caches casts until the autocast region ends.

    A recording must not use a cached one.
    """
    pair = pipe_pair(stack().float())
    batches = [[t.float() for t in batch(number)] for number in range(4)]
    found, expected = [], []
    with torch.autocast("cpu", torch.bfloat16):
        for x, y in batches:
            found.append(pair.graph.step(x, target=y).loss)
            with torch.no_grad():
                for p in pair.graph.parameters():
                    p.mul_(0.5)
    for x, y in batches:
        with torch.autocast("cpu", torch.bfloat16):
            expected.append(pair.inline.step(x, target=y).loss)
        with torch.no_grad():
            for p in pair.inline.parameters():
                p.mul_(0.5)
    assert torch.equal(torch.stack(found), torch.stack(expected))


def test_captured_dropout_when_its_rate_or_the_training_mode_changes() -> None:
    pair = pipe_pair(stack(nn.Dropout(0.4)))
    for number, p in enumerate([0.4, 0.4, 0.4, 0.8, 0.8, 0.8, 0.4, 0.0, 0.0, 0.8]):
        for pipe in pair.both:
            pipe[1].p = p
        pair.train(1, number)
    assert sum(recordings(pair.graph)) == 7
    for number in range(6):
        pair.each(lambda pipe: pipe.train(number % 3 == 0))  # noqa: B023
        pair.train(1, number)


class Mean(nn.Module):
    """A layer that rebinds a buffer, a plain tensor, or both."""

    mean: Tensor

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
        self.other = torch.zeros((), dtype=torch.float64)
        self.plain = plain

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean - self.other
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.plain:
            self.other = 0.5 * self.other + x.detach().mean()
        return y


@pytest.mark.parametrize("plain", [False, True])
def test_captured_layer_that_rebinds_a_buffer_or_tensor_attribute(plain: bool) -> None:
    # A recomputation restores buffers, and is refused if a tensor in an attribute has changed.
    pair = pipe_pair(stack(Mean(plain)), checkpoint="never" if plain else "except_last")
    for number in range(6):
        if number == 4:  # the user replaces it, too
            for pipe in pair.both:
                pipe[1].mean = torch.ones(8, dtype=torch.float64)
        pair.train(1, number)
        assert torch.equal(pair.graph[1].other, pair.inline[1].other)
    assert recordings(pair.graph) == [5]


def test_captured_rebound_tensors_across_alternating_batch_sizes() -> None:
    pair = pipe_pair(stack(Mean(True)), checkpoint="never")
    for number, rows in enumerate([11, 11, 11, 8, 11, 8, 8, 11]):
        pair.train(1, number, rows)
        assert torch.equal(pair.graph[1].other, pair.inline[1].other)
    assert sorted(recordings(pair.graph)) == [2, 4]


def test_input_kept_by_a_layer_is_not_overwritten_by_replays() -> None:
    """The layer keeps a view of the caller's batch."""

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = x.detach()
            return x

    model = nn.Sequential(Keeps(), *stack())
    pair = pipe_pair(model, chunks=1)
    batches = [batch(number) for number in range(5)]
    kept = [x.clone() for x, _ in batches]
    for x, y in batches:
        pair.graph.step(x, target=y)
        assert torch.equal(pair.graph[0].seen, x)
    assert all(torch.equal(x, old) for (x, _), old in zip(batches, kept, strict=True))


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) * torch.rand((), dtype=x.dtype)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_captured_layers_that_draw_random_numbers(checkpoint: str) -> None:
    attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True).double()

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = attention

        def forward(self, x: Tensor) -> Any:
            return self.inner(x[:, None])[:, 0]

    pair = pipe_pair(stack(Noisy(), Rows()), checkpoint=checkpoint)
    pair.train(4)
    assert recordings(pair.graph) == [3]

"""What layers compute in a captured step: state, random numbers, precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.stage.deferred_batchnorm import DeferredStatsBatchNorm
from tests.runtime.cuda_graph.support import batch, emulate, recordings, stack, twins


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_batchnorm(checkpoint: str) -> None:
    pair = twins(stack(nn.BatchNorm1d(8)), checkpoint=checkpoint)
    for number in range(5):
        x, y = batch(number)
        pair.step(x, target=y)
        tracked = dict(pair.graph.named_buffers())["1.num_batches_tracked"]
        assert tracked == 4 * (number + 1)
    assert recordings(pair.graph) == [4]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_deferred_batchnorm_also_if_chunks_change(checkpoint: str) -> None:
    pair = twins(stack(DeferredStatsBatchNorm(8)), checkpoint=checkpoint)
    for number in range(8):
        pair.each(lambda pipe: setattr(pipe, "chunks", 2 if number in (3, 4, 6) else 4))  # noqa: B023
        pair.step(*batch(number)[:1], target=batch(number)[1])
        assert dict(pair.graph.named_buffers())["1.num_batches_tracked"] == number + 1
    assert sum(recordings(pair.graph)) == 6


def test_autocast() -> None:
    pair = twins(stack().float(), checkpoint="always")
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


def test_within_one_autocast_region_weights_are_cast_in_every_replay() -> None:
    """PyTorch keeps casts until the region ends: none of them may be part of a recording."""
    pair = twins(stack().float())
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


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_dropout(checkpoint: str, p: float) -> None:
    """`step` of the twins compares the caller's generator, too."""
    pair = twins(stack(nn.Dropout(p)), checkpoint=checkpoint)
    x, y = batch(0)
    losses = [pair.step(x, target=y, seed=number).loss for number in range(4)]
    assert len(set(map(float, losses))) == (4 if p else 1)
    pair.each(nn.Module.zero_grad)
    torch.manual_seed(7)
    one, two = (pair.graph.step(x, target=y).loss for _ in range(2))
    assert (one != two) == bool(p)


def test_dropout_that_is_set_otherwise_comes_back() -> None:
    pair = twins(stack(nn.Dropout(0.4)))
    for number, p in enumerate([0.4, 0.4, 0.4, 0.8, 0.8, 0.8, 0.4, 0.0, 0.0, 0.8]):
        for pipe in pair.both:
            pipe[1].p = p
        x, y = batch(number)
        pair.step(x, target=y, seed=number)
    assert sum(recordings(pair.graph)) == 7
    for number in range(6):
        pair.each(lambda pipe: pipe.train(number % 3 == 0))  # noqa: B023
        x, y = batch(number)
        pair.step(x, target=y, seed=number)


class Mean(nn.Module):
    """Rebinds a buffer, a plain tensor, or both."""

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
def test_a_tensor_that_a_layer_replaces(plain: bool) -> None:
    pair = twins(stack(Mean(plain)))
    for number in range(6):
        if number == 4:  # by the user, too
            for pipe in pair.both:
                pipe[1].mean = torch.ones(8, dtype=torch.float64)
        x, y = batch(number)
        pair.step(x, target=y)
        assert torch.equal(pair.graph[1].other, pair.inline[1].other)
    assert recordings(pair.graph) == [5]


def test_it_goes_on_after_steps_of_another_kind() -> None:
    pair = twins(stack(Mean(True)))
    for number, rows in enumerate([11, 11, 11, 8, 11, 8, 8, 11]):
        x, y = batch(number, rows)
        pair.step(x, target=y)
        assert torch.equal(pair.graph[1].other, pair.inline[1].other)
    assert sorted(recordings(pair.graph)) == [2, 4]


def test_what_a_layer_has_seen_is_not_written_into() -> None:
    """The tensor that it keeps is the caller's batch."""

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = x.detach()
            return x

    model = nn.Sequential(Keeps(), *stack())
    pair = twins(model, chunks=1)
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
def test_layers_that_draw_themselves(checkpoint: str) -> None:
    attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True).double()

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = attention

        def forward(self, x: Tensor) -> Any:
            return self.inner(x[:, None])[:, 0]

    pair = twins(stack(Noisy(), Rows()), checkpoint=checkpoint)
    for number in range(4):
        x, y = batch(number)
        pair.step(x, target=y, seed=number)
    assert recordings(pair.graph) == [3]

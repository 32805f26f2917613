"""The limits of a pipe: features that it refuses, at least under some schedules."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock import Pipe, skippable, stash
from tests.features.common import SIZE, Block, blocks, made_of
from tests.features.more import penalised
from tests.features.table import Feature, Trainee, called
from tests.oracle import Batch, Outcome
from tests.support import Pop


def sharing_statistics() -> nn.Sequential:
    """Return a model whose first and last stage share a BatchNorm."""
    first, second, third, last = blocks()
    norm = nn.BatchNorm1d(SIZE)
    return made_of(nn.Sequential(first, norm), second, third, nn.Sequential(norm, last))


def differentiated(pipe: Pipe, batch: Batch) -> Outcome:
    """Train with a gradient penalty: the gradient of the input is part of the loss."""
    output = pipe(*batch.inputs)
    (gradient,) = torch.autograd.grad(output.sum(), batch.inputs, create_graph=True)
    loss = (output - batch.target).square().mean() + gradient.square().mean()
    loss.backward()
    return Outcome.of(pipe, batch, loss, output)


class DrawsInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.drawn, x, use_reentrant=False)
        return y

    def drawn(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.2)


def drawing_inside() -> nn.Sequential:
    torch.manual_seed(0)
    return made_of(Block(), DrawsInside(), Block(), Block())


class OwnGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
        return super().forward(x * noise)


def own_generators() -> nn.Sequential:
    torch.manual_seed(0)
    return made_of(Block(), OwnGenerator(), Block(), Block())


class Changes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


@skippable(stash=["far"])
class StashAsIs(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("far", x)
        return x


def changing_what_others_read() -> nn.Sequential:
    """Return a model in which a stashed tensor is also passed on and then changed in place."""
    first, second, third, last = blocks()
    return made_of(
        nn.Sequential(first, StashAsIs()),
        nn.Sequential(Changes(), second),
        third,
        nn.Sequential(Pop(), last),
    )


def only_refused(feature: Feature) -> Trainee:
    """Fail: the oracle cannot run this feature either, so it must be refused."""
    raise AssertionError(f"{feature.name}: the pipe ran, and nothing says what is right")


RECOMPUTED = (("inline", "always"), ("threads", "always"))

LIMITS = [
    Feature(
        "shared BatchNorm",
        "The first and the last stage share a BatchNorm, in training.",
        sharing_statistics,
        whole=False,
    ),
    Feature(
        "in place, read by others",
        "A stage stashes a tensor and passes it on, and the next stage modifies it in place.",
        changing_what_others_read,
    ),
    Feature(
        "added loss, pipe(x)",
        "A layer calls `penstock.add_loss` in `pipe(x)`, which has no loss to add to.",
        penalised,
        step=called,
    ),
    Feature(
        "gradient penalty",
        "Second derivatives: `create_graph=True` through `pipe(x)`.",
        blocks,
        step=differentiated,
    ),
    Feature(
        "random numbers in a checkpoint",
        "A layer uses `torch.utils.checkpoint` with dropout inside.",
        drawing_inside,
        reference=only_refused,
    ),
    Feature(
        "own generator",
        "A layer draws from its own `torch.Generator`, under recomputation.",
        own_generators,
        ways=RECOMPUTED,
        reference=only_refused,
    ),
]

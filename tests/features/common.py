"""The features that most users ask for: the first table of docs/features.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock import Pipe, is_recomputing
from tests.features.table import STAGES, Feature, Trainee, Unsplit, Way, given, twice
from tests.oracle import Outcome
from tests.support import CHECKPOINTS, RUNTIMES, Pop, Stash

SIZE = 6


class Block(nn.Module):
    """One stage: a norm, two matrices, a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(SIZE), nn.Linear(SIZE, 8), nn.Linear(8, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


def made_of(*layers: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return nn.Sequential(*layers).to(dtype)


def blocks(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return made_of(*(Block() for _ in range(STAGES)), dtype=dtype)


# ---- checkpointing ------------------------------------------------------------------------


class Repeated(Block):
    """A block that counts its forwards and its recomputations."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = self.recomputations = 0

    def forward(self, x: Tensor) -> Tensor:
        if is_recomputing():
            self.recomputations += 1
        else:
            self.forwards += 1
        return super().forward(x)


def repeated() -> nn.Sequential:
    torch.manual_seed(0)
    return made_of(*(Repeated() for _ in range(STAGES)))


def recomputed_once(pipe: Pipe, way: Way) -> None:
    again = {"never": 0, "except_last": pipe.chunks - 1, "always": pipe.chunks}[way.checkpoint]
    for layer in pipe:
        assert isinstance(layer, Repeated)
        assert (layer.forwards, layer.recomputations) == (2 * pipe.chunks, 2 * again)


# ---- the model ----------------------------------------------------------------------------


def tied() -> nn.Sequential:
    model = blocks()
    first, last = model[0], model[STAGES - 1]
    assert isinstance(first, Block)
    assert isinstance(last, Block)
    last.up.weight = first.up.weight
    last.norm = first.norm
    return model


def frozen() -> nn.Sequential:
    model = blocks()
    model[0].requires_grad_(False)
    block = model[2]
    assert isinstance(block, Block)
    block.up.weight.requires_grad_(False)
    block.norm.requires_grad_(False)
    return model


def without_input_gradient(trainee: Trainee) -> Iterator[Outcome]:
    return twice(trainee, lambda: given().detached())


def skips() -> nn.Sequential:
    first, *others = blocks()
    return made_of(nn.Sequential(first, Stash()), *others[:-1], nn.Sequential(Pop(), others[-1]))


def normalised() -> nn.Sequential:
    return made_of(*(nn.Sequential(block, nn.BatchNorm1d(SIZE)) for block in blocks()))


def dropping() -> nn.Sequential:
    return made_of(*(nn.Sequential(block, nn.Dropout(0.4)) for block in blocks()))


class Moves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5).add_(1.5)


def in_place() -> nn.Sequential:
    first, *others = blocks()
    begin = [Moves(), nn.LeakyReLU(0.1, inplace=True), Moves()]
    return made_of(first, *map(nn.Sequential, begin, others))


# ---- the batch ----------------------------------------------------------------------------


def of_many_sizes(trainee: Trainee) -> Iterator[Outcome]:
    for rows in (7, 5, 1, 3, 8):
        trainee.module.zero_grad()
        yield trainee.step(given(rows))


def without_zeroing(trainee: Trainee) -> Iterator[Outcome]:
    for seed, rows in enumerate((8, 5, 11)):
        yield trainee.step(given(rows, seed))


# ---- the machine --------------------------------------------------------------------------


def in_float32(trainee: Trainee) -> Iterator[Outcome]:
    return twice(trainee, lambda: given(dtype=torch.float32))


def casting_anew(feature: Feature) -> Unsplit:
    """Return the reference without autocast's weight cache.

    With the cache, the unsplit model would sum the gradients of the micro-batches in bfloat16.
    """
    under = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)
    return Unsplit(replace(feature, under=under))


class Holds(nn.Module):
    """A wrapper with the attribute name of a `torch.compile` wrapper, so that names agree."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._orig_mod(x)
        return y


def to_be_compiled() -> nn.Sequential:
    model = blocks()
    model[1] = Holds(model[1])
    return model


def compiled(model: nn.Sequential) -> None:
    holds = model[1]
    assert isinstance(holds, Holds)
    wrapped: Any = torch.compile(holds._orig_mod, backend="aot_eager")
    model[1] = wrapped
    model[2].compile(backend="aot_eager")


COMMON = [
    Feature(
        "checkpointing",
        "All three modes. The test also checks that every cell that is to be recomputed runs once "
        "more per step.",
        repeated,
        ways=tuple(itertools.product(RUNTIMES, CHECKPOINTS)),
        after=recomputed_once,
    ),
    Feature(
        "autocast",
        "A float32 model under `torch.autocast` to bfloat16: bit for bit equal to the unsplit "
        "model under autocast, one micro-batch after the other.",
        lambda: blocks(torch.float32),
        in_float32,
        whole=False,
        tolerance=0.0,
        chunks=2,
        under=lambda: torch.autocast("cpu", torch.bfloat16),
        reference=casting_anew,
    ),
    Feature("tied", "The first and the last stage share a matrix and a LayerNorm.", tied),
    Feature(
        "frozen",
        "The first stage and parts of the third are frozen, and the input requires no gradient.",
        frozen,
        without_input_gradient,
    ),
    Feature("skip", "A tensor stashed in the first stage is popped in the last.", skips),
    Feature(
        "BatchNorm",
        "A BatchNorm in every stage, in training, with its running statistics. The reference is "
        "the unsplit model, one micro-batch after the other, because BatchNorm normalises what "
        "it sees.",
        normalised,
        whole=False,
    ),
    Feature(
        "dropout",
        "Dropout in every stage. The reference is the unsplit model, one micro-batch after the "
        "other, with the same seeds for each stage and micro-batch.",
        dropping,
        whole=False,
    ),
    Feature(
        "uneven batch",
        "Batches of 7, 5, 1, 3 and 8 rows, in up to four micro-batches.",
        blocks,
        of_many_sizes,
    ),
    Feature(
        "in-place",
        "Every stage but the first begins with layers that modify their input in place.",
        in_place,
    ),
    Feature(
        "accumulate",
        "Three steps with batches of 8, 5 and 11 rows, without `zero_grad` between them.",
        blocks,
        without_zeroing,
    ),
    Feature(
        "compile",
        "One layer is `torch.compile(layer)`, and another is compiled in place with "
        "`layer.compile()`, with the backend `aot_eager`. The reference is the same model "
        "without compilation.",
        to_be_compiled,
        changed=compiled,
    ),
]

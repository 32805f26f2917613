"""Models that cannot be cut as they are, each for a different reason."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from tests.models.models_forms import mlp


class Dropping(nn.Module):
    """LayerDrop: the host draws which blocks run."""

    def __init__(self, dim: int = 6, layers: int = 4, rate: float = 0.5) -> None:
        super().__init__()
        self.rate = rate
        self.inner = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(mlp(dim, dim) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            if self.training and random.random() < self.rate:
                continue
            x = x + block(x)
        return x


class Peeking(nn.Module):
    """Continues only while the output of a block is large."""

    def __init__(self, dim: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(mlp(dim, dim) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x)
            if x.abs().mean() > 100:
                break
        return x


class Selecting(nn.Module):
    """Keeps rows by the output of a block, so that their number depends on the data."""

    def __init__(self, dim: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(mlp(dim, dim) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x).flatten(0, 1)
        x = x[x.mean(-1) > 0]
        for block in self.blocks:
            x = x + block(x)
        return x.sum()


class Sometimes(nn.Module):
    """A unit between others that only longer inputs need."""

    def __init__(self, dim: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(mlp(dim, dim) for _ in range(layers))
        self.extra = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        long = x.shape[1] > 7
        x = self.inner(x)
        for at, block in enumerate(self.blocks):
            x = x + block(x)
            if long and at == 0:
                x = x + self.extra(x)
        return x


class Lagging(nn.Module):
    """The first block reads what the last one wrote for the micro-batch before."""

    mean: Tensor

    def __init__(self, dim: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.inner = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(mlp(dim, dim) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) - self.mean
        for block in self.blocks:
            x = x + block(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return x


class Doubling(nn.Module):
    """Hooks compute with the outputs of blocks, which only the stage of the block has."""

    def __init__(self, dim: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim)) for _ in range(layers))
        self.twice: list[Tensor] = []
        for block in self.blocks:
            block[0].register_forward_hook(lambda _, args, out: self.twice.append(out * 2))

    def forward(self, x: Tensor) -> Tensor:
        self.twice = []
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x)
        return x + sum(self.twice)


class Notes:
    """A user-defined object that holds tensors."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}


class NotingBlock(nn.Module):
    """Reads the notes of earlier blocks and adds one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor, notes: Notes) -> Tensor:
        x = self.linear(x + notes.kept.get("x", 0))
        notes.kept["x"] = x
        return x


class Noting(nn.Module):
    """Blocks communicate through an object that is not a pytree."""

    def __init__(self, dim: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(NotingBlock(dim) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        notes = Notes()
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x, notes)
        return x

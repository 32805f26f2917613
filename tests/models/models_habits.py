"""Architectures whose forward sets attributes, writes in place, uses hooks or checkpoints."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.models_forms import mlp
from tests.models.models_sequences import Block, causal


class Remembering(nn.Module):
    """The parent sets attributes in its forward and reads them again."""

    def __init__(self, dim: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(mlp(dim, dim) for _ in range(layers))
        self.outer = nn.Linear(dim, 2)
        self.last: Tensor | None = None
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = []
        self.last = self.inner(x)
        for block in self.blocks:
            self.seen.append(tuple(self.last.shape))
            self.last = self.last + block(self.last)
        assert len(self.seen) == len(self.blocks)
        return self.outer(self.last)


class InPlace(nn.Module):
    """The code between units adds in place, and writes into masks and slices."""

    def __init__(self, vocabulary: int = 40, dim: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.mixers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.head = nn.Linear(dim, 5)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        mask = torch.zeros(ids.shape[0], 1, 1, ids.shape[1], dtype=h.dtype)
        mask[:, :, :, -1] = -1e4
        mask[ids[:, None, None, :] == 5] = -1e4
        mask[..., 0] = 0
        for block, mixer in zip(self.blocks, self.mixers, strict=True):
            r = block(h, mask)
            h = h.clone()
            h += r
            h[:, 0] *= 0.5
            h.add_(mixer(r)).mul_(0.7)
            F.relu_(h)
        return self.head(h)


class Checkpointed(nn.Module):
    """The parent recomputes its blocks itself."""

    def __init__(self, dim: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(5, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        mask = causal(x.shape[1], x)
        for layer in self.layers:
            if not self.training:
                x = layer(x, mask)
                continue
            x = checkpoint(layer, x, mask, use_reentrant=False)
        return self.norm(x)


class Residual(nn.Module):
    """A block that is compiled."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.silu(self.inner(x)))


class Compiled(nn.Module):
    """Each block is compiled separately, in one of three ways."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(5, dim)
        how: Any = {"backend": "aot_eager", "dynamic": False}
        one, two, three = (Residual(dim) for _ in range(3))
        one.compile(**how)
        three.forward = torch.compile(three.forward, **how)
        compiled: Any = torch.compile(two, **how)
        self.blocks = nn.ModuleList([one, compiled, three])
        self.outer = nn.Linear(dim, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.outer(x)


class Hooked(nn.Module):
    """Hooks change the inputs and outputs of blocks, and scale gradients."""

    def __init__(self, dim: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(mlp(dim, dim) for _ in range(layers))
        self.outer = nn.Linear(dim, 2)
        self.blocks[0].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        self.blocks[1].register_forward_hook(lambda _, args, out: out + args[0])
        self.blocks[2].register_full_backward_hook(lambda _, before, after: (before[0] * 0.5,))
        self.blocks[3].register_forward_hook(
            lambda _, args, kwargs, out: out * kwargs.get("scale", 3), with_kwargs=True
        )
        self.inner.weight.register_hook(lambda gradient: gradient * 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x)
        return self.outer(x)


class Features(nn.Module):
    """Hooks collect the outputs of blocks, as feature extractors do; the head reads them."""

    def __init__(self, dim: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(mlp(dim, dim) for _ in range(layers))
        self.head = nn.Linear(layers * dim, 2)
        self.gathered: dict[int, Tensor] = {}
        for at, block in enumerate(self.blocks):
            block.register_forward_hook(lambda _, args, out, at=at: self.keep(at, out))

    def keep(self, at: int, value: Tensor) -> None:
        self.gathered[at] = value

    def forward(self, x: Tensor) -> Tensor:
        self.gathered.clear()
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(torch.cat(list(self.gathered.values()), -1))


class Noisy(nn.Module):
    """Noise drawn between units is used at the start and at the end, and returned."""

    def __init__(self, dim: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(mlp(dim, dim) for _ in range(layers))
        self.outer = nn.Linear(dim, 4)

    def forward(self, x: Tensor, noise: Tensor | None = None) -> dict[str, Tensor]:
        if noise is None:
            noise = torch.randn_like(x)
        h = self.inner(x + noise)
        for block in self.blocks:
            h = h + block(h)
        found = self.outer(h)
        return {"loss": F.mse_loss(found, noise), "found": found, "noise": noise}


class Counting(nn.Module):
    """Buffers that the parent and its blocks update: a count and a running mean."""

    def __init__(self, dim: int = 6, layers: int = 3) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.inner = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.ReLU())
            for _ in range(layers)
        )
        self.outer = nn.Linear(dim, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        x = self.inner(x).flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        return self.outer(x)


class Stack(nn.ModuleList):
    """A list of blocks with a forward method."""

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for block in self:
            x = x + block(x)
            yield x


class Generated(nn.Module):
    """The blocks run in a generator, which the parent stops when it has enough."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        parts = OrderedDict(inner=nn.Linear(4, dim), norm=nn.LayerNorm(dim))
        self.stem = nn.Sequential(parts)
        self.stack = Stack(mlp(dim, dim) for _ in range(5))
        self.outer = nn.Linear(dim, 2)

    def forward(self, x: Tensor, enough: int = 4) -> Tensor:
        depths = self.stack(self.stem(x))
        for _ in range(enough):
            h = next(depths)
        return self.outer(h)


class Configured(nn.Module):
    """Control flow on shapes, on options, and on the values of a side input."""

    def __init__(self, dim: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(mlp(dim, dim) for _ in range(layers))
        self.extra = nn.Linear(dim, dim)
        self.outer = nn.Linear(dim, 2)

    def forward(self, x: Tensor, mask: Tensor, **options: Any) -> tuple[Tensor, ...]:
        h = self.inner(x)
        whole = bool(mask.all())
        for at, block in enumerate(self.blocks):
            y = block(h)
            h = h + (y if whole else y * mask[..., None])
            if h.shape[1] < 8 and at == 1:
                h = h + self.extra(h)
        if options.get("twice"):
            return self.outer(h), self.outer(h.flip(1))
        return (self.outer(h),)


class Region(nn.Module):
    """Checkpoints all its blocks at once, so that a cut between them is inside the checkpoint."""

    def __init__(self, dim: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(dim, dim) for _ in range(layers))

    def all_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.all_blocks, x, use_reentrant=False)

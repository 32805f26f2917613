"""Shared parts of the GPU tests: virtual devices, layers, and a check for hidden host waits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock import pop, skippable, stash
from penstock.schedules import FAMILIES

SCHEDULES = [*(name for name, family in FAMILIES.items() if family.trains), "fit"]
MODES = ["never", "except_last", "always"]
BUSY = 20_000_000  # cycles: about 10 ms


@contextmanager
def no_hidden_waits() -> Iterator[None]:
    """Make any operation that makes the host wait for the device an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode warns that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def four() -> list[Any]:
    return list(penstock.virtual_devices("cuda:0", 4))


@skippable(stash=["long"])
class Top(nn.Module):
    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Any:
        yield stash("long", x)
        return self.linear(x)


@skippable(pop=["long"])
class Bottom(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("long"))


class Sleep(nn.Module):
    """A layer that keeps its device busy."""

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(BUSY)
        return x * 1


WIDTH, WORDS = 16, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return x + torch.tanh(self.inner(x))


class Language(nn.Module):
    """A language model with a tied head.

    Positions and masks are created between units, on the device of the input.
    """

    frequencies: Tensor

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("frequencies", torch.rand(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        places = torch.arange(ids.shape[1], device=x.device)
        x = x + torch.sin(places[:, None] * self.frequencies)
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=self.words.weight.device).triu(1)
        first = x
        for block in self.blocks:
            x = block(x, mask) * self.scale
        x = x + first
        logits = functional.linear(x, self.words.weight)
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

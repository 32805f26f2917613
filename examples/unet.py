"""The U-Net (B, C) of the torchgpipe paper: B convolutions per level, C channels at the top.

    level 0   C  ─────────────── skip 0 ───────────────▶  C/2
    level 1     2C  ──────────── skip 1 ────────────▶   C
    level 2       4C  ────────── skip 2 ─────────▶   2C
                    4C ─▶ 8C ─▶ ··· ─▶ 8C ─▶ 4C

Each level of the encoder stashes its result, and the same level of the decoder pops it. Each level
has its own namespace. The Sequential is flat, with one convolution per child, so it can be cut
between any two of them. A skip then goes straight from the stage that stashes it to the stage that
pops it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Namespace, pop, skippable, stash


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stash the result of an encoder level for the decoder, and pass it on."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Join(nn.Module):
    """Upsample to the size of the stashed result and concatenate both."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        skip = yield pop("skip")
        return torch.cat([functional.interpolate(x, size=skip.shape[2:]), skip], dim=1)


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Build one child. It treats each sample alone, so micro-batches do not change the result."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1),
        nn.InstanceNorm2d(outputs),
        nn.LeakyReLU(0.1, inplace=True),
    )


def convolutions(name: str, *channels: int) -> OrderedDict[str, nn.Module]:
    """Build a convolution between each two adjacent channel counts, named in order."""
    shapes = enumerate(pairwise(channels))
    return OrderedDict((f"{name}_conv{i}", convolution(*shape)) for i, shape in shapes)


def unet(
    B: int = 5, C: int = 64, *, levels: int = 5, inputs: int = 3, outputs: int = 1
) -> nn.Sequential:
    """Build a U-Net for images of at least 2 ** (levels + 1) pixels per side.

    >>> model = unet(B=2, C=4, levels=2)
    >>> model(torch.ones(2, 3, 16, 16)).shape
    torch.Size([2, 1, 16, 16])
    """
    if B < 2 or levels < 1:
        raise ValueError(f"at least 2 convolutions a level and 1 level: B={B}, levels={levels}")
    widths = [C * 2**level for level in range(levels)]
    namespaces = [Namespace() for _ in widths]
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for level, width in enumerate(widths):
        before = widths[level - 1] if level else inputs
        layers |= convolutions(f"down{level}", before, *[width] * B)
        layers[f"down{level}_stash"] = Stash().isolate(namespaces[level])  # type: ignore[operator]
        layers[f"down{level}_pool"] = nn.MaxPool2d(2)
    bottom = widths[-1]
    layers |= convolutions("bottom", bottom, *[2 * bottom] * (B - 1), bottom)
    for level, width in reversed(list(enumerate(widths))):
        half = width // 2
        layers[f"up{level}_join"] = Join().isolate(namespaces[level])  # type: ignore[operator]
        layers |= convolutions(f"up{level}", 2 * width, *[half] * B)
    layers["head"] = nn.Conv2d(C // 2, outputs, kernel_size=1)
    return nn.Sequential(layers)

"""ResNet-101 as a flat Sequential, with children that are smaller than its blocks.

    ─ split ─ conv norm relu ─ conv norm relu ─ conv norm ─ join ─ relu ─
        └──────────────────── identity ───────────────────────┘

The identity of a bottleneck is an ordinary skip connection: stashed before the three convolutions
and popped after them. So a cut may go through the middle of a bottleneck. The sum and the ReLUs are
in place, as usual in ResNets, even where a stage begins with one of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence
from typing import Any

from torch import Tensor, nn

from penstock import Namespace, pop, skippable, stash

EXPANSION = 4


@skippable(stash=["identity"])
class Split(nn.Module):
    """Stash the input of the block, and pass it on."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("identity", x)
        return x


@skippable(pop=["identity"])
class Join(nn.Module):
    """Add the input of the block, projected to the output shape if necessary."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        identity = yield pop("identity")
        return x.add_(self.shortcut(identity))


def bottleneck(inputs: int, width: int, stride: int) -> OrderedDict[str, nn.Module]:
    """Build the children of one block, which has EXPANSION * width output channels."""
    outputs = EXPANSION * width
    block = Namespace()
    return OrderedDict(
        split=Split().isolate(block),  # type: ignore[operator]
        conv1=nn.Conv2d(inputs, width, kernel_size=1, bias=False),
        norm1=nn.BatchNorm2d(width),
        relu1=nn.ReLU(inplace=True),
        conv2=nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False),
        norm2=nn.BatchNorm2d(width),
        relu2=nn.ReLU(inplace=True),
        conv3=nn.Conv2d(width, outputs, kernel_size=1, bias=False),
        norm3=nn.BatchNorm2d(outputs),
        join=Join(inputs, outputs, stride).isolate(block),  # type: ignore[operator]
        relu3=nn.ReLU(inplace=True),
    )


def resnet101(
    layers: Sequence[int] = (3, 4, 23, 3), *, width: int = 64, classes: int = 1000, inputs: int = 3
) -> nn.Sequential:
    """Build a ResNet; `layers` has the number of blocks at each image size.

    >>> import torch
    >>> model = resnet101([1, 1], width=4, classes=10)
    >>> model(torch.ones(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    pieces: OrderedDict[str, nn.Module] = OrderedDict(
        conv=nn.Conv2d(inputs, width, kernel_size=7, stride=2, padding=3, bias=False),
        norm=nn.BatchNorm2d(width),
        relu=nn.ReLU(inplace=True),
        pool=nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    )
    channels = width
    for size, blocks in enumerate(layers):
        for block in range(blocks):
            stride = 2 if size and not block else 1
            for name, piece in bottleneck(channels, width * 2**size, stride).items():
                pieces[f"block{size}_{block}_{name}"] = piece
            channels = EXPANSION * width * 2**size
    pieces["mean"] = nn.AdaptiveAvgPool2d(1)
    pieces["flat"] = nn.Flatten()
    pieces["head"] = nn.Linear(channels, classes)
    return nn.Sequential(pieces)

"""AmoebaNet-D (L, D), the model of the GPipe paper's tables: L normal cells, D filters.

    stem ─▶ 2 reductions ─▶ L/3 normal ─▶ reduction ─▶ L/3 normal ─▶ reduction ─▶ L/3 normal ─▶ head

Each cell reads the results of the two cells before it. Both go through the Sequential as one tuple,
(last, older), so every child is a cell, and the model can be cut between any two.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

State = tuple[Tensor, Tensor]
Operation = Callable[[int, int], nn.Module]
"""A function from channels and stride to a layer that keeps the number of channels."""


def convolution(
    inputs: int,
    outputs: int,
    kernel: tuple[int, int] = (1, 1),
    stride: tuple[int, int] = (1, 1),
) -> list[nn.Module]:
    """Build ReLU, convolution and norm. The ReLU is not in place: others read the same state."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    return [
        nn.ReLU(),
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
    ]


def same(channels: int, stride: int) -> nn.Module:
    """Return the identity."""
    assert stride == 1, "neither kind of cell takes the input of a reduction as it is"
    return nn.Identity()


def mean_3x3(channels: int, stride: int) -> nn.Module:
    """Return average pooling that does not count the padding."""
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def max_3x3(channels: int, stride: int) -> nn.Module:
    """Return 3x3 maximum pooling."""
    return nn.MaxPool2d(3, stride, padding=1)


def max_2x2(channels: int, stride: int) -> nn.Module:
    """Return 2x2 maximum pooling, which has no overlap with stride 2."""
    return nn.MaxPool2d(2, stride, ceil_mode=True)


def conv_1x1(channels: int, stride: int) -> nn.Module:
    """Return a pointwise convolution."""
    return nn.Sequential(*convolution(channels, channels, stride=(stride, stride)))


def conv_3x3(channels: int, stride: int) -> nn.Module:
    """Return a 3x3 convolution on a quarter of the channels."""
    few = channels // 4
    return nn.Sequential(
        *convolution(channels, few),
        *convolution(few, few, (3, 3), (stride, stride)),
        *convolution(few, channels),
    )


def conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    """Return a 1x7 and a 7x1 convolution on a quarter of the channels."""
    few = channels // 4
    return nn.Sequential(
        *convolution(channels, few),
        *convolution(few, few, (1, 7), (1, stride)),
        *convolution(few, few, (7, 1), (stride, 1)),
        *convolution(few, channels),
    )


# The cells from the evolutionary search of the AmoebaNet paper. States 0 and 1 are the results of
# the last two cells, the most recent first. Each line adds a state: the sum of two operations on
# earlier states. The cell returns the concatenation of the states in CONCAT.
Recipe = list[tuple[tuple[int, Operation], tuple[int, Operation]]]
NORMAL: Recipe = [
    ((1, conv_1x1), (1, max_3x3)),
    ((1, same), (0, conv_1x7_7x1)),
    ((0, conv_1x1), (0, conv_1x7_7x1)),
    ((2, max_3x3), (2, same)),
    ((1, mean_3x3), (5, conv_1x1)),
]
NORMAL_CONCAT = [0, 3, 4, 6]
REDUCTION: Recipe = [
    ((0, max_2x2), (0, max_3x3)),
    ((2, same), (1, conv_3x3)),
    ((2, conv_1x7_7x1), (2, max_3x3)),
    ((3, same), (1, max_2x2)),
    ((2, mean_3x3), (3, conv_1x1)),
]
REDUCTION_CONCAT = [4, 5, 6]


class Halve(nn.Module):
    """Halve the image size: half of the channels read even pixels, the other half odd pixels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, kernel_size=1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, kernel_size=1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(x)
        shifted = functional.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        out: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return out


class Cell(nn.Module):
    """One cell; `inputs` are the channels of the last cell's result and of the one before it.

    After a reduction, the older result still has twice the image size, so it is halved.
    """

    def __init__(
        self, inputs: tuple[int, int], channels: int, *, reduces: bool, after_reduction: bool
    ) -> None:
        super().__init__()
        last, older = inputs
        self.recipe = REDUCTION if reduces else NORMAL
        self.concat = REDUCTION_CONCAT if reduces else NORMAL_CONCAT
        self.last = nn.Sequential(*convolution(last, channels))
        self.older: nn.Module = nn.Identity()
        if after_reduction:
            self.older = Halve(older, channels)
        elif older != channels:
            self.older = nn.Sequential(*convolution(older, channels))
        self.operations = nn.ModuleList(
            make(channels, 2 if reduces and source < 2 else 1)
            for pair in self.recipe
            for source, make in pair
        )

    def forward(self, state: State) -> State:
        states = [self.last(state[0]), self.older(state[1])]
        operations = iter(self.operations)
        for (a, _), (b, _) in self.recipe:
            states.append(next(operations)(states[a]) + next(operations)(states[b]))
        return torch.cat([states[i] for i in self.concat], dim=1), state[0]


class Stem(nn.Module):
    """Convert an image to the first state, in which both results are the same."""

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, channels, kernel_size=3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> State:
        out: Tensor = self.norm(self.conv(x))
        return out, out


class Head(nn.Module):
    """Convert the last result to class scores; the older result is not used."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, state: State) -> Tensor:
        out: Tensor = self.linear(state[0].mean(dim=(2, 3)))
        return out


def amoebanet_d(
    L: int = 18, D: int = 256, *, classes: int = 1000, inputs: int = 3
) -> nn.Sequential:
    """Build an AmoebaNet-D; L must be a multiple of 3, and D of 16.

    >>> model = amoebanet_d(L=3, D=16, classes=10)
    >>> model(torch.ones(2, 3, 64, 64)).shape
    torch.Size([2, 10])
    """
    if L < 3 or L % 3 or D < 16 or D % 16:
        raise ValueError(f"L must be a multiple of 3, D of 16, for even parts: L={L}, D={D}")
    kinds = ["R", "R", *"N" * (L // 3), "R", *"N" * (L // 3), "R", *"N" * (L // 3)]
    channels = D // 4
    last = older = channels
    layers: list[nn.Module] = [Stem(inputs, channels)]
    for before, kind in pairwise(["N", *kinds]):
        reduces = kind == "R"
        channels *= 2 if reduces else 1
        layers.append(Cell((last, older), channels, reduces=reduces, after_reduction=before == "R"))
        width = channels * len(REDUCTION_CONCAT if reduces else NORMAL_CONCAT)
        last, older = width, last
    return nn.Sequential(*layers, Head(last, classes))

"""Placing a model before it becomes a Pipe."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from penstock.compat.gpipe import DeviceLike, split_by_balance

__all__ = ["partition_model"]


def partition_model(
    module: nn.Sequential, balance: Iterable[int], devices: Iterable[DeviceLike] | None = None
) -> nn.Sequential:
    """A Sequential of Sequentials with so many layers each, every one on its device.

    >>> layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> [len(part) for part in partition_model(layers, [2, 1], devices=["cpu", "cpu"])]
    [2, 1]
    """
    parts, places = split_by_balance(module, balance, devices)
    moved = (nn.Sequential(*p).to(place) for p, place in zip(parts, places, strict=True))
    return nn.Sequential(*moved)

"""A balance for `GPipe`, found by measuring the layers one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.balance import cut
from penstock.compat.partitions import by_rows
from penstock.partition.profile import layer_bytes, layer_times

__all__ = ["balance_by_size", "balance_by_time"]

Device = torch.device | int | str


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]:
    """How many layers each partition takes, so that the slowest is quick.

    The layers are timed for `timeout` seconds, on a GPU if there is one and none is given.

    >>> layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    >>> sum(balance_by_time(2, layers, torch.ones(4, 8), timeout=0.0))
    4
    """
    times = layer_times(list(module), by_rows((sample,)), timeout=timeout, device=_place(device))
    return list(cut(times, partitions))


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """How many layers each partition takes, so that the largest is small.

    A layer's size is what a micro-batch keeps for its backward, and its parameters `param_scale`
    times.

    >>> layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    >>> balance_by_size(2, layers, torch.ones(4, 8))
    [2, 2]
    """
    sizes = layer_bytes(
        list(module),
        by_rows((input,)),
        chunks=chunks,
        param_scale=param_scale,
        device=_place(device),
    )
    return list(cut(sizes, partitions))


def _place(device: Device | None) -> torch.device | None:
    if device is None:
        return torch.device("cuda") if torch.cuda.is_available() else None
    return torch.device(device)

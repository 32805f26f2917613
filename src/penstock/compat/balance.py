"""A balance for `GPipe`, found by measuring the layers one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.compat.partitions import chunk_on_dim_zero
from penstock.model.sequential_profiler import measure_layer_bytes, measure_layer_times
from penstock.schedules.balance import balance_costs

__all__ = ["balance_by_size", "balance_by_time"]

DeviceLike = torch.device | int | str


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: DeviceLike | None = None,
) -> list[int]:
    """How many layers each partition takes, so that the slowest is quick.

    The layers are timed for `timeout` seconds, on a GPU if there is one and none is given.

    >>> layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    >>> sum(balance_by_time(2, layers, torch.ones(4, 8), timeout=0.0))
    4
    """
    times = measure_layer_times(
        list(module), chunk_on_dim_zero((sample,)), timeout=timeout, device=_resolve_device(device)
    )
    return list(balance_costs(times, partitions))


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: DeviceLike | None = None,
) -> list[int]:
    """How many layers each partition takes, so that the largest is small.

    A layer's size is what a micro-batch keeps for its backward, and its parameters `param_scale`
    times.

    >>> layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    >>> balance_by_size(2, layers, torch.ones(4, 8))
    [2, 2]
    """
    sizes = measure_layer_bytes(
        list(module),
        chunk_on_dim_zero((input,)),
        chunks=chunks,
        param_scale=param_scale,
        device=_resolve_device(device),
    )
    return list(balance_costs(sizes, partitions))


def _resolve_device(device: DeviceLike | None) -> torch.device | None:
    if device is None:
        return torch.device("cuda") if torch.cuda.is_available() else None
    return torch.device(device)

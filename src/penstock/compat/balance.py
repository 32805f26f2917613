"""`balance_by_time` and `balance_by_size`: layer counts for `GPipe`, by measuring each layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock.compat.legacy_pipe import DeviceLike, chunk_on_dim_zero
from penstock.device.accelerator import get_accelerator_type, list_accelerators
from penstock.model.profiler import measure_layer_bytes, measure_layer_times
from penstock.schedules.balance import balance_costs

__all__ = ["balance_by_size", "balance_by_time"]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: DeviceLike | None = None,
) -> list[int]:
    """Return the layer counts that make the slowest partition fastest.

    Each layer is timed in training mode; the whole takes about `timeout` seconds. Without `device`,
    a GPU is used if there is one.

    >>> layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    >>> sum(balance_by_time(2, layers, torch.ones(4, 8), timeout=0.0))
    4
    """
    with _training_mode(module):
        times = measure_layer_times(
            list(module),
            chunk_on_dim_zero((sample,)),
            timeout=timeout,
            device=_resolve_device(device),
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
    """Return the layer counts that make the largest partition smallest.

    The size of a layer is the bytes that one micro-batch keeps for its backward in training mode,
    plus `param_scale` times the bytes of its parameters.

    >>> layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    >>> balance_by_size(2, layers, torch.ones(4, 8))
    [2, 2]
    """
    with _training_mode(module):
        sizes = measure_layer_bytes(
            list(module),
            chunk_on_dim_zero((input,)),
            chunks=chunks,
            param_scale=param_scale,
            device=_resolve_device(device),
        )
    return list(balance_costs(sizes, partitions))


@contextmanager
def _training_mode(module: nn.Module) -> Iterator[None]:
    """Set a module to training mode, and each part back to its own mode afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.train()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _resolve_device(device: DeviceLike | None) -> torch.device | None:
    if device is None:
        return torch.device(get_accelerator_type()) if list_accelerators() else None
    return torch.device(device)

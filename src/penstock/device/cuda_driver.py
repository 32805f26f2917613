"""The CUDA driver, by NVIDIA's own bindings: for what PyTorch has no call."""

from __future__ import annotations

from typing import Any

from penstock.errors import MissingExtra, RunError


def load_driver(purpose: str) -> Any:
    """The bindings, which are there to do what is told."""
    try:
        from cuda.bindings import driver
    except ImportError as missing:
        raise MissingExtra("cuda-bindings", "cuda", purpose) from missing
    return driver


def check_status(result: tuple[Any, ...], purpose: str) -> Any:
    """What a call of the driver gave, which was asked to do that, without its status."""
    status, *found = result
    if int(status):
        raise RunError(f"the CUDA driver refuses {purpose}: {status!r}")
    return found[0] if len(found) == 1 else tuple(found)

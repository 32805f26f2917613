"""Access to the CUDA driver through NVIDIA's bindings, for calls that PyTorch does not have."""

from __future__ import annotations

from typing import Any

from penstock.errors import MissingExtra, RunError


def load_driver(purpose: str) -> Any:
    """Return the module of the bindings.

    Args:
        purpose: What the bindings are needed for, for the error message: "cutting a GPU into ...".

    Raises:
        MissingExtra: The bindings are not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError as missing:
        raise MissingExtra("cuda-bindings", "cuda", purpose) from missing
    return driver


def check_status(result: tuple[Any, ...], purpose: str) -> Any:
    """Return the values of a driver call without its status code; raise if the call failed."""
    status, *values = result
    if int(status):
        raise RunError(f"the CUDA driver failed while {purpose}: {status!r}")
    return values[0] if len(values) == 1 else tuple(values)

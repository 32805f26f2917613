"""Checks of the options that `Pipe` and `pipe.step` take.

Each option is checked once, where it enters the library, so that a mistake is reported with the
name of the option and not as an error deep inside a run.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from penstock.errors import ArgumentError, PenstockTypeError

RUNTIMES = ("threads", "inline", "graph", "auto")

_ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "runtime": RUNTIMES,
    "reduction": (None, "mean", "sum"),
    "data": ("all", "first"),
    "outputs": ("last", "all"),
    "shapes": ("learned", "sent"),
}


def check_chunks(chunks: Any) -> None:
    """Raise if `chunks`, the number of micro-batches, is not a positive integer."""
    # A bool is an int in Python, and `chunks=True` is a mistake.
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ArgumentError(
            f"chunks must be a positive integer, not {chunks!r}. It is the number of micro-batches "
            "of a batch, such as 8."
        )


def resolve_chunks(chunks: Any, n_microbatches: Any) -> Any:
    """Return the number of micro-batches, given under our name or that of PyTorch."""
    if n_microbatches is None:
        return chunks
    if chunks != 1:
        raise ArgumentError(
            f"chunks={chunks!r} and n_microbatches={n_microbatches!r} are two names of one number. "
            "Pass only one of them."
        )
    return n_microbatches


def check_choices(**options: Any) -> None:
    """Raise if an option has a value that is not in its list of allowed values."""
    for name, value in options.items():
        if value not in _ALLOWED_VALUES[name]:
            listed = ", ".join(repr(allowed) for allowed in _ALLOWED_VALUES[name])
            raise ArgumentError(f"{name} must be one of {listed}, not {value!r}")


def check_scale(scale: Any) -> None:
    """Raise if `scale`, a factor of gradients, is not a finite number."""
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not isfinite(scale):
        raise ArgumentError(
            f"scale must be a finite number, not {scale!r}. For a scale that changes, use scaler=."
        )


def check_audit(audit: Any) -> None:
    """Raise if `audit` is not "first", "off" or a positive number of steps."""
    is_count = isinstance(audit, int) and not isinstance(audit, bool) and audit > 0
    if audit not in ("first", "off") and not is_count:
        raise ArgumentError(
            f"audit must be 'first', 'off' or a positive number of steps, not {audit!r}"
        )


def check_loss_fn(loss_fn: Any) -> None:
    """Raise if `loss_fn` is neither None nor a callable object.

    A class such as `nn.CrossEntropyLoss` can be called, but calling it with an output and a target
    builds a loss and does not compute one. So a class is refused as well.
    """
    if isinstance(loss_fn, type) or (loss_fn is not None and not callable(loss_fn)):
        raise PenstockTypeError(
            f"loss_fn must be a function that is called as loss_fn(output, target), not "
            f"{loss_fn!r}. Pass a function, or a loss object such as nn.CrossEntropyLoss()."
        )

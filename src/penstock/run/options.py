"""Which options there are, and what is said to others."""

from __future__ import annotations

from typing import Any

from penstock.errors import ArgumentError, KindError
from penstock.lower import CHECKPOINT_MODES

RUNTIMES = ("threads", "inline")
REDUCTIONS = ("mean", "sum")


def check_options(chunks: Any, checkpoint: str, runtime: str, reduction: str | None) -> None:
    """What a pipe was asked to be."""
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ArgumentError(f"chunks is a whole number from 1 up, not {chunks!r}")
    allowed: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "checkpoint": (checkpoint, CHECKPOINT_MODES),
        "runtime": (runtime, RUNTIMES),
        "reduction": (reduction, (None, *REDUCTIONS)),
    }
    for name, (value, known) in allowed.items():
        if value not in known:
            listed = ", ".join(repr(one) for one in known)
            raise ArgumentError(f"{name} is one of {listed}, not {value!r}")


def check_loss(loss_fn: Any) -> None:
    """It can be called."""
    if isinstance(loss_fn, type) or (loss_fn is not None and not callable(loss_fn)):
        raise KindError(
            f"loss_fn is called as loss_fn(output, target), and {loss_fn!r} cannot be: give a "
            "function, or a loss such as nn.CrossEntropyLoss()"
        )

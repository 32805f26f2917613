"""What a pipe may be asked for: each option is checked where it comes in."""

from __future__ import annotations

from typing import Any

from penstock.errors import ArgumentError, KindError
from penstock.lower import CHECKPOINT_MODES

RUNTIMES = ("threads", "inline", "graph", "auto")
REDUCTIONS = ("mean", "sum")
DATA = ("all", "first")
OUTPUTS = ("last", "all")
SHAPES = ("learned", "sent")

_KNOWN: dict[str, tuple[Any, ...]] = {
    "checkpoint": CHECKPOINT_MODES,
    "runtime": RUNTIMES,
    "reduction": (None, *REDUCTIONS),
    "data": DATA,
    "outputs": OUTPUTS,
    "shapes": SHAPES,
}


def check_chunks(chunks: Any) -> None:
    """A number of micro-batches."""
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ArgumentError(f"chunks is a whole number from 1 up, not {chunks!r}")


def check_words(**options: Any) -> None:
    """Each is one of the words that it may be."""
    for name, value in options.items():
        if value not in _KNOWN[name]:
            listed = ", ".join(repr(one) for one in _KNOWN[name])
            raise ArgumentError(f"{name} is one of {listed}, not {value!r}")


def check_loss(loss_fn: Any) -> None:
    """Something that can be called."""
    if isinstance(loss_fn, type) or (loss_fn is not None and not callable(loss_fn)):
        raise KindError(
            f"loss_fn is called as loss_fn(output, target), and {loss_fn!r} cannot be: give a "
            "function, or a loss such as nn.CrossEntropyLoss()"
        )

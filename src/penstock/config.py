"""What a pipe may be asked for: each option is checked where it comes in."""

from __future__ import annotations

from typing import Any

from penstock.errors import ArgumentError, PenstockTypeError
from penstock.schedules.lowering import CHECKPOINT_MODES

RUNTIMES = ("threads", "inline", "graph", "auto")
REDUCTIONS = ("mean", "sum")
DATA_MODES = ("all", "first")
OUTPUT_MODES = ("last", "all")
SHAPE_MODES = ("learned", "sent")

_ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "checkpoint": CHECKPOINT_MODES,
    "runtime": RUNTIMES,
    "reduction": (None, *REDUCTIONS),
    "data": DATA_MODES,
    "outputs": OUTPUT_MODES,
    "shapes": SHAPE_MODES,
}


def check_chunks(chunks: Any) -> None:
    """A number of micro-batches."""
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ArgumentError(f"chunks is a whole number from 1 up, not {chunks!r}")


def check_choices(**options: Any) -> None:
    """Each is one of the words that it may be."""
    for name, value in options.items():
        if value not in _ALLOWED_VALUES[name]:
            listed = ", ".join(repr(one) for one in _ALLOWED_VALUES[name])
            raise ArgumentError(f"{name} is one of {listed}, not {value!r}")


def check_loss_fn(loss_fn: Any) -> None:
    """Something that can be called."""
    if isinstance(loss_fn, type) or (loss_fn is not None and not callable(loss_fn)):
        raise PenstockTypeError(
            f"loss_fn is called as loss_fn(output, target), and {loss_fn!r} cannot be: give a "
            "function, or a loss such as nn.CrossEntropyLoss()"
        )

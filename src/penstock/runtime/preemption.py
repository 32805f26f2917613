"""Preemption: a pipe saves and exits, see `Pipe.save_on_preemption`.

    SIGTERM on some ranks ──► the end of the step: all ranks agree ──► the next call of step:
                                                                       save, exit with code 143

Between two steps the model and its optimizer are those of the same step on every rank. Only
gradients that an optimizer has not used yet would be lost: then the next step runs as well.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from penstock.display import write_line
from penstock.errors import ArgumentError, PenstockTypeError


@dataclass(frozen=True)
class PreemptionRequest:
    """The arguments of `Pipe.save_on_preemption`."""

    folder: Path
    optimizer: Any
    extra: Callable[[], Any] | None
    within: float
    keep: int

    def check(self) -> None:
        """Raise unless the arguments are valid."""
        if self.extra is not None and not callable(self.extra):
            raise PenstockTypeError(
                f"extra of save_on_preemption is called when the pipe saves, and "
                f"{type(self.extra).__name__} cannot be called. Pass a function without arguments, "
                "such as extra=lambda: {'step': step}."
            )
        if not 0 < self.within < math.inf:
            raise ArgumentError(
                f"within must be a number of seconds above 0, not {self.within!r}. Pass the time "
                "that the launcher waits between SIGTERM and SIGKILL, less a few seconds."
            )


class PreemptionPlan:
    """The request of one pipe, if it has one. A copy of the pipe starts without."""

    def __init__(self) -> None:
        self.request: PreemptionRequest | None = None

    def __reduce__(self) -> tuple[type[PreemptionPlan], tuple[()]]:
        return PreemptionPlan, ()


def has_unused_gradients(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether a gradient is not zero: an optimizer has not used it, or nobody cleared it."""
    return any(p.grad is not None and bool((p.grad != 0).any()) for p in parameters)


def report_saved(path: Path) -> None:
    """Say why the process ends."""
    write_line(
        f"penstock: this process received SIGTERM, or another rank did. Everything is saved in "
        f"'{path}', and the process ends.",
        sys.stderr,
    )

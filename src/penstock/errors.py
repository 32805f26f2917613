"""The errors that Penstock raises on purpose.

    PenstockError
    ├── ArgumentError          (ValueError)     an argument is invalid; the message says what would work
    │   └── BatchShapeError    (RunError)       inputs cannot be split into the same micro-batches
    ├── PenstockTypeError      (TypeError)      an argument has the wrong type
    ├── RunError               (RuntimeError)   a pipe cannot continue; the message says why
    │   ├── CutError                            a model's forward cannot be cut into these stages
    │   ├── CaptureError                        a step cannot be captured as a CUDA graph
    │   └── RemoteError                         a rank failed; every rank raises the same error
    ├── FormatError            (ValueError)     a text is not a schedule
    ├── InvalidScheduleError   (ValueError)     a schedule must not run; lists every problem
    ├── Mismatch               (AssertionError) a pipe computes something else than the model
    ├── Deadlock               (RuntimeError)   ranks of a schedule wait for each other for ever
    └── MissingExtra           (ImportError)    an optional library is not installed

`CaptureError` is defined in `runtime/cuda_graph/capture_guard.py`, `Mismatch` in `checker/report.py` and
`Deadlock` in `schedules/simulator.py`, next to the code that raises them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


class PenstockError(Exception):
    """The root of the tree above."""


class ArgumentError(PenstockError, ValueError):
    """What was asked for cannot be. The message says what would work."""


class PenstockTypeError(PenstockError, TypeError):
    """A value of the wrong kind."""


class RunError(PenstockError, RuntimeError):
    """A pipe cannot go on."""


class CutError(RunError):
    """A model's forward cannot be cut into stages as it is."""


@dataclass(frozen=True)
class ErrorLocation:
    """Where in a pipe an error was raised: a worker leaves it on the error, as `.whereabouts`."""

    stage: int
    layers: tuple[str, ...]
    microbatch: int
    action: str
    stage_label: str  # the stage, with its layers, for people

    def __str__(self) -> str:
        return f"in {self.stage_label}, micro-batch {self.microbatch}, action {self.action}"


FailureKind = Literal["raised", "died", "stalled", "left", "disagreed", "interrupted"]


class RemoteError(RunError):
    """A rank failed, and with it every rank of its pipe: each raises this, with the same text.

    `kind` says what happened to `rank` (None: to none alone, as when they disagree) while it was
    `doing` something. If it was in a stage, `stage`, `layers`, `microbatch` and
    `action` say where. `traceback` is the text of the original error's. On the rank that
    raised it, that error is the `__cause__` of this one.
    """

    def __init__(
        self,
        message: str,
        kind: FailureKind = "raised",
        rank: int | None = None,
        doing: str = "",
        where: ErrorLocation | None = None,
        traceback: str = "",
    ) -> None:
        self._init_args = (message, kind, rank, doing, where, traceback)
        self.message, self.kind, self.rank, self.doing = message, kind, rank, doing
        self.stage = None if where is None else where.stage
        self.layers = () if where is None else where.layers
        self.microbatch = None if where is None else where.microbatch
        self.action = None if where is None else where.action
        self.where, self.traceback = where, traceback
        original = f"\n\nThe original error, on rank {rank}:\n{traceback}" if traceback else ""
        super().__init__(message + original)

    def __reduce__(self) -> tuple[type, tuple[object, ...], dict[str, object]]:
        return type(self), self._init_args, self.__dict__


class _ProblemListError(PenstockError, ValueError):
    """Several problems under one headline, each also in `.problems`."""

    def __init__(self, headline: str, problems: Sequence[str]) -> None:
        self.headline = headline
        self.problems = tuple(problems)
        super().__init__("\n".join([headline, *(f"  {problem}" for problem in problems)]))

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.headline, self.problems)


class BatchShapeError(_ProblemListError, ArgumentError, RunError):
    """Inputs that cannot be cut alike. A RuntimeError, too: with PyTorch's pipes it was one."""


class FormatError(_ProblemListError):
    """Text that is not a schedule."""


class InvalidScheduleError(_ProblemListError):
    """A schedule or program that must not run."""


class MissingExtra(PenstockError, ImportError):
    """An optional library is not installed."""

    def __init__(self, library: str, extra: str, purpose: str) -> None:
        self._init_args = (library, extra, purpose)
        super().__init__(f"{purpose} needs {library}: pip install 'penstock[{extra}]'")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), self._init_args


# Names of earlier releases. They are the same classes, so `except` clauses keep working.
DEPRECATED_NAMES: Mapping[str, type[PenstockError]] = {
    "KindError": PenstockTypeError,
    "Misfit": BatchShapeError,
    "Unsound": InvalidScheduleError,
}


def get_deprecated(name: str) -> type[PenstockError] | None:
    """Return the error that had this name in an earlier release, with a warning, or None."""
    error = DEPRECATED_NAMES.get(name)
    if error is not None:
        warnings.warn(
            f"penstock.{name} is now penstock.{error.__name__}. The old name will be removed.",
            DeprecationWarning,
            stacklevel=3,
        )
    return error


def __getattr__(name: str) -> type[PenstockError]:
    error = get_deprecated(name)
    if error is None:
        raise AttributeError(f"module 'penstock.errors' has no attribute '{name}'")
    return error

"""The errors that Penstock raises on purpose.

    PenstockError
    ├── ArgumentError          (ValueError)     an argument is invalid
    │   └── BatchShapeError    (RunError)       inputs cannot be split into the same micro-batches
    ├── PenstockTypeError      (TypeError)      an argument has the wrong type
    ├── RunError               (RuntimeError)   a pipe cannot continue; the message says why
    │   ├── CutError                            a model's forward cannot be cut into these stages
    │   ├── AuditError                          a step and the unsplit model compute other numbers
    │   ├── CaptureError                        a step cannot be captured as a CUDA graph
    │   ├── CheckpointError                     a checkpoint is damaged, unsafe or in use
    │   └── RemoteError                         a rank failed; every rank raises the same error
    ├── FormatError            (ValueError)     a text is not a schedule
    ├── InvalidScheduleError   (ValueError)     a schedule must not run; lists every problem
    ├── Mismatch               (AssertionError) a pipe and the model compute different results
    ├── Deadlock               (RuntimeError)   ranks of a schedule wait for each other forever
    ├── MissingExtra           (ImportError)    an optional library is not installed
    └── TorchVersionError      (ImportError)    this PyTorch lacks what a feature needs

Each class also inherits from the built-in error in brackets, so `except ValueError` works, too.

`CaptureError` is defined in `runtime/cuda_graph/capture_guard.py`, `Mismatch` in
`checker/report.py`, `Deadlock` in `schedules/simulator.py` and `UnknownFormatError`, a
`CheckpointError`, in `checkpoint/manifest.py`, next to the code that raises them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


class PenstockError(Exception):
    """The base class of all errors that Penstock raises on purpose.

    >>> import penstock
    >>> try:
    ...     penstock.schedules.one_f_one_b(ranks=0, chunks=1)
    ... except penstock.PenstockError as error:
    ...     print(type(error).__name__)
    ArgumentError
    """


class ArgumentError(PenstockError, ValueError):
    """Raised if an argument has an invalid value. The message says which values work."""


class PenstockTypeError(PenstockError, TypeError):
    """Raised if an argument has the wrong type."""


class RunError(PenstockError, RuntimeError):
    """Raised if a pipe cannot run or continue. The message says why and what to do."""


class CutError(RunError):
    """Raised if the forward of a model cannot be cut into these stages."""


class AuditError(RunError):
    """Raised if the audit of a step finds that the pipe and the unsplit model differ.

    The optimizer has not stepped yet.
    """


class CheckpointError(RunError):
    """Raised if a checkpoint is damaged, could run code, or belongs to another writer.

    The model and its optimizers are as they were before the call.
    """


@dataclass(frozen=True)
class ErrorLocation:
    """The place in a pipe where an error was raised.

    A worker attaches it to the error, as the attribute `whereabouts`.
    """

    stage: int
    layers: tuple[str, ...]
    microbatch: int
    action: str
    stage_label: str  # the stage with its layers, as text

    def __str__(self) -> str:
        return f"in {self.stage_label}, micro-batch {self.microbatch}, action {self.action}"


#   raised       it raised an exception
#   died         its process ended without a word, for example by a signal
#   stalled      it is alive and makes no progress
#   left         its program ended, or its pipe was dropped, while others wait for it
#   disagreed    the ranks were about to do different things
#   interrupted  it got Ctrl-C, SystemExit or SIGTERM
FailureKind = Literal["raised", "died", "stalled", "left", "disagreed", "interrupted"]


class RemoteError(RunError):
    """Raised on every rank, with the same text, if one rank of a pipe over processes fails.

    On the rank that raised the original error, that error is the `__cause__` of this one.

    Attributes:
        message: The text without the original traceback.
        kind: What happened: "raised", "died", "stalled", "left", "disagreed" or "interrupted".
        rank: The rank that failed, or None if no single rank did.
        doing: The call that the rank was in.
        where: An `ErrorLocation` if the rank was computing a stage, otherwise None.
        stage: The stage, or None.
        layers: The names of the layers of the stage, or an empty tuple.
        microbatch: The micro-batch, or None.
        action: The action, such as "1F3", or None.
        traceback: The text of the original traceback, or an empty string.
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
    """An error with a headline and a list of problems, which is also in `problems`."""

    def __init__(self, headline: str, problems: Sequence[str]) -> None:
        self.headline = headline
        self.problems = tuple(problems)
        super().__init__("\n".join([headline, *(f"  {problem}" for problem in problems)]))

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.headline, self.problems)


class BatchShapeError(_ProblemListError, ArgumentError, RunError):
    """Raised if inputs cannot be split into the same micro-batches.

    It is also a RuntimeError, because PyTorch's old `Pipe` raised one.

    Attributes:
        headline: The first line of the message.
        problems: One line for each input that does not fit.
    """


class FormatError(_ProblemListError):
    """Raised if a text is not a schedule.

    Attributes:
        headline: The first line of the message.
        problems: One line for each problem, with its place in the text.
    """


class InvalidScheduleError(_ProblemListError):
    """Raised if a schedule or program must not run: incomplete, out of order, or deadlocking.

    Attributes:
        headline: The first line of the message.
        problems: One line for each problem.
    """


class MissingExtra(PenstockError, ImportError):
    """Raised if an optional library is not installed. The message has the pip command."""

    def __init__(self, library: str, extra: str, purpose: str) -> None:
        self._init_args = (library, extra, purpose)
        super().__init__(f"{purpose} needs {library}: pip install 'torch-penstock[{extra}]'")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), self._init_args


class TorchVersionError(PenstockError, ImportError):
    """Raised if this release of PyTorch lacks a private API that a feature needs.

    The message names both, and the releases that have it. `penstock doctor` lists all of them.
    """


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

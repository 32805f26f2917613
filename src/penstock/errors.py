"""Every error that Penstock raises on purpose.

PenstockError
├── ArgumentError (ValueError)   what was asked for cannot be: says what would work
│   └── Misfit    (RunError)     inputs that cannot be cut alike: lists each, and what to write
├── KindError     (TypeError)    a value of the wrong kind: says which kind would work
├── RunError      (RuntimeError) a pipe cannot go on: says why, and what to do
│   ├── CutError                 a model cannot be cut so: says at which line of it, and why
│   ├── Uncapturable             in run/capture/watching.py: a replay would not repeat the step
│   └── RemoteError              a rank failed, and with it every rank: the same error on each
├── FormatError   (ValueError)   text that is not a schedule: says which lines, and why
├── Unsound       (ValueError)   a schedule that must not run: lists every problem
├── Mismatch      (AssertionError) in checking/report.py: a pipe computes something else
├── Deadlock      (RuntimeError) in play.py: some ranks wait for ever, and for whom
└── MissingExtra  (ImportError)  an optional library is not installed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


class PenstockError(Exception):
    """The root of the tree above."""


class ArgumentError(PenstockError, ValueError):
    """What was asked for cannot be. The message says what would work."""


class KindError(PenstockError, TypeError):
    """A value of the wrong kind."""


class RunError(PenstockError, RuntimeError):
    """A pipe cannot go on."""


class CutError(RunError):
    """A model's forward cannot be cut into stages as it is."""


@dataclass(frozen=True)
class Whereabouts:
    """Where in a pipe an error was raised: a worker leaves it on the error, as `.whereabouts`."""

    stage: int
    layers: tuple[str, ...]
    microbatch: int
    action: str
    called: str  # the stage, with its layers, for people

    def __str__(self) -> str:
        return f"in {self.called}, micro-batch {self.microbatch}, action {self.action}"


Kind = Literal["raised", "died", "stalled", "left", "disagreed", "interrupted"]


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
        kind: Kind = "raised",
        rank: int | None = None,
        doing: str = "",
        where: Whereabouts | None = None,
        traceback: str = "",
    ) -> None:
        self._given = (message, kind, rank, doing, where, traceback)
        self.message, self.kind, self.rank, self.doing = message, kind, rank, doing
        self.stage = None if where is None else where.stage
        self.layers = () if where is None else where.layers
        self.microbatch = None if where is None else where.microbatch
        self.action = None if where is None else where.action
        self.where, self.traceback = where, traceback
        original = f"\n\nThe original error, on rank {rank}:\n{traceback}" if traceback else ""
        super().__init__(message + original)

    def __reduce__(self) -> tuple[type, tuple[object, ...], dict[str, object]]:
        return type(self), self._given, self.__dict__


class _Listed(PenstockError, ValueError):
    """Several problems under one headline, each also in `.problems`."""

    def __init__(self, headline: str, problems: Sequence[str]) -> None:
        self.headline = headline
        self.problems = tuple(problems)
        super().__init__("\n".join([headline, *(f"  {problem}" for problem in problems)]))

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.headline, self.problems)


class Misfit(_Listed, ArgumentError, RunError):
    """Inputs that cannot be cut alike. A RuntimeError, too: with PyTorch's pipes it was one."""


class FormatError(_Listed):
    """Text that is not a schedule."""


class Unsound(_Listed):
    """A schedule or program that must not run."""


class MissingExtra(PenstockError, ImportError):
    """An optional library is not installed."""

    def __init__(self, library: str, extra: str, purpose: str) -> None:
        self._given = (library, extra, purpose)
        super().__init__(f"{purpose} needs {library}: pip install 'penstock[{extra}]'")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), self._given

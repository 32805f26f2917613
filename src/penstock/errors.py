"""Every error that Penstock raises on purpose.

PenstockError
├── ArgumentError (ValueError)   what was asked for cannot be: says what would work
│   └── Misfit    (RunError)     inputs that cannot be cut alike: lists each, and what to write
├── KindError     (TypeError)    a value of the wrong kind: says which kind would work
├── RunError      (RuntimeError) a pipe cannot go on: says why, and what to do
├── FormatError   (ValueError)   text that is not a schedule: says which lines, and why
├── Unsound       (ValueError)   a schedule that must not run: lists every problem
├── Mismatch      (AssertionError) in checking/report.py: a pipe computes something else
├── Deadlock      (RuntimeError) in play.py: some ranks wait for ever, and for whom
└── MissingExtra  (ImportError)  an optional library is not installed
"""

from __future__ import annotations

from collections.abc import Sequence


class PenstockError(Exception):
    """The root of the tree above."""


class ArgumentError(PenstockError, ValueError):
    """What was asked for cannot be. The message says what would work."""


class KindError(PenstockError, TypeError):
    """A value of the wrong kind."""


class RunError(PenstockError, RuntimeError):
    """A pipe cannot go on."""


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

from __future__ import annotations

import pytest

from penstock import errors
from penstock.errors import (
    ArgumentError,
    FormatError,
    InvalidScheduleError,
    MissingExtra,
    PenstockError,
    PenstockTypeError,
    RunError,
)
from penstock.schedules.simulator import Deadlock


@pytest.mark.parametrize(
    ("error", "also"),
    [
        (ArgumentError, ValueError),
        (FormatError, ValueError),
        (PenstockTypeError, TypeError),
        (RunError, RuntimeError),
        (InvalidScheduleError, ValueError),
        (Deadlock, RuntimeError),
        (MissingExtra, ImportError),
    ],
)
def test_errors_inherit_from_penstock_error_and_a_builtin_error(
    error: type[Exception], also: type[Exception]
) -> None:
    assert issubclass(error, PenstockError)
    assert issubclass(error, also)


def test_errors_are_listed_in_the_module_docstring() -> None:
    todo: list[type[Exception]] = [PenstockError]
    while todo:
        error = todo.pop()
        todo += error.__subclasses__()
        if error.__module__.startswith("penstock") and not error.__name__.startswith("_"):
            assert error.__name__ in str(errors.__doc__)


@pytest.mark.parametrize("error", [FormatError, InvalidScheduleError])
def test_error_with_problems_lists_them_below_its_headline(
    error: type[FormatError] | type[InvalidScheduleError],
) -> None:
    raised = error("two things are wrong:", ["this", "that"])
    assert str(raised) == "two things are wrong:\n  this\n  that"
    assert raised.problems == ("this", "that")


def test_missing_extra_says_what_to_install() -> None:
    assert str(MissingExtra("matplotlib", "draw", "a picture")) == (
        "a picture needs matplotlib: pip install 'torch-penstock[draw]'"
    )

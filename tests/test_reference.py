"""Every public name has an entry in the reference, and every argument is described."""

from __future__ import annotations

import inspect
import re
from enum import EnumMeta
from typing import Any

import pytest

import penstock
from penstock import draw, schedules
from tests.reference import COMMAND_LINE, command_line_page, commands, entries

PACKAGES = {"penstock": penstock, "penstock.draw": draw, "penstock.schedules": schedules}
PUBLIC = {
    f"{path}.{name}": getattr(package, name)
    for path, package in PACKAGES.items()
    for name in package.__all__
    if not inspect.ismodule(getattr(package, name))
}
ENTRIES = entries()


def undescribed(function: Any, docstring: str | None) -> list[str]:
    """Return the parameters that have no line in the docstring."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    described = re.findall(r"^ +\*{0,2}(\w+)(?: \([^)]*\))?: ", docstring or "", re.MULTILINE)
    return [name for name in names if name not in described]


def problems_of(name: str, value: Any, members: list[str] | None) -> list[str]:
    """Return what the entry of a name lacks. `members` are those that it lists, None for all."""
    if not callable(value) or isinstance(value, EnumMeta):
        return []  # a constant, a union of types or an enum
    if not inspect.getdoc(value):
        return [f"{name} has no docstring"]
    if inspect.isclass(value) and issubclass(value, Exception):
        return []
    problems = [f"{name}: {argument}" for argument in undescribed(value, value.__doc__)]
    if inspect.isclass(value):
        shown = [n for n in vars(value) if not n.startswith("_")] if members is None else members
        for member in (member for member in shown if inspect.isroutine(getattr(value, member))):
            problems += problems_of(f"{name}.{member}", getattr(value, member), None)
    return problems


@pytest.mark.parametrize("name", PUBLIC)
def test_reference_has_an_entry_with_every_argument(name: str) -> None:
    assert name in ENTRIES, f"add `::: {name}` to a page of docs/reference"
    assert problems_of(name, PUBLIC[name], ENTRIES[name]) == []


def test_reference_entries_exist() -> None:
    """Entries that are not public names belong to `penstock.compat`, which has its own page."""
    assert {name for name in ENTRIES if not name.startswith("penstock.compat.")} == set(PUBLIC)


def test_reference_index_lists_every_page() -> None:
    index = (COMMAND_LINE.parent / "index.md").read_text()
    pages = {page.name for page in COMMAND_LINE.parent.glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == pages


def test_command_line_page_is_current() -> None:
    """After a change of commands, run `python -m tests.reference`."""
    assert COMMAND_LINE.read_text() == command_line_page()


def test_every_option_of_the_command_line_is_described() -> None:
    for name, command in commands().items():
        for parameter in command.params:
            assert parameter.name == "help" or parameter.help, f"penstock {name}: {parameter.name}"


def test_undescribed_finds_missing_arguments() -> None:
    def function(first: int, second: int, *rest: int) -> None:
        """Return nothing.

        Args:
            first: A number.
            *rest: More numbers.
        """

    assert undescribed(function, function.__doc__) == ["second"]

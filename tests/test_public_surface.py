"""Compare the public names, their signatures, the errors and the schedules with snapshots.

After an intended change, rewrite the snapshots with `python -m tests.test_public_surface`.
"""

from __future__ import annotations

import inspect
import json
from enum import EnumMeta
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import draw, errors, schedules

SNAPSHOTS = Path(__file__).parent / "snapshots"


def signature_of(value: Any) -> str:
    """Return the parameters and their defaults, without annotations."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return "-"
    plain = (parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters)
    return f"({', '.join(str(parameter).split(' at 0x')[0] for parameter in plain)})"


def describe(value: Any) -> Any:
    """Return the signature of a function; for a class also its public members."""
    if isinstance(value, EnumMeta):  # the signature of Enum itself differs between versions
        return list(value.__members__)
    if not inspect.isclass(value):
        return signature_of(value) if callable(value) else type(value).__name__
    members = {
        name: signature_of(member) if callable(member) else "attribute"
        for name, member in vars(value).items()
        if not name.startswith("_")
    }
    return {"call": signature_of(value), "members": dict(sorted(members.items()))}


def public_names() -> dict[str, Any]:
    """Return every public name of the package and of its public modules."""
    packages = {"penstock": penstock, "penstock.draw": draw, "penstock.schedules": schedules}
    return {
        f"{path}.{name}": describe(getattr(package, name))
        for path, package in packages.items()
        for name in package.__all__
        if not inspect.ismodule(getattr(package, name))
    }


def error_types() -> dict[str, list[str]]:
    """Return the built-in and own base classes of every error."""
    names = [n for n in penstock.__all__ if inspect.isclass(getattr(penstock, n))]
    found = {name: getattr(penstock, name) for name in names}
    return {
        name: [base.__name__ for base in kind.__mro__[1:-1]]
        for name, kind in found.items()
        if issubclass(kind, Exception)
    }


def schedule_pictures() -> dict[str, list[str]]:
    """Return each family of schedules, for four ranks and eight micro-batches, as text."""
    return {
        name: penstock.dumps(schedules.make(name, ranks=4, chunks=8)).splitlines()
        for name in schedules.FAMILIES
    }


CURRENT = {"public_names": public_names, "error_types": error_types, "schedules": schedule_pictures}


@pytest.mark.parametrize("name", CURRENT)
def test_public_surface_equals_its_snapshot(name: str) -> None:
    assert CURRENT[name]() == json.loads((SNAPSHOTS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", errors.DEPRECATED_NAMES)
def test_old_error_names_are_deprecated_aliases(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"penstock.{name} is now penstock"):
        error = getattr(penstock, name)
    assert error is errors.DEPRECATED_NAMES[name]
    with pytest.warns(DeprecationWarning, match=f"penstock.{name} is now penstock"):
        assert getattr(errors, name) is error


def main() -> None:
    """Write the snapshots."""
    for name, current in CURRENT.items():
        text = json.dumps(current(), indent=1, sort_keys=True)
        (SNAPSHOTS / f"{name}.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()

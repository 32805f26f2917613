"""Contracts of the whole package: its imports, its public names, its docstrings and sizes."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import penstock
from penstock import schedules

SOURCE = Path(penstock.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
GENERATORS = [family.build for family in schedules.FAMILIES.values()]

MOST_LINES_OF_A_FUNCTION = 45
MOST_LINES_OF_A_GENERATOR = 40


def imported(code: str) -> set[str]:
    """Return the top-level modules that a new process has loaded after running the code."""
    report = "import json, sys; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_show_imports_neither_torch_nor_matplotlib() -> None:
    found = imported(
        "import sys\n"
        "from penstock import cli\n"
        "sys.argv = 'penstock show 1f1b --ranks 4 --chunks 8 --json'.split()\n"
        "try: cli.main()\n"
        "except SystemExit as end: assert not end.code"
    )
    assert {"penstock", "typer"} <= found
    assert not found & {"torch", "matplotlib", "numpy"}


def test_import_penstock_imports_nothing_heavy() -> None:
    found = imported("import penstock")
    assert "penstock" in found
    assert not found & {"torch", "rich", "typer", "matplotlib", "numpy"}


def test_dunder_all_lists_every_public_name() -> None:
    values = {
        name
        for name, value in vars(penstock).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert set(penstock.__all__) == values | set(penstock._ON_DEMAND) | {"draw", "schedules"}


@pytest.mark.parametrize("package", [penstock, penstock.schedules, penstock.draw])
def test_dunder_all_is_sorted_and_resolves(package: ModuleType) -> None:
    names = list(package.__all__)
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(package, name)] == []
    assert names == sorted(names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of lines of each function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


@pytest.mark.parametrize(
    "path", sorted((SOURCE / "schedules" / "families").glob("*.py")), ids=lambda path: path.name
)
def test_functions_of_schedule_families_are_short(path: Path) -> None:
    long = {name: lines for name, lines in functions(path) if lines > MOST_LINES_OF_A_FUNCTION}
    assert long == {}


def test_generators_of_schedule_families_are_short() -> None:
    lines = {build.__name__: len(inspect.getsourcelines(build)[0]) for build in GENERATORS}
    assert {n: count for n, count in lines.items() if count > MOST_LINES_OF_A_GENERATOR} == {}

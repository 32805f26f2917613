"""python -m tests.versions: test with every supported PyTorch release and write docs/versions.md.

For each release, it makes a virtual environment in a temporary folder, installs the release and the
package with its extras, runs a sample of the tests, and removes the environment. The sample is at
most `TESTS_PER_FILE` tests of every file, evenly spaced: about four minutes on two cores, after
two or three for the installation. The newest release is also tested with the newest transformers,
if that is not the pinned one.

The page is written if all releases were tested and no test failed. Otherwise the table is printed
only. If a test failed, the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

VERSIONS = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
TESTS_PER_FILE = 4
SAMPLE = "PENSTOCK_TESTS_PER_FILE"  # the environment variable that the plugin below reads
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"

# The longest prefix of a test's module decides on its area.
AREAS = {
    "Sequential": ("tests.stage", "tests.model", "tests.test_pipe", "tests.runtime"),
    "any model": ("tests.model.traced", "tests.models"),
    "schedules": ("tests.schedules", "tests.draw"),
    "recomputation": ("tests.stage.test_recompute", "tests.stage.test_rng"),
    "split backward": ("tests.runtime.test_split_backward", "tests.stage.test_weight_grad_ops"),
    "exactness": ("tests.exactness", "tests.features", "tests.properties", "tests.regressions"),
    "data parallel": ("tests.data_parallel",),
    "processes": ("tests.distributed", "tests.launch", "tests.runtime.distributed"),
    "faults": ("tests.faults", "tests.runtime.distributed.failure"),
    "checkpoints": ("tests.checkpoint",),
    "checker": ("tests.checker", "tests.doctor"),
    "Hugging Face": ("tests.hugging_face",),
    "commands, docs": ("tests.test_cli", "tests.test_demo", "tests.test_docs", "tests.examples"),
    "other": ("",),
}

INTRODUCTION = f"""\
# Tested versions

Penstock works with PyTorch 2.10 and newer. The tests ran with each of these releases, on CPUs. A
cell is the number of tests that passed; none failed. In brackets is the number of tests that were
skipped, for example because they need a GPU. What a release of PyTorch lacks raises a
`TorchVersionError` where it is used, and `penstock doctor` lists it.

`make test` runs all tests with the pinned versions. This command runs at most {TESTS_PER_FILE}
tests of each file with every release, and writes this page:

```bash
make versions
```

"""

Run = Callable[[Sequence[str], Mapping[str, str]], int]


@dataclass(frozen=True)
class Row:
    """The results of one environment: for each area, how many tests passed, failed, were skipped.

    `problem` says why there are no results, or which tests failed.
    """

    torch: str
    python: str
    transformers: str
    counts: Mapping[str, Counter[str]]
    problem: str = ""


# ---- the sample: `pytest -p tests.versions` -----------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep some tests of each file, evenly spaced."""
    limit = int(os.environ.get(SAMPLE, "0"))
    if limit:
        by_file: dict[Path, list[pytest.Item]] = {}
        for item in items:
            by_file.setdefault(item.path, []).append(item)
        kept = {id(i) for tests in by_file.values() for i in tests[:: -(-len(tests) // limit)]}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
        items[:] = [item for item in items if id(item) in kept]


# ---- one environment ----------------------------------------------------------------------


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command in the repository, and let it print its progress."""
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}).returncode


def install(run: Run, interpreter: str, version: str, folder: Path) -> bool:
    """Make an environment with a release of PyTorch, the package and its extras."""
    if run([interpreter, "-m", "venv", str(folder)], {}):
        return False
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pin for pin in pins if not pin.startswith("torch=")))
    pip = [f"{folder}/bin/pip", "install", "--quiet", "--disable-pip-version-check"]
    # With torch named once more, pip may not replace it.
    package = ["--constraint", str(constraints), "--editable", ".[dev]", f"torch=={version}"]
    return run([*pip, *package], {}) == 0


def run_tests(run: Run, folder: Path, version: str, full: bool, targets: Sequence[str] = ()) -> Row:
    """Run the tests in an environment, and return its row of the table."""
    results = folder / "results.xml"
    results.unlink(missing_ok=True)
    options = ["-n", "auto", "--dist", "worksteal", f"--junitxml={results}"]
    command = [f"{folder}/bin/python", "-m", "pytest", "-p", "tests.versions", *options, *targets]
    status = run(command, {} if full else {SAMPLE: str(TESTS_PER_FILE)})
    python = next(folder.glob("lib/python3*")).name.removeprefix("python")
    return Row(version, python, find_transformers(folder), *read_results(results, status))


def find_transformers(folder: Path) -> str:
    """Return the version of transformers in an environment."""
    info = next(folder.glob("lib/python3*/site-packages/transformers-*.dist-info"), None)
    return info.stem.partition("-")[2] if info else "none"


def read_results(results: Path, status: int) -> tuple[dict[str, Counter[str]], str]:
    """Return the counts of each area, and which tests failed."""
    if not results.exists():
        return {}, f"pytest ended with status {status} and without results"
    counts: dict[str, Counter[str]] = {area: Counter() for area in AREAS}
    failed = []
    for case in ET.parse(results).iter("testcase"):
        module, name = case.get("classname", ""), case.get("name")
        area = max((len(p), a) for a, ps in AREAS.items() for p in ps if module.startswith(p))[1]
        tags = {child.tag for child in case}
        outcome = (
            "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else ""
        )
        counts[area][outcome or "passed"] += 1
        failed += [f"{module}::{name}"] if outcome == "failed" else []
    if status and not failed:
        failed = [f"pytest ended with status {status}"]
    return counts, "; ".join(failed)


# ---- the page -----------------------------------------------------------------------------


def render(rows: Sequence[Row]) -> str:
    """Return the table, with a column for each environment."""
    lines = [
        ["PyTorch", *(row.torch for row in rows)],
        ["---"] * (len(rows) + 1),
        ["Python", *(row.python for row in rows)],
        ["transformers", *(row.transformers for row in rows)],
        *([area, *(format_counts(row, area) for row in rows)] for area in AREAS),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def format_counts(row: Row, area: str) -> str:
    """Return "12", "12 (1)" if one was skipped, or "12, **2 failed**"."""
    counts = row.counts.get(area, Counter())
    skipped = f" ({counts['skipped']})" if counts["skipped"] else ""
    failed = f", **{counts['failed']} failed**" if counts["failed"] else ""
    return f"{counts['passed']}{skipped}{failed}" if counts.total() else "-"


def main(words: Sequence[str], run: Run = run_command, page: Path = PAGE) -> int:
    """Test the releases one after another, and return the exit status."""
    options = parse(words)
    versions = options.versions or VERSIONS
    first, *others = options.python or ["python3"]
    rows = []
    for version, python in [*((v, first) for v in versions), *((versions[-1], o) for o in others)]:
        print(f"---- PyTorch {version}, {python}", flush=True)
        is_newest = (version, python) == (VERSIONS[-1], first)
        with tempfile.TemporaryDirectory(prefix="penstock-versions-") as temporary:
            base = Path(options.keep or temporary).resolve()
            folder = Path(
                options.environment.get(version) or base / f"{version}-{Path(python).name}"
            )
            rows += measure_release(run, version, python, folder, options.full, is_newest)
    print(render(rows))
    problems = [f"PyTorch {row.torch}: {row.problem}" for row in rows if row.problem]
    if problems:
        print("\n".join(problems))
        return 1
    if tuple(versions) == VERSIONS:
        page.write_text(INTRODUCTION + render(rows))
        print(f"wrote {page.name}")
    return 0


def measure_release(
    run: Run, version: str, python: str, folder: Path, full: bool, is_newest: bool
) -> list[Row]:
    """Return the row of a release, and for the newest one another with the newest transformers."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.exists() and not install(run, python, version, folder):
        return [Row(version, python, "-", {}, "the installation failed")]
    rows = [run_tests(run, folder, version, full)]
    if is_newest:
        upgrade = ["install", "--quiet", "--upgrade", "transformers", f"torch=={version}"]
        if run([f"{folder}/bin/pip", *upgrade], {}):
            return [*rows, Row(version, python, "newest", {}, "transformers cannot be upgraded")]
        if find_transformers(folder) != rows[0].transformers:  # the pinned one is not the newest
            targets = ["tests/hugging_face", "tests/models"]
            rows.append(run_tests(run, folder, version, full, targets))
    return rows


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options. `environment` is a dict."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions")
    add = parser.add_argument
    add("versions", nargs="*", metavar="VERSION", help="releases; without any, all of them")
    add("--full", action="store_true", help="run the whole suite")
    add("--keep", metavar="FOLDER", help="keep environments here, and use those that are here")
    add("--python", action="append", help="the interpreter; more of them test the last release")
    add("--environment", action="append", default=[], metavar="VERSION=FOLDER", help="use this one")
    options = parser.parse_args(words)
    options.environment = dict(word.split("=", 1) for word in options.environment)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The command that tests every PyTorch release, with a runner that installs and tests nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.torch_compat import TESTED_VERSIONS
from tests.versions import AREAS, SAMPLE, VERSIONS, main, pytest_collection_modifyitems

PASSED = """\
<testsuites><testsuite>
<testcase classname="tests.stage.test_rng" name="test_a[1]"/>
<testcase classname="tests.runtime.test_step" name="test_b"/>
<testcase classname="tests.runtime.distributed.failure.test_c" name="test_c"/>
<testcase classname="src.penstock.pipe" name="penstock.pipe.Pipe"/>
<testcase classname="tests.gpu.test_d" name="test_d"><skipped/></testcase>
{more}</testsuite></testsuites>
"""
FAILED = '<testcase classname="tests.faults.test_x" name="test_x"><failure/></testcase>\n'


class FakeRunner:
    """Records commands, makes the folders of an environment, and writes results of tests."""

    def __init__(self, fails: str = "") -> None:
        self.commands: list[list[str]] = []
        self.environments: list[Mapping[str, str]] = []
        self.fails = fails

    def __call__(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        self.commands.append(list(command))
        self.environments.append(environment)
        text = " ".join(command)
        is_failure = bool(self.fails) and self.fails in text
        if "-m venv" in text:
            packages = Path(command[-1]) / "lib/python3.11/site-packages"
            (packages / "transformers-5.22.2.dist-info").mkdir(parents=True)
        if "--upgrade transformers" in text:
            packages = Path(command[0]).parents[1] / "lib/python3.11/site-packages"
            pinned = packages / "transformers-5.22.2.dist-info"
            pinned.rename(packages / "transformers-5.99.0.dist-info")
        if "-m pytest" in text:
            results = next(word for word in command if word.startswith("--junitxml="))
            content = PASSED.format(more=FAILED if is_failure else "")
            Path(results.removeprefix("--junitxml=")).write_text(content)
        return int(is_failure)


def test_page_is_written_if_all_releases_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, page = FakeRunner(), tmp_path / "versions.md"
    assert main([], run, page) == 0
    lines = page.read_text().splitlines()
    assert f"| PyTorch | {' | '.join([*VERSIONS, VERSIONS[-1]])} |" in lines
    assert lines[-len(AREAS) - 1].endswith("| 5.22.2 | 5.99.0 |")
    columns = len(VERSIONS) + 1
    for area, cell in {
        "recomputation": "1",
        "Sequential": "1",
        "faults": "1",
        "processes": "-",
        "other": "1 (1)",
    }.items():
        assert f"| {area} | {' | '.join([cell] * columns)} |" in lines
    assert sum(line.startswith("| ") for line in lines) == len(AREAS) + 4
    assert f"---- PyTorch {VERSIONS[0]}, python3" in capsys.readouterr().out
    installed = [command[-1] for command in run.commands if ".[dev]" in command]
    assert installed == [f"torch=={version}" for version in VERSIONS]
    folders = {Path(command[0]).parents[1] for command in run.commands if "pytest" in command}
    assert not any(folder.exists() for folder in folders)


def test_failed_test_is_shown_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, page = FakeRunner(fails="2.11.0-python3/bin/python -m pytest"), tmp_path / "versions.md"
    assert main([], run, page) == 1
    printed = capsys.readouterr().out
    assert "| faults | 1 | 1, **1 failed** | 1 |" in printed
    assert printed.endswith("PyTorch 2.11.0: tests.faults.test_x::test_x\n")
    assert not page.exists()


def test_failed_installation_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["2.10.0"], FakeRunner(fails="torch==2.10.0"), tmp_path / "versions.md") == 1
    assert capsys.readouterr().out.endswith("PyTorch 2.10.0: the installation failed\n")


def test_chosen_release_in_an_existing_environment_writes_no_page(tmp_path: Path) -> None:
    folder, page, run = tmp_path / "v213", tmp_path / "versions.md", FakeRunner()
    (folder / "lib" / "python3.13").mkdir(parents=True)
    assert main(["2.13.0", "--environment", f"2.13.0={folder}", "--full"], run, page) == 0
    (command,) = run.commands
    assert command[0] == f"{folder}/bin/python"
    assert run.environments == [{}]
    assert not page.exists()


def test_every_interpreter_tests_the_newest_release(tmp_path: Path) -> None:
    run = FakeRunner()
    words = ["2.14.1", "2.15.0", "--python", "python3.11", "--python", "/opt/python3.13"]
    assert main([*words, "--keep", str(tmp_path)], run, tmp_path / "versions.md") == 0
    made = [command for command in run.commands if "venv" in command]
    assert [(command[0], Path(command[-1]).name) for command in made] == [
        ("python3.11", "2.14.1-python3.11"),
        ("python3.11", "2.15.0-python3.11"),
        ("/opt/python3.13", "2.15.0-python3.13"),
    ]
    assert all(Path(command[-1]).exists() for command in made)


def test_sample_takes_evenly_spaced_tests_of_each_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SAMPLE, "3")
    many: list[Any] = [Mock(path=Path("many.py")) for _ in range(7)]
    single: Any = Mock(path=Path("single.py"))
    items, config = [*many, single], Mock()
    pytest_collection_modifyitems(config, items)
    assert items == [many[0], many[3], many[6], single]
    config.hook.pytest_deselected.assert_called_once_with(items=[*many[1:3], *many[4:6]])


def test_error_messages_name_the_tested_releases() -> None:
    oldest, newest = (version.rpartition(".")[0] for version in (VERSIONS[0], VERSIONS[-1]))
    assert f"{oldest} to {newest}" == TESTED_VERSIONS

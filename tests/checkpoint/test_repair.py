"""`penstock saved`: what it lists, finds and repairs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import CheckpointError, cli, saved
from penstock.checkpoint.writer_lock import identify_writer
from tests.checkpoint.test_directory import make_old, make_pipe, save_steps
from tests.checkpoint.test_writer_lock import leave_lock

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `penstock saved`: its exit status, and what it prints."""

    def call(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["penstock", "saved", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out + err

    return call


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_saved_lists_the_saves_with_their_writers(run: Run, tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    code, text = run(tmp_path)
    first, second = text.splitlines()
    assert (code, first[:19], second[:19]) == (0, "save-000001   whole", "save-000002   whole")
    assert f"by process {os.getpid()} on" in second
    assert second.endswith("step 2  newest")
    assert run(tmp_path, "--verify") == (0, text)


def test_saved_of_other_folders(run: Run, tmp_path: Path) -> None:
    assert run(tmp_path) == (1, "no checkpoint that can be loaded\n")
    code, text = run(tmp_path / "none")
    assert code == 2
    assert "is not a folder. Pass one that pipe.save writes to." in text
    path = make_pipe().save(tmp_path).path
    code, text = run(path)
    assert code == 2
    assert f"is one checkpoint. Pass its folder, '{tmp_path}'." in text


def test_damaged_save_is_found_and_set_aside(run: Run, tmp_path: Path) -> None:
    pipe = save_steps(tmp_path, 2)
    flip(tmp_path / "save-000002" / "__0_0.distcp")
    assert run(tmp_path)[0] == 0  # the files were not read
    code, text = run(tmp_path, "--verify")
    assert code == 1
    assert "save-000002   damaged" in text
    assert "__0_0.distcp' is damaged: its bytes 0 to" in text
    assert text.splitlines()[0].endswith("newest")
    code, text = run(tmp_path, "--repair")
    assert code == 0
    assert "renamed save-000002 to damaged-save-000002" in text
    assert pipe.load(tmp_path) == 1
    assert run(tmp_path, "--repair")[0] == 0


@pytest.mark.parametrize("kind", ["lost", "old", "first", "renamed", "copied"])
def test_repair_writes_missing_manifests(kind: str, run: Run, tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    save = tmp_path / "save-000002"
    if kind == "lost":
        (save / "manifest.json").unlink()
    elif kind in ("old", "first"):
        make_old(tmp_path, 2, kind == "old")
    elif kind == "renamed":
        save = save.rename(tmp_path / "save-000005")
    else:
        save = shutil.copytree(save, tmp_path / "save-000005")
    code, text = run(tmp_path, "--repair")
    assert f"wrote a manifest for {save.name}" in text
    assert code == 0
    assert saved(tmp_path) == save
    pipe = make_pipe()
    assert pipe.load(tmp_path) == 2
    pipe.save(tmp_path)
    flip(save / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp' is damaged"):
        pipe.load(save)


@pytest.mark.parametrize("name", [".metadata", "extra.pt", "__0_0.distcp"])
def test_repair_sets_aside_what_cannot_be_read(name: str, run: Run, tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    save = tmp_path / "save-000002"
    (save / "manifest.json").unlink()
    os.truncate(save / name, 100)
    (tmp_path / "damaged-save-000002").mkdir()
    assert "renamed save-000002 to damaged-save-000002-2" in run(tmp_path, "--repair")[1]
    assert saved(tmp_path) == tmp_path / "save-000001"


def test_repair_removes_remains_of_killed_saves_only(run: Run, tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / "save-000002").mkdir()
    (tmp_path / "save-000002" / "writing.json").write_text("{}")
    (tmp_path / "save-20240101").mkdir()
    (tmp_path / "save-20240101" / "results.csv").write_text("mine")
    code, text = run(tmp_path, "--repair")
    assert (code, text.splitlines()[0]) == (0, "removed save-000002, which was not finished")
    assert sorted(os.listdir(tmp_path)) == ["save-000001", "save-20240101"]


def test_repair_beside_a_writer_is_refused(run: Run, tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    leave_lock(tmp_path, identify_writer())
    code, text = run(tmp_path, "--repair")
    assert code == 2
    assert "is saving to" in text


def test_names_cannot_control_the_terminal(run: Run, tmp_path: Path) -> None:
    from dataclasses import replace

    from penstock.checkpoint.manifest import read_manifest, write_manifest

    path = make_pipe().save(tmp_path).path
    manifest = read_manifest(path)
    assert manifest is not None
    write_manifest(path, 1, replace(manifest.writer, host="\x1b[2J"), manifest.files, None)
    assert "\x1b" not in run(tmp_path)[1]

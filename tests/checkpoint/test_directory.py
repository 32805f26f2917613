"""Folders of saves: which save is the newest, what is removed, copies, and older versions."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from penstock import ArgumentError, CheckpointError, Pipe, RunError, saved
from penstock.checkpoint.directory import find_newest
from penstock.checkpoint.manifest import write_file_synced


def make_pipe() -> Pipe:
    return Pipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), stages=2, devices=["cpu"] * 2)


def save_steps(folder: Path, steps: int, keep: int = 2) -> Pipe:
    pipe = make_pipe()
    for step in range(1, steps + 1):
        pipe.save(folder, extra=step, keep=keep)
    return pipe


def make_old(folder: Path, number: int, marked: bool = True) -> Path:
    """Turn a save into one of an earlier version, which `latest` names."""
    path = folder / f"save-{number:06d}"
    (path / "manifest.json").unlink()
    (path / "penstock-save.txt").unlink()
    if marked:
        (path / ".penstock-save").write_text("A checkpoint that penstock has written\n")
    (folder / "latest").unlink(missing_ok=True)
    (folder / "latest").symlink_to(path.name)
    return path


# ---- what is removed ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [4]), (2, [3, 4]), (3, [2, 3, 4]), (9, [1, 2, 3, 4])]
)
def test_save_keeps_the_newest_checkpoints_and_the_files_of_the_user(
    keep: int, left: list[int], tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "run"
    assert saved(folder) is None
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    (folder / "latest").write_text("mine")
    (folder / "save-me").mkdir()
    pipe = save_steps(folder, 4, keep)
    names = [f"save-{number:06d}" for number in left]
    assert sorted(os.listdir(folder)) == ["latest", "notes.txt", *names, "save-me"]
    assert saved(folder) == folder / "save-000004"
    assert pipe.load(folder) == 4
    assert pipe.load(folder / names[0]) == left[0]


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, None])
def test_keep_must_be_a_count(keep: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="is not a number of checkpoints"):
        make_pipe().save(tmp_path / "run", keep=keep)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name", ["save-20240101", "save-000002", ".removed-save-000001", ".new-save-1"]
)
def test_save_never_removes_a_folder_of_the_user(name: str, tmp_path: Path) -> None:
    """The first `pipe.save` deleted a user's folder named `save-20240101`, like our own saves."""
    own = tmp_path / name
    own.mkdir()
    (own / "results.csv").write_text("mine")
    pipe = save_steps(tmp_path, 4, keep=1)
    assert (own / "results.csv").read_text() == "mine"
    assert pipe.load(tmp_path) == 4


def test_checkpoint_of_pytorch_in_the_folder_is_neither_loaded_nor_removed(tmp_path: Path) -> None:
    shutil.copytree(_foreign(tmp_path), tmp_path / "run" / "save-000007")
    with pytest.raises(CheckpointError, match=r"save-000007/manifest.json' is missing"):
        saved(tmp_path / "run")
    pipe = save_steps(tmp_path / "run", 3, keep=1)
    assert sorted(os.listdir(tmp_path / "run")) == ["save-000007", "save-000010"]
    assert pipe.load(tmp_path / "run") == 3


def _foreign(folder: Path) -> Path:
    path = make_pipe().save(folder / "other").path
    for name in ("manifest.json", "penstock-save.txt", "extra.pt"):
        (path / name).unlink()
    return path


def test_checkpoint_is_kept_if_the_next_save_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = save_steps(tmp_path, 1)
    with monkeypatch.context() as broken:
        broken.setattr(FileSystemWriter, "finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pipe.save(tmp_path, extra=2, keep=1)
    assert os.listdir(tmp_path) == ["save-000001"]  # and the lock is released
    assert pipe.load(tmp_path) == 1


def test_damaged_save_does_not_count_among_those_that_are_kept(tmp_path: Path) -> None:
    pipe = save_steps(tmp_path, 2)
    (tmp_path / "save-000002" / "extra.pt").unlink()
    pipe.save(tmp_path, extra=3)
    pipe.load(tmp_path / "save-000001")
    assert pipe.load(tmp_path) == 3


# ---- the newest save ----------------------------------------------------------------------


def test_unfinished_save_is_not_loaded_and_is_removed_by_the_next(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    shutil.copytree(tmp_path / "save-000001", tmp_path / "save-000002")
    (tmp_path / "save-000002" / "manifest.json").rename(tmp_path / "save-000002" / "writing.json")
    assert saved(tmp_path) == tmp_path / "save-000001"
    assert save_steps(tmp_path, 1).load(tmp_path) == 1
    assert sorted(os.listdir(tmp_path)) == ["save-000001", "save-000003"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda save: (save / "manifest.json").unlink(), "manifest.json' is missing"),
        (lambda save: (save / "manifest.json").write_text("{}"), "manifest.json' is damaged"),
        (lambda save: _change_date(save), "manifest.json' is damaged"),
        (lambda save: save.rename(save.parent / "save-000009"), "renamed or copied"),
        (lambda save: _set_format(save, 2), "has format 2, and this version of penstock reads"),
    ],
)
@pytest.mark.parametrize("steps", [1, 2])
def test_odd_newest_save_raises_instead_of_starting_again(
    damage: Any, message: str, steps: int, tmp_path: Path
) -> None:
    pipe = save_steps(tmp_path, steps)
    damage(tmp_path / f"save-{steps:06d}")
    for call in (saved, pipe.load):
        with pytest.raises(CheckpointError, match=message) as raised:
            call(tmp_path)
    assert ("The newest complete save is" in str(raised.value)) == (steps == 2)


def _change_date(save: Path) -> None:
    content = json.loads((save / "manifest.json").read_text())
    content["saved_at"] = "2001-01-01T00:00:00+00:00"
    (save / "manifest.json").write_text(json.dumps(content))


def _set_format(save: Path, number: int) -> None:
    from penstock.checkpoint import manifest

    content = json.loads((save / "manifest.json").read_text())
    del content["digest"]
    content["format"] = number
    digest = manifest._digest_content(content)
    (save / "manifest.json").write_text(json.dumps({**content, "digest": digest}))


def test_damaged_older_save_does_not_stop_a_run(tmp_path: Path) -> None:
    pipe = save_steps(tmp_path, 2)
    (tmp_path / "save-000001" / "manifest.json").unlink()
    assert pipe.load(tmp_path) == 2


# ---- copies of folders --------------------------------------------------------------------


def _zip(source: Path, copy: Path) -> None:
    archive = source.parent / "run.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(source.rglob("*")):
            file.write(path, path.relative_to(source))
    with zipfile.ZipFile(archive) as file:
        file.extractall(copy)


def _rsync(source: Path, copy: Path) -> None:
    """Leave links out, as `rsync -r` does."""
    if shutil.which("rsync"):
        subprocess.run(["rsync", "-r", f"{source}/", str(copy)], check=True)
    else:
        shutil.copytree(
            source, copy, ignore=lambda folder, names: [n for n in names if n == "latest"]
        )


COPIES: dict[str, Any] = {
    "cp -rL": lambda source, copy: subprocess.run(["cp", "-rL", source, copy], check=True),
    "rsync -r": _rsync,
    "zip": _zip,
    "python": shutil.copytree,
}


@pytest.mark.parametrize("version", ["new", "marked", "first"])
@pytest.mark.parametrize("tool", COPIES)
def test_copied_folder_loads_and_goes_on(tool: str, version: str, tmp_path: Path) -> None:
    """Copy tools lose symbolic links, or replace them by what they name."""
    save_steps(tmp_path / "run", 2)
    if version != "new":
        make_old(tmp_path / "run", 2, version == "marked")
    COPIES[tool](tmp_path / "run", tmp_path / "copy")
    pipe = make_pipe()
    assert pipe.load(tmp_path / "copy") == 2
    pipe.save(tmp_path / "copy", extra=3)
    assert make_pipe().load(tmp_path / "copy") == 3


# ---- folders of earlier versions ----------------------------------------------------------


@pytest.mark.parametrize("marked", [True, False])
def test_folder_of_an_earlier_version_loads_and_is_continued(marked: bool, tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    old = make_old(tmp_path, 1, marked)
    assert saved(tmp_path) == old
    pipe = make_pipe()
    assert pipe.load(tmp_path) == pipe.load(tmp_path / "latest") == 1
    pipe.save(tmp_path, extra=2, keep=1)
    assert pipe.load(tmp_path) == 2
    left = ["save-000002"] if marked else ["save-000001", "save-000002"]
    assert sorted(os.listdir(tmp_path)) == left


@pytest.mark.parametrize("marked", [True, False])
def test_killed_save_of_an_earlier_version_is_not_loaded(marked: bool, tmp_path: Path) -> None:
    """The link was moved last, so a save that it does not name was not complete."""
    save_steps(tmp_path, 2)
    make_old(tmp_path, 2, marked)
    make_old(tmp_path, 1, marked)
    assert saved(tmp_path) == tmp_path / "save-000001"
    pipe = make_pipe()
    assert pipe.load(tmp_path) == 1
    pipe.save(tmp_path, extra=3)
    assert make_pipe().load(tmp_path) == 3


@pytest.mark.parametrize("lost", ["everything", ".metadata"])
def test_odd_link_of_an_earlier_version_raises(lost: str, tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    path = make_old(tmp_path, 1)
    shutil.rmtree(path) if lost == "everything" else (path / lost).unlink()
    with pytest.raises(CheckpointError, match="which is not a checkpoint"):
        saved(tmp_path)


def test_link_of_the_user_named_latest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("checkpoint-500")
    assert saved(tmp_path) is None
    assert save_steps(tmp_path, 1).load(tmp_path) == 1
    assert os.readlink(tmp_path / "latest") == "checkpoint-500"


def test_old_checkpoint_without_extra_raises(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    path = make_old(tmp_path, 1)
    (path / "extra.pt").unlink()
    with pytest.raises(CheckpointError, match=r"extra.pt' is damaged: the file is missing"):
        make_pipe().load(path)


# ---- two runs, one folder -----------------------------------------------------------------


def test_run_that_another_has_overtaken_cannot_save(tmp_path: Path) -> None:
    """A requeued job beside one that still ended: each removed the other's checkpoints."""
    first, second = make_pipe(), make_pipe()
    first.save(tmp_path, extra="first")
    second.load(tmp_path)
    second.save(tmp_path, extra="second")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"process \d+ on .* has saved .*save-000002"):
            first.save(tmp_path, extra="late")
    assert sorted(os.listdir(tmp_path)) == ["save-000001", "save-000002"]
    second.save(tmp_path, extra="third")
    first.load(tmp_path)
    first.save(tmp_path, extra="taken over")
    assert make_pipe().load(tmp_path) == "taken over"


def test_run_can_go_back_to_an_older_save(tmp_path: Path) -> None:
    save_steps(tmp_path, 3)
    pipe = make_pipe()
    assert pipe.load(tmp_path / "save-000002") == 2
    pipe.save(tmp_path, extra=7)
    newest = find_newest(tmp_path)
    assert newest is not None
    assert newest.number == 4
    shutil.copytree(newest.path, tmp_path / "save-000100")  # a copy of the user's
    shutil.rmtree(newest.path)
    pipe.save(tmp_path, extra=8)
    assert pipe.load(tmp_path) == 8
    assert (tmp_path / "save-000100").exists()


def test_load_follows_a_save_that_removes_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 751 loads beside a running save, 20 failed and 154 came back without `extra`."""
    from penstock.checkpoint import saver

    writer, read = save_steps(tmp_path, 1), saver._read_all
    steps = iter(range(2, 6))

    def read_late(*arguments: Any) -> Any:
        if (step := next(steps, None)) is not None:
            writer.save(tmp_path, extra=step, keep=1)
        return read(*arguments)

    monkeypatch.setattr(saver, "_read_all", read_late)
    assert make_pipe().load(tmp_path) == 5


def test_save_and_load_need_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("this file system has no links")

    monkeypatch.setattr(os, "symlink", refuse)
    monkeypatch.setattr(os, "link", refuse)
    assert save_steps(tmp_path, 3).load(tmp_path) == 3
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


def test_file_of_a_save_replaces_no_other(tmp_path: Path) -> None:
    (tmp_path / "extra.pt").write_text("of another writer")
    with pytest.raises(FileExistsError):
        write_file_synced(tmp_path / "extra.pt", b"mine")
    assert (tmp_path / "extra.pt").read_text() == "of another writer"


def test_manifest_lists_every_file_with_its_digests(tmp_path: Path) -> None:
    """A file of more than one block of 4 MiB."""
    pipe = Pipe(nn.Sequential(nn.Linear(1100, 1100), nn.Linear(3, 3)), stages=1, devices=["cpu"])
    path = pipe.save(tmp_path, extra=torch.ones(3)).path
    content = json.loads((path / "manifest.json").read_text())
    assert set(content["files"]) == {p.name for p in path.iterdir()} - {"manifest.json"}
    assert (content["library"], content["format"], content["number"]) == ("penstock", 1, 1)
    assert content["writer"]["pid"] == os.getpid()
    assert content["step"] is None
    data = (path / "__0_0.distcp").read_bytes()
    blocks = [data[i : i + 2**22] for i in range(0, len(data), 2**22)]
    assert len(blocks) == 2
    assert content["files"]["__0_0.distcp"] == {
        "size": len(data),
        "sha256": [hashlib.sha256(block).hexdigest() for block in blocks],
    }
    assert torch.equal(pipe.load(tmp_path), torch.ones(3))


# ---- manifests that somebody has edited, odd folders, full disks ----------------------------


def forge(save: Path, **changes: Any) -> None:
    """Change values of a manifest, and make its digest fit."""
    path = save / "manifest.json"
    content = {**json.loads(path.read_text()), **changes}
    del content["digest"]
    text = json.dumps(content, sort_keys=True).encode()
    path.write_text(json.dumps({**content, "digest": hashlib.sha256(text).hexdigest()}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": {"../../secret": {"size": 0, "sha256": []}}}, "it lists '../../secret'"),
        ({"files": {"/dev/zero": {"size": 0, "sha256": []}}}, "it lists '/dev/zero'"),
        ({"files": {"..": {"size": 0, "sha256": []}}}, r"it lists '\.\.'"),
        ({"files": {"extra.pt": {"size": 9, "sha256": []}}}, "'extra.pt' that do not fit"),
        ({"files": {"extra.pt": {"size": "9", "sha256": ["0"]}}}, "'extra.pt' that do not fit"),
        ({"files": []}, "a value is missing, or has the wrong type"),
        ({"writer": {}}, "a value is missing, or has the wrong type"),
        ({"number": "2"}, "a value is missing, or has the wrong type"),
        ({"step": [1]}, "a value is missing, or has the wrong type"),
        ({"version": "\x1b[2J"}, "characters that control a terminal"),
        ({"format": 2}, "reads format 1. It was written by penstock"),
    ],
)
def test_manifest_that_was_edited_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_steps(tmp_path, 2)
    forge(tmp_path / "save-000002", **changes)
    for path in (tmp_path, tmp_path / "save-000002"):
        with pytest.raises(CheckpointError, match=message) as raised:
            make_pipe().load(path)
        assert str(tmp_path / "save-000002" / "manifest.json") in str(raised.value)
    assert make_pipe().load(tmp_path / "save-000001") == 1


def test_file_that_the_manifest_does_not_list_is_not_read(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    forge(tmp_path / "save-000001", files={})
    with pytest.raises(CheckpointError, match=r".metadata' is damaged: .* does not list it"):
        make_pipe().load(tmp_path)


def test_pipe_in_place_of_a_file_does_not_block_a_load(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / "save-000001" / "extra.pt").unlink()
    os.mkfifo(tmp_path / "save-000001" / "extra.pt")
    with pytest.raises(CheckpointError, match=r"extra.pt' is damaged: it is not a file"):
        make_pipe().load(tmp_path)


def test_manifest_that_is_a_directory_raises(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / "save-000001" / "manifest.json").unlink()
    (tmp_path / "save-000001" / "manifest.json").mkdir()
    with pytest.raises(CheckpointError, match=r"manifest.json' is damaged: it is a directory"):
        saved(tmp_path)


def test_folder_that_is_a_link_to_nowhere_or_a_file_raises(tmp_path: Path) -> None:
    """A run would start from the beginning because a disk was not mounted."""
    link, file = tmp_path / "run", tmp_path / "notes.txt"
    link.symlink_to(tmp_path / "disk" / "run")
    file.write_text("mine")
    for folder, message in ((link, "which does not exist"), (file, "is a file, or is below one")):
        with pytest.raises(CheckpointError, match=message):
            saved(folder)
        with pytest.raises(CheckpointError, match=message):
            make_pipe().save(folder)
    (tmp_path / "disk" / "run").mkdir(parents=True)
    assert save_steps(link, 1).load(tmp_path / "disk" / "run") == 1


class FullFile(io.FileIO):
    """A file on a disk that gets full."""

    def write(self, data: Any, /) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("background", [False, True])
def test_full_disk_is_told_with_the_file(
    background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's writer said "unexpected pos 704 vs 598" instead."""
    pipe = save_steps(tmp_path, 1)
    with monkeypatch.context() as full:
        full.setattr(io, "FileIO", lambda path, mode: _open_full(path, mode))
        with pytest.raises(OSError, match=r"No space left on device: '.*/__0_0.distcp'"):
            pipe.save(tmp_path, background=background, keep=1).wait()
    assert os.listdir(tmp_path) == ["save-000001"]
    assert make_pipe().load(tmp_path) == 1


def _open_full(path: Path, mode: str) -> io.FileIO:
    kind = FullFile if path.name.endswith(".distcp") else _FILE_IO
    return kind(path, mode)


_FILE_IO = io.FileIO


# ---- threads, and saves that are interrupted --------------------------------------------------


def test_threads_that_save_the_same_pipe_take_turns(tmp_path: Path) -> None:
    """All of four threads failed, because each removed the lock of another."""
    pipe = make_pipe()
    with ThreadPoolExecutor(4) as pool:
        saves = [pool.submit(pipe.save, tmp_path, None, n, n % 2 == 0, 4) for n in range(4)]
    names = {save.result().wait().name for save in saves}
    assert names == set(os.listdir(tmp_path)) == {f"save-{n:06d}" for n in range(1, 5)}


def test_save_inside_a_save_is_refused(tmp_path: Path) -> None:
    pipe = make_pipe()
    pipe.save(tmp_path, extra=1)
    errors: list[str] = []
    write = FileSystemWriter.write_data

    def save_again(*given: Any) -> Any:
        with pytest.raises(RunError, match="save of a pipe was called inside another") as raised:
            pipe.save(tmp_path, extra=0)
        errors.append(str(raised.value))
        return write(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", save_again)
        pipe.save(tmp_path, extra=2)
    assert len(errors) == 1
    assert pipe.load(tmp_path) == 2
    assert sorted(os.listdir(tmp_path)) == ["save-000001", "save-000002"]


def test_save_after_one_that_was_interrupted_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C right behind the manifest, a run was told that another had overtaken it."""
    from penstock.checkpoint import directory

    pipe = save_steps(tmp_path, 1)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(directory, "_remove_old_saves", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pipe.save(tmp_path, extra=2)
    assert make_pipe().load(tmp_path) == 2
    pipe.save(tmp_path, extra=3)
    assert sorted(os.listdir(tmp_path)) == ["save-000002", "save-000003"]
    assert pipe.load(tmp_path) == 3

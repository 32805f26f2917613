"""The lock of a folder of saves: live writers are refused, dead ones are replaced."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from penstock import CheckpointError
from penstock.checkpoint import writer_lock
from penstock.checkpoint.manifest import Writer
from penstock.checkpoint.writer_lock import acquire_lock, identify_writer
from tests.checkpoint.test_directory import make_pipe, save_steps


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_lock, "_ARRIVAL_SECONDS", 0.2)
    monkeypatch.setattr(writer_lock, "BEAT_SECONDS", 0.05)


def leave_lock(folder: Path, writer: Writer | None, age: float = 0.0) -> Path:
    """Write the lock file of a writer, or one that is not complete."""
    path = folder / f".penstock-writer-{writer.token if writer else '0' * 32}"
    path.write_text('{"host": ' if writer is None else json.dumps(asdict(writer)))
    os.utime(path, (time.time() - age,) * 2)
    return path


def other(**changes: Any) -> Writer:
    return replace(identify_writer(), **changes)


def parent() -> Writer:
    started = writer_lock._get_start_time(os.getppid())
    assert started is not None
    return other(pid=os.getppid(), started=started)


def ended() -> Writer:
    process = subprocess.Popen(["true"])
    process.wait()
    return other(pid=process.pid)


def zombie() -> Writer:
    """A process that has ended, and whose parent has not looked yet."""
    process = subprocess.Popen(["sleep", "60"])
    started = writer_lock._get_start_time(process.pid)
    assert started is not None
    process.kill()
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    _zombies.append(process)
    return other(pid=process.pid, started=started)


_zombies: list[subprocess.Popen[bytes]] = []


LIVE: dict[str, Any] = {
    "a process of this machine": parent,
    "another pipe of this process": identify_writer,
    "another machine": lambda: other(machine="elsewhere", host="node7"),
    "a file that is being written": lambda: None,
}
DEAD: dict[str, Any] = {
    "a process that has ended": (ended, 0),
    "a process that nobody has waited for": (zombie, 0),
    "a number that was used again": (lambda: other(started="1"), 0),
    "another machine, silent": (lambda: other(machine="elsewhere"), 61),
    "a file that was not finished": (lambda: None, 61),
}


@pytest.mark.parametrize("case", LIVE)
def test_second_writer_is_refused(case: str, tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    lock, released = leave_lock(tmp_path, writer := LIVE[case](), 30), threading.Event()
    toucher = threading.Thread(target=writer_lock._touch_until, args=(lock, released))
    toucher.start()
    try:
        with pytest.raises(CheckpointError, match=r"is saving to .*two writers would") as raised:
            make_pipe().save(tmp_path)
    finally:
        released.set()
        toucher.join()
    assert str(writer or "another process") in str(raised.value)
    assert sorted(os.listdir(tmp_path)) == [lock.name, "save-000001"]
    lock.unlink()
    make_pipe().save(tmp_path)


@pytest.mark.parametrize("case", DEAD)
def test_lock_of_a_dead_writer_is_taken_over(case: str, tmp_path: Path) -> None:
    make, age = DEAD[case]
    leave_lock(tmp_path, make(), age)
    pipe = save_steps(tmp_path, 1)
    assert os.listdir(tmp_path) == ["save-000001"]
    assert pipe.load(tmp_path) == 1
    while _zombies:
        _zombies.pop().wait()


def test_save_waits_until_a_writer_on_another_machine_is_known_to_be_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_lock, "SILENT_SECONDS", 0.5)
    lock = leave_lock(tmp_path, other(machine="elsewhere"))
    last = lock.stat().st_mtime
    acquired = acquire_lock(tmp_path, identify_writer())
    assert acquired.path.stat().st_mtime - last >= 0.5
    acquired.release()
    assert os.listdir(tmp_path) == []


def test_lock_that_is_dated_in_the_future_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A clock that was set back by an hour made a save wait for an hour, without a word."""
    monkeypatch.setattr(writer_lock, "SILENT_SECONDS", 0.5)
    leave_lock(tmp_path, other(machine="elsewhere", host="node7"), age=-3600)
    acquire_lock(tmp_path, identify_writer()).release()
    assert os.listdir(tmp_path) == []
    [message] = caplog.messages
    assert "on node7 was saving to" in message


def test_own_lock_that_an_earlier_save_could_not_remove_is_no_obstacle(tmp_path: Path) -> None:
    writer = identify_writer()
    leave_lock(tmp_path, writer)
    acquire_lock(tmp_path, writer).release()
    assert os.listdir(tmp_path) == []


def test_writer_that_cannot_write_its_lock_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        acquire_lock(tmp_path, identify_writer())
    assert os.listdir(tmp_path) == []


def test_one_of_many_writers_that_come_at_once_gets_the_lock(tmp_path: Path) -> None:
    start, done = threading.Barrier(8), threading.Barrier(8)
    held: list[Any] = []

    def acquire() -> None:
        start.wait()
        try:
            held.append(acquire_lock(tmp_path, identify_writer()))
        except CheckpointError:
            pass
        finally:
            done.wait()

    for _ in range(5):
        held.clear()
        threads = [threading.Thread(target=acquire) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(held) == 1
        held[0].release()
        assert os.listdir(tmp_path) == []


def test_held_lock_is_touched_until_it_is_released(tmp_path: Path) -> None:
    lock = acquire_lock(tmp_path, identify_writer())
    os.utime(lock.path, (1, 1))
    while lock.path.stat().st_mtime < 2:
        time.sleep(0.01)
    lock.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("operation", ["write_data", "finish"])
def test_writer_that_has_lost_its_lock_commits_nothing(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer is held up for a minute, and another takes the folder over and saves to it."""
    first, second = save_steps(tmp_path, 2), make_pipe()
    original = getattr(FileSystemWriter, operation)

    def held_up(*arguments: Any) -> Any:
        monkeypatch.setattr(FileSystemWriter, operation, original)
        [lock] = tmp_path.glob(".penstock-writer-*")
        lock.unlink()
        second.save(tmp_path, extra="taken over")
        return original(*arguments)

    monkeypatch.setattr(FileSystemWriter, operation, held_up)
    with pytest.raises((CheckpointError, FileNotFoundError)):
        first.save(tmp_path, extra="late")
    assert make_pipe().load(tmp_path) == "taken over"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["save-000002", "save-000004"]
    with pytest.raises(CheckpointError, match=r"has saved .*save-000004"):
        first.save(tmp_path)


def test_check_of_a_lost_lock_says_what_happened(tmp_path: Path) -> None:
    lock = acquire_lock(tmp_path, identify_writer())
    lock.path.unlink()
    with pytest.raises(CheckpointError, match="was not heard of for 60 s"):
        lock.check_held()
    lock.release()

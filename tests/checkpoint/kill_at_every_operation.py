"""Save in a process that is killed at its n-th file system operation, for every n.

    python -m tests.checkpoint.kill_at_every_operation FOLDER

It prints for each n what can be loaded afterwards.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock import Pipe, saved
from tests.checkpoint.saved_models import optimizer_of

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "shutil.rmtree")


def pipe_at(step: int) -> tuple[Pipe, torch.optim.Optimizer]:
    """Return a pipe whose parameters all equal `step`, and its optimizer."""
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), stages=2, devices=["cpu"] * 2)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.fill_(step)
    return pipe, optimizer_of(pipe)


def save(folder: Path, step: int) -> None:
    pipe, optimizer = pipe_at(step)
    pipe.save(folder, optimizer=optimizer, extra=step)
    pipe.export(folder / "model.safetensors")


def found(folder: Path) -> int:
    """Load the checkpoint, check that it is complete, and return its step."""
    pipe, optimizer = pipe_at(-1)
    step = pipe.load(folder, optimizer=optimizer)
    assert all(bool((p == step).all()) for p in pipe.parameters())
    header = (folder / "model.safetensors").read_bytes()
    assert header[8:9] == b"{"
    return int(step)


def killed_at(number: int, folder: Path, work: Callable[[], None]) -> bool:
    """Run `work` in a process that is killed before its n-th event; return whether it died."""
    child = os.fork()
    if not child:
        left = number

        def count(event: str, given: tuple[Any, ...]) -> None:
            nonlocal left
            if event in EVENTS and str(folder) in str(given[0]):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def main() -> None:
    torch.set_num_threads(1)
    origin = Path(sys.argv[1])
    save(origin / "first", 1)
    number = 0
    while True:
        folder = origin / str(number)
        shutil.copytree(origin / "first", folder, symlinks=True)
        killed = killed_at(number, folder, lambda: save(folder, 2))  # noqa: B023
        step = found(folder)
        save(folder, 3)
        last = saved(folder)
        assert last is not None
        *_, before, newest = sorted(os.listdir(folder))
        assert newest == last.name
        assert sorted(os.listdir(folder)) == ["model.safetensors", before, newest]
        assert "writing.json" not in [*os.listdir(folder / before), *os.listdir(last)]
        print(number, "killed" if killed else "done", step, found(folder))
        if not killed:
            return
        number += 1


if __name__ == "__main__":
    main()

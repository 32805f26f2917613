"""Saves that are killed leave a checkpoint that loads, and no leftovers after the next save."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch import distributed
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tests.checkpoint.saved_models import build, interleaved, optimizer_of, part, saver_of, stepped
from tests.checkpoint.test_save_group import loaded
from tests.distributed.ranks import Died, ranks
from tests.launch.hosts import run


def test_save_killed_at_any_file_operation_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    done = run([sys.executable, "-m", "tests.checkpoint.kill_at_every_operation", str(tmp_path)])
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    steps = [int(line[2]) for line in lines]
    assert steps == sorted(steps)  # from one kill point on, the new checkpoint is found
    assert set(steps) == {1, 2}
    assert len(lines) > 12
    assert [line[1] for line in lines[-2:]] == ["killed", "done"]
    assert {line[3] for line in lines} == {"3"}


def killed_while_saving(folder: Path) -> None:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    module = part(build(), interleaved(rank, size))
    optimizer = optimizer_of(module)
    saver = saver_of(module)
    saver.save(folder, optimizer, {"steps": 0}, False)
    stepped(module, optimizer)
    if rank == 0:
        FileSystemWriter.finish = _killed  # type: ignore[method-assign, assignment]
    saver.save(folder, optimizer, {"steps": 2}, False)


def _killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_save_with_the_first_rank_killed_at_its_end_keeps_the_previous_checkpoint(
    tmp_path: Path,
) -> None:
    """tests/faults kills ranks while they write."""
    answers = ranks(3).answers(killed_while_saving, tmp_path, within=60, patience=3)
    assert isinstance(answers[0], Died)
    for extra, _ in ranks(2).run(loaded, tmp_path):
        assert extra == {"steps": 0}

"""The worker processes of other tests are reused, replaced after a failure, and always ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.distributed.rank import Raised, Returned
from tests.distributed.ranks import Died, RanksFailed, ranks

ROOT = Path(__file__).parents[2]


def pid() -> int:
    return os.getpid()


def failing(at: int) -> None:
    """Raise on one rank while the others wait for a message from it."""
    if distributed.get_rank() == at:
        print("what it printed")
        raise ZeroDivisionError("on purpose")
    distributed.recv(torch.ones(1), src=at)


def dying(at: int) -> str:
    if distributed.get_rank() == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def waiting_for_nobody() -> None:
    distributed.recv(torch.ones(1), src=(distributed.get_rank() + 1) % distributed.get_world_size())


def warned() -> None:
    warnings.warn("careful", stacklevel=1)


def drawn() -> float:
    return torch.rand(()).item()


def test_processes_are_reused_until_a_case_fails() -> None:
    before = ranks(2).run(pid)
    assert ranks(2).run(pid) == before
    with pytest.raises(RanksFailed):
        ranks(2).run(failing, 0)
    after = ranks(2).run(pid)
    assert not set(before) & set(after)
    assert not any(map(running, before))


def test_failure_report_contains_traceback_and_output_of_the_rank() -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks(3).run(failing, 1)
    report = str(caught.value)
    assert "rank 1 raised:\nTraceback" in report
    assert "ZeroDivisionError: on purpose" in report
    assert "rank 1 wrote:\nwhat it printed" in report
    assert "rank 0 was not done in time" in report  # it was still waiting for rank 1
    assert "in failing" in report.partition("rank 0 wrote:")[2]


def test_hanging_case_is_killed_and_shows_its_stack() -> None:
    with pytest.raises(RanksFailed, match="in waiting_for_nobody"):
        ranks(2).run(waiting_for_nobody, within=3)


def test_answers_report_which_rank_died() -> None:
    first, second = ranks(2).answers(dying, 1)
    assert first == Returned("alive")
    assert second == Died(-signal.SIGKILL)
    (raised, waited) = ranks(2).answers(failing, 0, patience=2.0)
    assert isinstance(raised, Raised)
    assert isinstance(waited, Died)
    assert waited.waited


def test_warnings_are_errors_and_every_case_has_the_same_seed() -> None:
    with pytest.raises(RanksFailed, match="UserWarning: careful"):
        ranks(2).run(warned)
    first, second = (ranks(2).run(drawn) for _ in range(2))
    assert first == second == [first[0]] * 2


# ---- end of the processes -----------------------------------------------------------------

SCRIPT = """
from tests.distributed import fork_server
fork_server.PRELOADED = ("tests.distributed.rank",)  # all that a case may need takes seconds
from tests.distributed.ranks import ranks
from tests.distributed.test_ranks import pid, waiting_for_nobody
if __name__ == "__main__":
    print(*ranks(2).run(pid), flush=True)
    ranks(2).run(waiting_for_nobody)
"""


@contextmanager
def started(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process, [int(word) for word in process.stdout.readline().split()]


def running(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it may end while it is read
        return False


def gone(processes: list[int], within: float = 60.0) -> bool:
    end = time.monotonic() + within
    while any(map(running, processes)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(running, processes))


def test_waiting_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    with started(tmp_path) as (parent, children):
        assert len(children) == 2
        assert all(map(running, children))
        parent.kill()
        parent.wait(timeout=120)
        assert gone(children)

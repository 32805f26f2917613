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
from torch import Tensor, distributed

from tests.distributed.packing import packed, unpacked
from tests.distributed.rank import Raised, Returned
from tests.distributed.ranks import SIZES, Died, RanksFailed, ranks

ROOT = Path(__file__).parents[2]


def summed(x: Tensor) -> tuple[int, Tensor]:
    distributed.all_reduce(x)
    return distributed.get_rank(), x


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


@pytest.mark.parametrize("size", SIZES)
def test_run_calls_the_function_on_every_rank(size: int) -> None:
    found = ranks(size).run(summed, torch.tensor([1.0, 2.0]))
    assert [rank for rank, _ in found] == list(range(size))
    assert all(torch.equal(x, torch.tensor([1.0, 2.0]) * size) for _, x in found)


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
    (raised, waited) = ranks(2).answers(failing, 0, within=5)
    assert isinstance(raised, Raised)
    assert isinstance(waited, Died)
    assert waited.waited


def test_warnings_are_errors_and_every_case_has_the_same_seed() -> None:
    with pytest.raises(RanksFailed, match="UserWarning: careful"):
        ranks(2).run(warned)
    first, second = (ranks(2).run(drawn) for _ in range(2))
    assert first == second == [first[0]] * 2


def test_packing_preserves_tensor_types_and_values() -> None:
    given = [
        torch.randn(2, 3).t(),
        torch.randn(2, requires_grad=True),
        torch.tensor(True),
        torch.empty(0, 4, dtype=torch.int64),
        torch.randn(3).bfloat16(),
        torch.nn.Parameter(torch.randn(2)),
        torch.eye(2).to_sparse(),
    ]
    for tensor, found in zip(given, unpacked(packed(given)), strict=True):
        assert type(found) is type(tensor)
        assert found.dtype == tensor.dtype
        assert found.requires_grad == tensor.requires_grad
        assert torch.equal(found.detach().to_dense(), tensor.detach().to_dense())


# ---- end of the processes -----------------------------------------------------------------

SCRIPT = """
import sys
from tests.distributed import fork_server
fork_server.PRELOADED = ("tests.distributed.rank",)  # all that a case may need takes seconds
from tests.distributed.ranks import ranks
from tests.distributed.test_ranks import pid, waiting_for_nobody
if __name__ == "__main__":
    print(*ranks(2).run(pid), flush=True)
    if sys.argv[1] == "wait":
        ranks(2).run(waiting_for_nobody)
"""


@contextmanager
def started(tmp_path: Path, argument: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, str(script), argument],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process, [int(word) for word in process.stdout.readline().split()]


def running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()


def gone(processes: list[int], within: float = 60.0) -> bool:
    end = time.monotonic() + within
    while any(map(running, processes)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(running, processes))


def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    with started(tmp_path, "end") as (parent, children):
        assert parent.wait(timeout=120) == 0
        assert len(children) == 2
        assert gone(children)


def test_waiting_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, "wait") as (parent, children):
        assert len(children) == 2
        assert all(map(running, children))
        parent.kill()
        parent.wait(timeout=120)
        assert gone(children)

"""examples/train_processes.py under torchrun, also when processes or hosts are killed."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.launch.hosts import (
    LIMIT,
    ROOT,
    TORCHRUN,
    Command,
    Ended,
    children,
    end,
    environment,
    kill,
    kill_all_on,
    start,
    start_on,
    two_hosts,
)

SCRIPT = str(ROOT / "examples" / "train_processes.py")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def ranks_equal(ended: Ended) -> list[int]:
    """Return the ranks whose numbers equal those of the unsplit model."""
    assert ended.code == 0, ended.out + ended.err
    return sorted(map(int, re.findall(r"rank (\d+)  the same as the unsplit model", ended.out)))


def losses(ended: Ended, step: int) -> set[str]:
    return set(re.findall(rf"step {step}  loss (\S+)", ended.out))


def wait_for(file: Path, started: Sequence[Command]) -> None:
    """Wait for a file that the processes write; if it does not appear, fail with their output."""
    until = time.monotonic() + LIMIT
    while not file.exists():
        if time.monotonic() > until or any(process.poll() is not None for process in started):
            kill(started)
            pytest.fail(f"no {file.name}: {end(started)}")
        time.sleep(0.05)


def test_example_resumes_after_a_killed_worker_and_as_two_replicas(tmp_path: Path) -> None:
    saving = ["--save", str(tmp_path / "run"), "--every", "1", "--check", "--meta"]
    two = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", SCRIPT, *saving]
    process = start([*TORCHRUN, *two], environment(**ONE_THREAD))
    wait_for(tmp_path / "run" / "save-000001" / "manifest.json", [process])
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    (ended,) = end([process])
    assert re.search(r"rank \d  goes on after step \d", ended.out)
    assert ranks_equal(ended) == [0, 1]
    four = ["--standalone", "--nproc-per-node", "4", SCRIPT, *saving, "--dp", "2"]
    four += ["--schedule", "zb-h1", "--steps", "22"]
    (ended,) = end([start([*TORCHRUN, *four], environment(**ONE_THREAD))])
    assert ended.err == ""
    assert ended.out.count("goes on after step 20") == 4
    assert ranks_equal(ended) == [0, 1, 2, 3]
    assert ended.out.count("step 22  loss") == 4
    assert len(losses(ended, 22)) == 1


def test_example_on_two_hosts_continues_after_one_host_dies(tmp_path: Path) -> None:
    saving = ["--save", str(tmp_path / "run"), "--every", "2", "--check"]
    with two_hosts() as hosts:
        # torchrun of torch 2.13 hangs if a host joins after the last call: imports must fit in it
        conf = "last_call_timeout=15,keep_alive_interval=2,keep_alive_max_attempt=3"
        started = start_on(hosts, [SCRIPT, *saving], environment(**ONE_THREAD), "1:2", conf)
        wait_for(tmp_path / "run" / "save-000001" / "manifest.json", started)
        kill_all_on(hosts[1])
        first, second = end(started)
    assert second.code != 0
    assert "rank 0  step 2  loss" in first.out
    assert re.search(r"rank 0  goes on after step \d", first.out)
    assert ranks_equal(first) == [0]

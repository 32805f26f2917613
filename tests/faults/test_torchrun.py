"""Ranks fail under `torchrun`: the others report which one, and no process is left running.

That training resumes after a restart is tested with the example, in tests/examples.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.distributed.test_ranks import gone
from tests.launch.hosts import ROOT, TORCHRUN, environment, run

SCRIPT = str(ROOT / "tests" / "faults" / "torchrun_script.py")


def test_every_rank_reports_the_failed_rank_under_torchrun(tmp_path: Path) -> None:
    """Rank 1 raises an error; after the restart, it is killed."""
    logs = ["--redirects", "3", "--log-dir", str(tmp_path / "logs")]
    words = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", *logs]
    ended = run([*words, SCRIPT, str(tmp_path)], environment(OMP_NUM_THREADS="1"))
    assert ended.code != 0
    pids = [int(file.read_text()) for file in tmp_path.glob("pid-*-*")]
    assert len(pids) == 4
    assert gone(pids)

    def written(attempt: int, rank: int) -> str:
        (log,) = (tmp_path / "logs").rglob(f"attempt_{attempt}/{rank}/stderr.log")
        return log.read_text()

    failed = r"rank 1 failed, in step \(call 2\), in stage 1 .*Burst"
    assert re.search(failed, written(0, 0)), written(0, 0)
    assert "Burst: all wrong" in written(0, 1)
    assert "rank 1 died: no heartbeat" in written(1, 0), written(1, 0)

"""A rank fails under `torchrun`: every rank reports which one, and no process is left running.

That training resumes after a restart is tested with the example, in tests/examples.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.test_ranks import gone
from tests.launch.hosts import ROOT, TORCHRUN, environment, run

SCRIPT = str(ROOT / "tests" / "faults" / "torchrun_script.py")
RANKS = 2


@pytest.mark.parametrize(
    ("fault", "place", "rank", "said"),
    [
        ("raise", "backward", 1, r"rank 1 failed, in step \(call 3\), in stage 1 .*Burst"),
        ("kill", "forward", 1, "rank 1 died: no heartbeat"),
    ],
)
def test_every_rank_reports_the_failed_rank_under_torchrun(
    fault: str, place: str, rank: int, said: str, tmp_path: Path
) -> None:
    logs = ["--redirects", "3", "--log-dir", str(tmp_path / "logs")]
    words = [*TORCHRUN, "--standalone", "--nproc-per-node", str(RANKS), *logs, SCRIPT]
    ended = run([*words, fault, place, str(rank), str(tmp_path)], environment(OMP_NUM_THREADS="1"))
    assert ended.code != 0
    assert gone([int((tmp_path / f"{r}").read_text()) for r in range(RANKS)])
    for other in range(RANKS):
        (log,) = (tmp_path / "logs").rglob(f"{other}/stderr.log")
        text = log.read_text()
        if other != rank:
            assert re.search(said, text), (other, text)
        elif fault == "raise":
            assert "Burst: all wrong" in text

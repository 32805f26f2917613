"""Kill a rank whose DataLoader workers live on, under torchrun: who died must be told at once.

python -m tests.faults.loader_kills [--cases 20] [--ranks 3]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.faults.cut_hosts import SCRIPT, wait_until
from tests.launch.hosts import TORCHRUN, environment, kill, start

LIMIT = 2.0  # seconds from the death of a rank to the error on every other one


def kill_rank(victim: int, size: int, pause: float) -> str:
    """Run one case, and return what was wrong, or an empty text."""
    with TemporaryDirectory() as name:
        words = [*TORCHRUN, "--standalone", "--nproc-per-node", str(size), SCRIPT]
        started = start([*words, "loading", name, "10"], environment(OMP_NUM_THREADS="1"))
        try:
            pids = [Path(name, f"pid-{rank}") for rank in range(size)]
            wait_until(lambda: all(file.exists() and file.read_text() for file in pids), 60)
            time.sleep(pause)
            os.kill(int(pids[victim].read_text()), signal.SIGKILL)
            killed = time.time()
            ends = [Path(name, f"end-{rank}") for rank in range(size) if rank != victim]
            wait_until(lambda: all(file.exists() and file.read_text() for file in ends), 20)
            texts = [file.read_text() if file.exists() else f"{time.time()} -" for file in ends]
        finally:
            kill([started])
    seconds = [float(text.split()[0]) - killed for text in texts]
    print(f"rank {victim}:", " ".join(f"{second:.2f} s" for second in seconds))
    wrong = [t for t in texts if f"rank {victim} died: " not in t]
    late = [second for second in seconds if second > LIMIT]
    return f"rank {victim}: {wrong} {late}" if wrong or late else ""


def main() -> None:
    """Run all cases, and exit with 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=3)
    given = parser.parse_args()
    draw = random.Random(0)
    problems = [
        kill_rank(1 + case % (given.ranks - 1), given.ranks, draw.uniform(0, 0.3))
        for case in range(given.cases)
    ]
    failed = [text for text in problems if text]
    print(*failed, sep="\n")
    print(f"{given.cases - len(failed)} of {given.cases} cases")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

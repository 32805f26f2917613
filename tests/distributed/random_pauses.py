"""Run tests as on a busy machine: stop random worker processes for short times while the tests run.

    python -m tests.distributed.random_pauses [--longest 1.2] [--threads 4] [--seed 0] ARGUMENTS ...

A test that fails here and nowhere else has a race, or its timeouts are too short.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

from tests.launch.hosts import children

GAP = 0.3  # longest pause, in seconds, between two stops by one thread


def main() -> int:
    """Run pytest with the remaining arguments and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--longest", type=float, default=1.2, help="the longest pause in seconds")
    parser.add_argument(
        "--threads", type=int, default=4, help="how many processes are paused at once"
    )
    parser.add_argument("--seed", type=int, default=0)
    options, arguments = parser.parse_known_args()
    tests = subprocess.Popen([sys.executable, "-m", "pytest", *arguments])
    for thread in range(options.threads):
        draw = random.Random(f"{options.seed} {thread}")
        threading.Thread(target=_pause, args=(tests, options.longest, draw)).start()
    return tests.wait()


def _pause(tests: subprocess.Popen[bytes], longest: float, draw: random.Random) -> None:
    while tests.poll() is None:
        found = _descendants(tests.pid)
        if found:
            with suppress(ProcessLookupError):
                os.kill(pid := draw.choice(found), signal.SIGSTOP)
                time.sleep(draw.uniform(0, longest))
                os.kill(pid, signal.SIGCONT)
        time.sleep(draw.uniform(0, GAP))


def _descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [below for child in found for below in _descendants(child)]


if __name__ == "__main__":
    sys.exit(main())

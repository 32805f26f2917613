"""A script for torchrun in which rank 1 fails in the second step, in another way after a restart.

Each rank first writes its pid.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import penstock
from tests.faults.training_run import Fault, FaultInjector, batch, burst, pipe_of
from tests.faults.watchdog_step import kill

FAULTS = Fault(1, "backward", burst), Fault(1, "forward", kill)


def main(pids: Path) -> None:
    """Run the training on this rank."""
    penstock.init()
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (pids / f"pid-{attempt}-{rank}").write_text(f"{os.getpid()}")
    injector = FaultInjector(rank, FAULTS[attempt])
    pipe = pipe_of(injector)
    for injector.step in range(3):
        x, target = batch(injector.step)
        pipe.step(x, target=target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

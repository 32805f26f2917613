"""A script for torchrun in which one rank fails in the second step.

Each rank first writes its pid.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import penstock
from tests.faults.training_run import Fault, FaultInjector, batch, burst, optimizer_of, pipe_of
from tests.faults.watchdog_step import kill

FAULTS = {"raise": burst, "kill": kill}


def main(fault: str, place: str, rank: int, pids: Path) -> None:
    """Run the training on this rank."""
    penstock.init()
    here = int(os.environ["RANK"])
    (pids / f"{here}").write_text(f"{os.getpid()}")
    injector = FaultInjector(here, Fault(rank, place, FAULTS[fault]))
    # the first optimizer imports the compiler, which takes seconds
    pipe = pipe_of(injector, heartbeat=20.0)
    optimizer = optimizer_of(pipe)
    for injector.step in range(3):
        x, target = batch(injector.step)
        optimizer.zero_grad()
        pipe.step(x, target=target)
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))

"""A script for torchrun: in its second step one rank fails, and says before who it is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import penstock
from tests.faults.course import Fault, Trap, batch, burst, kill, optimizer_of, pipe_of

FAULTS = {"raise": burst, "kill": kill}


def main(fault: str, place: str, rank: int, pids: Path) -> None:
    """The same lines on every rank."""
    penstock.init()
    here = int(os.environ["RANK"])
    (pids / f"{here}").write_text(f"{os.getpid()}")
    trap = Trap(here, Fault(rank, place, FAULTS[fault]))
    pipe = pipe_of(trap, heartbeat=20.0)  # the first optimizer imports the compiler: for seconds
    optimizer = optimizer_of(pipe)
    for trap.step in range(3):
        x, target = batch(trap.step)
        optimizer.zero_grad()
        pipe.step(x, target=target)
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))

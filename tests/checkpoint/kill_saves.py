"""Kill ranks at random moments of saves and of the steps between them, and resume.

    python -m tests.checkpoint.kill_saves --cases 200 --ranks 1 2 3 4 --seed 0

Each case trains and saves after every step. One rank gets SIGKILL or SIGTERM at a random moment.
The run is then started again. It must go on from the last save that had returned, or from the one
that was being written, and its losses and its final state must be bitwise those of an uninterrupted
run.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.optim import AdamW

from penstock import saved
from tests.checkpoint.saved_models import differences, state_of
from tests.checkpoint.test_resume import STEPS, build, learned, piped
from tests.distributed.rank import Returned
from tests.distributed.ranks import Died, ranks


class Kill(NamedTuple):
    """Which rank is killed, from which step on, after how many seconds and by which signal."""

    rank: int
    step: int
    delay: float
    signal: int


class Run(NamedTuple):
    """The first step of a run, its losses and its final state."""

    start: int
    losses: list[Tensor]
    state: dict[str, Any]


def train(folder: Path, kill: Kill | None, background: bool) -> Run:
    """Resume from the folder if it has a checkpoint; save after every step."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    pipe = piped(build())
    optimizer = AdamW(pipe.parameters(), lr=0.05)
    start = pipe.load(folder, optimizer=optimizer) if saved(folder) else 0
    losses, handle, timer = [], None, None
    for step in range(start, STEPS):
        if kill is not None and (rank, step) == (kill.rank, kill.step):
            timer = Timer(kill.delay, os.kill, (os.getpid(), kill.signal))
            timer.daemon = True
            timer.start()
        losses += learned(pipe, optimizer, range(step, step + 1))
        handle = pipe.save(folder, optimizer=optimizer, extra=step + 1, background=background)
        if not background and rank == 0:
            (folder / "returned").write_text(str(step + 1))
    if handle is not None:
        handle.wait()
    if timer is not None:
        timer.cancel()
    return Run(start, losses, state_of(pipe, optimizer))


@cache
def uninterrupted(size: int) -> tuple[list[Run], float]:
    """Return the run of each rank, and the seconds that a step and its save take."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        runs = run_ranks(size, Path(folder), None, False)
        seconds = (time.monotonic() - begin) / STEPS
    assert all(isinstance(run, Run) for run in runs)
    return runs, seconds


def run_ranks(size: int, folder: Path, kill: Kill | None, background: bool) -> list[Any]:
    """Return the run of each rank, or how it failed."""
    if size > 1:
        answers = ranks(size).answers(train, folder, kill, background, within=120, patience=10)
        return [answer.value if isinstance(answer, Returned) else answer for answer in answers]
    if kill is None:
        return [train(folder, None, background)]
    process = os.fork()
    if not process:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        train(folder, kill, background)
        os._exit(0)
    return [Died(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))]


def run_case(number: int, size: int, folder: Path) -> str:
    """Kill one run and resume it. Return what happened, for the table."""
    draw = random.Random(number)
    expected, seconds = uninterrupted(size)
    kill = Kill(
        rank=draw.randrange(size),
        step=draw.randrange(STEPS),
        delay=draw.random() * seconds * 1.2,
        signal=draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]),
    )
    background = draw.random() < 0.5
    first = run_ranks(size, folder, kill, background)
    was_killed = not all(isinstance(run, Run) for run in first) and first[kill.rank] != Died(0)
    returned = folder / "returned"
    at_least = int(returned.read_text()) if returned.exists() and returned.read_text() else 0
    was_saving = any(folder.glob("save-*/writing.json"))
    if background:  # the save before has returned when the next begins
        at_least = max(at_least, kill.step - 1 if was_killed else STEPS)
    resumed = run_ranks(size, folder, None, False)
    for rank, run in enumerate(resumed):
        context = f"case {number}, {size} ranks, {kill}: rank {rank}"
        assert isinstance(run, Run), f"{context}: {run}"
        assert run.start >= at_least, f"{context}: resumed at {run.start}, saved {at_least}"
        assert all(map(torch.equal, run.losses, expected[rank].losses[run.start :])), context
        assert differences(run.state, expected[rank].state) == [], context
    left = {path.name for path in folder.iterdir()} - {"returned"}
    if resumed[0].start < STEPS:  # it has saved: there are two saves at most, and no lock
        assert len(left) <= 2, f"{context}: {left}"
    moment = "in a save" if was_saving else "between saves"
    return f"{size} ranks: {'killed ' + moment if was_killed else 'was done first'}"


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for number in range(options.seed, options.seed + options.cases):
        size = options.ranks[number % len(options.ranks)]
        with tempfile.TemporaryDirectory() as folder:
            counts[outcome := run_case(number, size, Path(folder))] += 1
        print(f"case {number}: {outcome}", flush=True)
    for name, count in sorted(counts.items()):
        print(f"{count:5} {name}")
    print(f"{counts.total()} cases: none lost, all resumed bit for bit")


if __name__ == "__main__":
    main()

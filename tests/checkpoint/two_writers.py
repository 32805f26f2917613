"""Let two processes save to one folder, while a third looks and a fourth loads.

    python -m tests.checkpoint.two_writers --seconds 60

At every look there must be a whole checkpoint. Whenever both writers are running, one of them must
stop with a `CheckpointError`; it is then started again, as a job that is requeued.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from torch import nn

from penstock import CheckpointError, Pipe, saved
from penstock.checkpoint.manifest import find_damage, read_manifest
from tests.distributed.fork_server import forked

OVERTAKEN = 3  # the exit code of a writer that was refused


def make_pipe() -> Pipe:
    return Pipe(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)), stages=2, devices=["cpu"] * 2)


def save_until(folder: Path, end: Path, seed: int) -> None:
    """Resume from the folder and save to it, until it is refused or the file `end` exists."""
    draw, pipe = random.Random(seed), make_pipe()
    try:
        step = pipe.load(folder) if saved(folder) else 0
        while not end.exists():
            step += 1
            pipe.save(folder, extra=step, background=draw.random() < 0.5, keep=draw.choice([1, 2]))
            time.sleep(draw.random() * 0.02)
    except CheckpointError as error:
        sys.exit(OVERTAKEN if "would remove each other's checkpoints" in str(error) else 1)


def run(folder: Path, seconds: float) -> Counter[str]:
    """Run the writers, and return how often something happened."""
    until, counts, seed = time.monotonic() + seconds, Counter[str](), 0
    make_pipe().save(folder, extra=0)
    end = folder.parent / "end"
    writers: list[ForkServerProcess] = []
    reader, last = make_pipe(), 0
    try:
        while time.monotonic() < until or not counts["writers that stopped with an error"]:
            for writer in [writer for writer in writers if writer.exitcode is not None]:
                writers.remove(writer)
                assert writer.exitcode == OVERTAKEN, f"a writer ended with {writer.exitcode}"
                counts["writers that stopped with an error"] += 1
            while len(writers) < 2:
                seed += 1
                writers.append(forked().Process(target=save_until, args=(folder, end, seed)))
                writers[-1].start()
            newest = saved(folder)
            assert newest is not None, os.listdir(folder)
            counts["looks"] += 1
            manifest = read_manifest(newest)  # None: it was removed since
            if manifest is not None and not list(find_damage(newest, manifest)):
                counts["looks that verified every byte"] += 1
            step = reader.load(folder)
            assert isinstance(step, int), "came back without `extra`"
            counts["loads"] += 1
            counts["saves that were seen"] += step != last
            last = step
    finally:
        end.touch()
        for writer in writers:
            writer.join()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        for name, count in run(Path(folder) / "run", seconds).items():
            print(f"{count:6} {name}")


if __name__ == "__main__":
    main()

"""Compare thousands of random models as a pipe and unsplit: `make fuzz`.

First, every family of schedules is verified at every size.

    python -m tests.properties.fuzz --cases 8000 --seed 1 --workers 16
    python -m tests.properties.fuzz --processes             ranks are processes
    python -m tests.properties.fuzz --case out/fuzz.txt     run one saved case again

A case that fails is shrunk, printed and saved. The same seed and numbers of cases and workers try
the same cases again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.distributed.ranks import SIZES
from tests.properties.cases import Case, cases
from tests.properties.comparing import compare
from tests.properties.models import Layer, Model, Skip, Tie
from tests.properties.test_sweep import VARIANTS, check_family

NAMES = {made.__name__: made for made in (Case, Layer, Model, Skip, Tie)}  # the classes in a case
FOUND = Path("out/fuzz.txt")


class Passed(NamedTuple):
    """A case that equals the unsplit model."""

    whole: bool
    bitwise: bool


class Failed(NamedTuple):
    """The smallest case that fails, and its error."""

    case: str
    text: str


class Ended(NamedTuple):
    """A worker has tried all its cases."""


Tell = Callable[[Passed | Failed | Ended], None]


def attempt(start: int, number: int, tell: Tell, processes: bool = False) -> None:
    """Try `number` cases and report each; after a failure, report the smallest that fails."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)  # each worker has one core
    failing: list[Case] = []

    @seed(start)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(st.sampled_from(SIZES).flatmap(cases) if processes else cases())
    def one(case: Case) -> None:
        try:
            compare(case)
        except Exception:
            failing.append(case)
            raise
        if not failing:
            tell(Passed(not case.mixes, case.bitwise))

    try:
        one()
    except Exception as error:
        text = "".join(traceback.format_exception_only(error))
        tell(Failed(repr(failing[-1]) if failing else "", text))
    tell(Ended())


def read_case(text: str) -> Case:
    """Parse a case from its printed form."""
    found = eval(text, NAMES)
    assert isinstance(found, Case)
    return found


def fuzz(start: int, number: int, workers: int, processes: bool) -> int:
    """Try `number` cases in several processes, and return the exit status."""
    print(f"{number} cases of seed {start}, {workers} at once", flush=True)
    spawn = multiprocessing.get_context("spawn")
    queue: SimpleQueue[Passed | Failed | Ended] = spawn.SimpleQueue()  # type: ignore[assignment]
    share = -(-number // workers)
    running = [
        spawn.Process(target=attempt, args=(start * workers + at, share, queue.put, processes))
        for at in range(workers)
    ]
    for process in running:
        process.start()
    passed, failed = _listen(queue, share * workers, workers)
    for process in running:
        process.join()
    whole, bitwise = (sum(getattr(one, name) for one in passed) for name in ("whole", "bitwise"))
    print(
        f"{len(passed)} cases equal the unsplit model, {whole} of them also on the whole batch at "
        f"once, {bitwise} to the last bit"
    )
    return _report(failed)


def _listen(
    queue: SimpleQueue[Passed | Failed | Ended], number: int, running: int
) -> tuple[list[Passed], list[Failed]]:
    passed, failed = [], []
    began = time.monotonic()
    while running:
        news = queue.get()
        if isinstance(news, Passed):
            passed.append(news)
            if len(passed) % 200 == 0:
                took = time.monotonic() - began
                print(f"{len(passed):6} of {number}, {took:.0f} s", flush=True)
        elif isinstance(news, Failed):
            failed.append(news)
        else:
            running -= 1
    return passed, failed


def _report(failed: list[Failed]) -> int:
    for one in failed:
        FOUND.parent.mkdir(exist_ok=True)
        FOUND.write_text(one.case + "\n")
        print(f"\n{one.text}\n{one.case}\n")
        print(f"once more: python -m tests.properties.fuzz --case {FOUND}")
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("--cases", type=int)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--case", type=Path, help="a file with one case")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--processes", action="store_true", help="each rank is one")
    options = parser.parse_args(arguments)
    if options.case is not None:
        compare(read_case(options.case.read_text()))
        print("the case equals the unsplit model")
        return 0
    if not options.processes:
        for name, v in VARIANTS:
            for ranks in range(1, 9):
                check_family(name, v, ranks, range(1, 18))
        print("every family of schedules is sound at every size", flush=True)
    number = options.cases or (1500 if options.processes else 8000)
    return fuzz(options.seed, number, options.workers, options.processes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

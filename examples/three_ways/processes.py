"""Run scripts in several local processes over gloo, with a time limit for each group."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from three_ways.row import Found, Script

LIMIT = 120.0  # seconds for a group of processes
GRACE = 3.0  # seconds that the other ranks get to finish after one has failed
POLL = 0.02


@dataclass(frozen=True)
class Failure:
    """The reason why a script has no result: the earliest failure of all its ranks."""

    rank: int
    text: str
    at: float

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}"


def in_processes(
    scripts: Sequence[Script], processes: int, limit: float = LIMIT
) -> list[Found | Failure]:
    """Run each script on all ranks, and return the merged results of the ranks, or a failure.

    One group of processes runs the scripts one after another. If a script fails, a new group
    continues with the next script.
    """
    results: list[Found | Failure] = []
    while len(results) < len(scripts):
        results += _one_group(scripts[len(results) :], processes, limit)
    return results


def _one_group(scripts: Sequence[Script], processes: int, limit: float) -> list[Found | Failure]:
    with tempfile.TemporaryDirectory() as folder:
        started = [
            multiprocessing.get_context("spawn").Process(
                target=_rank, args=(rank, processes, scripts, Path(folder), limit), daemon=True
            )
            for rank in range(processes)
        ]
        for process in started:
            process.start()
        try:
            _wait(started, time.monotonic() + limit)
        finally:
            for process in started:
                process.kill()
                process.join()
        return _findings(Path(folder), started, len(scripts))


def _wait(started: Sequence[BaseProcess], until: float) -> None:
    """Wait until all processes have exited, or until the limit or the grace period is over."""
    while time.monotonic() < until and any(process.is_alive() for process in started):
        if any(process.exitcode for process in started):
            until = min(until, time.monotonic() + GRACE)
        time.sleep(POLL)


def _findings(folder: Path, started: Sequence[BaseProcess], scripts: int) -> list[Found | Failure]:
    """Return the results of the scripts that all ranks completed, and the failure after them."""
    findings: list[Found | Failure] = []
    for script_index in range(scripts):
        files = [folder / f"{script_index}-{rank}" for rank in range(len(started))]
        parts = [
            torch.load(file, weights_only=False) if file.exists() else _end_of(folder, rank, ended)
            for rank, (file, ended) in enumerate(zip(files, started, strict=True))
        ]
        failed = [part for part in parts if isinstance(part, Failure)]
        if failed:
            return [*findings, min(failed, key=lambda failure: failure.at)]
        results = [part for part in parts if not isinstance(part, Failure)]
        findings.append({name: value for part in results for name, value in part.items()})
    return findings


def _end_of(folder: Path, rank: int, process: BaseProcess) -> Failure:
    """Describe why a rank wrote no result: it died, or it was killed at the time limit."""
    code = process.exitcode
    if code == -signal.SIGKILL:
        return Failure(rank, "no answer within the time limit", at=inf)
    log = folder / f"{rank}.err"  # missing if the process died before it opened its log
    errors = (
        [line for line in log.read_text().splitlines() if "what()" in line] if log.exists() else []
    )
    cause = f": {_bare(errors[0].partition('what():')[2])}" if errors else ""
    status = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    # The time -inf puts this failure first: those of the other ranks are consequences.
    return Failure(rank, f"the process died, {status}{cause}", at=-inf)


def _rank(rank: int, processes: int, scripts: Sequence[Script], folder: Path, limit: float) -> None:
    """Run all scripts as one rank, and write the result of each to a file.

    Each file is renamed into place, so that it only appears once it is complete.
    """
    log = os.open(folder / f"{rank}.err", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = next(n for _, n in socket.if_nameindex() if n[:2] == "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=limit),
    )
    for script_index, script in enumerate(scripts):
        finding: Found | Failure
        try:
            finding = script()
        except Exception as error:
            finding = Failure(rank, _first_line(error), time.time())
        torch.save(finding, folder / f"part-{rank}")
        (folder / f"part-{rank}").rename(folder / f"{script_index}-{rank}")
        if isinstance(finding, Failure):
            os._exit(1)  # exit script_index once, because the peers may be waiting for this rank
    dist.barrier()
    dist.destroy_process_group()


def _first_line(error: BaseException) -> str:
    """Return the type and the first line of the root cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {_bare(lines[0]) if lines else ''}"


def _bare(line: str) -> str:
    """Strip the source location that gloo puts in front of its messages."""
    return re.sub(r"^\[[^]]*] *", "", line.strip())

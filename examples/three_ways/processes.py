"""Scripts in several processes over loopback, none of which is waited for longer than a limit."""

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
GRACE = 3.0  # seconds that ranks have left once one of them has failed
POLL = 0.02


@dataclass(frozen=True)
class Failure:
    """Why a script gave nothing: of the ranks' failures, the one that came first."""

    rank: int
    text: str
    at: float

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}"


def in_processes(
    scripts: Sequence[Script], processes: int, limit: float = LIMIT
) -> list[Found | Failure]:
    """What each script gives, run on all ranks: the ranks' findings together.

    One group of processes runs one script after another. If it fails at one, a new group goes on
    with the next.
    """
    found: list[Found | Failure] = []
    while len(found) < len(scripts):
        found += _one_group(scripts[len(found) :], processes, limit)
    return found


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
    """Until all have ended, or the time is up, or one has failed and the others had their grace."""
    while time.monotonic() < until and any(process.is_alive() for process in started):
        if any(process.exitcode for process in started):
            until = min(until, time.monotonic() + GRACE)
        time.sleep(POLL)


def _findings(folder: Path, started: Sequence[BaseProcess], scripts: int) -> list[Found | Failure]:
    """Of the scripts that all ranks have run, and the failure of the one after, if there is one."""
    findings: list[Found | Failure] = []
    for at in range(scripts):
        files = [folder / f"{at}-{rank}" for rank in range(len(started))]
        parts = [
            torch.load(file, weights_only=False) if file.exists() else _end_of(folder, rank, ended)
            for rank, (file, ended) in enumerate(zip(files, started, strict=True))
        ]
        failed = [part for part in parts if isinstance(part, Failure)]
        if failed:
            return [*findings, min(failed, key=lambda failure: failure.at)]
        found = [part for part in parts if not isinstance(part, Failure)]
        findings.append({name: value for part in found for name, value in part.items()})
    return findings


def _end_of(folder: Path, rank: int, process: BaseProcess) -> Failure:
    """Of a rank that left no finding: it died by itself, or was ended while it waited."""
    code = process.exitcode
    if code == -signal.SIGKILL:
        return Failure(rank, "no answer within the time limit", at=inf)
    log = folder / f"{rank}.err"  # not there, if it died before its first line
    said = (
        [line for line in log.read_text().splitlines() if "what()" in line] if log.exists() else []
    )
    cause = f": {_bare(said[0].partition('what():')[2])}" if said else ""
    how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    return Failure(rank, f"the process died, {how}{cause}", at=-inf)  # others noticed it later


def _rank(rank: int, processes: int, scripts: Sequence[Script], folder: Path, limit: float) -> None:
    """In its own process: all scripts, each finding in a file that appears when it is whole."""
    said = os.open(folder / f"{rank}.err", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 2)
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
    for at, script in enumerate(scripts):
        finding: Found | Failure
        try:
            finding = script()
        except Exception as error:
            finding = Failure(rank, _first_line(error), time.time())
        torch.save(finding, folder / f"part-{rank}")
        (folder / f"part-{rank}").rename(folder / f"{at}-{rank}")
        if isinstance(finding, Failure):
            os._exit(1)  # at once: its peers may be waiting for it
    dist.barrier()
    dist.destroy_process_group()


def _first_line(error: BaseException) -> str:
    """The first line of the error that came first."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {_bare(lines[0]) if lines else ''}"


def _bare(line: str) -> str:
    """Without the source file that gloo's messages begin with."""
    return re.sub(r"^\[[^]]*] *", "", line.strip())

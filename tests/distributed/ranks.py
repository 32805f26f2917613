"""Run a function on all ranks of a gloo group, in processes that stay alive between cases.

    def function(x): ...                         # importable; every rank runs it
    results = ranks(3).run(function, x)          # a list of its return values, one per rank
    answers = ranks(3).answers(function, x)      # also works if it fails, or if ranks die

The processes are started when they are first needed. They are replaced after a case that fails, so
that its broken group cannot harm another case. They end with the process that started them, however
it ends.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.distributed.fork_server import forked, store, visible_gpus
from tests.distributed.rank import SHOW, Answer, Raised, Returned, packed, serve, unpacked

SIZES = (2, 3, 4)
SOAK = "PENSTOCK_SOAK" in os.environ  # set by `make soak`: more combinations, and longer runs
START = 300.0  # seconds that processes may take to start
LIMIT = 300.0  # seconds for a case, also on a very busy machine
SHOWING = 30.0  # seconds that a hanging process may take to write its stacks


@dataclass(frozen=True)
class Died:
    """The process ended, or was killed: its exit code, and what it wrote."""

    code: int | None
    written: str = ""
    waited: bool = False  # it was killed because its time was over


class RanksFailed(AssertionError):
    """Some rank raised, died, or did not finish in time."""


def ranks(size: int) -> Ranks:
    """Return the processes of this group size. There is one set of them per size.

    Tests that see GPUs do not share them with tests that do not: see `tests/conftest.py`.
    """
    return _ranks(size, visible_gpus())


@cache
def _ranks(size: int, visible: str | None) -> Ranks:
    return Ranks(size)


class Ranks:
    """A group of `size` processes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._team: _Team | None = None

    def run(
        self, function: Callable[..., Any], *arguments: Any, within: float = LIMIT
    ) -> list[Any]:
        """Return the result of each rank, or fail with the tracebacks of the failed ranks."""
        answers = self.answers(function, *arguments, within=within, patience=2.0)
        if all(isinstance(answer, Returned) for answer in answers):
            return [answer.value for answer in answers if isinstance(answer, Returned)]
        raise RanksFailed(_describe_failures(answers))

    def answers(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        within: float = LIMIT,
        patience: float | None = None,
    ) -> list[Answer | Died]:
        """Return the outcome on each rank.

        A rank that is not done `within` these seconds is killed.

        After the first failure the other ranks have `patience` seconds, or all the remaining time
        if it is None.
        """
        if self._team is None:
            self._team = _Team(self.size)
        try:
            answers = self._team.ask(packed((within, function, arguments)), within, patience)
        except BaseException:
            self.end()
            raise
        if not all(isinstance(answer, Returned) for answer in answers):
            self.end()
        return answers

    def end(self) -> None:
        """End the processes. The next case starts new ones."""
        if self._team is not None:
            self._team.end()
            self._team = None


class _Team:
    """The processes of one group, from their start to their end."""

    def __init__(self, size: int) -> None:
        context = forked()
        self._owner = os.getpid()
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-ranks-"))
        self._store = store()
        self._connections: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        atexit.register(self.end)
        for rank in range(size):
            mine, theirs = context.Pipe()
            given = rank, size, self._store.port, theirs, self._log(rank), visible_gpus()
            process = context.Process(target=serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)
        answers = self._answers(START, None)
        if not all(isinstance(answer, Returned) for answer in answers):
            self.end()
            raise RanksFailed(_describe_failures(answers))

    def ask(self, task: bytes, within: float, patience: float | None) -> list[Answer | Died]:
        for connection in self._connections:
            try:
                connection.send_bytes(task)
            except OSError:  # the process died between cases, and `_answers` reports it
                continue
        return self._answers(within, patience)

    def _answers(self, within: float, patience: float | None) -> list[Answer | Died]:
        found: dict[int, Answer | Died] = {}
        end = time.monotonic() + within
        while len(found) < len(self._processes):
            waiting = {c: rank for rank, c in enumerate(self._connections) if rank not in found}
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                found[rank] = self._answer(rank)
                if patience is not None and not isinstance(found[rank], Returned):
                    end = min(end, time.monotonic() + patience)
            if not ready:
                found |= self._given_up(list(waiting.values()))
        return [found[rank] for rank in range(len(self._processes))]

    def _answer(self, rank: int) -> Answer | Died:
        try:
            answer = unpacked(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(timeout=SHOWING)
            return Died(self._processes[rank].exitcode, self._written(rank))
        if isinstance(answer, Raised):
            return replace(answer, written=self._written(rank))
        assert isinstance(answer, Returned)
        return answer

    def _given_up(self, late: Sequence[int]) -> dict[int, Answer | Died]:
        """Let the ranks that are not done in time write their stacks, then kill them."""
        before = {rank: self._written(rank) for rank in late}
        for rank in late:
            pid = self._processes[rank].pid
            if self._processes[rank].is_alive() and pid is not None:
                os.kill(pid, SHOW)
        end = time.monotonic() + SHOWING
        while any(before[rank] == self._written(rank) for rank in late):
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        time.sleep(0.2)  # lets the last line be written
        for rank in late:
            self._processes[rank].kill()
        for rank in late:
            self._processes[rank].join()
        return {
            rank: Died(self._processes[rank].exitcode, self._written(rank), waited=True)
            for rank in late
        }

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.txt"

    def _written(self, rank: int) -> str:
        log = self._log(rank)
        return log.read_text(errors="replace") if log.exists() else ""

    def end(self) -> None:
        atexit.unregister(self.end)
        # a fork inherits the exit handler, but must not end the processes
        if os.getpid() != self._owner:
            return
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _describe_failures(answers: Sequence[Answer | Died]) -> str:
    parts = []
    for rank, answer in enumerate(answers):
        if isinstance(answer, Raised):
            parts.append(f"rank {rank} raised:\n{answer.traceback}")
        elif isinstance(answer, Died) and answer.waited:
            parts.append(f"rank {rank} was not done in time, and was ended")
        elif isinstance(answer, Died):
            parts.append(f"rank {rank} died with exit code {answer.code}")
        if not isinstance(answer, Returned) and answer.written:
            parts.append(f"rank {rank} wrote:\n{answer.written[-8000:]}")
    return "\n".join(parts)

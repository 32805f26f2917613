"""Processes for one case: they may die, and each reports what became of it.

    outcomes = run_ranks(3, function, ...)     # every rank runs function(context, ...)

They form a gloo group. They are forked from a server that has imported torch, so a case takes a
fraction of a second.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from penstock.errors import RemoteError
from tests.distributed.fork_server import (
    ENVIRONMENT,
    forked,
    show_gpus,
    visible_gpus,
    without_network_notes,
)
from tests.distributed.fork_server import store as served

WITHIN = 300.0  # seconds for a whole case
THREAD_END = 30.0  # seconds for the threads of a failed pipe to end

# `Process.start` polls all processes that were started before, and so do `join` and `exitcode`. Two
# threads that poll the same process at once may lose its exit code, which is then 255.
_polling = threading.Lock()

T = TypeVar("T")


class RankContext(NamedTuple):
    """The rank, the group size and the connection to the test that a function receives."""

    rank: int
    size: int
    connection: Connection

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of all ranks."""
        found = dist.group.WORLD
        assert found is not None
        return found

    def gather_pids(self) -> list[int]:
        """Return the process ids of all ranks. All ranks must call this."""
        pids: list[Any] = [None] * self.size
        dist.all_gather_object(pids, os.getpid())
        return pids

    def interrupt_soon(self, ranks: Sequence[int], number: int, after: float) -> None:
        """Send a signal to these ranks at once, as a terminal does. All ranks must call this.

        They become a process group: with one signal after another, the first rank to receive it
        could tell the others before they receive theirs.
        """
        leader = self.gather_pids()[ranks[0]]
        if self.rank == ranks[0]:
            os.setpgid(0, 0)
        dist.barrier()
        if self.rank in ranks[1:]:
            os.setpgid(0, leader)
        dist.barrier()
        if self.rank == ranks[0]:
            threading.Timer(after, os.killpg, (leader, number)).start()

    def report(self, **facts: Any) -> None:
        """Report facts to the test. Later values replace earlier ones."""
        self.connection.send(facts)


@dataclass
class RankOutcome:
    """The outcome of a rank: its exit code, the facts it reported, and what it wrote."""

    code: int | None  # None if it had to be killed because its time was over
    facts: dict[str, Any] = field(default_factory=dict)
    written: str = ""


def run_ranks(
    size: int,
    function: Callable[..., object],
    *arguments: Any,
    within: float = WITHIN,
    hosted: bool = False,
) -> list[RankOutcome]:
    """Run a function on `size` ranks.

    If `hosted`, rank 0 serves the store, otherwise this process does.
    """
    context, server = forked(), served()
    with TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            log = str(Path(folder) / f"{rank}.log")
            rank_context = RankContext(rank, size, theirs)
            given = rank_context, log, visible_gpus(), server.port, hosted, function, arguments
            process = context.Process(target=_run_rank, args=given, daemon=True)
            with _polling:
                process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        outcomes = [RankOutcome(None) for _ in range(size)]
        until = time.monotonic() + within
        for process, outcome, pipe, rank in zip(
            processes, outcomes, pipes, range(size), strict=True
        ):
            if wait([process.sentinel], max(0.0, until - time.monotonic())):
                with _polling:
                    outcome.code = process.exitcode
            else:
                process.kill()
                wait([process.sentinel])
            outcome.facts = _collect_facts(pipe)
            log_text = (Path(folder) / f"{rank}.log").read_text()
            outcome.written = without_network_notes(log_text)
            with _polling:
                process.close()
        return outcomes


def run_cases(cases: Mapping[T, Sequence[Any]], at_once: int = 6) -> dict[T, list[RankOutcome]]:
    """Run several cases in parallel. Most of them wait most of the time."""
    with ThreadPoolExecutor(at_once) as pool:
        begun = {case: pool.submit(run_ranks, *given) for case, given in cases.items()}
    return {case: one.result() for case, one in begun.items()}


def _collect_facts(pipe: Connection) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    try:
        while pipe.poll():
            facts.update(pipe.recv())
    except EOFError:
        pass
    pipe.close()
    return facts


def _run_rank(
    context: RankContext,
    log: str,
    gpus: str | None,
    port: int,
    hosted: bool,
    function: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    gc.freeze()  # collecting what the server has imported would copy its memory pages
    out = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.environ.update(ENVIRONMENT)
    show_gpus(gpus)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if hosted:
        if context.rank == 0:
            store.set("hosted", str((own := served()).port))
            store = own
        else:
            port = int(store.get("hosted"))
            store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo",
        store=PrefixStore("group", store),
        rank=context.rank,
        world_size=context.size,
        timeout=timedelta(seconds=WITHIN),
    )
    store.set(f"up/{context.rank}", "")
    # no rank fails before all have arrived
    store.wait([f"up/{rank}" for rank in range(context.size)])
    code = 0
    try:
        function(context, *arguments)
    except BaseException as error:
        _report_error(context, error)
        code = _ended_by(error)
    _end(code)


def _ended_by(error: BaseException) -> int:
    """Print the error and return the exit code, as the interpreter does for an uncaught error."""
    if isinstance(error, SystemExit):
        return int(error.code or 0)
    traceback.print_exception(error)
    sys.last_value = error
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _end(code: int) -> None:
    """Run the exit handlers, as the interpreter does.

    A process forked from a server would skip them.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def remaining_threads(is_meant: Callable[[threading.Thread], bool]) -> list[str]:
    """Return the names of those of these threads that do not end within a while."""
    end = time.monotonic() + THREAD_END
    while found := [thread.name for thread in threading.enumerate() if is_meant(thread)]:
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return found


def _report_error(context: RankContext, error: BaseException) -> None:
    names = ("kind", "rank", "doing", "stage", "layers", "microbatch", "action", "traceback")
    # After other errors the pipe may still be open. "penstock-end" ends the process after SIGTERM.
    if isinstance(error, RemoteError):
        ended = threading.main_thread().name, "penstock-end"
        context.report(threads=remaining_threads(lambda thread: thread.name not in ended))
    context.report(
        error=type(error).__name__,
        text=str(error),
        fields={name: getattr(error, name, None) for name in names},
        whole="".join(traceback.format_exception(error)),
        came_from=type(error.__cause__).__name__,
    )

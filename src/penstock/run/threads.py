"""One thread a rank. The threads live as long as their crew, and wait for work between calls."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue

import torch

from penstock.errors import RunError
from penstock.run.phase import Phase
from penstock.run.transport import Mailboxes, Stopped, Transport
from penstock.run.worker import Step, Worker
from penstock.stage.context import Context
from penstock.stage.places import Place

Job = Callable[[], None]


class Crew:
    """Threads that do one job each, all at the same time; they end when nobody holds the crew."""

    def __init__(self, size: int) -> None:
        self._pid = os.getpid()
        self._orders: list[SimpleQueue[_Order | None]] = [SimpleQueue() for _ in range(size)]
        self._one_at_a_time = threading.Lock()
        threads = [
            threading.Thread(target=_work, args=(orders,), name=f"penstock-{rank}", daemon=True)
            for rank, orders in enumerate(self._orders)
        ]
        for thread in threads:
            thread.start()
        self._idents = {thread.ident for thread in threads}
        weakref.finalize(self, _end, self._orders, threads, self._pid)

    @property
    def here(self) -> bool:
        """Do the threads exist in this process? A fork has none."""
        return self._pid == os.getpid()

    def check_caller(self) -> None:
        """It is none of the crew: that one would wait for itself."""
        if threading.get_ident() in self._idents:
            raise RunError(
                "a pipe was called by one of its own workers, in a layer or a hook, and would wait "
                "for itself: call it after the step, or make another Pipe for this"
            )

    def do(self, jobs: Sequence[Job], stop: Callable[[], None]) -> None:
        """Do the jobs, one a thread, and wait for all. When one fails, `stop` the others.

        The first error is raised here, as it was raised there.
        """
        self.check_caller()
        if not self.here:
            raise RunError(
                "this pipe was called in another process, whose threads a fork does not have: call "
                "it, forward and backward, in one process"
            )
        with self._one_at_a_time:  # all ranks must see calls in the same order
            self._do(jobs, stop)

    def _do(self, jobs: Sequence[Job], stop: Callable[[], None]) -> None:
        failures: list[BaseException] = []
        orders = [_Order(job, stop, failures) for job in jobs]
        while not all(order.done.is_set() for order in orders):
            try:  # Ctrl-C may come at any line, and every order is given and awaited all the same
                for queue, order in zip(self._orders, orders, strict=True):
                    if not order.given:
                        queue.put(order)
                        order.given = True
                for order in orders:
                    while not order.done.wait(timeout=1):  # a signal may come just before it
                        pass
            except BaseException as interrupt:
                failures.append(interrupt)
                stop()
        if failures:
            try:
                raise next((e for e in failures if not isinstance(e, Stopped)), failures[0])
            finally:
                del failures, orders, order


class Threads:
    """The runtime of one call, in a crew's threads. They may have to take turns at forwards."""

    def __init__(
        self,
        crew: Crew,
        places: Sequence[Place],
        placement: Sequence[int],
        turn: AbstractContextManager[object] | None = None,
    ) -> None:
        self._crew = crew
        self._turn = turn or nullcontext()
        self._mailboxes = Mailboxes(places, placement)

    def end(self, rank: int) -> Transport:
        """The rank's mailbox."""
        return self._mailboxes.end(rank)

    def carry_out(self, workers: Sequence[Worker], phase: Phase, context: Context) -> None:
        """All lanes at the same time; when one fails, the others stop."""
        for worker in workers:
            worker.turn = self._turn
        jobs = [
            partial(self._lane, worker, steps, context)
            for worker, steps in zip(workers, phase.lanes, strict=True)
        ]
        self._crew.do(jobs, self._mailboxes.stop)

    def _lane(self, worker: Worker, steps: Sequence[Step], context: Context) -> None:
        # inference_mode(False) would switch autograd's threads on again
        inference = context.inference
        mode = torch.inference_mode() if inference else torch.set_grad_enabled(context.grad)
        with mode, worker.place.entered():
            for step in steps:
                if self._mailboxes.stopped:
                    raise Stopped
                worker.do(step)


class _Order:
    """A job, and what became of it."""

    def __init__(self, job: Job, stop: Callable[[], None], failures: list[BaseException]) -> None:
        self.given = self._begun = False
        self.done = threading.Event()
        self._job, self._stop, self._failures = job, stop, failures

    def carry_out(self) -> None:
        """Once, though it may be given twice; when it fails, the others are stopped."""
        if self._begun:
            return
        self._begun = True
        try:
            self._job()
        except BaseException as error:
            self._failures.append(error)
            self._stop()
        finally:
            del self._job, self._stop, self._failures
            self.done.set()


def _end(
    orders: Sequence[SimpleQueue[_Order | None]], threads: Sequence[threading.Thread], pid: int
) -> None:
    """Let the threads end, and wait for them unless this is one of them, or another process."""
    for queue in orders:
        queue.put(None)
    if pid == os.getpid():
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5)


def _work(orders: SimpleQueue[_Order | None]) -> None:
    # A backward runs in the thread that asks for it. Autograd's own thread for a GPU may be the
    # one that waits for this worker, and one thread for all ranks would be a queue.
    torch.autograd.set_multithreading_enabled(False)
    torch.get_num_threads()  # a thread follows `torch.set_num_threads` only once it has asked
    while True:
        order = orders.get()
        if order is None:
            return
        order.carry_out()
        del order

"""One thread a rank. The threads live as long as their crew, and wait for work between calls."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from penstock.run.transport import Stopped

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

    def do(self, jobs: Sequence[Job], stop: Callable[[], None]) -> None:
        """Do the jobs, one a thread, and wait for all. When one fails, `stop` the others.

        The first error is raised here, as it was raised there.
        """
        if threading.get_ident() in self._idents:
            raise RuntimeError(
                "a pipe was called by one of its own workers, in a layer or a hook, and would wait "
                "for itself: call it after the step, or make another Pipe for this"
            )
        with self._one_at_a_time:  # all ranks must see calls in the same order
            self._do(jobs, stop)

    def _do(self, jobs: Sequence[Job], stop: Callable[[], None]) -> None:
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        for orders, job in zip(self._orders, jobs, strict=True):
            orders.put(_Order(job, done))
        first: BaseException | None = None
        left = len(jobs)
        while left:
            try:
                error = done.get()
                left -= 1
            except BaseException as interrupt:  # Ctrl-C reaches the thread that waits
                error = interrupt
            if error is not None:
                if first is None or isinstance(first, Stopped):
                    first = error
                stop()
        if first is not None:
            try:
                raise first
            finally:
                del first, error


class _Order:
    """A job, and where to say that it is done."""

    def __init__(self, job: Job, done: SimpleQueue[BaseException | None]) -> None:
        self.job, self.done = job, done


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
        try:
            order.job()
        except BaseException as error:
            order.done.put(error)
        else:
            order.done.put(None)
        del order

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

from penstock.device.device import Device
from penstock.errors import RunError
from penstock.runtime.program_cache import Phase
from penstock.runtime.transport import Mailboxes, Stopped, Transport
from penstock.runtime.worker import BoundAction, Worker
from penstock.stage.caller_context import CallerContext

Job = Callable[[], None]


class WorkerPool:
    """Threads that do one job each, all at the same time; they end when nobody holds the crew."""

    def __init__(self, size: int) -> None:
        self._pid = os.getpid()
        self._job_queues: list[SimpleQueue[_QueuedJob | None]] = [
            SimpleQueue() for _ in range(size)
        ]
        self._run_lock = threading.Lock()
        threads = [
            threading.Thread(
                target=_worker_loop, args=(orders,), name=f"penstock-{rank}", daemon=True
            )
            for rank, orders in enumerate(self._job_queues)
        ]
        for thread in threads:
            thread.start()
        self._thread_idents = {thread.ident for thread in threads}
        weakref.finalize(self, _shut_down, self._job_queues, threads, self._pid)

    @property
    def is_in_this_process(self) -> bool:
        """Do the threads exist in this process? A fork has none."""
        return self._pid == os.getpid()

    def check_caller(self) -> None:
        """It is none of the crew: that one would wait for itself."""
        if threading.get_ident() in self._thread_idents:
            raise RunError(
                "a pipe was called by one of its own workers, in a layer or a hook, and would wait "
                "for itself: call it after the step, or make another Pipe for this"
            )

    def run_jobs(self, jobs: Sequence[Job], stop: Callable[[], None]) -> None:
        """Do the jobs, one a thread, and wait for all. When one fails, `stop` the others.

        The first error is raised here, as it was raised there.
        """
        self.check_caller()
        if not self.is_in_this_process:
            raise RunError(
                "this pipe was called in another process, whose threads a fork does not have: call "
                "it, forward and backward, in one process"
            )
        with self._run_lock:  # all ranks must see calls in the same order
            self._run_jobs(jobs, stop)

    def _run_jobs(self, jobs: Sequence[Job], stop: Callable[[], None]) -> None:
        failures: list[BaseException] = []
        orders = [_QueuedJob(job, stop, failures) for job in jobs]
        while not all(order.done.is_set() for order in orders):
            try:  # Ctrl-C may come at any line, and every order is given and awaited all the same
                for queue, order in zip(self._job_queues, orders, strict=True):
                    if not order.is_queued:
                        queue.put(order)
                        order.is_queued = True
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


class ThreadExecutor:
    """The runtime of one call, in a crew's threads. They may have to take turns at forwards."""

    def __init__(
        self,
        pool: WorkerPool,
        devices: Sequence[Device],
        placement: Sequence[int],
        forward_lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._pool = pool
        self._forward_lock = forward_lock or nullcontext()
        self._mailboxes = Mailboxes(devices, placement)

    def endpoint(self, rank: int) -> Transport:
        """The rank's mailbox."""
        return self._mailboxes.endpoint(rank)

    def execute(self, workers: Sequence[Worker], phase: Phase, context: CallerContext) -> None:
        """All lanes at the same time; when one fails, the others stop."""
        for worker in workers:
            worker.forward_lock = self._forward_lock
        jobs = [
            partial(self._run_lane, worker, steps, context)
            for worker, steps in zip(workers, phase.lanes, strict=True)
        ]
        self._pool.run_jobs(jobs, self._mailboxes.stop)

    def _run_lane(
        self, worker: Worker, actions: Sequence[BoundAction], context: CallerContext
    ) -> None:
        # inference_mode(False) would switch autograd's threads on again
        inference = context.inference_mode
        mode = torch.inference_mode() if inference else torch.set_grad_enabled(context.grad_enabled)
        with mode, worker.device.activate():
            for step in actions:
                if self._mailboxes.stopped:
                    raise Stopped
                worker.execute(step)


class _QueuedJob:
    """A job, and what became of it."""

    def __init__(self, job: Job, stop: Callable[[], None], failures: list[BaseException]) -> None:
        self.is_queued = self._is_started = False
        self.done = threading.Event()
        self._job, self._stop, self._failures = job, stop, failures

    def run_once(self) -> None:
        """Once, though it may be given twice; when it fails, the others are stopped."""
        if self._is_started:
            return
        self._is_started = True
        try:
            self._job()
        except BaseException as error:
            self._failures.append(error)
            self._stop()
        finally:
            del self._job, self._stop, self._failures
            self.done.set()


def _shut_down(
    job_queues: Sequence[SimpleQueue[_QueuedJob | None]],
    threads: Sequence[threading.Thread],
    pid: int,
) -> None:
    """Let the threads end, and wait for them unless this is one of them, or another process."""
    for queue in job_queues:
        queue.put(None)
    if pid == os.getpid():
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5)


def _worker_loop(job_queue: SimpleQueue[_QueuedJob | None]) -> None:
    # A backward runs in the thread that asks for it. Autograd's own thread for a GPU may be the
    # one that waits for this worker, and one thread for all ranks would be a queue.
    torch.autograd.set_multithreading_enabled(False)
    torch.get_num_threads()  # a thread follows `torch.set_num_threads` only once it has asked
    while True:
        order = job_queue.get()
        if order is None:
            return
        order.run_once()
        del order

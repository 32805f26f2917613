"""The `threads` runtime: one thread per rank.

A `WorkerPool` belongs to a pipe and keeps its threads between calls. A `ThreadExecutor` belongs to
one call and gives each thread a lane to run.

    caller's thread                      thread of rank r
    ---------------                      ----------------
    WorkerPool.run_jobs
      put a job into every queue   --->  _worker_loop takes the job
      wait until all are done            ThreadExecutor._run_lane: its actions, one by one
                                         on an error: record it, wake and stop the other ranks
      raise the first error        <---  mark the job as done
"""

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
from penstock.torch_compat import close_failed_checkpoints, keep_fake_cuda_guard

Job = Callable[[], None]


class WorkerPool:
    """Threads that run one job each, all at the same time. They end when the pool is collected."""

    def __init__(self, size: int) -> None:
        self._pid = os.getpid()
        self._job_queues: list[SimpleQueue[_QueuedJob | None]] = [
            SimpleQueue() for _ in range(size)
        ]
        self._run_lock = threading.Lock()
        keep_fake_cuda_guard()
        threads = [
            threading.Thread(
                target=_worker_loop, args=(queue,), name=f"penstock-{rank}", daemon=True
            )
            for rank, queue in enumerate(self._job_queues)
        ]
        for thread in threads:
            thread.start()
        self._thread_idents = {thread.ident for thread in threads}
        # The threads hold their queues, not the pool, so the pool can be collected while they wait.
        weakref.finalize(self, _shut_down, self._job_queues, threads, self._pid)

    @property
    def is_in_this_process(self) -> bool:
        """Return whether the threads exist in this process. A fork does not copy threads."""
        return self._pid == os.getpid()

    def check_caller(self) -> None:
        """Raise if the caller is one of the pool's own threads: it would wait for itself."""
        if threading.get_ident() in self._thread_idents:
            raise RunError(
                "a pipe was called by one of its own workers, from a layer or a hook, and would "
                "wait for itself. Call it after the step, or make another Pipe for this call."
            )

    def run_jobs(self, jobs: Sequence[Job], stop: Callable[[], None]) -> None:
        """Run one job in each thread and wait for all of them.

        When a job fails, `stop` is called to stop the others, and the first error is raised here.
        """
        self.check_caller()
        if not self.is_in_this_process:
            raise RunError(
                "this pipe was called in another process, which was forked and does not have the "
                "pipe's threads. Run the forward and its backward in the same process."
            )
        # Two callers may use one pipe. Every rank must see their calls in the same order, or one
        # rank would wait for a message of a call that another rank has not begun.
        with self._run_lock:
            self._run_jobs(jobs, stop)

    def _run_jobs(self, jobs: Sequence[Job], stop: Callable[[], None]) -> None:
        failures: list[BaseException] = []
        queued_jobs = [_QueuedJob(job, stop, failures) for job in jobs]
        # A KeyboardInterrupt may be raised between any two lines here. The loop then goes on until
        # every job has been queued and has ended: a thread that still runs would write into the
        # state of the next call. A job that is queued twice runs once.
        while not all(queued_job.is_done for queued_job in queued_jobs):
            try:
                for queue, queued_job in zip(self._job_queues, queued_jobs, strict=True):
                    if not queued_job.is_queued:
                        queue.put(queued_job)
                        queued_job.is_queued = True
                for queued_job in queued_jobs:
                    # With a timeout, a signal that arrived just before the wait is still handled.
                    while not queued_job.is_done:
                        queued_job.end_lock.acquire(timeout=1)
            except BaseException as interrupt:
                failures.append(interrupt)
                stop()
        if failures:
            try:
                raise next((e for e in failures if not isinstance(e, Stopped)), failures[0])
            finally:
                # The error holds this frame. Without the `del`, the frame would hold all errors
                # and jobs, and with them the tensors of the call.
                del failures, queued_jobs, queued_job


class ThreadExecutor:
    """The executor of one call in the threads of a pool.

    With `forward_lock`, only one rank at a time computes a forward.
    """

    def __init__(
        self,
        pool: WorkerPool,
        devices: Sequence[Device],
        placement: Sequence[int],
        forward_lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._pool = pool
        self._forward_lock = forward_lock
        self._mailboxes = Mailboxes(devices, placement)

    def endpoint(self, rank: int) -> Transport:
        """Return the mailbox of a rank."""
        return self._mailboxes.endpoint(rank)

    def execute(self, workers: Sequence[Worker], phase: Phase, context: CallerContext) -> None:
        """Run all lanes at the same time. When one fails, the others stop."""
        if self._forward_lock is not None:
            for worker in workers:
                worker.forward_lock = self._forward_lock
        jobs = [
            partial(context.copy_variables().run, self._run_lane, worker, lane, context)
            for worker, lane in zip(workers, phase.lanes, strict=True)
        ]
        self._pool.run_jobs(jobs, self._mailboxes.stop)

    def _run_lane(
        self, worker: Worker, actions: Sequence[BoundAction], context: CallerContext
    ) -> None:
        # `torch.inference_mode(False)` would turn autograd's threads on again, so that context is
        # entered only where inference mode is on.
        inference = context.inference_mode
        mode = torch.inference_mode() if inference else torch.set_grad_enabled(context.grad_enabled)
        thread_locals = context.use_thread_locals() if context.thread_locals else nullcontext()
        with mode, thread_locals, worker.device.activate():
            for bound_action in actions:
                if self._mailboxes.stopped:
                    raise Stopped
                worker.execute(bound_action)


class _QueuedJob:
    """A job with its state: queued, started, done.

    `end_lock` is held until the job is done. Waiting for a lock takes a quarter of the time that a
    `threading.Event` takes, of which each step would make one for each rank.
    """

    def __init__(self, job: Job, stop: Callable[[], None], failures: list[BaseException]) -> None:
        self.is_queued = self._is_started = self.is_done = False
        self.end_lock = threading.Lock()
        self.end_lock.acquire()
        self._job, self._stop, self._failures = job, stop, failures

    def run_once(self) -> None:
        """Run the job unless it has been started before. On an error, stop the other ranks."""
        if self._is_started:
            return
        self._is_started = True
        try:
            self._job()
        except BaseException as error:
            close_failed_checkpoints(error)
            self._failures.append(error)
            self._stop()
        finally:
            # The thread may wait long for its next job. It must not keep the tensors of this one.
            del self._job, self._stop, self._failures
            self.is_done = True
            self.end_lock.release()


def _shut_down(
    job_queues: Sequence[SimpleQueue[_QueuedJob | None]],
    threads: Sequence[threading.Thread],
    pid: int,
) -> None:
    """End the threads and wait for them.

    Collection may happen in one of these threads, which cannot join itself, or in a forked process,
    where the threads do not exist.
    """
    for queue in job_queues:
        queue.put(None)
    if pid == os.getpid():
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5)


def _worker_loop(job_queue: SimpleQueue[_QueuedJob | None]) -> None:
    # A backward must run in the thread that asks for it. By default PyTorch runs it in autograd's
    # thread for the GPU. Inside `loss.backward()` that thread is already waiting for this worker,
    # which would be a deadlock; and one thread for all ranks would run them one after another.
    torch.autograd.set_multithreading_enabled(False)
    # A thread follows `torch.set_num_threads` only after it has asked for the number once.
    torch.get_num_threads()
    while True:
        queued_job = job_queue.get()
        if queued_job is None:
            return
        queued_job.run_once()
        del queued_job

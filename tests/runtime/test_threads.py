from __future__ import annotations

import gc
import sys
import threading
import traceback
import weakref
from contextlib import suppress
from itertools import count
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from penstock.runtime import threads
from penstock.runtime.threads import WorkerPool
from penstock.runtime.transport import Stopped
from penstock.torch_compat import get_saved_tensor_hooks
from tests.support import crews, ends, without_gc


def nothing() -> None: ...


def test_ranks_see_the_calls_of_two_callers_in_the_same_order() -> None:
    """Otherwise one rank waits for a message of a call that another rank has not begun."""
    pool = WorkerPool(2)
    calls: tuple[list[str], list[str]] = ([], [])

    def run(caller: str) -> None:
        pool.run_jobs([lambda lane=lane: lane.append(caller) for lane in calls], nothing)  # type: ignore[misc]

    second = threading.Thread(target=run, args=("second",))
    queue = pool._job_queues[0]

    class StartsTheSecondCaller:
        def put(self, job: Any) -> None:
            pool._job_queues[0] = queue
            queue.put(job)
            second.start()
            second.join(timeout=0.5)  # it ends only if it did not wait for the first

    pool._job_queues[0] = StartsTheSecondCaller()  # type: ignore[call-overload]
    run("first")
    second.join()
    assert calls[0] == calls[1] == ["first", "second"]


def test_worker_pool_runs_each_job_in_its_own_thread_at_the_same_time() -> None:
    meeting = threading.Barrier(3)
    names: list[str] = []

    def meet() -> None:
        meeting.wait(timeout=20)
        names.append(threading.current_thread().name)

    pool = WorkerPool(3)
    for _ in range(2):
        pool.run_jobs([meet] * 3, nothing)
    assert sorted(names) == sorted(2 * ["penstock-0", "penstock-1", "penstock-2"])


def test_worker_pool_waits_for_all_jobs() -> None:
    first_is_done = threading.Event()
    done = []

    def last() -> None:
        first_is_done.wait(timeout=20)
        done.append("last")

    WorkerPool(2).run_jobs([first_is_done.set, last], nothing)
    assert done == ["last"]


def test_worker_pool_raises_the_error_of_a_job_and_stops_the_others() -> None:
    stopped = threading.Event()

    def wait() -> None:
        assert stopped.wait(timeout=20)
        raise Stopped

    def fail() -> None:
        raise ZeroDivisionError("mine")

    pool = WorkerPool(3)
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        pool.run_jobs([wait, fail, wait], stopped.set)
    assert "fail" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    pool.run_jobs([nothing] * 3, nothing)


def test_worker_pool_prefers_the_real_error_to_stopped() -> None:
    failing = threading.Event()

    def stop() -> None:
        raise Stopped

    def fail() -> None:
        failing.wait(timeout=20)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        WorkerPool(2).run_jobs([stop, fail], failing.set)


def test_worker_threads_end_with_their_pool() -> None:
    gc.collect()
    before = crews()
    pool = WorkerPool(2)
    pool.run_jobs([nothing] * 2, nothing)
    assert len(crews()) == len(before) + 2
    with without_gc():
        del pool
        assert crews() == before


def test_worker_pool_is_freed_after_a_failure() -> None:
    gc.collect()
    before = crews()

    def fail() -> None:
        raise ZeroDivisionError

    with without_gc():
        pool = WorkerPool(1)
        with pytest.raises(ZeroDivisionError):
            pool.run_jobs([fail], nothing)
        del pool
        assert crews() == before


def test_worker_pool_frees_finished_jobs() -> None:
    class Job:
        def __call__(self) -> None: ...

    pool = WorkerPool(1)
    with without_gc():
        job = Job()
        seen = weakref.ref(job)
        pool.run_jobs([job], nothing)
        pool.run_jobs([nothing], nothing)  # now the thread has begun another job
        del job
        assert seen() is None


def test_worker_thread_is_clean_after_an_error_inside_torch_checkpoint() -> None:
    """PyTorch 2.11 leaves the hooks of the failed call to the thread that drops the error."""
    hooks = []

    def fail(x: torch.Tensor) -> None:
        raise ZeroDivisionError(str(x))

    pool = WorkerPool(1)
    with pytest.raises(ZeroDivisionError):
        pool.run_jobs([lambda: checkpoint(fail, torch.zeros(1), use_reentrant=False)], nothing)
    pool.run_jobs([lambda: hooks.append(get_saved_tensor_hooks())], nothing)
    assert hooks == [None]


def test_worker_threads_disable_autograd_multithreading() -> None:
    """Autograd's own threads are off in the workers, and unchanged in the calling thread."""
    seen: list[bool] = []
    WorkerPool(1).run_jobs([lambda: seen.append(torch._C._is_multithreading_enabled())], nothing)
    assert seen == [False]
    assert torch._C._is_multithreading_enabled()


def interrupted_at(line: int, pool: WorkerPool) -> bool:
    """Run two jobs that wait for each other, with Ctrl-C at a line.

    Return whether this line was reached.
    """
    meeting = threading.Barrier(2)
    lines = count()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_name
        if frame.f_code.co_filename != threads.__file__ or name in ("run_jobs", "__init__"):
            return None  # a lock cannot be left at every line
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    def meet() -> None:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(timeout=20)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        pool.run_jobs([meet, meet], meeting.abort)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_worker_pool_survives_ctrl_c_at_any_line() -> None:
    """The pool is usable again at once, and no caller waits for an answer that came long ago."""
    pool = WorkerPool(2)
    line = 0

    def interrupt() -> bool:
        return interrupted_at(line, pool)

    while True:
        answers: list[bool] = []
        assert ends(lambda: answers.append(interrupt()), within=20), f"line {line}"  # noqa: B023
        assert ends(lambda: pool.run_jobs([nothing, nothing], nothing), within=20), (
            f"after line {line}"
        )
        if not answers[0]:
            break
        line += 1
    assert line > 5


def test_worker_pool_serializes_concurrent_callers() -> None:
    """All ranks do the work of one call before that of the next, whichever thread calls."""
    pool = WorkerPool(2)
    order: list[list[int]] = [[], []]

    def call(number: int) -> None:
        for _ in range(50):
            pool.run_jobs(
                [lambda: order[0].append(number), lambda: order[1].append(number)], nothing
            )

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert order[0] == order[1]
    assert len(order[0]) == 200

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

from penstock.runtime import threads
from penstock.runtime.threads import WorkerPool
from penstock.runtime.transport import Stopped
from tests.support import crews, ends, without_gc


def nothing() -> None: ...


def test_each_job_has_a_thread_and_all_run_at_the_same_time() -> None:
    meeting = threading.Barrier(3)
    names: list[str] = []

    def meet() -> None:
        meeting.wait(timeout=20)
        names.append(threading.current_thread().name)

    crew = WorkerPool(3)
    for _ in range(2):
        crew.run_jobs([meet] * 3, nothing)
    assert sorted(names) == sorted(2 * ["penstock-0", "penstock-1", "penstock-2"])


def test_do_waits_for_all() -> None:
    first_is_done = threading.Event()
    done = []

    def last() -> None:
        first_is_done.wait(timeout=20)
        done.append("last")

    WorkerPool(2).run_jobs([first_is_done.set, last], nothing)
    assert done == ["last"]


def test_an_error_is_raised_as_it_was_and_stops_the_others() -> None:
    stopped = threading.Event()

    def wait() -> None:
        assert stopped.wait(timeout=20)
        raise Stopped

    def fail() -> None:
        raise ZeroDivisionError("mine")

    crew = WorkerPool(3)
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        crew.run_jobs([wait, fail, wait], stopped.set)
    assert "fail" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    crew.run_jobs([nothing] * 3, nothing)


def test_that_others_stopped_is_never_the_error_that_comes_out() -> None:
    failing = threading.Event()

    def stop() -> None:
        raise Stopped

    def fail() -> None:
        failing.wait(timeout=20)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        WorkerPool(2).run_jobs([stop, fail], failing.set)


def test_threads_end_when_nobody_holds_their_crew() -> None:
    gc.collect()
    before = crews()
    crew = WorkerPool(2)
    crew.run_jobs([nothing] * 2, nothing)
    assert len(crews()) == len(before) + 2
    with without_gc():
        del crew
        assert crews() == before


def test_a_failure_does_not_keep_a_crew() -> None:
    gc.collect()
    before = crews()

    def fail() -> None:
        raise ZeroDivisionError

    with without_gc():
        crew = WorkerPool(1)
        with pytest.raises(ZeroDivisionError):
            crew.run_jobs([fail], nothing)
        del crew
        assert crews() == before


def test_jobs_are_dropped_when_done() -> None:
    class Job:
        def __call__(self) -> None: ...

    crew = WorkerPool(1)
    with without_gc():
        job = Job()
        seen = weakref.ref(job)
        crew.run_jobs([job], nothing)
        crew.run_jobs([nothing], nothing)  # the thread has begun another
        del job
        assert seen() is None


def test_threads_do_their_backwards_themselves() -> None:
    """Autograd's threads are off there, and stay as they are here."""
    seen: list[bool] = []
    WorkerPool(1).run_jobs([lambda: seen.append(torch._C._is_multithreading_enabled())], nothing)
    assert seen == [False]
    assert torch._C._is_multithreading_enabled()


def interrupted_at(line: int, crew: WorkerPool) -> bool:
    """Do two jobs that wait for each other, with a Ctrl-C at a line; was there such a line?"""
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
        crew.run_jobs([meet, meet], meeting.abort)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_may_come_at_any_line() -> None:
    """The crew is at hand again at once, and nobody waits for an answer that came long ago."""
    crew = WorkerPool(2)
    line = 0

    def interrupt() -> bool:
        return interrupted_at(line, crew)

    while True:
        answers: list[bool] = []
        assert ends(lambda: answers.append(interrupt()), within=20), f"line {line}"  # noqa: B023
        assert ends(lambda: crew.run_jobs([nothing, nothing], nothing), within=20), (
            f"after line {line}"
        )
        if not answers[0]:
            break
        line += 1
    assert line > 5


def test_callers_take_turns() -> None:
    """All ranks do one call's work before the next one's, whoever calls."""
    crew = WorkerPool(2)
    order: list[list[int]] = [[], []]

    def call(number: int) -> None:
        for _ in range(50):
            crew.run_jobs(
                [lambda: order[0].append(number), lambda: order[1].append(number)], nothing
            )

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert order[0] == order[1]
    assert len(order[0]) == 200

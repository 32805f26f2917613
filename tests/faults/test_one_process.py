"""An error in a layer is raised unchanged, with its location, and the pipe remains usable."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Compute, Pipe, Program
from penstock.schedules.ir import consumes, produces
from tests.pairs import each_pair
from tests.support import RUNTIMES, Traced, Watch, crews, each_runtime, numbered

STAGES = CHUNKS = 3
ACTIONS = [f"{s}{op}{i}" for op in "FRB" for s in range(STAGES) for i in range(CHUNKS)]


class Burst(Exception):
    """The error that a fault raises."""


class Fuse:
    """Record which actions begin, and let one of them fail."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str]] = []  # thread and action
        self.at: str | None = None
        self.fail: Callable[[], object] = self.burst

    def burst(self) -> None:
        raise Burst(f"at {self.at}")

    def tell(self, action: str) -> None:
        self.begun.append((threading.current_thread().name, action))
        if action == self.at:
            self.fail()

    @property
    def actions(self) -> list[str]:
        return [action for _, action in self.begun]


def fused(**options: Any) -> tuple[Fuse, Pipe]:
    fuse = Fuse()
    layers = [Traced(fuse.tell, stage) for stage in range(STAGES)]
    given = {"checkpoint": "always", "stages": STAGES, "loss_fn": squares, **options}
    return fuse, Pipe(nn.Sequential(*layers), CHUNKS, **given)


def squares(output: Tensor) -> Tensor:
    return (output**2).mean()


def works(fuse: Fuse, pipe: Pipe, door: str = "step") -> bool:
    """Return whether the pipe trains with the right loss and gradients."""
    fuse.at = None
    pipe.zero_grad()
    x = numbered(CHUNKS)
    loss = pipe.step(x).loss if door == "step" else squares(pipe(x))
    if door != "step":
        loss.backward()
    gradients = [p.grad for p in pipe.parameters()]
    right = 2 * squares(x)  # the gradient of each weight, since all weights are one
    return torch.allclose(loss, squares(x)) and all(
        g is not None and torch.allclose(g, right) for g in gradients
    )


def spoiled(program: Program, first: str) -> set[str]:
    """Return the actions that depend on the first one, or come after it on its rank."""
    needs: dict[str, list[str]] = {}
    makers = {
        message: str(action)
        for lane in program.schedule.lanes
        for action in lane
        for message in produces(action, program.graph)
    }
    for lane in program.schedule.lanes:
        for before, action in zip([None, *lane], lane, strict=False):
            needs[str(action)] = [makers[message] for message in consumes(action, program.graph)]
            needs[str(action)] += [] if before is None else [str(before)]
    found = {first}
    while more := {a for a, needed in needs.items() if found & set(needed)} - found:
        found |= more
    return found - {first}


def frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


# ---- an exception in any cell -------------------------------------------------------------


@each_pair(runtime=RUNTIMES, schedule=["gpipe", "1f1b"], action=ACTIONS)
def test_exception_in_a_step_is_raised_unchanged_with_its_location(
    action: str, schedule: str, runtime: str
) -> None:
    fuse, pipe = fused(schedule=schedule, runtime=runtime)
    fuse.at = action
    with pytest.raises(Burst, match=f"at {action}") as caught:
        pipe.step(numbered(CHUNKS))
    stage, microbatch = action[0], action[2]
    location, hidden_frames = caught.value.__notes__
    assert location == (
        f"in stage {stage} (layer {stage}: Traced), micro-batch {microbatch}, action {action} on "
        f"rank {stage} (cpu)"
    )
    assert "penstock.full_tracebacks(True) shows them" in hidden_frames
    assert frames(caught.value)[-2:] == ["tell", "burst"]
    assert ("backward" if "B" in action else "forward") in frames(caught.value)
    program = pipe.forecast().program
    assert not spoiled(program, action) & set(fuse.actions)
    if runtime == "inline":
        assert fuse.actions[-1] == action
    assert works(fuse, pipe)


@each_runtime
@pytest.mark.parametrize("action", ["0F0", "2F1", "1F2", "0R1", "2R0", "1B1", "2B2"])
def test_exception_in_pipe_call_or_its_backward(action: str, runtime: str) -> None:
    fuse, pipe = fused(runtime=runtime)
    fuse.at = action
    with pytest.raises(Burst, match=f"at {action}") as caught:
        squares(pipe(numbered(CHUNKS))).backward()
    assert f"action {action}" in caught.value.__notes__[0]
    assert frames(caught.value)[-2:] == ["tell", "burst"]
    assert works(fuse, pipe, "call")
    assert works(fuse, pipe)


@each_runtime
def test_exception_in_pipe_call_without_gradients(runtime: str) -> None:
    fuse, pipe = fused(runtime=runtime)
    fuse.at = "1F1"
    with torch.no_grad(), pytest.raises(Burst):
        pipe(numbered(CHUNKS))
    assert {"1F2", "2F1", "2F2"}.isdisjoint(fuse.actions)
    assert works(fuse, pipe)


@each_runtime
def test_exception_in_the_loss_function(runtime: str) -> None:
    fuse, pipe = fused(runtime=runtime)

    def picky(output: Tensor) -> Tensor:
        if output[0, 0] == 1:
            raise Burst("in the loss")
        return squares(output)

    with pytest.raises(Burst, match="in the loss") as caught:
        pipe.step(numbered(CHUNKS), loss_fn=picky)
    assert "stage 2 (layer 2: Traced), micro-batch 1, action 2R1" in caught.value.__notes__[1]
    assert works(fuse, pipe)


@each_runtime
def test_exception_in_a_gradient_hook(runtime: str) -> None:
    def burst(gradient: Tensor) -> None:
        raise Burst("in a hook")

    fuse, pipe = fused(runtime=runtime)
    hook = pipe[1].weight.register_hook(burst)
    with pytest.raises(Burst, match="in a hook"):
        pipe.step(numbered(CHUNKS))
    hook.remove()
    assert works(fuse, pipe)


@each_runtime
@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, StopIteration, KeyboardInterrupt])
def test_system_exit_and_other_base_exceptions_are_raised(
    error: type[BaseException], runtime: str
) -> None:
    def leave() -> None:
        raise error

    fuse, pipe = fused(runtime=runtime)
    fuse.at, fuse.fail = "1F1", leave
    with pytest.raises(error):
        pipe.step(numbered(CHUNKS))
    assert works(fuse, pipe)


def test_simultaneous_failures_of_several_ranks_raise_one_error() -> None:
    meeting = threading.Barrier(2)

    def fail(x: Tensor) -> None:
        if x[0, 0] == {"penstock-0": 1, "penstock-1": 0}[threading.current_thread().name]:
            meeting.wait(timeout=120)
            raise Burst(threading.current_thread().name)

    pipe = Pipe(nn.Sequential(Watch(fail), Watch(fail)), 2, stages=2)
    for _ in range(5):
        with pytest.raises(Burst):
            pipe(numbered(2))


def test_failure_leaves_no_worker_thread_behind() -> None:
    gc.collect()
    before = crews()
    fuse, pipe = fused()
    fuse.at = "1R1"
    with pytest.raises(Burst):
        pipe.step(numbered(CHUNKS))
    assert len(crews()) == len(before) + STAGES
    del pipe
    gc.collect()
    assert crews() == before


# ---- Ctrl-C -------------------------------------------------------------------------------


heard = threading.Event()  # the main thread has received the signal


def hear(number: int, frame: FrameType | None) -> None:
    heard.set()
    signal.default_int_handler(number, frame)


@pytest.fixture
def interruptible() -> Iterator[None]:
    heard.clear()
    before = signal.signal(signal.SIGINT, hear)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    """Send Ctrl-C to the main thread as the terminal does, and compute until it has arrived."""
    main = threading.main_thread().ident
    assert main is not None
    if main != threading.get_ident():
        seen = [_where(main)]
        # a signal that arrives just before a wait does not end the wait
        while len(seen) < 5 or len({*seen[-5:]}) > 1:
            time.sleep(0.02)
            seen.append(_where(main))
    signal.pthread_kill(main, signal.SIGINT)
    heard.wait(120)
    time.sleep(0.2)  # the main thread tells the others to stop


def _where(thread: int) -> tuple[int, int]:
    frame = sys._current_frames()[thread]
    return id(frame), frame.f_lasti


@each_runtime
@pytest.mark.parametrize("action", ["0F0", "1F1", "2B1", "1R2"])
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_during_a_step_raises_keyboard_interrupt(action: str, runtime: str) -> None:
    fuse, pipe = fused(runtime=runtime)
    fuse.at, fuse.fail = action, interrupt
    with pytest.raises(KeyboardInterrupt):
        pipe.step(numbered(CHUNKS))
    assert not spoiled(pipe.forecast().program, action) & set(fuse.actions)
    assert works(fuse, pipe)


@each_runtime
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_during_backward_raises_keyboard_interrupt(runtime: str) -> None:
    fuse, pipe = fused(runtime=runtime)
    loss = squares(pipe(numbered(CHUNKS)))
    fuse.at, fuse.fail = "1B1", interrupt
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert works(fuse, pipe, "call")


def test_helpers_of_this_file() -> None:
    """2B1 needs nothing that 0R2 produces, but 0B1 comes after it on its rank."""
    fuse, pipe = fused(schedule="gpipe")
    after = spoiled(pipe.forecast().program, "0R2")
    assert after == {"0B2", "0R1", "0B1", "0R0", "0B0"}
    assert "1F1" in spoiled(pipe.forecast().program, "0F1")
    assert isinstance(pipe.forecast().program.schedule.lanes[0][0], Compute)
    assert works(fuse, pipe)
    assert sorted(set(fuse.actions)) == sorted(ACTIONS)

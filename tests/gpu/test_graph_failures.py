"""Tests of steps that cannot be captured: a clear error or threads, and no state left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from benchmarks.virtual import graph_of
from torch import Tensor, nn

import penstock
from penstock import Pipe
from penstock.runtime.cuda_graph import graph_cache
from tests.gpu.support import (
    GPU,
    batch,
    check_same,
    layers,
    needs_gpu,
    pipe_of,
    pipes_per_runtime,
    replays_of,
)

pytestmark = needs_gpu

capturing = torch.cuda.is_current_stream_capturing


class Odd(nn.Module):
    """A layer that prevents a capture while it is `on`.

    Another `number` makes the step one of another kind.
    """

    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.on, self.number = True, 0
        self.what = what
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.what(x) if self.on else x * 1


def reads(x: Tensor) -> Tensor:
    return x * (x.sum().item() * 0 + 1)


def branches(x: Tensor) -> Tensor:
    return x * 1 if (x * x).sum() >= 0 else x


def selects(x: Tensor) -> Tensor:
    return x * (len(x[x > 0]) * 0 + 1)


def computes_on_the_host(x: Tensor) -> Tensor:
    return x * x.cpu().sign().square().to(x.device)


OF_THE_HOST = torch.tensor(2.0)


def has_a_number_on_the_host(x: Tensor) -> Tensor:
    return x * OF_THE_HOST


def brings_numbers(x: Tensor) -> Tensor:
    return x * torch.ones(288, dtype=x.dtype).to(x.device)[:32]


def fails(x: Tensor) -> Tensor:
    if capturing():
        raise LookupError("planted")
    return x * 1


def takes_too_much(x: Tensor) -> Tensor:
    if capturing():
        torch.empty(2**50, dtype=torch.uint8, device=x.device)
    return x * 1


def waits(x: Tensor) -> Tensor:
    """Synchronize; only the driver notices this, and it aborts the capture."""
    if capturing():
        torch.cuda.synchronize()
    return x * 1


def interrupted(x: Tensor) -> Tensor:
    if capturing():
        raise KeyboardInterrupt
    return x * 1


class Case(NamedTuple):
    what: Callable[[Tensor], Tensor]
    message: str
    passing: type[Exception] | None = None  # may not occur again, so the capture is tried twice


CASES = [
    Case(reads, "waits for a value on the device"),
    Case(branches, "waits for a value on the device"),
    Case(selects, "waits for a value on the device"),
    Case(computes_on_the_host, "copies between the host and the device"),
    Case(has_a_number_on_the_host, "computes with a tensor in host memory"),
    Case(brings_numbers, "copies 288 numbers from host memory"),
    Case(fails, "LookupError: planted", LookupError),
    Case(takes_too_much, "OutOfMemoryError", torch.OutOfMemoryError),
    Case(waits, "Error"),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.what.__name__)


def model_with(what: Callable[[Tensor], Tensor]) -> tuple[nn.Sequential, Odd]:
    torch.manual_seed(0)
    odd = Odd(what)
    parts = list(layers())
    return nn.Sequential(*parts[:6], odd, *parts[6:]).to(GPU, torch.float64), odd


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Check after each test that the device works, RNG works, and a capture succeeds."""
    yield
    gc.collect()
    torch.cuda.synchronize()
    x = torch.rand(64, 64, device=GPU)  # from the global generator
    assert not capturing()
    kept = torch.zeros(64, 64, device=GPU)
    graph = graph_of(lambda: x @ x, lambda: kept.copy_(x @ x), torch.cuda.Stream(GPU))
    graph.replay()
    assert torch.equal(kept, x @ x)


def failing(pipe: Pipe, x: Tensor, y: Tensor, case: Case) -> str:
    """Return the error of a capture. The first step is not captured, the second would be."""
    pipe.step(x, target=y)
    for _ in range(graph_cache.MAX_CAPTURE_ATTEMPTS if case.passing else 0):
        with pytest.raises(case.passing or Exception) as found:
            pipe.step(x, target=y)
        assert "while the step was captured as a CUDA graph" in found.value.__notes__
    with pytest.raises(penstock.RunError, match="cannot be captured as a CUDA graph") as caught:
        pipe.step(x, target=y)
    text = str(caught.value)
    assert case.message in text
    return text


def check_captured(pipe: Pipe, x: Tensor, y: Tensor) -> None:
    """Assert that two of three steps are replayed."""
    before = replays_of(pipe)
    assert [pipe.step(x, target=y).ran.runtime for _ in range(3)] == ["graph"] * 3
    assert replays_of(pipe) == before + 2


# ---- errors and recovery -------------------------------------------------------------------


@each_case
def test_failed_capture_names_the_layer_and_the_pipe_recovers(case: Case) -> None:
    model, odd = model_with(case.what)
    pipe = pipe_of(model, "graph")
    x, y = batch(0)
    text = failing(pipe, x, y, case)
    assert "layer 6 (Odd)" in text
    assert "test_graph_failures.py" in text
    # The failure is cached: the capture is not tried again.
    with pytest.raises(penstock.RunError, match="layer 6"):
        pipe.step(x, target=y)
    odd.on = False
    reference, other = model_with(case.what)
    other.on = False
    inline = pipe_of(reference, "inline")
    inline.load_state_dict(pipe.state_dict())
    for number in range(4):
        x, y = batch(number)
        for each in (pipe, inline):
            each.zero_grad()
            ran = each.step(x, target=y).ran
            assert ran.runtime == each.runtime
        check_same(pipe, inline)
    assert replays_of(pipe) == 3


@each_case
def test_auto_runtime_falls_back_to_threads_with_a_warning(case: Case) -> None:
    pipes = [pipe_of(model_with(case.what)[0], runtime) for runtime in ("auto", "inline")]
    for number in range(4):
        x, y = batch(number)
        for pipe in pipes:
            pipe.zero_grad()
        pipes[1].step(x, target=y)
        if number == 0:
            assert pipes[0].step(x, target=y).ran.runtime == "graph"
        else:
            once = pytest.warns(UserWarning, match="runs in threads: .*layer 6")
            with once if number == 1 else nullcontext():
                ran = pipes[0].step(x, target=y).ran
            assert ran.runtime == "threads"
            assert case.message in ran.why
        check_same(*pipes)


def test_keyboard_interrupt_during_capture_and_the_pipe_recovers() -> None:
    model, odd = model_with(interrupted)
    pipe = pipe_of(model, "graph")
    x, y = batch(0)
    pipe.step(x, target=y)
    before = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
    with pytest.raises(KeyboardInterrupt):
        pipe.step(x, target=y)
    after = [p.grad for p in pipe.parameters() if p.grad is not None]
    assert all(map(torch.equal, before, after))
    odd.on = False
    check_captured(pipe, x, y)


class Constant(nn.Module):
    """A layer that creates constants on the device, which become part of the recording."""

    def forward(self, x: Tensor) -> Tensor:
        half = torch.tensor(0.5, device=x.device, dtype=x.dtype)
        few = torch.as_tensor([1.0, 2.0] * 16, device=x.device).to(x.dtype)
        return x * half + few * torch.tensor(2.0).to(x.device)


def test_constants_created_in_a_forward_can_be_captured() -> None:
    def made() -> nn.Sequential:
        parts = list(layers())
        return nn.Sequential(*parts[:5], Constant(), *parts[5:]).to(GPU, torch.float64)

    pipes = pipes_per_runtime(made, ["inline"])
    for number in range(4):
        x, y = batch(number)
        for pipe in pipes:
            pipe.zero_grad()
            pipe.step(x, target=y)
        check_same(*pipes)
    assert replays_of(pipes[0]) == 3


def test_error_in_an_uncaptured_step_is_raised_unchanged() -> None:
    def raises(x: Tensor) -> Tensor:
        raise LookupError("planted")

    model, odd = model_with(raises)
    pipe = pipe_of(model, "graph")
    x, y = batch(0)
    with pytest.raises(LookupError, match="planted"):
        pipe.step(x, target=y)
    odd.on = False
    check_captured(pipe, x, y)


# ---- memory --------------------------------------------------------------------------------


ROWS = 60_000  # a step takes about 100 MB


def used() -> tuple[int, int]:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def used_by_libraries() -> tuple[int, int]:
    """Return the memory that stays after any step: cuBLAS keeps a workspace for each stream."""
    x, y = batch(0, ROWS)
    pipe_of(layers(), "inline").step(x, target=y)
    del x, y
    return used()


MOMENTS = [reads, fails, takes_too_much, waits, interrupted]
STOPPED = (penstock.RunError, LookupError, torch.OutOfMemoryError, KeyboardInterrupt)


@pytest.mark.parametrize("what", MOMENTS)
def test_failing_captures_do_not_leak_memory(what: Callable[[Tensor], Tensor]) -> None:
    before = used_by_libraries()
    model, odd = model_with(what)
    pipe = pipe_of(model, "graph")
    x, y = batch(0, ROWS)
    found = []
    for number in range(12):
        odd.number = number  # another kind of step: the capture is tried again
        pipe.step(x, target=y)
        with pytest.raises(STOPPED):
            pipe.step(x, target=y)
        found.append(used())
    assert found[-1][0] <= found[1][0] + 2**20
    assert found[-1][1] <= found[1][1] + 2**22
    del pipe, model, odd, x, y
    after = used()
    assert after[0] <= before[0] + 2**20
    assert after[1] <= before[1] + 2**25


@pytest.mark.parametrize("what", MOMENTS)
def test_steps_in_threads_free_memory_after_a_failed_capture(
    what: Callable[[Tensor], Tensor],
) -> None:
    """Tensors with `record_stream` are not freed while the allocator assumes a capture."""
    model, _ = model_with(what)
    pipe = pipe_of(model, "graph")
    x, y = batch(0, ROWS)
    pipe.step(x, target=y)
    with pytest.raises(STOPPED):
        pipe.step(x, target=y)
    threads = pipe_of(layers(), "threads")
    found = []
    for _ in range(30):
        threads.step(x, target=y)
        torch.cuda.synchronize()
        found.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert found[-1][0] <= found[4][0] + 2**20
    assert found[-1][1] <= found[4][1] + 2**25


def test_deleted_recordings_free_their_memory() -> None:
    before = used_by_libraries()
    for _ in range(3):
        pipe: Any = pipe_of(layers(), "graph")
        x, y = batch(0, ROWS)
        for _ in range(3):
            pipe.step(x, target=y)
        del pipe, x, y
    after = used()
    assert after[0] <= before[0] + 2**20
    assert after[1] <= before[1] + 2**25


def test_pipe_recovers_after_running_out_of_memory() -> None:
    """There is too little memory for a recording and for threads, so the error is raised."""
    x, y = batch(0, ROWS)
    pipe = pipe_of(layers(), "auto", checkpoint="never")
    pipe.step(x, target=y)
    total = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.set_per_process_memory_fraction((used()[1] + 2**24) / total, GPU)
    warned = pytest.warns(UserWarning, match="OutOfMemoryError")
    try:
        with warned, pytest.raises(torch.OutOfMemoryError):
            pipe.step(x, target=y)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    check_captured(pipe, x[:60], y[:60])
    assert pipe.step(x, target=y).ran.runtime == "graph"  # tried again with enough memory

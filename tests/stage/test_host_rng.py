"""Tests of draws from `random` and `numpy.random` in layers and between units."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from queue import SimpleQueue

import numpy
import pytest
import torch
from torch import Tensor, nn

from penstock import Pipe, is_recomputing
from penstock.errors import RunError
from penstock.stage.host_rng import HostRngCell, HostRngState
from tests.support import Do, each_checkpoint, each_runtime

DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy.random": lambda: float(numpy.random.rand()),
}
each_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=list(DRAWS))


class DrawsBetweenUnits(nn.Module):
    """Scale by a number that is drawn between the units, and by others inside of them."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), Do(lambda x: x * draw())) for _ in range(3)
        )
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.draw()
        return x


@each_draw
@each_checkpoint
@each_runtime
def test_stages_of_a_traced_model_draw_the_same_numbers_between_units(
    draw: Callable[[], float], checkpoint: str, runtime: str
) -> None:
    """Every stage runs the code between the units, and draws for itself."""
    told: SimpleQueue[float] = SimpleQueue()  # a list that the forward changes is refused

    def draw_and_tell() -> float:
        number = draw()
        told.put(number)
        return number

    model, x = DrawsBetweenUnits(draw_and_tell), torch.randn(4, 4)
    pipe = Pipe(model, 2, checkpoint, stages=3, example=x, runtime=runtime)
    before = told.qsize()
    pipe.step(x, loss_fn=lambda y: y.square().mean())
    seen = [told.get() for _ in range(told.qsize())][before:]
    assert len(set(seen)) == 2 * (3 + 3)  # micro-batches; between the units, and in them


@each_draw
@each_runtime
def test_cells_draw_different_numbers_and_the_next_step_again_others(
    draw: Callable[[], float], runtime: str
) -> None:
    seen: list[float] = []

    def scale(x: Tensor) -> Tensor:
        drawn = draw()
        seen.append(drawn)
        return x * drawn

    layers = nn.Sequential(nn.Linear(2, 2), Do(scale), nn.Linear(2, 2), Do(scale))
    pipe = Pipe(layers, 2, "always", stages=2, runtime=runtime)
    before = HostRngState()
    for _ in range(2):
        pipe.step(torch.ones(4, 2), loss_fn=lambda y: y.square().mean())
    assert len(set(seen)) == 2 * 2 * 2  # steps, stages, micro-batches
    assert len(seen) == 2 * len(set(seen))  # once in the forward, once in its recomputation
    assert len(before.find_used()) == 1


def test_a_draw_in_the_forward_alone_is_refused() -> None:
    def scale(x: Tensor) -> Tensor:
        return x if is_recomputing() else x * random.random()

    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), Do(scale), nn.Linear(2, 2)), 2, "always", stages=2)
    with pytest.raises(RunError, match="these layers draw from random, and their recomputation"):
        pipe.step(torch.ones(4, 2), loss_fn=lambda y: y.square().mean())


def test_a_cell_waits_for_a_cell_of_another_thread() -> None:
    lock, numbers = threading.RLock(), []

    def compute(stage: int) -> None:
        with HostRngCell(3, stage, 0, lock):
            numbers.append([random.random() for _ in range(1000)])

    threads = [threading.Thread(target=compute, args=(stage % 2,)) for stage in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tuple(drawn) for drawn in numbers}) == 2


def test_a_cell_leaves_the_generators_as_they_were() -> None:
    before = HostRngState()
    with HostRngCell(3, 0, 0, nullcontext()) as cell:
        numpy.random.rand()
    assert cell.used == {"numpy.random"}
    assert not before.find_used()


def test_numpy_is_not_imported() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from penstock.stage.host_rng import HostRngCell\n"
        "from contextlib import nullcontext\n"
        "with HostRngCell(0, 0, 0, nullcontext()) as cell: pass\n"
        "assert not cell.used\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@each_checkpoint
def test_state_that_the_compiler_restores_in_another_thread_is_no_draw(checkpoint: str) -> None:
    """PyTorch sets the state of `random` back after it has compiled a function in any thread.

    A layer of another stage, whose first forward ran meanwhile, seemed to draw from `random`. Half
    of the first steps with a compiled function failed: "their recomputation drew other numbers".
    """
    state = random.getstate()

    def compile_elsewhere(x: Tensor) -> Tensor:
        compiler = threading.Thread(target=random.setstate, args=(state,))
        compiler.start()
        compiler.join()
        return x * 2

    pipe = Pipe(
        nn.Sequential(nn.Linear(4, 4), Do(compile_elsewhere), nn.Linear(4, 4)), 2, checkpoint,
        stages=[1, 2], devices=["cpu"] * 2, loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    for _ in range(2):
        pipe.step(torch.ones(8, 4), target=torch.ones(8, 4))
    assert random.getstate() == state


def test_cell_whose_state_was_overwritten_does_not_count_as_one_that_draws() -> None:
    state = random.getstate()
    cell = HostRngCell(0, 0, 0, threading.RLock())
    with cell:
        random.setstate(state)
    assert cell.was_overwritten
    assert not cell.used
    drawing = HostRngCell(0, 0, 0, threading.RLock())
    with drawing:
        random.random()
    assert not drawing.was_overwritten
    assert drawing.used == {"random"}

"""The cells alive in a step are those of the timeline, and nothing stays alive afterwards."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock import Pipe
from tests.pairs import each_pair
from tests.support import (
    CHECKPOINTS,
    DOORS,
    RUNTIMES,
    SCHEDULES,
    Doubled,
    Pop,
    Stash,
    batch,
    crews,
    each_checkpoint,
    each_door,
    each_runtime,
    network,
    plain,
    trained,
    without_gc,
)

RANKS, CHUNKS = 3, 5


class Token:
    """A placeholder for a saved tensor that lives as long as autograd keeps it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Cell:
    """One forward of one layer, alive while any of its tokens is."""


class Meter:
    """Count the cells alive on each rank, and their maximum."""

    def __init__(self) -> None:
        self.alive: Counter[int] = Counter()
        self.most: Counter[int] = Counter()

    def born(self, rank: int) -> Cell:
        cell = Cell()
        self.alive[rank] += 1
        self.most[rank] = max(self.most[rank], self.alive[rank])
        weakref.finalize(cell, self._died, rank)
        return cell

    def _died(self, rank: int) -> None:
        self.alive[rank] -= 1


class Metered(nn.Module):
    """A layer whose saved tensors are counted."""

    def __init__(self, meter: Meter, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.meter, self.rank = meter, rank

    def forward(self, x: Tensor) -> Tensor:
        cell: Cell | None = None

        def pack(tensor: Tensor) -> Token:
            nonlocal cell
            if cell is None:
                cell = self.meter.born(self.rank)
            token = Token(tensor)
            token.cell = cell  # type: ignore[attr-defined]
            return token

        with saved_tensors_hooks(pack, lambda token: token.tensor):
            y: Tensor = self.linear(x).tanh()
        return y


@each_pair(
    runtime=RUNTIMES,
    checkpoint=CHECKPOINTS,
    door=DOORS,
    schedule=["gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs"],
)
def test_live_cells_match_the_forecast_peak(
    schedule: str, door: str, checkpoint: str, runtime: str
) -> None:
    meter = Meter()
    per_rank = SCHEDULES[schedule]
    layers = [Metered(meter, stage % RANKS) for stage in range(RANKS * per_rank)]
    pipe = Pipe(
        nn.Sequential(*layers), CHUNKS, checkpoint, stages=len(layers), schedule=schedule,
        runtime=runtime, loss_fn=lambda y: y.sum(),
    )  # fmt: skip
    x = torch.randn(2 * CHUNKS, 6)
    forecast = pipe.forecast()
    if door == "step":
        with without_gc():
            pipe.step(x)
    else:
        with without_gc():
            pipe(x).sum().backward()
        schedule = "gpipe"  # all forwards come first, whatever the schedule
    most = tuple(meter.most[rank] / per_rank for rank in range(RANKS))
    if door == "step":
        assert most == pytest.approx(forecast.peak)
    elif checkpoint == "never":
        assert most == (CHUNKS,) * RANKS
    assert set(meter.alive.values()) == {0}


def test_forecast_peak_differs_between_schedule_families() -> None:
    """The test above compares different peaks: that of 1f1b decreases from rank to rank."""
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2 * RANKS)))

    def peak(schedule: str, checkpoint: str, per_rank: int = 1) -> tuple[float, ...]:
        stages = RANKS * per_rank
        pipe = Pipe(layers, CHUNKS, checkpoint, stages=stages, schedule=schedule)
        return pipe.forecast().peak

    assert peak("gpipe", "never") == (5, 5, 5)
    assert peak("1f1b", "never") == (3, 2, 1)
    assert peak("eager-1f1b", "never") == (5, 3, 1)
    assert peak("1f1b", "always") == (1, 1, 1)
    assert peak("interleaved", "always", 2) == (0.5, 0.5, 0.5)


# ---- saved tensor hooks around the call ---------------------------------------------------


@each_runtime
@each_door
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_saved_tensors_hooks_reach_the_worker_threads(
    door: str, checkpoint: str, runtime: str
) -> None:
    """They see what the model itself would save, in the thread that computes it."""
    seen: list[tuple[str, torch.Size]] = []
    unpacked: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append((threading.current_thread().name, tensor.shape))
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor.shape)
        return tensor

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).sum()

    model = plain()
    x, target = batch(4)
    with saved_tensors_hooks(pack, unpack):
        for piece in x.chunk(2):
            model(piece).sum().backward()
    expected = Counter(shape for _, shape in seen)
    seen.clear()
    unpacked.clear()
    pipe = Pipe(plain(), 2, checkpoint, stages=4, runtime=runtime, loss_fn=loss_fn)
    if door == "step":
        with saved_tensors_hooks(pack, unpack):
            pipe.step(x, target=target)
    else:
        with saved_tensors_hooks(pack, unpack):
            output = pipe(x)
        output.sum().backward()
    assert Counter(shape for _, shape in seen) == expected
    assert Counter(unpacked) == expected
    names = {"MainThread"} if runtime == "inline" else {"penstock-0", "penstock-2", "penstock-3"}
    assert {name for name, _ in seen} >= names


# ---- nothing stays alive ------------------------------------------------------------------


@each_runtime
@each_checkpoint
@each_door
def test_step_frees_all_activations(door: str, checkpoint: str, runtime: str) -> None:
    layers = [nn.Linear(6, 6).double() for _ in range(4)]
    doubled = [Doubled() for _ in range(4)]
    model = nn.Sequential(
        layers[0], doubled[0], Stash(), doubled[1], layers[1], doubled[2], Pop(), *layers[2:],
        doubled[3],
    )  # fmt: skip
    pipe = Pipe(model, 3, checkpoint, stages=[2, 2, 2, 2, 2], runtime=runtime, loss_fn=squares)
    with without_gc():
        x = torch.randn(7, 6, dtype=torch.float64)
        given = weakref.ref(x)
        result = pipe.step(x, outputs=True) if door == "step" else squares(pipe(x))
        if isinstance(result, Tensor):
            result.backward()
        del x, result
        assert given() is None
        assert all(len(layer.made) >= 3 for layer in doubled)
        assert [layer.alive for layer in doubled] == [0] * 4


def squares(output: Tensor) -> Tensor:
    return (output**2).mean()


@each_checkpoint
@pytest.mark.parametrize(("schedule", "most"), [("1f1b", 2), ("gpipe", 12)])
def test_stage_inputs_are_freed_after_their_last_use(
    schedule: str, most: int, checkpoint: str
) -> None:
    """A stage holds the input of a micro-batch no longer than the micro-batch is alive."""
    alive: list[int] = []
    doubled = Doubled()
    doubled.register_forward_hook(lambda *given: alive.append(doubled.alive))
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), doubled), nn.Linear(6, 6)).double()
    pipe = Pipe(
        model, 12, checkpoint, stages=2, schedule=schedule, runtime="inline", loss_fn=squares
    )
    with without_gc():
        pipe.step(torch.randn(12, 6, dtype=torch.float64))
    again = 0 if checkpoint == "never" else 1  # a recomputation creates one more
    assert max(alive) in (most, most + again)
    assert doubled.alive == 0


@each_runtime
def test_forward_without_backward_frees_all_activations(runtime: str) -> None:
    doubled = Doubled()
    model = nn.Sequential(nn.Linear(6, 6), doubled, nn.Linear(6, 6)).double()
    pipe = Pipe(model, 3, "never", stages=3, runtime=runtime)
    x, _ = batch(6)
    with without_gc():
        output = pipe(x)
        assert doubled.alive == 3
        del output
        assert doubled.alive == 0
        with torch.no_grad():
            output = pipe(x)
        assert doubled.alive == 0
        assert output.shape == (6, 6)


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(found), Tensor) for found in gc.get_objects())


@each_runtime
def test_hundred_steps_leak_nothing(runtime: str) -> None:
    doubled = Doubled()
    model = nn.Sequential(*network(), doubled)
    pipe = Pipe(model, 2, stages=[5, 6], runtime=runtime, loss_fn=nn.functional.mse_loss)
    x, target = batch(4)

    def counts() -> tuple[int, int, int, int]:
        caches = (len(cache) for cache in vars(pipe).values() if isinstance(cache, dict))
        return live_tensors(), doubled.alive, threading.active_count(), sum(caches)

    for door in ("step", "call"):
        trained(pipe, x, target, door)
    before = counts()
    for _ in range(50):
        trained(pipe, x, target, "step")
        trained(pipe, x, target, "call")
    assert counts() == before


# ---- worker threads -----------------------------------------------------------------------


def test_worker_threads_start_with_the_first_call_and_end_with_the_pipe() -> None:
    gc.collect()
    before = crews()
    pipe = Pipe(plain(), 2, stages=4)
    assert crews() == before
    x, _ = batch(4)
    pipe(x)
    started = set(crews())
    assert started >= {f"penstock-{rank}" for rank in range(4)}
    pipe(x)
    assert len(crews()) == len(before) + 4
    with without_gc():
        del pipe
        assert crews() == before

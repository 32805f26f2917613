"""Layers that take values from other rows with a small probability, as swap noise and mixup do."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from penstock import AuditError
from penstock.runtime.audit.rows import RowsCheck
from penstock.stage.cell_graph import CellGraph
from tests.runtime.audit.test_rows import WIDTH, Layer, expect_equal, layers, made, run

Function = Callable[[Tensor], Tensor]


pytestmark = pytest.mark.usefixtures("double")


@pytest.fixture(autouse=True)
def seed_host_generators() -> None:
    random.seed(0)
    numpy.random.seed(0)


def mix_up(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x.flip(0)


def mix_up_some(x: Tensor) -> Tensor:
    return torch.where(torch.rand(len(x), 1) < 0.3, mix_up(x), x)


MIXING: dict[str, Function] = {
    "swapped numbers": lambda x: torch.where(
        torch.rand_like(x) < 0.15, x[torch.randperm(len(x))], x
    ),
    "rows": mix_up_some,
    "shuffled rows": lambda x: x + x[torch.rand(len(x)).argsort()],
    "rows in a random order": lambda x: x + x[torch.randn(len(x)).sort().indices],
    "all rows": lambda x: mix_up(x) if torch.rand(()) < 0.3 else x,
    "large numbers": lambda x: torch.where(torch.rand(len(x), 1) > 0.85, mix_up(x), x),
    "uniform_": lambda x: mix_up(x) if torch.empty(()).uniform_(-1, 1) < -0.8 else x,
}
BY_ROW: dict[str, Function] = {
    "noise": lambda x: x + 0.1 * torch.rand_like(x),
    "skipped rows": lambda x: torch.where(torch.rand(len(x), 1) < 0.1, torch.zeros_like(x), x),
    "half of the rows": lambda x: torch.where(torch.rand(len(x), 1) < 0.5, -x, x),
    "tenth of the rows": lambda x: torch.where(torch.rand(len(x), 1) > 0.99, -x, x),
    "rows below one number": lambda x: torch.where(torch.rand(len(x), 1) < torch.rand(1), -x, x),
    "numbers in a random order": lambda x: x[:, torch.rand(x.shape[1]).argsort()],
    "skipped layer": lambda x: x * 0.5 if torch.rand(()) < 0.1 else x,
    "gumbel": lambda x: x - (-torch.rand_like(x).clamp(1e-9, 1 - 1e-9).log()).log(),
    "dropout": nn.Dropout(0.2),
}


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("function", MIXING.values(), ids=list(MIXING))
def test_rows_that_are_mixed_with_a_small_probability_are_found(
    function: Function, door: str
) -> None:
    torch.manual_seed(0)
    pipe = made(layers(Layer(function)))
    with pytest.raises(AuditError, match="parts of the batch"):
        run(pipe, door)


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("function", BY_ROW.values(), ids=list(BY_ROW))
def test_draws_for_each_row_by_itself_are_left_alone(
    function: Function, door: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    pipe = made(layers(Layer(function)))
    with caplog.at_level(logging.WARNING, "penstock"):
        for seed in range(2):
            run(pipe, door, seed)
    assert not caplog.records


def centre(x: Tensor) -> Tensor:
    return x - x.mean(0)


def drop_some(x: Tensor, change: Function) -> Tensor:
    """Draw numbers for each row before the one that decides."""
    dropped = nn.functional.dropout(x, 0.2)
    return change(dropped) if 0.1 < torch.rand(1) < 0.15 else dropped


# A layer that changes its input now and then.
DECISIONS: dict[str, Callable[[Tensor, Function], Tensor]] = {
    "range": lambda x, change: change(x) if 0.1 < torch.rand(()) < 0.15 else x,
    "normal": lambda x, change: change(x) if torch.randn(()).abs() > 2 else x,
    "after dropout": drop_some,
    "random": lambda x, change: change(x) if random.random() < 0.05 else x,
    "choice": lambda x, change: change(x) if random.choice(range(16)) == 2 else x,
    "numpy": lambda x, change: change(x) if numpy.random.rand() < 0.05 else x,
}
STEPS = 16


def measure_losses(function: Function) -> list[float]:
    torch.manual_seed(0)
    pipe = made(layers(Layer(function)), audit="off")
    return [run(pipe, "step", seed).item() for seed in range(STEPS)]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("decide", DECISIONS.values(), ids=list(DECISIONS))
def test_rows_that_a_random_number_mixes_are_found_in_the_step_that_mixes_them(
    decide: Callable[[Tensor, Function], Tensor], door: str, checkpoint: str
) -> None:
    plain = measure_losses(lambda x: decide(x, torch.clone))
    mixed = measure_losses(lambda x: decide(x, centre))
    first = next(step for step in range(STEPS) if plain[step] != mixed[step])
    torch.manual_seed(0)
    pipe = made(layers(Layer(lambda x: decide(x, centre))), checkpoint=checkpoint)
    for seed in range(first):
        run(pipe, door, seed)
    with pytest.raises(AuditError, match="random numbers"):
        run(pipe, door, first)


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("decide", DECISIONS.values(), ids=list(DECISIONS))
def test_layers_that_a_random_number_changes_are_compared_seldom(
    decide: Callable[[Tensor, Function], Tensor],
    door: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = list[int]()
    compare = RowsCheck.compare_drawn

    def count(check: RowsCheck, microbatch: int) -> str | None:
        compared.append(microbatch)
        return compare(check, microbatch)

    monkeypatch.setattr(RowsCheck, "compare_drawn", count)
    pipe = made(layers(Layer(lambda x: decide(x, torch.sin))))
    with caplog.at_level(logging.WARNING, "penstock"):
        for seed in range(STEPS):
            run(pipe, door, seed)
    assert not caplog.records
    # Graphs have two forms. Branches on a number of a tensor have ways as well.
    has_graphs_only = decide in [DECISIONS[name] for name in ("random", "choice", "numpy")]
    assert 1 <= len(compared) <= (2 if has_graphs_only else 6)


@pytest.mark.parametrize(
    ("function", "first_count", "later_count"),
    [
        (BY_ROW["skipped rows"], 1, 1),
        (BY_ROW["skipped layer"], 4, 0),  # its branches are watched in later steps
        (lambda x: x if random.random() < 0.1 else x.sin(), 4, 4),
    ],
)
def test_graphs_are_described_for_the_micro_batches_that_need_it(
    function: Function, first_count: int, later_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = list[CellGraph]()
    describe = CellGraph.describe

    def count(graph: CellGraph) -> int:
        described.append(graph)
        return describe(graph)

    monkeypatch.setattr(CellGraph, "describe", count)
    pipe = made(layers(Layer(function), nn.Dropout(0.1)))
    run(pipe, "step")
    assert len(described) == 2 * first_count  # two stages
    described.clear()
    run(pipe, "step", 2)
    assert len(described) == 2 * later_count


class Scaled(nn.Module):
    """A layer that draws a number for each row from a generator of its own."""

    def __init__(self, generator: Any, function: Function) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(WIDTH, WIDTH), generator
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        numbers = [0.5 + self.generator.random() for _ in range(len(x))]
        return self.function(self.linear(x)) * torch.tensor(numbers)[:, None]


GENERATORS: list[Callable[[int], Any]] = [random.Random, numpy.random.default_rng]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("build_generator", GENERATORS)
def test_numbers_for_rows_from_a_generator_of_the_model(
    build_generator: Callable[[int], Any], door: str, checkpoint: str
) -> None:
    """The rows of a micro-batch get the numbers that follow those of the one before."""
    torch.manual_seed(0)
    model = layers(Scaled(build_generator(3), torch.sin))
    expect_equal(model, door, steps=5, checkpoint=checkpoint)


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("build_generator", GENERATORS)
def test_rows_that_are_mixed_beside_a_generator_of_the_model_are_found(
    build_generator: Callable[[int], Any], door: str
) -> None:
    torch.manual_seed(0)
    pipe = made(layers(Scaled(build_generator(3), centre)))
    with pytest.raises(AuditError, match="parts of the batch"):
        run(pipe, door)

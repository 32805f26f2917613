"""State outside of the modules: what dry runs and measurements leave as it was."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock import Pipe
from penstock.model.outside_state import preserve_outside_state

WIDTH, ROWS = 4, 8
Function = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x).tanh())


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Layer(function), nn.Linear(WIDTH, 1)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Owner:
    calls = 0
    scale: Any = None


def count_in_list() -> tuple[Function, Callable[[], Any]]:
    counts = [0]

    def function(x: Tensor) -> Tensor:
        counts[0] += 1
        return x * counts[0]

    return function, lambda: counts[0]


def count_in_closure() -> tuple[Function, Callable[[], Any]]:
    count = Fraction(0)

    def function(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * float(count)

    return function, lambda: count


def count_in_class() -> tuple[Function, Callable[[], Any]]:
    Owner.calls = 0

    def function(x: Tensor) -> Tensor:
        Owner.calls += 1
        return x * Owner.calls

    return function, lambda: Owner.calls


def count_in_object() -> tuple[Function, Callable[[], Any]]:
    owner = SimpleNamespace(calls=0)

    def function(x: Tensor) -> Tensor:
        owner.calls += 1
        output: Tensor = x * owner.calls
        return output

    return function, lambda: owner.calls


def count_in_tensor() -> tuple[Function, Callable[[], Any]]:
    count = torch.zeros(())

    def function(x: Tensor) -> Tensor:
        count.add_(1)
        return x * count.clone()

    return function, lambda: count.item()


def count_in_array() -> tuple[Function, Callable[[], Any]]:
    count = numpy.zeros(1)

    def function(x: Tensor) -> Tensor:
        count[0] += 1
        return x * float(count[0])

    return function, lambda: count[0]


def log_calls() -> tuple[Function, Callable[[], Any]]:
    log: list[int] = []

    def function(x: Tensor) -> Tensor:
        log.append(len(x))
        return x * len(log)

    return function, lambda: len(log)


def rotate_deque() -> tuple[Function, Callable[[], Any]]:
    factors = deque([0.5, 1.0, 1.5])

    def function(x: Tensor) -> Tensor:
        factors.rotate(1)
        output: Tensor = x * factors[0]
        return output

    return function, lambda: list(factors)


def draw_from_torch() -> tuple[Function, Callable[[], Any]]:
    generator = torch.Generator().manual_seed(3)

    def function(x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=generator)

    return function, lambda: generator.get_state().tolist()


def draw_from_numpy() -> tuple[Function, Callable[[], Any]]:
    generator = numpy.random.default_rng(3)

    def function(x: Tensor) -> Tensor:
        return x * generator.random()

    return function, lambda: generator.bit_generator.state["state"]


def draw_from_python() -> tuple[Function, Callable[[], Any]]:
    generator = random.Random(3)

    def function(x: Tensor) -> Tensor:
        return x * generator.random()

    return function, generator.getstate


KINDS = [
    count_in_list,
    count_in_closure,
    count_in_class,
    count_in_object,
    count_in_tensor,
    count_in_array,
    log_calls,
    rotate_deque,
    draw_from_torch,
    draw_from_numpy,
    draw_from_python,
]


@pytest.mark.parametrize("kind", KINDS)
def test_pipe_finds_the_state_that_the_unsplit_model_finds(kind: Any) -> None:
    function, read_state = kind()
    before, model = read_state(), Model(function)
    x = torch.randn(ROWS, WIDTH)
    options: dict[str, Any] = {"stages": 2, "devices": ["cpu"] * 2, "schedule": "1f1b"}
    pipe = Pipe(model, 1, "never", example=x, loss_fn=functional.mse_loss, **options)
    assert read_state() == before
    penstock.split(model, stages=2, example=x)
    assert read_state() == before
    Pipe(nn.Sequential(*model.layers), 1, example=x, **options)
    assert read_state() == before
    target = torch.zeros(ROWS, 1)
    loss = pipe.step(x, target=target).loss
    unsplit = Model(kind()[0])
    unsplit.load_state_dict(model.state_dict())
    torch.testing.assert_close(loss, functional.mse_loss(unsplit(x), target).detach())


def test_plan_leaves_a_counter_as_it_was() -> None:
    function, read_state = count_in_list()
    penstock.plan(
        Model(function), example=torch.randn(ROWS, WIDTH), devices=["cpu"] * 2, solver_seconds=0
    )
    assert read_state() == 0


def test_check_leaves_a_counter_as_it_was() -> None:
    count = 0

    def function(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x

    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer(function), nn.Tanh(), nn.Linear(WIDTH, 1))
    report = penstock.check(layers, torch.randn(ROWS, WIDTH), quick=True, quiet=True)
    assert report.ok
    assert count == 0


def test_trace_of_another_size_leaves_a_counter_as_it_was() -> None:
    function, read_state = count_in_list()
    pipe = Pipe(
        Model(function),
        1,
        "never",
        stages=2,
        devices=["cpu"] * 2,
        example=torch.randn(ROWS, WIDTH),
        audit="off",
    )
    for count, rows in enumerate((ROWS, 4, 6, 5), 1):
        pipe(torch.randn(rows, WIDTH))
        assert read_state() == count


def test_caches_stay_filled() -> None:
    """The trace has found them filled, and so must the first step."""
    masks: dict[int, Tensor] = {}
    entries: list[Tensor] = []
    Owner.scale = None

    def function(x: Tensor) -> Tensor:
        if len(x) not in masks:
            masks[len(x)] = torch.ones(len(x), 1)
        if not entries:
            entries.append(torch.ones(()))
        if Owner.scale is None:
            Owner.scale = 0.5
        output: Tensor = x * masks[len(x)] * entries[0] * Owner.scale
        return output

    with preserve_outside_state(Layer(function)):
        function(torch.ones(3, 1))
    assert list(masks) == [3]
    assert len(entries) == 1
    assert Owner.scale == 0.5


def test_tensors_without_numbers_do_not_stay() -> None:
    masks: dict[str, Any] = {"old": None}
    entries: list[Tensor] = []
    Owner.scale = None

    def function(x: Tensor) -> Tensor:
        masks["old"] = masks["new"] = Owner.scale = x
        entries.append(x)
        return x

    fake = torch._subclasses.fake_tensor.FakeTensorMode()
    with preserve_outside_state(Layer(function)), fake:
        function(torch.ones(3))
    assert masks == {"old": None}
    assert entries == []
    assert Owner.scale is None


def fill_behind_flag() -> tuple[Function, Callable[[], Any]]:
    cache: list[float] = []
    is_filled = False

    def function(x: Tensor) -> Tensor:
        nonlocal is_filled
        if not is_filled:
            cache.append(3.0)
            is_filled = True
        return x * cache[0]

    return function, lambda: (cache, is_filled)


def fill_behind_none() -> tuple[Function, Callable[[], Any]]:
    cache: list[float] = []
    size: int | None = None

    def function(x: Tensor) -> Tensor:
        nonlocal size
        if size is None:
            size = 2
            cache.extend([3.0, 2.0])
        return x * cache[size - 1]

    return function, lambda: (cache, size)


def fill_behind_entry() -> tuple[Function, Callable[[], Any]]:
    cache: set[float] = set()
    table: dict[str, Any] = {"ready": False}

    def function(x: Tensor) -> Tensor:
        if not table["ready"] and "size" not in table:
            table["ready"] = table["size"] = True
            cache.add(3.0)
        return x * next(iter(cache))

    return function, lambda: (cache, table)


def fill_known_list() -> tuple[Function, Callable[[], Any]]:
    cache: deque[float] = deque()
    table: dict[str, Any] = {}

    def function(x: Tensor) -> Tensor:
        if "cache" not in table:
            table["cache"] = cache
            cache.append(3.0)
        output: Tensor = x * table["cache"][0]
        return output

    return function, lambda: (cache, table)


@pytest.mark.parametrize("form", ["sequential", "traced"])
@pytest.mark.parametrize(
    "fill", [fill_behind_flag, fill_behind_none, fill_behind_entry, fill_known_list]
)
def test_lists_that_are_filled_once_are_filled_in_the_first_step(
    fill: Callable[[], tuple[Function, Callable[[], Any]]], form: str
) -> None:
    """They were empty again, while the flag said that they were filled."""
    function, read = fill()
    before = copy.deepcopy(read())
    torch.manual_seed(0)
    traced = Model(function)
    is_traced = form == "traced"
    options: dict[str, Any] = {"units": [Layer]} if is_traced else {}
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)
    model = traced if is_traced else nn.Sequential(*traced.layers)
    pipe = Pipe(model, 2, stages=2, devices=["cpu"] * 2, example=x, **options)
    assert read() == before
    pipe.step(x, target=y, loss_fn=nn.MSELoss())
    assert read() != before


def test_a_log_is_emptied_beside_a_cache() -> None:
    function, read = fill_behind_flag()
    log: list[str] = []

    def add_to_log(x: Tensor) -> Tensor:
        log.append("called")
        return function(x)

    before = copy.deepcopy(read())
    with preserve_outside_state(Layer(add_to_log)):
        add_to_log(torch.ones(3))
    assert log == []
    assert read() == before

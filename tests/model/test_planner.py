"""`penstock.plan`, pipes that are made from plans, and plans that do not apply."""

from __future__ import annotations

import json
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock import (
    ArgumentError,
    InvalidScheduleError,
    PenstockTypeError,
    Pipe,
    Plan,
    RunError,
)
from penstock.model import planner
from penstock.model.model_profile import resolve_optimizer
from tests.properties.memory_caps import Stack
from tests.support import batch, closely, differences, plain, trained, whole

QUICK: dict[str, Any] = {"solver_seconds": 0, "chunks": [2, 4], "schedules": ["1f1b", "zb-h1"]}
X, Y = torch.randn(32, 16), torch.randn(32, 16)


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack(16, 4, {3: 0}, 0.0)


def quick_plan(model: nn.Module, x: Tensor, **options: Any) -> Plan:
    return penstock.plan(model, x, **{"devices": 2, **QUICK, **options})


@pytest.mark.parametrize("kind", ["sequential", "traced"])
def test_pipe_of_a_plan_equals_the_model(kind: str) -> None:
    model = plain() if kind == "sequential" else stack().double()
    x, y = batch(16) if kind == "sequential" else (X.double(), Y.double())
    expected = whole(model, x, y, mse_loss)
    model.zero_grad()
    pipe = Pipe(model, plan=quick_plan(model, x), loss_fn=mse_loss)
    assert differences(trained(pipe, x, y, "step"), expected, closely) == []
    assert len(pipe._placed_partition.devices) == 2


def test_plan_is_what_the_pipe_runs(tmp_path: Path) -> None:
    """It also is after it was saved and loaded; a traced model then needs an example."""
    model = stack()
    plan = quick_plan(model, X)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    with pytest.raises(ArgumentError, match="Pass one as example="):
        Pipe(model, plan=loaded)
    for pipe in (Pipe(model, plan=plan), Pipe(model, plan=loaded, example=X, devices=["cpu"] * 2)):
        assert pipe.forecast().program.schedule == plan.full_schedule
        assert pipe._placed_partition.partition.counts == plan.cut
        assert (pipe.chunks, pipe.runtime) == (plan.chunks, plan.runtime)


def test_plan_measures_and_leaves_no_trace() -> None:
    model = stack()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    seen: list[float] = []
    plan = quick_plan(model, X, progress=lambda what, fraction: seen.append(fraction))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert seen == sorted(seen)
    assert plan.profile.unit_names == ("blocks.0", "blocks.1", "blocks.2", "blocks.3", "head")
    skips = [value for value in plan.profile.values if value.src == 0]
    assert skips[0].dsts == (1, 2)  # the sum with it is computed after block 2
    assert [unit.parameter_bytes for unit in plan.profile.units[:2]] == [6528, 6528]
    # What the blocks keep grows with the rows, and nothing else.
    assert plan.profile.units[0].activation.fixed == 0
    assert plan.profile.units[0].activation.per_row > 0


@pytest.mark.parametrize("share", [0.7, 0.85])
def test_plan_keeps_to_a_cap_that_the_pipe_measures(share: float) -> None:
    model = stack()
    free = Pipe(model, plan=quick_plan(model, X, memory="1TB", target=Y), loss_fn=mse_loss)
    assert free._memory_forecast is not None
    cap = share * max(free._memory_forecast.total)
    plan = quick_plan(model, X, memory=cap, target=Y, chunks=[2, 4, 8], schedules=None)
    pipe = Pipe(model, plan=plan, loss_fn=mse_loss)
    memory, forecast = pipe.memory(X, target=Y), pipe._memory_forecast
    assert forecast is not None
    assert memory.peak == forecast.peak
    assert max(forecast.total) <= cap


def test_pipe_with_only_an_example_makes_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses as many ranks as PyTorch uses threads on a machine without GPUs."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    pipe = Pipe(stack(), 4, example=X, schedule="1f1b", loss_fn=mse_loss)
    assert (len(pipe._placed_partition.devices), pipe.chunks) == (2, 4)
    assert "plan     1f1b, 2 stages on 2 ranks, 4 micro-batches" in pipe.summary()
    assert "advice" not in pipe.summary()  # it said that nothing was measured
    with pytest.raises(ArgumentError, match="a plan decides what to recompute"):
        Pipe(stack(), 4, "always", example=X)


def test_replan_uses_measured_costs() -> None:
    model = stack()
    pipe = Pipe(model, plan=quick_plan(model, X, chunks=4), loss_fn=mse_loss)
    with pytest.raises(RunError, match="nothing is measured yet"):
        pipe.replan()
    assert "pipe.replan()" in pipe.summary()
    pipe.step(X, target=Y)
    again = pipe.replan(chunks=4, solver_seconds=0)
    assert again.profile.units[0].seconds != pipe._plan.profile.units[0].seconds  # type: ignore[union-attr]
    assert "plan is faster" in pipe.summary() or "would gain" in pipe.summary()
    Pipe(model, plan=again, loss_fn=mse_loss).step(X, target=Y)
    with pytest.raises(RunError, match="made without a plan"):
        Pipe(plain(), 2, stages=2).replan()


# ---- what is refused, before anything moves ------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0}, "devices=0: a plan needs at least one device"),
        ({"devices": "cpu"}, "devices must be a number, or a list of devices, not 'cpu'"),
        ({"devices": []}, "devices is empty"),
        ({"memory": "3 furlongs"}, "is not a number of bytes"),
        ({"memory": "2KB"}, "no plan fits"),
        ({"optimizer": "adamax2"}, "optimizer must be one of sgd"),
        ({"example": None}, "Pass a batch as example="),
    ],
)
def test_plan_refuses_bad_input(options: dict[str, Any], message: str) -> None:
    options = {"example": X, "devices": 2, **QUICK, **options}
    with pytest.raises(ArgumentError, match=message):
        penstock.plan(stack(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 2}, "stages= does not apply with plan="),
        ({"chunks": 3}, "chunks= does not apply with plan="),
        ({"memory": 1e9}, "memory= does not apply with plan="),
        ({"devices": ["cpu"] * 3}, "the plan is for 2 devices, but there are 3"),
    ],
)
def test_options_that_a_plan_decides_are_refused(options: dict[str, Any], message: str) -> None:
    model = stack()
    with pytest.raises(ArgumentError, match=message):
        Pipe(model, plan=quick_plan(model, X), **options)


def test_plan_for_another_model_is_refused() -> None:
    plan = quick_plan(stack(), X)
    with pytest.raises(ArgumentError, match="this plan is for another model"):
        Pipe(plain(), plan=plan)
    with pytest.raises(ArgumentError, match="this plan is for another model"):
        Pipe(Stack(16, 3, {}, 0.0), plan=plan)
    # The batch of the plan is not one of this model.
    with pytest.raises(ArgumentError, match=r"another model .*, or its batch .*RuntimeError"):
        Pipe(Stack(8, 3, {}, 0.0), plan=plan)


def test_pipe_takes_the_path_of_a_plan(tmp_path: Path) -> None:
    plan = quick_plan(plain(), batch(16)[0], chunks=[2], schedules=["1f1b"])
    plan.save(tmp_path / "plan.json")
    for path in (tmp_path / "plan.json", str(tmp_path / "plan.json")):
        assert Pipe(plain(), plan=path).chunks == 2
    with pytest.raises(PenstockTypeError, match=r"plan must be a plan of penstock\.plan"):
        Pipe(plain(), plan=plan.to_json())  # type: ignore[arg-type]


def test_edited_plan_that_deadlocks_is_refused(tmp_path: Path) -> None:
    plan = quick_plan(plain(), batch(16)[0], chunks=[2], schedules=["1f1b"])
    data = plan.to_json()
    data["actions"] = ["0B0 0F0 0F1 0B1", "1F0 1B0 1F1 1B1"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(InvalidScheduleError):
        Plan.load(tmp_path / "plan.json")


def test_optimizer_factors() -> None:
    assert [resolve_optimizer(name) for name in ("sgd", "AdamW", 0.5)] == [0.0, 2.0, 0.5]
    weights = [nn.Parameter(torch.zeros(2))]
    optimizers = [
        torch.optim.SGD(weights, lr=0.1),
        torch.optim.SGD(weights, lr=0.1, momentum=0.9),
        torch.optim.RMSprop(weights, centered=True, momentum=0.9),
        torch.optim.Adam(weights, amsgrad=True),
        torch.optim.AdamW,
        type("MyAdam", (torch.optim.AdamW,), {}),
        torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))]),
    ]
    assert list(map(resolve_optimizer, optimizers)) == [0.0, 1.0, 3.0, 3.0, 2.0, 2.0, 1.0]
    with pytest.raises(ArgumentError, match="not -1"):
        resolve_optimizer(-1)
    with pytest.raises(ArgumentError, match=r"not .*LBFGS"):
        resolve_optimizer(torch.optim.LBFGS(weights))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"memory": "12 parsecs"}, "'12 parsecs' is not a number of bytes"),
        ({"memory": -5}, "a cap is more than 0 bytes"),
        ({"memory": ["1GB"]}, "1 entries for 2 devices"),
        ({"optimizer": "adamwww"}, "not 'adamwww'"),
        ({"schedules": ["1f2b"]}, "1f2b"),
        ({"schedules": ["forward-only"]}, "has no backwards"),
    ],
)
def test_mistakes_are_found_before_the_model_runs(
    mistake: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "profile_model", pytest.fail)
    with pytest.raises(ArgumentError, match=message):
        penstock.plan(stack(), X, devices=2, **mistake)


def test_last_layer_is_measured_with_the_loss() -> None:
    def slow_loss(output: Tensor, target: Tensor) -> Tensor:
        assert len(output) == len(target)  # of one micro-batch
        sleep(0.02)
        return (output - target).square().mean()

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    batch = torch.randn(8, 4)
    found = penstock.plan(
        model, batch, target=batch, loss_fn=slow_loss, devices=["cpu"] * 2, chunks=4
    )
    first, last = (unit.seconds[found.profile.devices[0].kind].F for unit in found.profile.units)
    assert first.at(2) < 0.01 < last.at(2)

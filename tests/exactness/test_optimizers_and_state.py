"""Tests that optimizers, averages, state dicts and dropout behave as on the unsplit model."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from penstock import Pipe
from tests.support import (
    CHECKPOINTS,
    CUTS,
    Outcome,
    batch,
    bitwise,
    closely,
    differences,
    each_door,
    network,
    plain,
    trained,
    whole,
)

CHUNKS = 3


def piped(model: nn.Sequential, **options: Any) -> Pipe:
    given = {"chunks": CHUNKS, "stages": 4, "loss_fn": functional.mse_loss, **options}
    return Pipe(copy.deepcopy(model), **given)


def expect(pipe: Pipe, model: nn.Sequential, door: str, rows: int = 7) -> None:
    """Train both for one step and assert equal results."""
    x, target = batch(rows)
    expected = whole(model, x, target, functional.mse_loss)
    assert differences(trained(pipe, x, target, door), expected, closely) == []


def tied() -> nn.Sequential:
    model = plain()
    model.append(nn.Linear(3, 8).double())
    model.append(nn.Linear(8, 8).double())
    model[5].weight = model[2].weight
    model.append(nn.Linear(8, 3).double())
    return model


# ---- optimizers and averages ---------------------------------------------------------------

EMA = get_ema_multi_avg_fn(0.9)


@each_door
@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("make", [network, tied], ids=["network", "tied"])
def test_averaged_model_of_a_pipe(
    make: Callable[[], nn.Sequential], use_buffers: bool, door: str
) -> None:
    model = make()
    for layer in model:
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    pipe = piped(model, chunks=1)  # BatchNorm, if any, sees the whole batch
    averages = [AveragedModel(m, multi_avg_fn=EMA, use_buffers=use_buffers) for m in (model, pipe)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, pipe)]
    for _ in range(3):
        expect(pipe, model, door)
        for module, average, optimizer in zip((model, pipe), averages, optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(module)
    states = [average.state_dict() for average in averages]
    assert list(states[0]) == list(states[1])
    assert all(map(closely, states[1].values(), states[0].values()))
    x, target = batch(5)
    for average in averages:
        average.eval()
    assert closely(averages[1](x), averages[0](x))
    averaged = averages[1].module
    assert isinstance(averaged, Pipe)
    wanted = functional.mse_loss(averages[0](x), target)
    assert closely(averaged.step(x, target=target).loss, wanted)


@pytest.mark.parametrize("make", [plain, tied], ids=["plain", "tied"])
def test_optimizer_parameter_groups_by_name(make: Callable[[], nn.Sequential]) -> None:
    def groups(module: nn.Module) -> list[dict[str, Any]]:
        named = list(module.named_parameters())
        decayed = [(n, p) for n, p in named if n.endswith("weight")]
        plainly = [(n, p) for n, p in named if not n.endswith("weight")]
        return [{"params": decayed, "weight_decay": 0.1}, {"params": plainly, "lr": 0.5}]

    model = make()
    pipe = piped(model, schedule="1f1b")
    optimizers = [torch.optim.AdamW(groups(m), lr=0.05) for m in (model, pipe)]
    named = [[group["param_names"] for group in o.param_groups] for o in optimizers]
    assert named[0] == named[1]
    for _ in range(3):
        expect(pipe, model, "step")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    states = [optimizer.state_dict() for optimizer in optimizers]
    for key, state in states[0]["state"].items():
        assert all(closely(value, states[1]["state"][key][name]) for name, value in state.items())


@pytest.mark.parametrize("make", [network, tied], ids=["network", "tied"])
def test_state_dicts_move_between_model_and_pipe(make: Callable[[], nn.Sequential]) -> None:
    """The states of model and optimizer go from model to pipe and back."""
    x, target = batch(8)
    model = make().eval()  # without dropout and BatchNorm updates
    modules: list[Any] = [model, piped(make()).eval(), make().eval(), piped(make(), stages=2)]
    modules[3].eval()
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in modules]
    always = make().eval()
    of_always = torch.optim.Adam(always.parameters(), lr=0.01)
    saved = io.BytesIO()
    for at, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
        if at:
            saved.seek(0)
            states = torch.load(saved)
            module.load_state_dict(states["model"])
            optimizer.load_state_dict(states["optimizer"])
        for trainee, its in ((module, optimizer), (always, of_always)):
            its.zero_grad()
            functional.mse_loss(trainee(x), target).backward()
            its.step()
        saved = io.BytesIO()
        torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        assert all(map(closely, module.state_dict().values(), always.state_dict().values()))


# ---- randomness ---------------------------------------------------------------------------

PLACED = [("gpipe", 1), ("gpipe", 2), ("gpipe", 4), ("1f1b", 4), ("zb-v", 2), ("fit", 4)]


@each_door
def test_dropout_is_independent_of_schedule_and_placement(door: str) -> None:
    """Outputs are equal to the bit, and gradients up to the order of their sums."""
    model = network()
    x, target = batch(8)
    outcomes: list[Outcome] = []
    for (schedule, ranks), checkpoint in zip(PLACED, 2 * CHECKPOINTS, strict=True):
        devices = ["cpu"] * ranks
        pipe = piped(
            model, stages=CUTS[4], devices=devices, checkpoint=checkpoint, schedule=schedule
        )
        torch.manual_seed(3)
        outcomes.append(trained(pipe, x, target, door))
        outcomes.append(trained(pipe, x, target, door))
    assert not bitwise(outcomes[0].output, outcomes[1].output)
    for at, found in enumerate(outcomes[2:]):
        assert bitwise(found.output, outcomes[at % 2].output)
        assert differences(found, outcomes[at % 2], closely) == []

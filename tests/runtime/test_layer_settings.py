"""Layers that users change between calls: the next call is audited again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import AuditError, Pipe, PipeSequential
from penstock.runtime.audit import Audit
from penstock.runtime.layer_settings import SettingsWatch
from tests.support import same_gradients

ROWS, WIDTH = 8, 4
each_door = pytest.mark.parametrize("door", ["call", "step"])


class Switched(nn.Module):
    """A layer that mixes rows if one of its settings says so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.is_centred, self.mode, self.factor = False, "rows", 0.0
        self.options, self.config = {"is_centred": False}, SimpleNamespace(factor=0)
        self.calls = 0

    def forward(self, x: Tensor, is_centred: bool | float | Tensor = False) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x)
        if self.is_centred or self.mode == "batch" or self.options["is_centred"]:
            y = y - y.mean(0)
        factor: Any = self.factor + self.config.factor + is_centred
        return y.sub(factor * y.mean(0))


class Traced(nn.Module):
    """The same layer in a model that is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Switched(), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, is_centred: bool | float | Tensor = False) -> Tensor:
        output: Tensor = self.last(self.first(x, is_centred))
        return output


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64)


def build(is_traced: bool = False) -> tuple[Pipe, Switched]:
    torch.manual_seed(0)
    given: dict[str, Any] = {"chunks": 3, "stages": 2, "devices": ["cpu"] * 2, "schedule": "1f1b"}
    if is_traced:
        model = Traced()
        pipe = Pipe(
            model, example=rows(), balance="parameters", loss_fn=functional.mse_loss, **given
        )
        return pipe, model.first
    layer = Switched()
    last = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    return Pipe(PipeSequential(layer, last), loss_fn=functional.mse_loss, **given), layer


def train(pipe: Pipe, door: str, *others: Any) -> None:
    if door == "step":
        pipe.step(rows(), *others, target=rows())
    else:
        functional.mse_loss(pipe(rows(), *others), rows()).backward()


def centre(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output - output.mean(0)


class Centre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


CHANGES: dict[str, Callable[[Switched], object]] = {
    "a flag": lambda layer: setattr(layer, "is_centred", True),
    "a name": lambda layer: setattr(layer, "mode", "batch"),
    "a number that was 0": lambda layer: setattr(layer, "factor", 0.5),
    "an entry of a dict": lambda layer: layer.options.update(is_centred=True),
    "an attribute of an object": lambda layer: setattr(layer.config, "factor", 1),
    "a forward hook": lambda layer: layer.linear.register_forward_hook(centre),
    "a forward pre-hook": lambda layer: layer.register_forward_pre_hook(
        lambda module, args: (args[0] - args[0].mean(0),)
    ),
    "a forward of its own": lambda layer: setattr(
        layer, "forward", lambda x, *_: layer.linear(x) - layer.linear(x).mean(0)
    ),
    "an inner layer": lambda layer: setattr(layer, "linear", nn.Sequential(layer.linear, Centre())),
}


@each_door
@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_layer_that_mixes_rows_since_a_change_is_found(
    change: str, is_traced: bool, door: str
) -> None:
    pipe, layer = build(is_traced)
    for _ in range(3):
        train(pipe, door)
    CHANGES[change](layer)
    for _ in range(2):  # also after the error
        with pytest.raises(AuditError):
            train(pipe, door)


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize(
    "hook", [lambda g: g.clamp(-0.01, 0.01), lambda g: g + 1, lambda g: g / g.norm()]
)
def test_hook_of_a_parameter_that_is_registered_later_is_found(hook: Any, is_traced: bool) -> None:
    pipe, layer = build(is_traced)
    train(pipe, "step")
    layer.linear.weight.register_hook(hook)
    with pytest.raises(AuditError, match="is not the sum"):
        train(pipe, "step")


@each_door
@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("values", [(False, True), (0.0, 0.5), (0, 1), "tensors"])
def test_input_that_switches_a_layer_later_is_found(
    values: Any, is_traced: bool, door: str
) -> None:
    before, after = (
        (torch.tensor(0.0).double(), torch.tensor(0.5).double()) if values == "tensors" else values
    )
    pipe, _ = build(is_traced)
    for _ in range(2):
        train(pipe, door, before)
    with pytest.raises(AuditError):
        train(pipe, door, after)


@each_door
def test_backward_hook_that_is_registered_later_is_found(door: str) -> None:
    pipe, _ = build()
    train(pipe, door)
    pipe[1].register_full_backward_hook(lambda module, inputs, _: (inputs[0] / inputs[0].norm(),))
    with pytest.raises(AuditError):
        train(pipe, door)


def test_changes_that_mix_no_rows_are_equal() -> None:
    pipe, layer = build()
    model = copy.deepcopy(nn.Sequential(layer, pipe[1]))
    for factor in (0, 2, 3):
        for linear in (layer.linear, model.get_submodule("0.linear")):
            linear.register_forward_hook(lambda m, a, y, factor=factor: y + factor)
        x, y = rows(), rows()
        pipe.step(x, target=y)
        functional.mse_loss(model(x), y).backward()
        assert same_gradients(pipe, model)


# ---- how often ------------------------------------------------------------------------------


@pytest.fixture
def audits(monkeypatch: pytest.MonkeyPatch) -> list[Audit]:
    """The audits whose references ran."""
    seen: list[Audit] = []
    run = Audit.run_reference

    def note(self: Audit, loss: Any) -> None:
        seen.append(self)
        run(self, loss)

    monkeypatch.setattr(Audit, "run_reference", note)
    return seen


def test_counter_of_the_layer_itself_is_no_change(audits: list[Audit]) -> None:
    pipe, layer = build()
    for _ in range(5):
        train(pipe, "step")
    assert layer.calls == 15
    assert len(audits) == 1


def test_number_that_changes_in_each_step_is_audited_at_each_doubling(audits: list[Audit]) -> None:
    pipe, layer = build()
    for step in range(20):
        layer.temperature = 1.0 + step  # type: ignore[assignment]
        train(pipe, "step")
    # The first step, and changes 1, 2, 4, 8 and 16.
    assert len(audits) == 6


def test_settings_that_were_audited_are_not_audited_again(audits: list[Audit]) -> None:
    pipe, layer = build()
    for step in range(8):
        layer.mode = "abc"[step % 2]
        hook = layer.register_forward_hook(lambda m, a, y: None) if step % 2 else None
        train(pipe, "step")
        if hook is not None:
            hook.remove()
    assert len(audits) == 2


def test_training_and_evaluation_in_turn_are_audited_once_each(audits: list[Audit]) -> None:
    pipe, _ = build()
    for _ in range(4):
        pipe.train()
        train(pipe, "step")
        pipe.eval()
        with torch.no_grad():
            pipe(rows())
    assert len(audits) == 2


def test_name_that_is_another_one_in_each_step_is_audited_seldom() -> None:
    layer = nn.Linear(2, 2)
    watch = SettingsWatch(lambda: [layer])
    keys = set()
    for step in range(200):
        layer.tag = f"step {step}"  # type: ignore[assignment]
        watch.read()
        keys.add(watch.key)
    assert len(keys) == 16 + 3  # 32, 64 and 128


def test_number_that_becomes_0_is_another_setting() -> None:
    layer = nn.Linear(2, 2)
    layer.factor = 1.0  # type: ignore[assignment]
    watch = SettingsWatch(lambda: [layer])
    watch.read()
    keys, looked_at = {watch.key}, []
    for factor in (2.0, 3.0, 4.0):
        layer.factor = factor  # type: ignore[assignment]
        looked_at.append(watch.read())
        keys.add(watch.key)
    assert (looked_at, len(keys)) == ([True, True, False], 1)  # the third change is not looked at
    layer.factor = 0.0  # type: ignore[assignment]
    watch.read()
    assert watch.key not in keys

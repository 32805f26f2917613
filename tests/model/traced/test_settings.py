"""Tests of Python values that the path of a forward depends on, and that change between steps."""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock import CutError
from penstock.model.traced.settings import SettingsReader
from tests.model.traced.splitting import batches, piped
from tests.models.architecture import squares

LOW, HIGH = -1e9, 1e9
STATE: dict[str, float] = {}  # variables of this module that models read
THRESHOLD = LOW


@dataclass
class Options:
    """A configuration."""

    threshold: Any = LOW


class Asking(nn.Module):
    """A model whose output depends on whether the mean of its input is above a threshold."""

    class_threshold = LOW

    def __init__(self, get: Callable[[Any], Any], held: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.get, self.held = get, held

    def forward(self, x: Tensor) -> Tensor:
        doubled = bool(x.mean() > self.get(self))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * 2 if doubled else x


class AskingGlobals(Asking):
    """Reads the threshold from a global variable."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + (STATE["scale"] if x.mean() > THRESHOLD else 0)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class AskingClass(Asking):
    """Reads the threshold from its class."""

    def forward(self, x: Tensor) -> Tensor:
        self.get = lambda model: model.class_threshold
        return super().forward(x)


class AskingSwitch(Asking):
    """Takes another path if an entry of a dict says so."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x if self.held["skip"] else layer(x)
        return x


class AskingGradients(Asking):
    """Asks which parameters and tensors need gradients."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * (2 if layer.weight.requires_grad else 1)
            x = torch.tanh(x) if x.requires_grad else x
        return x


def _freeze(model: Asking) -> None:
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(not parameter.requires_grad)


def _set_global(_: Any) -> None:
    global THRESHOLD
    THRESHOLD = HIGH


CHANGES: dict[str, tuple[Callable[[], Asking], Callable[[Any], object]]] = {
    "namespace": (
        lambda: Asking(lambda m: m.held.threshold, SimpleNamespace(threshold=LOW)),
        lambda m: setattr(m.held, "threshold", HIGH),
    ),
    "parsed arguments": (
        lambda: Asking(lambda m: m.held.threshold, argparse.Namespace(threshold=LOW)),
        lambda m: setattr(m.held, "threshold", HIGH),
    ),
    "dataclass in a list": (
        lambda: Asking(lambda m: m.held[0].threshold, [Options()]),
        lambda m: setattr(m.held[0], "threshold", HIGH),
    ),
    "dict": (
        lambda: Asking(lambda m: m.held["a"], {"a": LOW}),
        lambda m: m.held.update(a=HIGH),
    ),
    "array": (
        lambda: Asking(lambda m: m.held[0], np.array([LOW])),
        lambda m: m.held.fill(HIGH),
    ),
    "tensor": (
        lambda: Asking(lambda m: m.held, torch.tensor(LOW)),
        lambda m: setattr(m, "held", torch.tensor(HIGH)),
    ),
    "tensor changed in place": (
        lambda: Asking(lambda m: m.held, torch.tensor(LOW)),
        lambda m: m.held.fill_(HIGH),
    ),
    "global": (lambda: AskingGlobals(lambda m: 0), _set_global),
    "global dict": (lambda: AskingGlobals(lambda m: 0), lambda m: STATE.update(scale=2.0)),
    "class": (
        lambda: AskingClass(lambda m: 0),
        lambda m: setattr(AskingClass, "class_threshold", HIGH),
    ),
    "switch in a dict": (
        lambda: AskingSwitch(lambda m: 0, {"skip": True}),
        lambda m: m.held.update(skip=False),
    ),
    "requires_grad": (lambda: AskingGradients(lambda m: 0), _freeze),
}


@pytest.fixture(autouse=True)
def _reset() -> None:
    global THRESHOLD
    THRESHOLD, AskingClass.class_threshold = LOW, LOW
    STATE["scale"] = 1.0


@pytest.mark.parametrize("name", CHANGES)
def test_value_that_decides_the_path_and_changes_later(name: str) -> None:
    make, change = CHANGES[name]
    torch.manual_seed(0)
    model = make().double()
    unsplit = copy.deepcopy(model)
    (x,) = batches(5)
    pipe = piped(model, x, 3)
    for step in range(2):
        if step:
            change(model)
            change(unsplit)
        pipe.zero_grad()
        unsplit.zero_grad()
        loss = pipe.step(x).loss
        expected = squares(unsplit(x))
        expected.backward()
        assert torch.allclose(loss, expected, rtol=1e-10)
        for mine, theirs in zip(pipe.parameters(), unsplit.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is not None and theirs.grad is not None:
                assert torch.allclose(mine.grad, theirs.grad, rtol=1e-10)


class AskingAnInput(Asking):
    """Reads the threshold from an object that it is called with."""

    def forward(self, x: Tensor, options: Any = None) -> Tensor:
        self.held = options
        return super().forward(x)


def test_object_among_the_inputs_that_changes_later() -> None:
    model = AskingAnInput(lambda m: m.held.threshold).double()
    (x,) = batches(5)
    options = SimpleNamespace(threshold=LOW)
    pipe = piped(model, (x, options), 3)
    with torch.no_grad():
        for options.threshold in (LOW, HIGH, LOW):
            assert torch.allclose(pipe(x, options), model(x, options), rtol=1e-10)


@pytest.mark.parametrize("holder", ["unit", "environment"])
def test_value_out_of_reach_is_refused_when_it_has_changed(
    holder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THRESHOLD", "-100")
    get = {
        "unit": lambda m: m.layers[0].threshold,
        "environment": lambda m: float(os.environ["THRESHOLD"]),
    }
    model = Asking(get[holder]).double()
    model.layers[0].threshold = LOW  # type: ignore[assignment]
    (x,) = batches(5)
    pipe = piped(model, x, 3)
    pipe.step(x)
    model.layers[0].threshold = HIGH  # type: ignore[assignment]
    monkeypatch.setenv("THRESHOLD", "100")
    with pytest.raises(CutError, match="gt is called with other values than when the forward"):
        pipe.step(x)


def test_settings_are_equal_until_a_value_changes() -> None:
    module = Asking(lambda m: 0, {"a": [1, 2.0], "b": (None, SimpleNamespace(c="x"))})
    reader = SettingsReader([module])
    first = reader.read()
    assert reader.read() == first
    assert reader.read() is not first
    module.held["b"][1].c = "y"
    second = reader.read()
    assert second != first
    module.held["a"][0] = True  # equal to 1, but not the same
    assert reader.read() not in (first, second)


class BaseConfig:
    """The base of a configuration, as libraries have one."""


class CacheConfig(BaseConfig):
    """A configuration that a stage copies, because it says that a cache is used."""

    use_cache, scale, shift = True, 1.0, 0.0


class Scaled(nn.Module):
    """A model that reads its configuration and two attributes in the glue of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.config, self.seen = CacheConfig(), list[float]()
        self.first, self.second = 2.0, 3.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.config.scale + self.config.shift
        return x * self.first + self.second + sum(self.seen)


def swap_names(model: Scaled) -> None:
    """Exchange the names of two attributes. Their values stay in order in the `__dict__`."""
    names = [name for name in vars(model) if name in ("first", "second")]
    values = [vars(model).pop(name) for name in names]
    vars(model).update(zip(reversed(names), values, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.config, "scale", model.config.scale / 2),
        lambda model: setattr(model, "config", CacheConfig()),
        lambda model: setattr(model, "first", 5.0),
        lambda model: model.seen.append(7.0),
        swap_names,
    ],
    ids=["value in config", "another config", "attribute", "list", "names swapped"],
)
@pytest.mark.parametrize("is_copied", [False, True], ids=["", "copied pipe"])
def test_attributes_that_change_after_the_first_steps_reach_every_stage(
    change: Callable[[Any], object], is_copied: bool
) -> None:
    model = Scaled().double()
    model.config.shift = 0.25
    (x,) = batches(5)
    pipe = piped(model, x, 3)
    for _ in range(2):
        assert torch.equal(pipe(x), model(x))
    if is_copied:
        pipe, model = copy.deepcopy((pipe, model))
    for _ in range(3):
        assert torch.equal(pipe(x), model(x))
        change(model)

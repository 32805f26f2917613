"""Layers that users change between calls: the next call is audited again."""

from __future__ import annotations

import copy
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import AuditError, PenstockError, Pipe, PipeSequential
from penstock.runtime.audit.audited_call import Audit
from penstock.runtime.audit.layer_settings import SettingsWatch
from tests.pairs import each_pair
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


# ---- switches that are not attributes of a layer -------------------------------------------------


class Slots:
    """An object whose attributes are not in a dict."""

    __slots__ = ("is_on",)

    def __init__(self) -> None:
        self.is_on = False


class Options:
    """A class that is used as a namespace."""

    is_on = False


is_on_globally = False
global_options = SimpleNamespace(is_on=False)


class Keyed(nn.Module):
    """A layer that adds another row to each row if one of many switches is on."""

    is_on = False
    on_list: ClassVar[list[bool]] = [False]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        zero = torch.zeros((), dtype=torch.float64)
        self.register_buffer("gate", zero.clone())
        self.register_buffer("large_gate", zero.repeat(64))
        self.frozen = nn.Parameter(zero.clone(), requires_grad=False)
        self.gates = [zero.clone()]
        self.table = {f"option {index}": False for index in range(100)}
        self.flags = [False] * 300
        self.tags: set[Any] = set(range(300))
        self.deep = [[[[False]]]]
        self.array, self.recent, self.slots = numpy.zeros(3), deque([False] * 3), Slots()
        self.extra = self._build_extra()

    def _build_extra(self) -> Callable[[], bool]:
        is_on = False

        def read(new: bool | None = None) -> bool:
            nonlocal is_on
            is_on = is_on if new is None else new
            return is_on

        return read

    @staticmethod
    def mix(x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self.linear(x))
        is_on = (
            self.is_on
            or self.on_list[0]
            or is_on_globally
            or global_options.is_on
            or Options.is_on
            or self.table["option 99"]
            or self.flags[299]
            or "on" in self.tags
            or self.deep[0][0][0][0]
            or bool(self.array[2])
            or self.recent[2]
            or self.slots.is_on
            or self.extra()
            or "PENSTOCK_TEST_SWITCH" in os.environ
        )
        gate: Any = self.gate
        large_gate: Any = self.large_gate
        gate = gate + large_gate[:1] + self.frozen + self.gates[0]
        if is_on:
            x = x + x.flip(0)
        output: Tensor = x + gate * x.flip(0)
        return output


class TracedKeyed(nn.Module):
    """The same layer in a model that is traced."""

    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(x))
        return output


def set_global(value: bool) -> None:
    global is_on_globally
    is_on_globally = value


SWITCHES: dict[str, Callable[[Keyed], object]] = {
    "an attribute of its class": lambda layer: setattr(Keyed, "is_on", True),
    "a list of its class": lambda layer: Keyed.on_list.__setitem__(0, True),
    "a method of its class": lambda layer: setattr(Keyed, "mix", staticmethod(lambda x: x.flip(0))),
    "a global variable": lambda layer: set_global(True),
    "a global object": lambda layer: setattr(global_options, "is_on", True),
    "an attribute of another class": lambda layer: setattr(Options, "is_on", True),
    "a variable of a closure": lambda layer: layer.extra(True),  # type: ignore[call-arg]
    "an environment variable": lambda layer: os.environ.update(PENSTOCK_TEST_SWITCH="1"),
    "a buffer, in place": lambda layer: layer.gate.fill_(1.0),  # type: ignore[operator]
    "another buffer": lambda layer: setattr(layer, "gate", torch.ones((), dtype=torch.float64)),
    "a buffer by its data": lambda layer: layer.gate.data.fill_(1.0),  # type: ignore[operator]
    "a large buffer": lambda layer: layer.large_gate.fill_(1.0),  # type: ignore[operator]
    "a frozen parameter": lambda layer: layer.frozen.data.fill_(1.0),
    "a tensor in a list": lambda layer: layer.gates[0].fill_(1.0),
    "a dict of 100 entries": lambda layer: layer.table.update({"option 99": True}),
    "a list of 300 entries": lambda layer: layer.flags.__setitem__(299, True),
    "a set of 300 entries": lambda layer: layer.tags.add("on"),
    "a list in a list in a list": lambda layer: layer.deep[0][0][0].__setitem__(0, True),
    "an array": lambda layer: layer.array.__setitem__(2, 1.0),
    "a deque": lambda layer: layer.recent.__setitem__(2, True),
    "an object with slots": lambda layer: setattr(layer.slots, "is_on", True),
}


@pytest.fixture
def restored() -> Iterator[None]:
    """Turn the switches that layers share off again."""
    mix = Keyed.__dict__["mix"]
    yield
    Keyed.is_on = Keyed.on_list[0] = False
    setattr(Keyed, "mix", mix)  # noqa: B010
    global_options.is_on = Options.is_on = False
    set_global(False)
    os.environ.pop("PENSTOCK_TEST_SWITCH", None)


@pytest.mark.usefixtures("restored")
@each_pair(switch=SWITCHES, is_traced=[False, True], door=["call", "step"])
def test_switch_that_is_turned_on_later_is_found(switch: str, is_traced: bool, door: str) -> None:
    torch.manual_seed(0)
    layer, last = Keyed(), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    options: dict[str, Any] = {"chunks": 2, "stages": 2, "devices": ["cpu"] * 2}
    options |= {"loss_fn": functional.mse_loss, "schedule": "1f1b"}
    if is_traced:
        model = TracedKeyed(layer, last)
        pipe = Pipe(model, example=rows(), balance="parameters", **options)
    else:
        pipe = Pipe(PipeSequential(layer, last), **options)
    for _ in range(3):
        train(pipe, door)
    SWITCHES[switch](layer)
    for _ in range(2):  # also after the error
        with pytest.raises(PenstockError) as caught:  # a trace may have another path
            train(pipe, door)
        assert is_traced or isinstance(caught.value, AuditError)


class OtherDim(nn.Module):
    """A layer whose softmax is over the rows if a setting outside of the model says so."""

    def forward(self, x: Tensor) -> Tensor:
        is_on = (
            logging.getLogger("a library").isEnabledFor(logging.DEBUG) or torch.is_anomaly_enabled()
        )
        return x * x.softmax(0 if is_on else 1)


def turn_on_logging(is_on: bool) -> None:
    logging.getLogger("a library").setLevel(logging.DEBUG if is_on else logging.ERROR)


def turn_on_anomaly_mode(is_on: bool) -> None:
    torch.autograd.set_detect_anomaly(is_on, check_nan=False)


@pytest.mark.parametrize("turn", [turn_on_logging, turn_on_anomaly_mode])
@each_pair(
    is_traced=[False, True],
    checkpoint=["never", "except_last", "always"],
    schedule=["gpipe", "zb-h1"],
    door=["call", "step"],
)
def test_same_operations_along_another_dim_are_found(
    turn: Callable[[bool], None], is_traced: bool, checkpoint: str, schedule: str, door: str
) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, WIDTH), OtherDim(), nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(*layers).double()
    options: dict[str, Any] = {"chunks": 2, "stages": 2, "devices": ["cpu"] * 2}
    options |= {"loss_fn": functional.mse_loss, "schedule": schedule, "checkpoint": checkpoint}
    if is_traced:
        traced = TracedKeyed(model[:2], model[2])
        pipe = Pipe(traced, example=rows(), balance="parameters", **options)
    else:
        pipe = Pipe(model, **options)
    turn(False)
    for _ in range(3):
        train(pipe, door)
    try:
        turn(True)
        for _ in range(2):  # also after the error
            with pytest.raises(AuditError):
                train(pipe, door)
    finally:
        turn(False)
    train(pipe, door)


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize(
    "hook", [lambda g: g.clamp(-0.01, 0.01), lambda g: g + 1, lambda g: g / g.norm()]
)
def test_hook_of_a_parameter_that_is_registered_later_sees_the_batch(
    hook: Any, is_traced: bool
) -> None:
    pipe, layer = build(is_traced)
    train(pipe, "step")
    torch.manual_seed(1)
    batches = [(rows(), rows()) for _ in range(2)]
    gradients = []
    for x, y in batches:
        pipe.zero_grad()
        pipe.step(x, target=y)
        assert layer.linear.weight.grad is not None
        gradients.append(hook(layer.linear.weight.grad.clone()))
    layer.linear.weight.register_hook(hook)
    for (x, y), expected in zip(batches, gradients, strict=True):
        pipe.zero_grad()
        pipe.step(x, target=y)
        assert layer.linear.weight.grad is not None
        assert torch.allclose(layer.linear.weight.grad, expected, atol=1e-12)


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


class Bound(nn.Module):
    """A layer with a function whose argument is bound."""

    def __init__(self) -> None:
        super().__init__()
        self.function: partial[Tensor] = partial(torch.softmax, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.function(x)
        return output


@each_door
def test_argument_that_is_bound_by_partial_is_a_setting(door: str) -> None:
    linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    layer = Bound()
    model = nn.Sequential(linear, layer)
    pipe = Pipe(model, 2, stages=2, devices=["cpu"] * 2, loss_fn=functional.mse_loss)
    for _ in range(3):
        train(pipe, door)
    layer.function.keywords["dim"] = 0
    with pytest.raises(AuditError, match="depends on how"):
        train(pipe, door)


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


class OwnLinear(nn.Linear):
    """A layer of a user, with the same settings as the ones below."""


class InPlaceLinear(nn.Linear):
    """A layer that changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1.5))


class DroppingLinear(nn.Linear):
    """A layer that draws random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("old", [nn.Linear, OwnLinear])
@pytest.mark.parametrize("new", [InPlaceLinear, DroppingLinear])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_layer_that_gets_another_class_behaves_as_one_made_of_it(
    old: type[nn.Linear], new: type[nn.Linear], checkpoint: str
) -> None:
    """What was observed of a layer (draws, changes of inputs) is not that of its new class.

    A step kept the old observations: it drew from the wrong generator, or was refused.
    """

    def make(kind: type[nn.Linear]) -> Pipe:
        torch.manual_seed(1)
        layers = [nn.Linear(WIDTH, WIDTH), nn.Identity(), kind(WIDTH, WIDTH), nn.Tanh()]
        return Pipe(
            nn.Sequential(*layers).double(),
            chunks=2,
            checkpoint=checkpoint,
            stages=2,
            devices=["cpu"] * 2,
            loss_fn=functional.mse_loss,
        )

    x, y = rows(), rows()
    changed, expected = make(old), make(new)
    for pipe in (changed, expected):
        for _ in range(2):
            pipe.step(x, target=y)
    changed[2].__class__ = new
    for seed in range(3):
        losses = []
        for pipe in (changed, expected):
            pipe.zero_grad()
            torch.manual_seed(seed)
            losses.append(pipe.step(x, target=y).loss)
        assert torch.equal(*losses)
        assert same_gradients(changed, expected)


class SetsFlag(nn.Module):
    """A layer that sets a flag in its first forward, and goes by numbers of its rows."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.compute, self.is_ready = compute, False

    def forward(self, x: Tensor) -> Tensor:
        self.is_ready = True
        return self.compute(self.linear(x) + x)


@pytest.mark.parametrize(
    "compute",
    [lambda x: 2 * x if x.mean() > 5 else x, lambda x: x * 0.5 if len(x) > ROWS // 2 else x],
    ids=["mean", "number of rows"],
)
def test_layer_that_sets_a_flag_in_its_first_forward_is_watched(
    compute: Callable[[Tensor], Tensor],
) -> None:
    """What was found out about the first call was not known in later ones, which had the flag."""
    torch.manual_seed(0)
    last = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    options: dict[str, Any] = {"stages": 2, "devices": ["cpu"] * 2, "checkpoint": "never"}
    pipe = Pipe(PipeSequential(SetsFlag(compute), last), 2, loss_fn=functional.mse_loss, **options)
    half = ROWS // 2
    for _ in range(2):
        pipe.step(rows()[:half], target=rows()[:half])
    x = rows()
    x[:half] += 20
    with pytest.raises(AuditError):
        pipe.step(x, target=rows())

"""The profile of a model for the planner: the loss, and devices that share an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from queue import SimpleQueue
from time import sleep
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import cross_entropy, mse_loss

import penstock
from penstock.device.contention import SharedDevice, Slowdowns
from penstock.model import model_profile, profiler
from penstock.model.profiler import UnitMeasurement, measure_unit_layers
from penstock.planning import Profile, search_plan
from tests.properties.memory_caps import Stack

X, Y = torch.randn(8, 16), torch.randn(8, 16)


def profile(model: nn.Module, x: Tensor = X, **options: Any) -> Profile:
    fixed = {"devices": ["cpu"] * 2, "chunks": 4, "schedules": ["1f1b"], "solver_seconds": 0}
    return penstock.plan(model, x, **{**fixed, **options}).profile


# ---- the loss ------------------------------------------------------------------------------------


def slow_loss(output: Tensor, target: Tensor) -> Tensor:
    assert len(output) == len(target)  # of one micro-batch
    sleep(0.02)
    return (output - target).square().mean()


def test_last_unit_of_a_traced_model_is_measured_with_the_loss() -> None:
    found = profile(Stack(16, 3, {}, 0.0), target=Y, loss_fn=slow_loss)
    first, *_, last = (unit.seconds[found.devices[0].kind].F for unit in found.units)
    assert first.at(2) < 0.01 < last.at(2)


class _Swap(nn.Module):
    """Swaps the dims of a value, without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).unflatten(1, (2, 2))
        return out.transpose(1, 2)


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class _SwapAndScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Swap(), _Scale()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_units_of_a_traced_model_are_measured_with_the_strides_of_their_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of T5 were measured with another attention kernel than they run with."""
    strides: SimpleQueue[tuple[int, ...]] = SimpleQueue()  # a set is restored after measurements
    forward = _Scale.forward

    def note_strides(self: _Scale, x: Tensor) -> Tensor:
        strides.put(x.stride())
        return forward(self, x)

    monkeypatch.setattr(_Scale, "forward", note_strides)
    profile(_SwapAndScale())
    assert {strides.get() for _ in range(strides.qsize())} == {(4, 1, 2)}


def words_loss(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target.argmax(1))


@pytest.mark.parametrize("loss_fn", [words_loss, mse_loss])
@pytest.mark.parametrize("kind", ["sequential", "traced"])
def test_activations_of_the_loss_count_for_the_last_unit(
    kind: str, loss_fn: Callable[..., Tensor]
) -> None:
    layers = [nn.Linear(16, 16) for _ in range(2)]
    model = nn.Sequential(*layers) if kind == "sequential" else Stack(16, 2, {}, 0.0)
    kept = profile(model, target=Y, loss_fn=loss_fn).units[-1].activation.at(2)
    without = profile(model, target=Y, loss_fn=lambda output, target: output.sum()).units[-1]
    # The output, or log-probabilities of the same size. The target is there anyway.
    size = 2 * 16 * 4
    assert size <= kept - without.activation.at(2) < 1.5 * size


def test_units_are_measured_without_a_loss_that_cannot_be_measured() -> None:
    """Some losses do not accept the values that the output is replaced by."""

    def fail(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("not a distribution")

    found = profile(Stack(16, 2, {}, 0.0), target=Y, loss_fn=fail)
    assert all(unit.seconds[found.devices[0].kind].F.at(2) > 0 for unit in found.units)


# ---- devices that share an accelerator -----------------------------------------------------------


class Meter:
    """A meter that finds that neighbours make everything take a given number of times longer.

    Args:
        slowdowns: With neighbours that are always busy, and with neighbours that have pauses. None
            if they cannot be measured.
    """

    def __init__(self, slowdowns: tuple[float, float] | None) -> None:
        self.slowdowns = slowdowns
        self.seconds: dict[Hashable, float] = {}
        self.counts: Mapping[Hashable, int] = {}
        self.values: list[object] = []  # kept alive

    def add(self, key: Hashable, prepare: Callable[[], Any], seconds: float, size: float) -> None:
        assert size > 0
        self.seconds[key] = seconds
        for _ in range(2):
            with prepare() as (run, values):
                self.values.append(values)
                for _ in range(3):
                    run()

    def measure(self, counts: Mapping[Hashable, int]) -> dict[Hashable, Slowdowns]:
        self.counts = counts
        if self.slowdowns is None:
            return {}
        return dict.fromkeys(self.seconds, Slowdowns(*self.slowdowns))


@pytest.fixture
def meters(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list whose meters are used, one after the other, for devices that share one."""
    meters: list[Any] = []
    used = iter(meters)
    monkeypatch.setattr(profiler, "ContentionMeter", lambda shared: next(used))
    monkeypatch.setattr(SharedDevice, "find", staticmethod(lambda device, devices: device))
    return meters


def measure_shared(*layers: nn.Module) -> list[UnitMeasurement]:
    shared: Any = "a device"
    x = X.clone().requires_grad_()
    return measure_unit_layers(layers, (x,), None, False, timeout=0.0, shared=shared)


@pytest.mark.parametrize(
    ("slowdowns", "speed", "gain"),
    [((1.25, 1.25), 0.8, 0.0), ((1.0, 1.0), 1.0, 0.0), ((2.2, 2.0), 1 / 2.2, 0.4), (None, 1, 0)],
)
@pytest.mark.parametrize("kind", ["sequential", "traced"])
def test_devices_are_as_fast_as_while_their_neighbours_are_busy(
    kind: str, slowdowns: tuple[float, float] | None, speed: float, gain: float, meters: list[Any]
) -> None:
    meters += [Meter(slowdowns) for _ in range(2)]  # for two sizes of micro-batches
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2)))
    found = profile(model if kind == "sequential" else Stack(16, 2, {}, 0.0)).devices
    assert [device.speed for device in found] == pytest.approx([speed, speed])
    assert [device.idle_gain for device in found] == pytest.approx([gain, gain])


@pytest.mark.parametrize("kind", ["sequential", "traced"])
def test_neighbours_run_the_loss_among_the_other_units(kind: str, meters: list[Any]) -> None:
    """The loss of a traced model was timed beside neighbours that repeated this loss only."""
    meters += [Meter((1.5, 1.25)) for _ in range(2)]  # for two sizes of micro-batches
    layers = [nn.Linear(16, 16) for _ in range(2)]
    model = nn.Sequential(*layers) if kind == "sequential" else Stack(16, 2, {}, 0.0)
    units = profile(model, target=Y, loss_fn=mse_loss).units
    assert [sum(meter.counts.values()) for meter in meters] == [len(units) + 1] * 2


def test_devices_that_share_nothing_have_their_own_speed() -> None:
    found = profile(nn.Sequential(*(nn.Linear(16, 16) for _ in range(2)))).devices
    assert [(device.speed, device.idle_gain) for device in found] == [(1.0, 0.0)] * 2


def test_equal_layers_are_measured_once_beside_their_neighbours(meters: list[Any]) -> None:
    meters.append(Meter((1.5, 1.25)))
    measured = measure_shared(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8))
    assert [unit.slowdowns for unit in measured] == [pytest.approx((1.5, 1.25))] * 3
    assert sorted(meters[0].counts.values()) == [1, 2]


def test_layers_that_take_no_time_are_not_timed_beside_neighbours(
    meters: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were replayed millions of times. If all layers were like this, that never ended."""
    monkeypatch.setattr(profiler._CallProfiler, "measure", lambda *_: (0, (0.0, 0.0, 0.0)))
    monkeypatch.setattr(profiler._CallProfiler, "measure_workspace", lambda *_: 0)
    meters.append(Meter((1.5, 1.25)))
    (unit,) = measure_shared(nn.Identity())
    assert unit.slowdowns is None
    assert not meters[0].seconds


def test_slowdowns_of_the_last_layer_and_its_loss() -> None:
    layer = UnitMeasurement(1.0, 1.0, 1.0, 10, True, True, 4, slowdowns=Slowdowns(1.0, 1.0))
    loss = UnitMeasurement(0.5, 0.5, 0.0, 4, True, False, 4, slowdowns=Slowdowns(2.0, 1.0))
    both = layer.with_loss(loss)
    assert (both.seconds, both.inner_bytes, both.has_loss) == (4.0, 18, True)
    assert both.slowdowns == pytest.approx(((3.0 + 2.0) / 4.0, 1.0))


class GradientRecorder(nn.Module):
    """A layer that notes its weight, and the gradients of weight and output in its backward."""

    # Of the class, as attributes of a layer are put back after measurements.
    weights: ClassVar[list[int]] = []
    had_gradient: ClassVar[list[bool]] = []
    gradients: ClassVar[list[Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        for notes in (self.weights, self.had_gradient, self.gradients):
            notes.clear()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        out: Tensor = self.linear(x)

        def look(gradient: Tensor) -> None:
            self.weights.append(weight.data_ptr())
            self.had_gradient.append(weight.grad is not None)
            self.gradients.append(gradient)

        out.register_hook(look)
        return out


def test_neighbours_have_weights_and_gradients_of_their_own(meters: list[Any]) -> None:
    """With shared weights and without sums of gradients, they read and wrote less memory.

    Plans for an MLP were 12% too fast.
    """
    layer = GradientRecorder()

    class RecordingMeter(Meter):
        def add(self, *args: Any) -> None:
            for notes in (layer.weights, layer.had_gradient):
                notes.clear()
            super().add(*args)

    meters.append(RecordingMeter(None))
    before = layer.linear.weight.data_ptr()
    measure_shared(layer)
    first, second = layer.weights[:4], layer.weights[4:]
    assert len({*first}) == len({*second}) == 1
    assert len({before, *first, *second}) == 3
    assert layer.had_gradient == [True] * 8
    assert layer.linear.weight.data_ptr() == before
    assert layer.linear.weight.grad is None


def test_layers_are_timed_with_random_gradients(meters: list[Any]) -> None:
    """With ones, a GPU draws less power and lowers its clock less: steps were 4% slower."""
    layer = GradientRecorder()
    meters.append(Meter(None))
    measure_shared(layer)
    assert all(gradient.std() > 0.5 for gradient in layer.gradients)
    # Random numbers take time: they are not drawn in each of the runs that are captured.
    assert len({gradient.data_ptr() for gradient in layer.gradients[-3:]}) == 1


class InPlaceLayer(nn.Module):
    """A layer that may change its input in place. It notes the address and the values of inputs."""

    addresses: ClassVar[list[int]] = []
    values: ClassVar[list[float]] = []

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.changes, self.weight = changes, nn.Parameter(torch.ones(16))
        for notes in (self.addresses, self.values):
            notes.clear()

    def forward(self, x: Tensor) -> Tensor:
        self.addresses.append(x.data_ptr())
        self.values.append(x.sum().item())
        return (x.add_(1.0) if self.changes else x) * self.weight


@pytest.mark.parametrize("changes", [False, True])
def test_inputs_are_copied_only_if_a_layer_changes_them(changes: bool, meters: list[Any]) -> None:
    """A step copies nothing between stages that share memory."""
    layer = InPlaceLayer(changes)
    meters.append(Meter(None))
    measure_shared(layer)
    assert len({*layer.values[-3:], *layer.values[-7:-4]}) == 1  # it never sees its own changes
    if not changes:
        first, second = (set(layer.addresses[-7:-4]), set(layer.addresses[-3:]))
        assert len(first) == len(second) == 1
        assert first != second  # each device has inputs of its own


class AccumulationProbe(nn.Module):
    """A layer that sees whether the nodes that accumulate its gradients outlive a backward."""

    survivors = 0  # of the class, as attributes of a layer are put back after measurements

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for parameter in (self.norm.weight, self.linear.weight):
            metadata: dict[str, Any] = get_gradient_edge(parameter).node.metadata  # type: ignore[assignment]
            AccumulationProbe.survivors += "seen" in metadata
            metadata["seen"] = True
        out: Tensor = self.linear(self.norm(x))
        return out


def test_slowdown_is_not_measured_with_accumulation_nodes_of_another_stream(
    meters: list[Any],
) -> None:
    """A node that accumulates gradients runs on the stream on which it was made.

    One that the profiler kept alive let all neighbours wait for the first device, so that four
    virtual GPUs seemed to slow each other down by 1.6% instead of 16%.
    """
    survivors: list[int] = []

    class CountingMeter(Meter):
        def add(self, *args: Any) -> None:
            before = AccumulationProbe.survivors
            super().add(*args)
            survivors.append(AccumulationProbe.survivors - before)

    meters.append(CountingMeter(None))
    measure_shared(AccumulationProbe())
    assert survivors == [0]


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_planned_peak_is_what_a_step_keeps(schedule: str, recompute: bool) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Tanh(), nn.Linear(16, 16)) for _ in range(6)))
    options = {"devices": ["cpu"] * 3, "target": Y, "loss_fn": mse_loss, "optimizer": "sgd"}
    planned = penstock.plan(model, X.detach(), **options, chunks=4, schedules=[schedule])  # type: ignore[arg-type]
    flags = [recompute] * 3
    found = search_plan(
        planned.profile, chunks=[4], schedules=[schedule], cut=[2, 2, 2], recompute=flags
    )
    pipe = penstock.Pipe(model, plan=found, devices=["cpu"] * 3, loss_fn=mse_loss, audit="off")
    memory = pipe.memory(X.detach(), target=Y)
    peaks = map(sum, zip(memory.peak, memory.held, strict=True))
    # The losses of the micro-batches, a few bytes each, are not in the profile.
    assert list(found.forecast.peak) == pytest.approx(list(peaks), abs=100)


def measure_by_size(
    monkeypatch: pytest.MonkeyPatch, slowdowns: Callable[[int], list[tuple[float, float] | None]]
) -> tuple[Profile, list[int]]:
    """Return a profile of two layers, and both sizes of micro-batches.

    Alone, each layer takes a second per row.
    """
    sizes: list[int] = []

    def measure(layers: Any, microbatch: Any, *rest: Any, **options: Any) -> Any:
        sizes.append(len(microbatch[0]))
        unit = UnitMeasurement(float(sizes[-1]), 0.0, 0.0, 0, False, False, 0)
        return [
            unit._replace(slowdowns=None if pair is None else Slowdowns(*pair))
            for pair in slowdowns(sizes[-1])
        ]

    monkeypatch.setattr(model_profile, "measure_unit_layers", measure)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2)))
    return profile(model), sizes


def test_small_microbatches_count_with_their_own_slowdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """With large weights they slowed each other down more: plans with many were 10% too fast."""
    profiled, (large, small) = measure_by_size(
        monkeypatch, lambda rows: [(2.0, 2.0) if rows == 1 else (1.0, 1.0)] * 2
    )
    assert small == 1
    seconds, device = profiled.units[0].seconds["cpu"], profiled.devices[0]
    assert seconds.F.at(large) / device.speed == pytest.approx(large)
    assert seconds.F.at(small) / device.speed == pytest.approx(2.0 * small)


def test_units_count_with_their_own_slowdowns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that read much memory are slowed down more: stages of ResNet-101 were uneven."""
    profiled, (large, _) = measure_by_size(monkeypatch, lambda rows: [(1.5, 1.5), (1.1, 1.1)])
    device = profiled.devices[0]
    first, second = (unit.seconds["cpu"].F.at(large) / device.speed for unit in profiled.units)
    assert (first, second) == pytest.approx((1.5 * large, 1.1 * large))


def test_units_that_were_not_measured_count_with_the_mean_slowdown_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profiled, (large, _) = measure_by_size(monkeypatch, lambda rows: [(1.5, 1.5), None])
    device = profiled.devices[0]
    first, second = (unit.seconds["cpu"].F.at(large) / device.speed for unit in profiled.units)
    assert (first, second) == pytest.approx((1.5 * large, 1.5 * large))


def test_size_without_a_measured_unit_counts_with_the_slowdown_of_the_other_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without memory for the large size, its units counted as if all neighbours were idle."""
    profiled, (large, small) = measure_by_size(
        monkeypatch, lambda rows: [(2.0, 1.9) if rows == 1 else None] * 2
    )
    assert small == 1
    seconds, device = profiled.units[0].seconds["cpu"], profiled.devices[0]
    for rows in (small, large):
        assert seconds.F.at(rows) / device.speed == pytest.approx(2.0 * rows)

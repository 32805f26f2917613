"""The profile of a model for the planner: the loss, and devices that share an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import cross_entropy, mse_loss

import penstock
from penstock.device.contention import SharedDevice
from penstock.device.device import Device
from penstock.model import model_profile
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
    strides: set[tuple[int, ...]] = set()
    forward = _Scale.forward

    def note_strides(self: _Scale, x: Tensor) -> Tensor:
        strides.add(x.stride())
        return forward(self, x)

    monkeypatch.setattr(_Scale, "forward", note_strides)
    profile(_SwapAndScale())
    assert strides == {(4, 1, 2)}


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


# ---- devices that share an accelerator -----------------------------------------------------------


class Shared:
    """A device whose neighbours make everything take a given number of times longer."""

    def __init__(self, slowdown: float | None) -> None:
        self.slowdown, self.calls = slowdown, 0

    def measure_slowdown(self, work: Callable[[], object]) -> float | None:
        self.calls += 1
        for _ in range(3):
            work()
        return self.slowdown


@pytest.mark.parametrize(("slowdown", "speed"), [(1.25, 0.8), (1.0, 1.0), (None, 1.0)])
@pytest.mark.parametrize("kind", ["sequential", "traced"])
def test_devices_are_as_fast_as_while_their_neighbours_are_busy(
    kind: str, slowdown: float | None, speed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(device: Device, devices: Sequence[Device]) -> Any:
        assert len(devices) == 2
        return Shared(slowdown)

    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2)))
    before = profile(model if kind == "sequential" else Stack(16, 2, {}, 0.0))
    monkeypatch.setattr(SharedDevice, "find", staticmethod(find))
    after = profile(model if kind == "sequential" else Stack(16, 2, {}, 0.0))
    assert [device.speed for device in before.devices] == [1.0, 1.0]
    assert [device.speed for device in after.devices] == pytest.approx([speed, speed])


def test_slowdown_of_equal_layers_is_measured_once() -> None:
    shared: Any = Shared(1.5)
    layers = [nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)]
    options: dict[str, Any] = {"timeout": 0.0, "shared": shared}
    measured = measure_unit_layers(layers, (X.requires_grad_(),), None, False, **options)
    assert [unit.slowdown for unit in measured] == [1.5] * 3
    assert shared.calls == 2


def test_slowdown_of_the_last_layer_and_its_loss() -> None:
    layer = UnitMeasurement(1.0, 1.0, 1.0, 10, True, True, 4, slowdown=1.0)
    loss = UnitMeasurement(0.5, 0.5, 0.0, 4, True, False, 4, slowdown=2.0)
    both = layer.with_loss(loss)
    assert (both.seconds, both.inner_bytes, both.has_loss) == (4.0, 18, True)
    assert both.slowdown == pytest.approx((3.0 + 2.0) / 4.0)


class Accumulating(nn.Module):
    """A layer that sees whether the nodes that accumulate its gradients outlive a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)
        self.survivors = 0

    def forward(self, x: Tensor) -> Tensor:
        for parameter in (self.norm.weight, self.linear.weight):
            metadata: dict[str, Any] = get_gradient_edge(parameter).node.metadata  # type: ignore[assignment]
            self.survivors += "seen" in metadata
            metadata["seen"] = True
        out: Tensor = self.linear(self.norm(x))
        return out


def test_slowdown_is_not_measured_with_accumulation_nodes_of_another_stream() -> None:
    """A node that accumulates gradients runs on the stream on which it was made.

    One that the profiler kept alive let all neighbours wait for the first device, so that four
    virtual GPUs seemed to slow each other down by 1.6% instead of 16%.
    """
    layer = Accumulating()
    survivors: list[int] = []

    class Counting(Shared):
        def measure_slowdown(self, work: Callable[[], object]) -> float | None:
            before = layer.survivors
            super().measure_slowdown(work)
            survivors.append(layer.survivors - before)
            return None

    shared: Any = Counting(None)
    measure_unit_layers([layer], (X.requires_grad_(),), None, False, timeout=0.0, shared=shared)
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


def test_small_microbatches_count_with_their_own_slowdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """With large weights they slowed each other down more: plans with many were 10% too fast."""
    sizes: list[int] = []

    class BySize:
        def measure_slowdown(self, work: Callable[[], object]) -> float | None:
            return 2.0 if sizes[-1] == 1 else 1.0

    def measure(layers: Any, microbatch: Any, *rest: Any, shared: Any, **options: Any) -> Any:
        sizes.append(len(microbatch[0]))
        unit = UnitMeasurement(float(sizes[-1]), 0.0, 0.0, 0, False, False, 0)
        return [unit._replace(slowdown=shared.measure_slowdown(None))] * len(layers)

    monkeypatch.setattr(model_profile, "measure_unit_layers", measure)
    monkeypatch.setattr(SharedDevice, "find", staticmethod(lambda *_: BySize()))
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2)))
    profiled = profile(model)
    large, small = sizes
    assert small == 1
    seconds, device = profiled.units[0].seconds["cpu"], profiled.devices[0]
    assert seconds.F.at(large) / device.speed == pytest.approx(large)
    assert seconds.F.at(small) / device.speed == pytest.approx(2.0 * small)

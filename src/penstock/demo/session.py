"""The devices of the demo, and its uses of a pipe.

The demo trains, generates text, measures steps, and compares gradients with the unsplit model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.demo.model import ByteBatch, move_batch, next_byte_loss
from penstock.device.accelerator import list_accelerators
from penstock.device.device import Device, resolve_device
from penstock.device.nvidia import virtual_devices
from penstock.errors import ArgumentError, MissingExtra
from penstock.model.profiler import measure_layer_times
from penstock.pipe import Pipe
from penstock.runtime.step import StepResult
from penstock.schedules.balance import balance_costs
from penstock.schedules.registry import default_stages_per_rank
from penstock.schedules.timeline import Timeline

# ---- devices --------------------------------------------------------------------------------

VIRTUAL_DEVICE_COUNT = 4  # virtual GPUs that a single GPU is split into


class DemoDevices(NamedTuple):
    """The devices of the demo, one for each rank, and why these were chosen."""

    by_rank: tuple[Device, ...]
    reason: str

    @property
    def first(self) -> torch.device:
        """Return the device of the first rank, which receives the batch."""
        return self.by_rank[0].device


def parse_devices(names: str) -> DemoDevices:
    """Return the devices of a text such as `cpu,cpu` or `cuda:0,cuda:1`.

    >>> parse_devices("cpu,cpu")
    DemoDevices(by_rank=(cpu, cpu), reason='from --devices')
    """
    device_names = [name.strip() for name in names.split(",") if name.strip()]
    try:
        devices = tuple(map(resolve_device, device_names))
    except (RuntimeError, ArgumentError) as error:
        reason = str(error).splitlines()[0]
        raise ArgumentError(
            f"--devices takes names such as cpu,cpu, not '{names}': {reason}"
        ) from None
    if len(devices) < 2:
        raise ArgumentError(
            f"a pipeline needs at least two devices, such as --devices cpu,cpu, not '{names}'"
        )
    return DemoDevices(devices, "from --devices")


def find_devices() -> DemoDevices:
    """Return all GPUs; if there is one, virtual GPUs on it; if there is none, two CPU ranks."""
    gpus = list_accelerators()
    if len(gpus) > 1:
        return DemoDevices(tuple(map(resolve_device, gpus)), "all GPUs")
    reason = "two CPU ranks, because there is no GPU"
    if gpus:
        try:
            devices = tuple(virtual_devices(gpus[0], VIRTUAL_DEVICE_COUNT))
            return DemoDevices(devices, f"one GPU, split into {VIRTUAL_DEVICE_COUNT}")
        except (ArgumentError, MissingExtra, RuntimeError) as error:
            reason = f"two CPU ranks, because the GPU cannot be split: {error}"
    return DemoDevices((resolve_device("cpu"), resolve_device("cpu")), reason)


@contextmanager
def limit_cpu_threads(devices: DemoDevices) -> Iterator[None]:
    """Run each CPU operation in one thread, for the duration of the context.

    The ranks are to run in parallel. Parallel operations inside each rank would compete for the
    same cores.
    """
    before = torch.get_num_threads()
    if devices.first.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class DeviceLayout:
    """Devices, and the measured seconds of each layer, by which all pipes are cut into stages."""

    devices: DemoDevices
    layer_seconds: tuple[float, ...]

    @classmethod
    def measure(cls, devices: DemoDevices, model: nn.Sequential, example: Tensor) -> DeviceLayout:
        """Measure the layers of a model on the first device. `example` is one micro-batch."""
        inputs = (example.to(devices.first),)
        times = measure_layer_times(list(model), inputs, timeout=0.5, device=devices.first)
        return cls(devices, tuple(times))

    def layers_per_stage(self, schedule: str) -> Sequence[int]:
        """Return the number of layers of each stage, balanced by the measured times."""
        return balance_costs(self.layer_seconds, count_stages(schedule, self.devices))

    def build_pipe(self, model: nn.Sequential, schedule: str, chunks: int) -> Pipe:
        """Return a pipe over the devices."""
        return Pipe(
            model,
            chunks=chunks,
            checkpoint="never",
            stages=self.layers_per_stage(schedule),
            devices=self.devices.by_rank,
            schedule=schedule,
            loss_fn=next_byte_loss,
        )


def count_stages(schedule: str, devices: DemoDevices) -> int:
    """Return how many stages the schedule has on these devices."""
    return len(devices.by_rank) * default_stages_per_rank(schedule)


# ---- training, measuring, comparing ---------------------------------------------------------

LEARNING_RATE = 3e-3
WARMUP_STEPS = 10
GRADIENT_TOLERANCE = 1e-10  # largest difference of gradients in float64 that counts as rounding


def train(
    pipe: Pipe, batches: Iterator[ByteBatch], steps: int, devices: DemoDevices
) -> Iterator[StepResult]:
    """Train with AdamW and yield the result of each step. The learning rate rises, then falls."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(
                (step + 1) / WARMUP_STEPS, max(0.05, 1 - step / steps)
            )
        inputs, target = move_batch(devices.first, next(batches))
        optimizer.zero_grad()
        result = pipe.step(inputs, target=target)
        optimizer.step()
        yield result


@torch.no_grad()
def generate_text(pipe: Pipe, prompt: bytes, length: int, context: int, seed: int) -> bytes:
    """Return the prompt and `length` generated bytes, with one forward of the pipe for each."""
    device = next(pipe.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(length):
        output = pipe(torch.tensor([text[-context:]], device=device))
        probabilities = torch.softmax(output[0, -1].float().cpu() / 0.7, dim=0)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text)


class DemoMeasurement(NamedTuple):
    """A measured step, and its forecast from the measured times of its actions."""

    timeline: Timeline
    forecast: Timeline

    def rescale_activations(self, factor: int) -> DemoMeasurement:
        """Return the measurement with memory in units of micro-batches `factor` times smaller."""

        def rescale(timeline: Timeline) -> Timeline:
            activation = tuple(size * factor for size in timeline.cost.activation)
            return replace(timeline, cost=replace(timeline.cost, activation=activation))

        return DemoMeasurement(rescale(self.timeline), rescale(self.forecast))


def measure_steps(
    pipes: Sequence[Pipe], batch: ByteBatch, repeats: int = 5
) -> list[DemoMeasurement]:
    """Return the median of several steps of each pipe.

    The pipes take turns, so a disturbance of the machine affects all of them. The first round warms
    up and does not count.
    """
    inputs, target = batch
    rounds = [
        [pipe.step(inputs, target=target).timeline for pipe in pipes] for _ in range(repeats + 1)
    ]
    for pipe in pipes:
        pipe.zero_grad()
    measurements = []
    for pipe, timelines in zip(pipes, zip(*rounds[1:], strict=True), strict=True):
        median = sorted(timelines, key=lambda timeline: timeline.makespan)[repeats // 2]
        measurements.append(DemoMeasurement(median, pipe.forecast(median.cost)))
    return measurements


class GradientComparison(NamedTuple):
    """The difference between the gradients of the pipe and those of the unsplit model."""

    max_difference: float
    max_gradient: float
    tensor_count: int

    @property
    def is_equal(self) -> bool:
        """Return whether the gradients differ by rounding errors only."""
        return self.max_difference <= GRADIENT_TOLERANCE


def compare_gradients(
    model: nn.Sequential, layout: DeviceLayout, schedule: str, chunks: int, batch: ByteBatch
) -> GradientComparison:
    """Compare one step of the pipe with the unsplit model, both in float64."""
    inputs, target = batch
    unsplit = deepcopy(model).double().to(layout.devices.first)
    next_byte_loss(unsplit(inputs), target).backward()
    pipe = layout.build_pipe(deepcopy(model).double(), schedule, chunks)
    pipe.step(inputs, target=target)
    # Sequential and Pipe list the same parameters in the same order.
    expected, actual = _collect_gradients(unsplit), _collect_gradients(pipe)
    differences = torch.stack([(a - b).abs().max() for a, b in zip(expected, actual, strict=True)])
    magnitudes = torch.stack([gradient.abs().max() for gradient in expected])
    return GradientComparison(float(differences.max()), float(magnitudes.max()), len(differences))


def _collect_gradients(module: nn.Module) -> list[Tensor]:
    """Return the gradient of each parameter, on the CPU, and zeros where it is None.

    So a gradient that is missing in one of the two models counts as a difference.
    """
    return [
        torch.zeros_like(p, device="cpu") if p.grad is None else p.grad.cpu()
        for p in module.parameters()
    ]

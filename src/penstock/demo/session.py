"""What the demo does with a pipe: it trains, writes, is measured, and compared with its model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.demo.model import ByteBatch, move_batch, next_byte_loss
from penstock.device.device import Device, resolve_device
from penstock.device.virtual_gpu import virtual_devices
from penstock.errors import ArgumentError, MissingExtra
from penstock.model.sequential_profiler import measure_layer_times
from penstock.pipe import Pipe
from penstock.runtime.train_step import StepResult
from penstock.schedules.balance import balance_costs
from penstock.schedules.registry import default_stages_per_rank
from penstock.schedules.timeline import Timeline

# -------------------------------------------------------------------------------------------------
# The devices at hand, and how a model is laid out over them.
# -------------------------------------------------------------------------------------------------

VIRTUAL_DEVICE_COUNT = 4  # devices that one GPU is cut into


class DemoDevices(NamedTuple):
    """One for each rank, and why these."""

    by_rank: tuple[Device, ...]
    reason: str

    @property
    def first(self) -> torch.device:
        """Where the batch goes in."""
        return self.by_rank[0].device


def parse_devices(names: str) -> DemoDevices:
    """Those of a text such as `cpu,cpu` or `cuda:0,cuda:1`.

    >>> parse_devices("cpu,cpu")
    DemoDevices(by_rank=(cpu, cpu), reason='as asked')
    """
    asked = [name.strip() for name in names.split(",") if name.strip()]
    try:
        places = tuple(map(resolve_device, asked))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ArgumentError(f"--devices takes names such as cpu,cpu; '{names}': {reason}") from None
    if len(places) < 2:
        raise ArgumentError(
            f"a pipeline has at least two devices: --devices cpu,cpu, not '{names}'"
        )
    return DemoDevices(places, "as asked")


def find_devices() -> DemoDevices:
    """Every GPU; the parts of one, if it is alone; else the CPU, twice."""
    gpus = torch.cuda.device_count()
    if gpus > 1:
        return DemoDevices(tuple(resolve_device(f"cuda:{gpu}") for gpu in range(gpus)), "all GPUs")
    if gpus == 0:
        return DemoDevices(
            (resolve_device("cpu"), resolve_device("cpu")), "two CPU ranks, as there is no GPU"
        )
    try:
        return DemoDevices(
            tuple(virtual_devices("cuda:0", VIRTUAL_DEVICE_COUNT)),
            f"one GPU, cut in {VIRTUAL_DEVICE_COUNT}",
        )
    except (ArgumentError, MissingExtra, RuntimeError) as error:
        why = f"two CPU ranks, as the one GPU cannot be cut: {error}"
        return DemoDevices((resolve_device("cpu"), resolve_device("cpu")), why)


@contextmanager
def limit_cpu_threads(devices: DemoDevices) -> Iterator[None]:
    """On the CPU the ranks are what runs side by side, not the parts of one operation."""
    before = torch.get_num_threads()
    if devices.first.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class DeviceLayout:
    """Devices, and the seconds of each layer on them: every pipe over it is cut by those."""

    devices: DemoDevices
    layer_seconds: tuple[float, ...]

    @classmethod
    def measure(cls, devices: DemoDevices, model: nn.Sequential, example: Tensor) -> DeviceLayout:
        """With a micro-batch as the example."""
        inputs = (example.to(devices.first),)
        times = measure_layer_times(list(model), inputs, timeout=0.5, device=devices.first)
        return cls(devices, tuple(times))

    def layers_per_stage(self, schedule: str) -> Sequence[int]:
        """How many layers each stage has, for the stages that the schedule wants."""
        return balance_costs(self.layer_seconds, count_stages(schedule, self.devices))

    def build_pipe(self, model: nn.Sequential, schedule: str, chunks: int) -> Pipe:
        """The model, cut into stages, over the devices."""
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
    """As many as the schedule wants on these devices."""
    return len(devices.by_rank) * default_stages_per_rank(schedule)


# -------------------------------------------------------------------------------------------------

LEARNING_RATE = 3e-3
WARMUP_STEPS = 10  # steps
GRADIENT_TOLERANCE = 1e-10  # the most that gradients in float64 may differ by


def train(
    pipe: Pipe, batches: Iterator[ByteBatch], steps: int, devices: DemoDevices
) -> Iterator[StepResult]:
    """Train with AdamW for so many steps, with a rate that rises, then falls."""
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
    """What the model writes after the prompt, byte by byte: a forward through the pipe for each."""
    device = next(pipe.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(length):
        output = pipe(torch.tensor([text[-context:]], device=device))
        likely = torch.softmax(output[0, -1].float().cpu() / 0.7, dim=0)
        text.append(int(torch.multinomial(likely, 1, generator=generator)))
    return bytes(text)


class DemoMeasurement(NamedTuple):
    """A step as it was measured, and as it was forecast from what its actions took."""

    timeline: Timeline
    forecast: Timeline

    def rescale_activations(self, factor: int) -> DemoMeasurement:
        """With what is alive counted in micro-batches that are so many times smaller."""

        def rescale(timeline: Timeline) -> Timeline:
            activation = tuple(size * factor for size in timeline.cost.activation)
            return replace(timeline, cost=replace(timeline.cost, activation=activation))

        return DemoMeasurement(rescale(self.timeline), rescale(self.forecast))


def measure_steps(
    pipes: Sequence[Pipe], batch: ByteBatch, repeats: int = 5
) -> list[DemoMeasurement]:
    """The median of some steps of each pipe. They take turns; a first round is not counted."""
    inputs, target = batch
    rounds: list[list[Timeline]] = []
    for _ in range(repeats + 1):
        rounds.append([pipe.step(inputs, target=target).timeline for pipe in pipes])
    for pipe in pipes:
        pipe.zero_grad()
    found = []
    for pipe, timelines in zip(pipes, zip(*rounds[1:], strict=True), strict=True):
        middle = sorted(timelines, key=lambda timeline: timeline.makespan)[repeats // 2]
        found.append(DemoMeasurement(middle, pipe.forecast(middle.cost)))
    return found


class GradientComparison(NamedTuple):
    """How far the gradients of the pipe and those of the unsplit model are apart."""

    max_difference: float
    max_gradient: float
    tensor_count: int

    @property
    def is_equal(self) -> bool:
        """No difference but rounding."""
        return self.max_difference <= GRADIENT_TOLERANCE


def compare_gradients(
    model: nn.Sequential, layout: DeviceLayout, schedule: str, chunks: int, batch: ByteBatch
) -> GradientComparison:
    """One step of the pipe, and a forward and backward of the unsplit model, both in float64."""
    inputs, target = batch
    whole = deepcopy(model).double().to(layout.devices.first)
    next_byte_loss(whole(inputs), target).backward()
    pipe = layout.build_pipe(deepcopy(model).double(), schedule, chunks)
    pipe.step(inputs, target=target)
    expected, found = _collect_gradients(whole), _collect_gradients(pipe)
    apart = [(one - two).abs().max() for one, two in zip(expected, found, strict=True)]
    largest = torch.stack([gradient.abs().max() for gradient in expected])
    return GradientComparison(float(torch.stack(apart).max()), float(largest.max()), len(apart))


def _collect_gradients(module: nn.Module) -> list[Tensor]:
    """One for each parameter, where none is, zeros: they count as a difference, too."""
    return [
        torch.zeros_like(p, device="cpu") if p.grad is None else p.grad.cpu()
        for p in module.parameters()
    ]

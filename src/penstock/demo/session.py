"""What the demo does with a pipe: it trains, writes, is measured, and compared with its model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.demo.devices import DemoDevices, DeviceLayout
from penstock.demo.model import next_byte_loss
from penstock.demo.text import ByteBatch, move_batch
from penstock.pipe import Pipe
from penstock.run.training import StepResult
from penstock.timeline import Timeline

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

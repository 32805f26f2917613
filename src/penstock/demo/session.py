"""What the demo does with a pipe: it trains, writes, is measured, and compared with its model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.demo.devices import Devices, Layout
from penstock.demo.model import next_byte_loss
from penstock.demo.text import Batch, on
from penstock.pipe import Pipe
from penstock.run.training import StepResult
from penstock.timeline import Timeline

RATE = 3e-3
WARM_UP = 10  # steps
SAMENESS = 1e-10  # the most that gradients in float64 may differ by


def train(
    pipe: Pipe, batches: Iterator[Batch], steps: int, devices: Devices
) -> Iterator[StepResult]:
    """Train with AdamW for so many steps, with a rate that rises, then falls."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=RATE, betas=(0.9, 0.95))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / WARM_UP, max(0.05, 1 - step / steps))
        inputs, target = on(devices.first, next(batches))
        optimizer.zero_grad()
        result = pipe.step(inputs, target=target)
        optimizer.step()
        yield result


@torch.no_grad()
def written(pipe: Pipe, prompt: bytes, length: int, context: int, seed: int) -> bytes:
    """What the model writes after the prompt, byte by byte: a forward through the pipe for each."""
    device = next(pipe.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(length):
        output = pipe(torch.tensor([text[-context:]], device=device))
        likely = torch.softmax(output[0, -1].float().cpu() / 0.7, dim=0)
        text.append(int(torch.multinomial(likely, 1, generator=generator)))
    return bytes(text)


class Measured(NamedTuple):
    """A step as it was measured, and as it was forecast from what its actions took."""

    timeline: Timeline
    forecast: Timeline

    def counted_in(self, parts: int) -> Measured:
        """With what is alive counted in micro-batches that are so many times smaller."""

        def smaller(timeline: Timeline) -> Timeline:
            activation = tuple(size * parts for size in timeline.cost.activation)
            return replace(timeline, cost=replace(timeline.cost, activation=activation))

        return Measured(smaller(self.timeline), smaller(self.forecast))


def measure(pipes: Sequence[Pipe], batch: Batch, times: int = 5) -> list[Measured]:
    """The median of some steps of each pipe. They take turns; a first round is not counted."""
    inputs, target = batch
    rounds: list[list[Timeline]] = []
    for _ in range(times + 1):
        rounds.append([pipe.step(inputs, target=target).timeline for pipe in pipes])
    for pipe in pipes:
        pipe.zero_grad()
    found = []
    for pipe, timelines in zip(pipes, zip(*rounds[1:], strict=True), strict=True):
        middle = sorted(timelines, key=lambda timeline: timeline.makespan)[times // 2]
        found.append(Measured(middle, pipe.forecast(middle.cost)))
    return found


class Sameness(NamedTuple):
    """How far the gradients of the pipe and those of the unsplit model are apart."""

    difference: float
    largest: float
    tensors: int

    @property
    def holds(self) -> bool:
        """No difference but rounding."""
        return self.difference <= SAMENESS


def compare_gradients(
    model: nn.Sequential, layout: Layout, schedule: str, chunks: int, batch: Batch
) -> Sameness:
    """One step of the pipe, and a forward and backward of the unsplit model, both in float64."""
    inputs, target = batch
    whole = deepcopy(model).double().to(layout.devices.first)
    next_byte_loss(whole(inputs), target).backward()
    pipe = layout.pipe(deepcopy(model).double(), schedule, chunks)
    pipe.step(inputs, target=target)
    expected, found = _gradients(whole), _gradients(pipe)
    apart = [(one - two).abs().max() for one, two in zip(expected, found, strict=True)]
    largest = torch.stack([gradient.abs().max() for gradient in expected])
    return Sameness(float(torch.stack(apart).max()), float(largest.max()), len(apart))


def _gradients(module: nn.Module) -> list[Tensor]:
    """One for each parameter, where none is, zeros: they count as a difference, too."""
    return [
        torch.zeros_like(p, device="cpu") if p.grad is None else p.grad.cpu()
        for p in module.parameters()
    ]

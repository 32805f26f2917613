"""The other door: forward, loss and backward of a batch in one go, under any schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.batch import gather
from penstock.ir import Program
from penstock.run.call import Call, Measured
from penstock.run.feed import Fed
from penstock.run.passage import Cell, from_outside, pass_changes_on, tensors_of
from penstock.run.phase import Phase
from penstock.stage.parcel import Parcel, put_together
from penstock.timeline import Timeline


@dataclass(frozen=True)
class StepResult:
    """What `Pipe.step` gives back."""

    loss: Tensor
    outputs: Any
    measured: Measured

    @property
    def timeline(self) -> Timeline:
        """When everything ran. On a GPU, reading it waits until the step has ended."""
        return self.measured.timeline

    def __repr__(self) -> str:
        return f"StepResult(loss={self.loss.item():.6g})"


def train(
    call: Call,
    program: Program,
    phase: Phase,
    fed: Fed,
    weights: Sequence[float],
) -> StepResult:
    """Run the phase over micro-batches; the loss is the weighted sum of theirs."""
    last = len(call.tapes) - 1
    given = tensors_of(fed.given)
    call.desk.inputs = from_outside(fed.given)
    call.desk.answer = lambda i, made: _gradients(made, weights[i])
    call.run(phase)
    for cell, parcel in call.desk.inputs.items():
        pass_changes_on(given[cell], parcel.tensors)
    _pass_on(given, call)
    outputs = [call.desk.outputs[last, i] for i in range(fed.chunks)]
    values = [put_together(p.tensors, p.layout) for p in outputs]  # type: ignore[arg-type]
    losses = [value[0] * weight for value, weight in zip(values, weights, strict=True)]
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    asked = [value[1] for value in values if len(value) > 1]
    joined = gather(asked, fed.rows) if asked else None
    return StepResult(total.detach(), joined, call.measured(program))


def _gradients(made: Parcel, weight: float) -> Parcel:
    """The loss is wanted with its weight; the outputs, given out besides, have no gradient."""
    loss, *others = made.tensors
    assert loss is not None
    return Parcel((torch.full_like(loss, weight), *(None for _ in others)))


def _pass_on(given: Mapping[Cell, Sequence[Tensor]], call: Call) -> None:
    """If what was given was computed by something that learns: let it learn, once."""
    found = [
        (tensor, gradient)
        for cell, parcel in sorted(call.desk.input_gradients.items())
        for tensor, gradient in zip(given[cell], parcel.tensors, strict=True)
        if gradient is not None
    ]
    if found:
        tensors, gradients = zip(*found, strict=True)
        torch.autograd.backward(tensors, gradients)

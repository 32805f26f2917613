"""The other door: forward, loss and backward of a batch in one go, under any schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.batch import gather
from penstock.ir import Program
from penstock.run.call import Call, Measured
from penstock.run.passage import from_outside, pass_changes_on
from penstock.run.phase import Phase
from penstock.run.weighing import Ledger
from penstock.stage.parcel import taken_apart
from penstock.timeline import Timeline


@dataclass(frozen=True)
class StepResult:
    """What `Pipe.step` gives back."""

    loss: Tensor
    outputs: Any
    metrics: dict[str, Any]
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
    batches: Sequence[tuple[Any, ...]],
    targets: Sequence[tuple[Any, ...]],
    ledger: Ledger,
) -> StepResult:
    """Run the phase over micro-batches; the ledger says what their losses come to."""
    last = len(call.tapes) - 1
    given = {0: batches, last: targets}
    if last == 0:
        given = {0: [batch + target for batch, target in zip(batches, targets, strict=True)]}
    for stage, values in given.items():
        for microbatch, parcel in enumerate(from_outside(values)):
            if values[microbatch]:
                call.desk.inputs[stage, microbatch] = parcel
    call.desk.answer, call.desk.prepare = ledger.answer, ledger.prepare
    try:
        call.run(phase)
    except BaseException:
        ledger.give_up()
        raise
    factor = ledger.finish()
    for (stage, microbatch), parcel in call.desk.inputs.items():
        pass_changes_on(taken_apart(given[stage][microbatch])[0], parcel.tensors)
    _pass_on(given, call, factor)
    scores = ledger.scores
    asked = [score.beside.output[0] for score in scores if score.beside.output]
    return StepResult(
        ledger.combined([score.loss for score in scores]).detach(),
        gather(asked) if asked else None,
        _metrics(ledger),
        call.measured(program),
    )


def _metrics(ledger: Ledger) -> dict[str, Any]:
    """Those of the micro-batches put together, name by name."""
    device = ledger.scores[0].loss.device
    columns = [score.beside.metrics for score in ledger.scores]
    return {name: _joined([c[name] for c in columns], ledger, device) for name in columns[0]}


def _joined(column: Sequence[Any], ledger: Ledger, device: torch.device) -> Any:
    """Numbers as the losses, other tensors by rows if they have the same, other values listed."""
    flat = [pytree.tree_flatten(value) for value in column]
    if any(spec != flat[0][1] for _, spec in flat):
        return list(column)

    def join(leaves: tuple[Any, ...]) -> Any:
        if all(map(_is_number, leaves)):
            return ledger.combined([_number(leaf, device) for leaf in leaves])
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
        alike = len({(tensor.shape[1:], tensor.device) for tensor in tensors}) == 1
        return torch.cat(tensors) if alike and len(tensors) == len(leaves) else list(leaves)

    leaves = [join(leaves) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)]
    return pytree.tree_unflatten(leaves, flat[0][1])


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value
    kind = torch.float64 if isinstance(value, float) else torch.int64
    return torch.full((), value, dtype=kind, device=device)


def _pass_on(
    given: Mapping[int, Sequence[tuple[Any, ...]]], call: Call, factor: Tensor | None
) -> None:
    """If what was given was computed by something that learns: let it learn, once."""
    found = [
        (tensor, gradient if factor is None else _times(gradient, factor))
        for (stage, microbatch), parcel in sorted(call.desk.input_gradients.items())
        for tensor, gradient in zip(
            taken_apart(given[stage][microbatch])[0], parcel.tensors, strict=True
        )
        if gradient is not None
    ]
    if found:
        tensors, gradients = zip(*found, strict=True)
        torch.autograd.backward(tensors, gradients)


def _times(gradient: Tensor, factor: Tensor) -> Tensor:
    return (gradient * factor.to(gradient.device)).to(gradient.dtype)

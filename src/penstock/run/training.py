"""The other door: forward, loss and backward of a batch in one go, under any schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.batch import Rows, gather
from penstock.gradients.replicas import Replicas
from penstock.ir import Program
from penstock.run.call import Call
from penstock.run.feed import Fed
from penstock.run.passage import Cell, from_outside, pass_changes_on, tensors_by_cell
from penstock.run.phase import Phase
from penstock.run.weighing import Ledger
from penstock.timeline import Timeline


class HasTimeline(Protocol):
    """A run that took place."""

    @property
    def timeline(self) -> Timeline:
        """When everything ran."""


class Ran(NamedTuple):
    """What carried a step out, and why it was that, if another was asked for."""

    runtime: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.runtime}: {self.why}" if self.why else self.runtime


@dataclass(frozen=True)
class StepResult:
    """What `Pipe.step` gives back."""

    loss: Tensor
    outputs: Any
    metrics: dict[str, Any]
    measured: HasTimeline
    ran: Ran = Ran("processes")  # noqa: RUF009 (a value)

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
    ledger: Ledger,
    replicas: Replicas,
) -> StepResult:
    """Run the phase over micro-batches; the ledger says what their losses come to.

    The gradients of stages that have replicas are reduced once.
    """
    given = tensors_by_cell(fed.given)
    call.desk.inputs = from_outside(fed.given)
    call.desk.answer, call.desk.prepare = ledger.answer, ledger.prepare
    with replicas.held() as held:
        try:
            call.run(phase)
        except BaseException:
            ledger.give_up()
            raise
        ledger.finish()
        held.factor = ledger.factor
    for cell, parcel in call.desk.inputs.items():
        pass_changes_on(given[cell], parcel.tensors)
    pass_gradients_on(given, call, ledger.factor)
    scores = ledger.scores
    asked = [score.beside.output[0] for score in scores if score.beside.output]
    return StepResult(
        ledger.total(),
        gather(asked, fed.rows) if asked else None,
        metrics_of(ledger, fed.rows),
        call.measured(program),
    )


def metrics_of(ledger: Ledger, rows: Rows) -> dict[str, Any]:
    """Those of the micro-batches put together, name by name."""
    device = ledger.scores[0].loss.device
    columns = [score.beside.metrics for score in ledger.scores]
    return {name: _joined([c[name] for c in columns], ledger, rows, device) for name in columns[0]}


def _joined(column: Sequence[Any], ledger: Ledger, rows: Rows, device: torch.device) -> Any:
    """Numbers as the losses, all else as outputs are."""
    flat = [pytree.tree_flatten(value) for value in column]
    if any(spec != flat[0][1] for _, spec in flat):
        return list(column)

    def join(leaves: tuple[Any, ...]) -> Any:
        if all(map(_is_number, leaves)):
            return ledger.combined([_number(leaf, device) for leaf in leaves])
        return gather(leaves, rows)

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


def pass_gradients_on(
    given: Mapping[Cell, Sequence[Tensor]], call: Call, factor: Tensor | None
) -> None:
    """If what was given was computed by something that learns: let it learn, once."""
    found = [
        (tensor, gradient if factor is None else _times(gradient, factor))
        for cell, parcel in sorted(call.desk.input_gradients.items())
        if cell in given  # else it came from another process
        for tensor, gradient in zip(given[cell], parcel.tensors, strict=True)
        if gradient is not None
    ]
    if found:
        tensors, gradients = zip(*found, strict=True)
        torch.autograd.backward(tensors, gradients)


def _times(gradient: Tensor, factor: Tensor) -> Tensor:
    return (gradient * factor.to(gradient.device)).to(gradient.dtype)

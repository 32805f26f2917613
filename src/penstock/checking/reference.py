"""What the unsplit model computes: on the whole batch, or micro-batch by micro-batch.

Some models compute something else when the batch is cut, and rightly so: BatchNorm in training
normalises what it sees, and random numbers are drawn for each cell. Their reference is the model
itself, run over one micro-batch after another with the draws of the pipe's cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from penstock.batch import gather
from penstock.checking.draws import Draws
from penstock.checking.report import Difference
from penstock.checking.subject import Called, Subject, Values
from penstock.stage.batchnorm import DeferredBatchNorm
from penstock.stage.randomness import OwnRandom


@dataclass(frozen=True)
class Nature:
    """What makes a model depend on how the batch is cut, by nature."""

    draws: bool
    batch_norms: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Nothing does."""
        return not self.draws and not self.batch_norms

    def __str__(self) -> str:
        if self.whole:
            return "the unsplit model on the whole batch, in float64"
        reasons = ["it draws random numbers"] if self.draws else []
        if self.batch_norms:
            reasons.append(f"BatchNorm ({', '.join(self.batch_norms[:3])}) is in training")
        return (
            f"the unsplit model, micro-batch by micro-batch, in float64, as {' and '.join(reasons)}"
        )


def nature_of(subject: Subject, training: bool = True) -> Nature:
    """Watch a copy of the model at work."""
    model = subject.fresh()
    if not training:
        model.eval()
    norms = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    ]
    with OwnRandom(0) as random, torch.no_grad():
        subject.call(model, subject.values.uncut())
    return Nature(random.drew, tuple(norms))


@dataclass(frozen=True)
class Outcome:
    """The numbers of a step, by kind and name; None where there is no gradient."""

    numbers: dict[tuple[str, str], Tensor | None]

    def against(self, expected: Outcome) -> Iterator[Difference]:
        """How far each is from what is expected."""
        for (kind, name), wanted in expected.numbers.items():
            yield difference(kind, name, self.numbers.get((kind, name)), wanted)

    def differs_from(self, other: Outcome, *kinds: str) -> bool:
        """Does any number of these kinds?"""
        return any(d.size for d in self.against(other) if d.kind in kinds)


def difference(kind: str, name: str, found: Tensor | None, wanted: Tensor | None) -> Difference:
    """How far one tensor is from another."""
    if found is None or wanted is None:
        if found is wanted:
            return Difference(kind, name, 0.0)
        note = "is missing" if found is None else "is there, and the unsplit model has none"
        return Difference(kind, name, float("inf"), note)
    if found.shape != wanted.shape:
        note = f"has the shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
        return Difference(kind, name, float("inf"), note)
    found, wanted = (t.to_dense() if t.is_sparse else t for t in (found, wanted))
    if torch.equal(found, wanted) or not wanted.numel():
        return Difference(kind, name, 0.0)
    wide = torch.complex128 if wanted.is_complex() or found.is_complex() else torch.float64
    mine, theirs = found.to(wide), wanted.to(wide)
    both_nan = mine.isnan() & theirs.isnan()
    apart = (
        (mine - theirs).abs().masked_fill(both_nan | (mine == theirs), 0.0).nan_to_num(torch.inf)
    )
    finite = theirs.abs().nan_to_num(0.0, 0.0)
    size = float(apart.max()) / max(1.0, float(finite.max()))
    return Difference(kind, name, 0.0 if size <= _rounding(wanted) else size)


def _rounding(wanted: Tensor) -> float:
    """What a model gives in float32, whatever it is asked for, is no more exact than that."""
    if not wanted.is_floating_point() or wanted.dtype is torch.float64:
        return 0.0
    return 8 * torch.finfo(wanted.dtype).eps


def outcome(model: nn.Module, loss: Tensor, outputs: Any, values: Values | None = None) -> Outcome:
    """What a step leaves; with `values`, also the gradients of the inputs."""
    numbers: dict[tuple[str, str], Tensor | None] = {("loss", ""): _kept(loss)}
    numbers.update(_shown(outputs))
    for name, parameter in model.named_parameters():
        numbers["gradients", f"of '{name}'"] = _kept(parameter.grad)
    for name, buffer in model.named_buffers():
        numbers["buffers", f"'{name}'"] = _kept(buffer)
    if values is not None:
        for name, tensor in values.inputs().items():
            if tensor.requires_grad:
                numbers["inputs", f"gradient of {name}"] = _kept(tensor.grad)
    return Outcome(numbers)


def evaluation(loss: Tensor, outputs: Any) -> Outcome:
    """What eval mode gives."""
    return Outcome({("loss", ""): _kept(loss), **_shown(outputs)})


def _shown(outputs: Any) -> dict[tuple[str, str], Tensor | None]:
    """The tensors among the outputs that are put together by rows."""
    found = pytree.tree_flatten_with_path(outputs)[0]
    return {
        ("outputs", pytree.keystr(path)): _kept(leaf)
        for path, leaf in found
        if isinstance(leaf, Tensor) and leaf.dim()
    }


def _kept(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def unsplit(subject: Subject, model: nn.Module, values: Values, whole: bool) -> tuple[Tensor, Any]:
    """The loss and the outputs of the model itself; with gradients on, its backward, too."""
    pieces, rows = values.cut(1 if whole else subject.chunks)
    for layer in model.modules():
        if isinstance(layer, DeferredBatchNorm):
            layer.begin(len(pieces))
    draws = Draws(subject, model)
    calls = []
    for microbatch, piece in enumerate(pieces):
        with draws.of(microbatch):
            calls.append(subject.call(model, piece))
    draws.end()
    total = _reduced(calls, [1.0] if whole else rows.shares(), subject.rule.sums)
    if torch.is_grad_enabled() and total.requires_grad:
        total.backward()
    return total.detach(), gather([call.output for call in calls], rows)


def _reduced(calls: Sequence[Called], shares: Sequence[float], sums: bool) -> Tensor:
    """The loss of a batch, from those of its parts: by weights, if there are some."""
    weights = [call.weight for call in calls if call.weight is not None]
    parts: list[float | Tensor] = [1.0 if sums else share for share in shares]
    if weights and len(calls) > 1:
        parts = [weight / torch.stack(weights).sum() for weight in weights]
    total = torch.zeros_like(calls[0].loss)
    for call, share, part in zip(calls, shares, parts, strict=True):
        total = total + call.added * share
        if not isinstance(part, Tensor) or part:  # what counts for nothing may be no number
            total = total + call.loss * part
    return total.to(calls[0].loss.dtype)

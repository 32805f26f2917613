"""Compare a model of the zoo as a pipe with itself unsplit.

The oracle is the same model run over one micro-batch after another, each loss weighted by its
rows: that is what a pipe computes. If the rows of a batch do not affect each other, the model gives
the same numbers on the whole batch, and these are compared, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock import Pipe, StepResult
from penstock.checker.reference import compute_difference
from penstock.microbatch import MicrobatchRows, gather, scatter
from penstock.torch_compat import pytree
from tests.models.architecture import Architecture, Batch, called, tensors_in

LIMIT = 1e-10
LIMIT_OF_SINGLE = 1e-5  # for sums in float32, whose order differs
LIMIT_OF_FLOAT32 = 1e-6  # for float32 tensors
ROWS = (4, 8)  # 8 rows in 3 micro-batches are 3, 3, 2, whose shares are exact in float32

Numbers = dict[str, Tensor | None]


@dataclass(frozen=True)
class Trial:
    """The options of a pipe of a model."""

    stages: int
    schedule: str
    runtime: str
    chunks: int = 2
    checkpoint: str = "except_last"

    def __str__(self) -> str:
        return f"{self.stages} stages, {self.schedule}, {self.runtime}, {self.chunks} chunks"


def trials(number: int) -> list[Trial]:
    """Return the trials of the model with that number: 2 stages, then 3 or 4, both schedules."""
    one, other = ("1f1b", "zb-h1") if number % 2 else ("zb-h1", "1f1b")
    return [
        Trial(2, one, "inline", checkpoint="never"),
        Trial(3 + number // 2 % 2, other, "threads", chunks=2 + number % 2),
    ]


def every_trial() -> list[Trial]:
    """Return each number of stages under each schedule."""
    return [
        Trial(2, "1f1b", "inline", 2, "never"),
        Trial(2, "zb-h1", "threads", 3),
        Trial(3, "1f1b", "threads", 3),
        Trial(3, "zb-h1", "inline", 2, "never"),
        Trial(4, "1f1b", "inline", 3),
        Trial(4, "zb-h1", "threads", 2, "never"),
    ]


class Different(AssertionError):
    """Some numbers differ from those of the unsplit model."""


# ---- the unsplit model --------------------------------------------------------------------


class Unsplit:
    """The unsplit model, run by micro-batches and on the whole batch; its results are cached."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        self.model = architecture.made()
        self._buffers = kept_buffers(self.model)
        self._known: dict[tuple[int, int, bool], Numbers] = {}

    def numbers(self, at: int, chunks: int, training: bool) -> Numbers:
        """Return the numbers for the batch of size index `at`."""
        key = (at, chunks, training)
        if key not in self._known:
            reset(self.model, self._buffers)
            self._known[key] = self._computed(batch_of(self.architecture, at), chunks, training)
        return self._known[key]

    def _computed(self, batch: Batch, chunks: int, training: bool) -> Numbers:
        self.model.train(training)
        pieces, rows = cut(batch, chunks)
        losses, columns = [], []
        with torch.set_grad_enabled(training):
            for piece, share in zip(pieces, self._shares(pieces, rows), strict=True):
                output = called(self.model, piece)
                columns.append(dict(shown(output)))
                if training:
                    loss = loss_of(self.architecture, output)
                    (loss * share).backward()
                    losses.append(loss.detach() * share)
        outputs = {name: gather([c[name] for c in columns], rows) for name in columns[0]}
        found: Numbers = {f"output {name}": value for name, value in shown(outputs)}
        if training:
            found["loss"] = torch.stack(losses).sum()
            found |= learned(self.model)
        return found

    def _shares(self, pieces: list[Batch], rows: MicrobatchRows) -> list[float]:
        if self.architecture.counts is None:
            return rows.fractions()
        counts = [self.architecture.counts(piece) for piece in pieces]
        return [count / sum(counts) for count in counts]


def loss_of(architecture: Architecture, output: Any) -> Tensor:
    """Return the loss of an output."""
    if architecture.loss is not None:
        return architecture.loss(output)
    if isinstance(output, Tensor):
        return output
    loss = output["loss"] if isinstance(output, dict) else output.loss
    assert isinstance(loss, Tensor)
    return loss


def shown(output: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an output that have rows; the loss is compared separately."""
    for name, tensor in tensors_in(output):
        if tensor.dim():
            yield name.lstrip("."), tensor.detach()


def cut(batch: Batch, chunks: int) -> tuple[list[Batch], MicrobatchRows]:
    """Cut a batch into micro-batches."""
    if isinstance(batch, tuple):
        pieces, rows = scatter(batch, chunks)
        return list(pieces), rows
    pieces, rows = scatter(tuple(batch.values()), chunks)
    return [dict(zip(batch, piece, strict=True)) for piece in pieces], rows


def batch_of(architecture: Architecture, at: int) -> Batch:
    """Return the batch of the first or of the second size."""
    batch = architecture.batch(ROWS[at], architecture.sizes[at])

    def convert(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.dtype == torch.float64
        return value.to(architecture.dtype) if is_float else value

    converted: Batch = pytree.tree_map(convert, batch)
    return converted


def learned(model: nn.Module) -> Numbers:
    """Return gradients and buffers by name."""
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    buffers = {f"buffer {name}": b for name, b in model.named_buffers()}
    return {
        name: None if value is None else value.detach().clone()
        for name, value in {**gradients, **buffers}.items()
    }


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the buffers."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def reset(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    """Clear the gradients and restore the buffers."""
    model.zero_grad(set_to_none=True)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


# ---- the pipe -----------------------------------------------------------------------------


class Exhibited:
    """A model of the zoo and its unsplit reference. All pipes use the same model object."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        self.unsplit = Unsplit(architecture)
        self.model = architecture.made()
        self._buffers = kept_buffers(self.model)
        self.names = list(self.model.state_dict())

    def piped(self, trial: Trial) -> Pipe:
        """Return a pipe of the model."""
        # A loss that compares rows is found by the audit. Here it is compared by micro-batches.
        audit = "off" if "loss" in self.architecture.meets else "first"
        return piped(self.architecture, self.model, trial, audit)

    def compared(self, trial: Trial, pipe: Pipe, at: int, training: bool) -> float:
        """Return the largest difference; if it is too large, raise with all that differ."""
        has_outputs = not self.architecture.pairs
        if not training and not has_outputs:
            return 0.0
        self.model.train(training)
        pipe.train(training)
        reset(self.model, self._buffers)
        batch = batch_of(self.architecture, at)
        found = stepped(pipe, batch, has_outputs) if training else evaluated(pipe, batch)
        if training:
            found |= learned(self.model)
        expected = self.unsplit.numbers(at, trial.chunks, training)
        if not has_outputs:
            expected = {k: v for k, v in expected.items() if not k.startswith("output")}
        what = f"{self.architecture.name}, {trial}, {'training' if training else 'forward only'}"
        worst = apart(f"{what}, size {at}", found, expected, LIMIT)
        if not self.architecture.meets:
            self._whole(f"{what}, size {at}, the whole batch", found, at, training)
        return worst

    def _whole(self, what: str, found: Numbers, at: int, training: bool) -> None:
        whole = self.unsplit.numbers(at, 1, training)
        loss = self.unsplit.numbers(at, 1, training=True)["loss"]
        assert loss is not None
        single = self.architecture.single or loss.dtype == torch.float32
        limit = LIMIT_OF_SINGLE if single else LIMIT
        # Outputs whose rows are not on dim 0 are not joined, and were compared by micro-batch.
        same = [
            name
            for name, wanted in whole.items()
            if not name.startswith("buffer") and _shape(found.get(name)) == _shape(wanted)
        ]
        apart(what, {k: found[k] for k in same}, {k: whole[k] for k in same}, limit)

    def as_before(self) -> None:
        """Check that the model is unchanged: it computes the same, under the same names."""
        assert list(self.model.state_dict()) == self.names
        batch = batch_of(self.architecture, 0)
        reset(self.unsplit.model, self._buffers)
        reset(self.model, self._buffers)
        both = (self.model.eval(), self.unsplit.model.eval())
        with torch.no_grad():
            found, expected = (_outputs(called(model, batch)) for model in both)
        apart("the model after it", found, expected, 0.0)


def piped(architecture: Architecture, model: nn.Module, trial: Trial, audit: str) -> Pipe:
    """Return a pipe of a model."""
    return Pipe(
        model.train(),
        chunks=trial.chunks,
        checkpoint=trial.checkpoint,
        stages=trial.stages,
        devices=["cpu"] * trial.stages,
        example=batch_of(architecture, 0),
        schedule=trial.schedule,
        runtime=trial.runtime,
        loss_fn=architecture.loss,
        balance="parameters",
        audit=audit,
    )


def stepped(pipe: Pipe, batch: Batch, has_outputs: bool = True) -> Numbers:
    """Run a training step, and return its numbers."""
    result = step(pipe, batch, has_outputs)
    return {**_outputs(result.outputs), "loss": result.loss}


def step(pipe: Pipe, batch: Batch, outputs: bool = False) -> StepResult:
    """Run a training step."""
    named = batch if isinstance(batch, dict) else {}
    inputs = batch if isinstance(batch, tuple) else ()
    return pipe.step(*inputs, outputs=outputs, **named)


def evaluated(pipe: Pipe, batch: Batch) -> Numbers:
    """Run the forward only."""
    with torch.no_grad():
        return _outputs(called(pipe, batch))


def _outputs(outputs: Any) -> Numbers:
    return {f"output {name}": value for name, value in shown(outputs)}


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


def apart(what: str, found: Numbers, expected: Numbers, limit: float) -> float:
    """Return the largest difference between numbers of the same names; raise beyond the limit."""
    wrong, worst = [], 0.0
    for name, wanted in expected.items():
        one = compute_difference("", name, found.get(name), wanted)
        rounded = wanted is not None and wanted.dtype == torch.float32
        worst = max(worst, 0.0 if rounded else one.size)
        if not one.size <= (max(limit, LIMIT_OF_FLOAT32) if rounded else limit):
            wrong.append(f"{name} {one.note or f'differs by {one.size:.3g}'}")
    wrong += [f"{name} is there, and should not be" for name in found if name not in expected]
    if wrong:
        raise Different("\n".join([f"{what}:", *wrong]))
    return worst

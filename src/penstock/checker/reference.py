"""The reference: what the unsplit model computes, and how outcomes are compared.

Most models compute the same whether the batch is split or not, and their reference is a run on the
whole batch. Two kinds of models cannot: BatchNorm in training mode normalises the rows that it
sees, and a pipe draws random numbers separately for each cell. Their reference is the unsplit
model, run on one micro-batch after another, with the random numbers that the cells of a pipe would
draw.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.checker.case import CheckedModel, ModelCallResult, StepArguments, call_like_pipe
from penstock.checker.report import Difference
from penstock.microbatch import gather
from penstock.model.stage_inputs import Batch
from penstock.model.unsplit import UnsplitCells
from penstock.stage.aux_loss import added_losses
from penstock.stage.deferred_batchnorm import DeferredStatsBatchNorm
from penstock.stage.host_rng import HostRngCell
from penstock.stage.rng import CellRngMode, advance_caller_rng, peek_seed
from penstock.stage.stage import OUTSIDE
from penstock.torch_compat import BatchNormBase, pytree

# ---- random numbers of cells ---------------------------------------------------------------------


def emulate_cells(checked: CheckedModel, model: nn.Module) -> UnsplitCells:
    """Return the cells of a pipe, whose random numbers a copy of the unsplit model is to draw."""
    partition = checked.partition
    unit_stages = [
        (model.get_submodule(name), stages) for name, stages in partition.find_unit_stages().items()
    ]
    functions = partition.find_function_stages()
    return UnsplitCells(peek_seed(), len(partition.stages), unit_stages, functions)


# ---- models that depend on the split of the batch ------------------------------------------------


@dataclass(frozen=True)
class BatchDependence:
    """The accepted reasons why the results of a model change when its batch is split."""

    uses_rng: bool
    batch_norms: tuple[str, ...]

    @property
    def is_independent(self) -> bool:
        """Whether there is no such reason: the reference is a run on the whole batch."""
        return not self.uses_rng and not self.batch_norms

    def __str__(self) -> str:
        if self.is_independent:
            return "the unsplit model on the whole batch, in float64"
        reasons = ["it draws random numbers"] if self.uses_rng else []
        if self.batch_norms:
            reasons.append(f"BatchNorm ({', '.join(self.batch_norms[:3])}) is in training")
        return (
            "the unsplit model, micro-batch by micro-batch, in float64, because "
            f"{' and '.join(reasons)}"
        )


def detect_batch_dependence(checked: CheckedModel, training: bool = True) -> BatchDependence:
    """Run a copy of the model once, and find out whether it depends on the split of the batch."""
    model = checked.copy_model()
    if not training:
        model.eval()
    # Without running statistics, BatchNorm uses those of the batch in eval mode as well.
    norms = [
        name
        for name, module in model.named_modules()
        if isinstance(module, BatchNormBase) and (module.training or module.running_mean is None)
    ]
    arguments = checked.arguments.take_whole_batch()
    loss_weight = checked.compute_loss_weight(arguments)
    host_rng = HostRngCell(0, OUTSIDE, 0, nullcontext())
    with CellRngMode(0) as random, host_rng, torch.no_grad():
        checked.call_model(model, arguments, loss_weight)
    return BatchDependence(random.has_drawn or bool(host_rng.used), tuple(norms))


# ---- outcomes and their comparison ---------------------------------------------------------------


@dataclass(frozen=True)
class StepOutcome:
    """The tensors that a step computes, by kind and name; None for a missing gradient."""

    tensors: dict[tuple[str, str], Tensor | None]

    def compare_to(self, expected: StepOutcome) -> Iterator[Difference]:
        """Yield the difference of each tensor from the expected one."""
        for (kind, name), expected_tensor in expected.tensors.items():
            yield compute_difference(kind, name, self.tensors.get((kind, name)), expected_tensor)

    def differs_from(self, other: StepOutcome, *kinds: str) -> bool:
        """Return whether any tensor of these kinds differs at all."""
        return any(d.size for d in self.compare_to(other) if d.kind in kinds)


def compute_difference(
    kind: str, name: str, actual: Tensor | None, expected: Tensor | None
) -> Difference:
    """Return the difference between two tensors.

    Its size is the largest absolute difference of two elements, divided by the largest finite
    element of `expected` if that is above 1. NaN equals NaN, and an infinity equals itself.
    """
    if actual is None or expected is None:
        if actual is expected:
            return Difference(kind, name, 0.0)
        note = "is missing" if actual is None else "is present, but the unsplit model has none"
        return Difference(kind, name, float("inf"), note)
    if actual.shape != expected.shape:
        note = f"has shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
        return Difference(kind, name, float("inf"), note)
    actual, expected = (t.to_dense() if t.is_sparse else t for t in (actual, expected))
    if torch.equal(actual, expected) or not expected.numel():
        return Difference(kind, name, 0.0)
    dtype = torch.complex128 if expected.is_complex() or actual.is_complex() else torch.float64
    left, right = actual.to(dtype), expected.to(dtype)
    both_nan = left.isnan() & right.isnan()
    # Equal infinities subtract to NaN, so equal elements are set to 0. Any other NaN counts as an
    # infinite difference.
    distances = (
        (left - right).abs().masked_fill(both_nan | (left == right), 0.0).nan_to_num(torch.inf)
    )
    finite = right.abs().nan_to_num(0.0, 0.0)
    size = float(distances.max()) / max(1.0, float(finite.max()))
    return Difference(kind, name, 0.0 if size <= _get_rounding_tolerance(expected) else size)


def _get_rounding_tolerance(expected: Tensor) -> float:
    """Return the rounding error to ignore in a tensor that is not float64.

    A model may compute in float32 whatever the dtype of its inputs is.
    """
    if not expected.is_floating_point() or expected.dtype is torch.float64:
        return 0.0
    return 8 * torch.finfo(expected.dtype).eps


def collect_training_outcome(
    model: nn.Module, loss: Tensor, outputs: Any, arguments: StepArguments | None = None
) -> StepOutcome:
    """Return the outcome of a training step; with `arguments`, also the gradients of inputs."""
    tensors: dict[tuple[str, str], Tensor | None] = {("loss", ""): _snapshot_tensor(loss)}
    tensors.update(_collect_output_tensors(outputs))
    for name, parameter in model.named_parameters():
        tensors["gradients", f"of '{name}'"] = _snapshot_tensor(parameter.grad)
    for name, buffer in model.named_buffers():
        tensors["buffers", f"'{name}'"] = _snapshot_tensor(buffer)
    if arguments is not None:
        for name, tensor in arguments.get_named_tensors().items():
            if tensor.requires_grad:
                tensors["inputs", f"gradient of {name}"] = _snapshot_tensor(tensor.grad)
    return StepOutcome(tensors)


def collect_eval_outcome(loss: Tensor, outputs: Any) -> StepOutcome:
    """Return the outcome of a forward in eval mode."""
    return StepOutcome({("loss", ""): _snapshot_tensor(loss), **_collect_output_tensors(outputs)})


def _collect_output_tensors(outputs: Any) -> dict[tuple[str, str], Tensor | None]:
    """Return the output tensors that have rows. Scalars of micro-batches cannot be joined."""
    leaves = pytree.tree_flatten_with_path(outputs)[0]
    return {
        ("outputs", pytree.keystr(path)): _snapshot_tensor(leaf)
        for path, leaf in leaves
        if isinstance(leaf, Tensor) and leaf.dim()
    }


def _snapshot_tensor(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


# ---- a step of the unsplit model -----------------------------------------------------------------


def run_unsplit(
    checked: CheckedModel, model: nn.Module, arguments: StepArguments, whole_batch: bool
) -> tuple[Tensor, Any]:
    """Run the unsplit model, and its backward if gradients are enabled.

    Args:
        checked: The case.
        model: The copy of the model to run; its gradients and buffers change.
        arguments: The batch.
        whole_batch: Run on the whole batch at once, and not on one micro-batch after another.

    Returns:
        The loss and the outputs.
    """
    pieces, rows = arguments.split_microbatches(1 if whole_batch else checked.chunks)
    for layer in model.modules():
        if isinstance(layer, DeferredStatsBatchNorm):
            layer.begin_minibatch(len(pieces))
    cells = emulate_cells(checked, model)
    calls = []
    for microbatch, piece in enumerate(pieces):
        loss_weight = checked.compute_loss_weight(piece)
        with cells.emulate(microbatch):
            calls.append(checked.call_model(model, piece, loss_weight))
    if cells.has_drawn:  # as a pipe does at the end of a step
        advance_caller_rng()
    total = _reduce_losses(
        calls, [1.0] if whole_batch else rows.fractions(), checked.loss_reduction.is_sum
    )
    if torch.is_grad_enabled() and total.requires_grad:
        total.backward()
    rows = rows._replace(output_dims=_find_output_dims(checked, model, arguments))
    outputs = gather([call.output for call in calls], rows)
    if whole_batch and checked.chunks > 1:
        outputs = _split_unjoined_outputs(checked, model, arguments, calls[0].output, outputs)
    return total.detach(), outputs


def _find_output_dims(
    checked: CheckedModel, model: nn.Module, arguments: StepArguments
) -> tuple[tuple[int, int], ...]:
    """Return the dims on which a pipe joins outputs, if it knows them: by index of the output."""
    if not checked.partition.needs_whole_batch or checked.chunks == 1:
        return ()
    batch = Batch(
        arguments.batch, arguments.side, chunks=checked.chunks, is_step=True, return_outputs=True
    )
    traced_model = checked.partition.root(model)
    was_training = traced_model.training
    traced_model.train(model.training)
    try:
        return checked.partition.build_stage_inputs(batch, {}).rows.output_dims
    finally:
        traced_model.train(was_training)


def _split_unjoined_outputs(
    checked: CheckedModel, model: nn.Module, arguments: StepArguments, output: Any, joined: Any
) -> Any:
    """Return the outputs of the whole batch in the form in which a pipe returns them.

    A pipe joins tensors that have rows on dim 0, and gives a list with one tensor for each
    micro-batch otherwise (a cache with rows on dim 1). Such tensors come from a forward of each
    micro-batch here.
    """
    _, whole_rows = arguments.split_microbatches(1)
    dims = dict(_find_output_dims(checked, model, arguments))
    leaves = [
        (leaf, leaf if index in dims else gather([leaf], whole_rows))
        for index, leaf in enumerate(pytree.tree_leaves(output))
    ]
    if all(
        isinstance(row, Tensor) for leaf, row in leaves if isinstance(leaf, Tensor) and leaf.dim()
    ):
        return joined
    known_leaves = {i: row for i, (_, row) in enumerate(leaves) if isinstance(row, Tensor)}
    pieces, rows = arguments.split_microbatches(checked.chunks)
    model = copy.deepcopy(model)
    with torch.no_grad(), added_losses():
        outputs = [call_like_pipe(model, piece) for piece in pieces]
    return gather(outputs, rows, known_leaves)


def _reduce_losses(
    calls: Sequence[ModelCallResult], shares: Sequence[float], is_sum: bool
) -> Tensor:
    """Return the loss of a batch from the losses of its micro-batches.

    A micro-batch counts by its weight if there is one. Otherwise it counts by its share of the
    rows, or fully if the losses are summed.
    """
    weights = [call.weight for call in calls if call.weight is not None]
    factors: list[float | Tensor] = [1.0 if is_sum else share for share in shares]
    if weights and len(calls) > 1:
        factors = [weight / torch.stack(weights).sum() for weight in weights]
    total = torch.zeros_like(calls[0].loss)
    for call, share, factor in zip(calls, shares, factors, strict=True):
        total = total + call.aux_loss * share
        # A micro-batch of weight 0, in which all targets are ignored, has a loss of NaN.
        if not isinstance(factor, Tensor) or factor:
            total = total + call.loss * factor
    return total.to(calls[0].loss.dtype)

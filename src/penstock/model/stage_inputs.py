"""The arguments of one call of a pipe, and the inputs of each stage that they are split into.

    model         positional inputs         keyword inputs                    target
    Sequential    the first stage           every stage with a layer that     the last stage
                                            takes an input of that name
    traced        every stage whose part    every stage whose part of the     the last stage
                  of the forward uses it    forward uses it

Each tensor goes straight to the device of the stage that uses it, not from stage to stage.
`Partition.build_stage_inputs` does this for both kinds of models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.microbatch import MicrobatchRows, gather
from penstock.schedules.ir import StageGraph
from penstock.stage.loss import (
    LossReduction,
    TargetCounter,
    find_loss_tensor,
    has_weighted_loss,
)
from penstock.stage.payload import Payload, flatten_values, is_in_graph
from penstock.torch_compat import pytree

# For each stage, the input values of each micro-batch.
InputsByStage = Mapping[int, list[tuple[Any, ...]]]
Cell = tuple[int, int]  # stage, micro-batch
# The devices of the stages whose inputs this process supplies, by stage.
InputDevices = Mapping[int, torch.device]


_TOKEN_INPUTS = ("input_ids", "decoder_input_ids")
_TOKEN_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Batch:
    """The batch of one call of a pipe.

    Attributes:
        inputs: The positional inputs of the model.
        keyword_inputs: The inputs by name.
        target: The target in a tuple, or an empty tuple.
        chunks: The number of micro-batches to split it into.
        uses_model_loss: Whether this is a step whose loss the model computes itself.
        reduction: How losses are combined: "mean", "sum", or None for what the loss does.
        is_step: Whether this is `pipe.step`. Otherwise it is `pipe(x)`.
        return_outputs: Whether a step returns the outputs of the model.
    """

    inputs: tuple[Any, ...]
    keyword_inputs: Mapping[str, Any] = field(default_factory=dict)
    target: tuple[Any, ...] = ()
    chunks: int = 1
    uses_model_loss: bool = False
    reduction: str | None = None
    is_step: bool = False
    return_outputs: bool = False

    def list_batch(self) -> tuple[Any, ...]:
        """Return the inputs and the target."""
        return *self.inputs, *self.keyword_inputs.values(), *self.target

    def count_tokens(self) -> int | None:
        """Return the number of token ids, padding included, or None if there are none.

        They are the inputs called `input_ids` and `decoder_input_ids`, or the first input if it is
        a matrix of whole numbers.
        """
        tokens = None
        named = [self.keyword_inputs[n] for n in _TOKEN_INPUTS if n in self.keyword_inputs]
        for value in named or self.inputs[:1]:
            if isinstance(value, Tensor) and value.dim() == 2 and value.dtype in _TOKEN_DTYPES:
                tokens = (tokens or 0) + value.numel()
        return tokens

    @property
    def returns_loss(self) -> bool:
        """Whether a number that the model returns is the loss of the batch, or all of its output.

        A `loss_fn` takes the output of each micro-batch instead.
        """
        return self.uses_model_loss or not self.is_step


@dataclass(frozen=True)
class StageInputs:
    """The inputs of each stage from outside the pipe, split into micro-batches."""

    by_stage: InputsByStage
    rows: MicrobatchRows
    chunks: int
    # which stage sends to which in this call
    graph: StageGraph
    # whether the last input of the last stage is the target
    has_target: bool = False
    # a digest of how a traced forward was assigned to stages; ranks compare it
    assignment_digest: str = ""
    # how the model's own loss counts its targets, if that is known
    target_count: TargetCounter | None = None
    # the weights of the micro-batches in the model's own loss, for `pipe(x)`
    loss_shares: Sequence[float | Tensor] = ()
    # the labels of each micro-batch by which these weights are counted, and their counter
    counted_labels: tuple[list[Tensor], TargetCounter] | None = None
    # the tensors before the split, if all inputs are tensors that are split by their rows
    unsplit_tensors: tuple[Tensor, ...] = ()
    # whether the losses of a step, which the model computes itself, are known to be sums
    sums_loss: bool = False
    # whether the outputs of a step contain the loss, which the model computes itself
    outputs_have_loss: bool = False
    # a digest that traced batches share whose forwards differ in sizes only; the audit goes by it
    kind_digest: str = ""
    # what Python would read differently from the inputs of the whole batch; the audit goes by it
    other_reads: frozenset[str] = frozenset()

    def refine_reduction(self, reduction: LossReduction) -> LossReduction:
        """Return the reduction, as far as the inputs show more about the model's own loss."""
        if self.sums_loss:
            return LossReduction(is_sum=True)
        if self.target_count is None or reduction.is_sum:
            return reduction
        return replace(reduction, target_counter=self.target_count)

    def merge_outputs(self, outputs: Sequence[Any]) -> Any:
        """Combine the outputs of the micro-batches into the output of the batch.

        If the output contains the model's own loss, that is averaged; all else is concatenated.
        """
        losses = [find_loss_tensor(output) for output in outputs] if self.loss_shares else []
        if not losses or not all(isinstance(x, Tensor) and not x.dim() for x in losses):
            return gather(outputs, self.rows)
        if has_weighted_loss(outputs[0]):
            raise RunError(
                "the model returned a loss with a weight, by which pipe.step combines "
                "micro-batches. pipe(x) does not use it. Call pipe.step, or return the loss "
                "without the weight."
            )
        weighted_losses = [
            _weight_loss(*pair) for pair in zip(losses, self.loss_shares, strict=True)
        ]
        total = torch.stack(weighted_losses).sum().to(losses[0].dtype)
        return self._gather_with_loss(outputs, losses[0], total)

    def merge_step_outputs(self, outputs: Sequence[Any], loss: Tensor) -> Any:
        """Combine the outputs of a step, which has this loss, into the output of the batch.

        If they contain the model's own loss, that is the loss of the step, as in `pipe(x)`.
        """
        first_loss = find_loss_tensor(outputs[0]) if self.outputs_have_loss else None
        if not isinstance(first_loss, Tensor) or has_weighted_loss(outputs[0]):
            return gather(outputs, self.rows)
        return self._gather_with_loss(outputs, first_loss, loss.to(first_loss.dtype))

    def _gather_with_loss(self, outputs: Sequence[Any], first_loss: Tensor, total: Tensor) -> Any:
        """Join the outputs, with the loss of the batch in the place of the first one's loss."""
        if outputs[0] is first_loss:
            return total
        leaves = pytree.tree_leaves(outputs[0])
        loss_index = next(index for index, leaf in enumerate(leaves) if leaf is first_loss)
        return gather(outputs, self.rows, {loss_index: total})

    @property
    def averages_loss_by_rows(self) -> bool:
        """Whether `pipe(x)` averages the model's own loss by rows."""
        shares = self.loss_shares
        return len(shares) > 1 and not any(isinstance(s, Tensor) or s == 1 for s in shares)

    def split_alike(self, unsplit_tensors: Sequence[Tensor]) -> InputsByStage:
        """Split other tensors in place of `unsplit_tensors`, in the same way."""
        columns = [torch.split(whole, list(self.rows.counts)) for whole in unsplit_tensors]
        pieces = list(zip(*columns, strict=True))
        input_count = len(unsplit_tensors) - self.has_target
        by_stage = {0: [piece[:input_count] for piece in pieces]}
        if self.has_target:
            append_target(by_stage, max(self.by_stage), [piece[-1] for piece in pieces])
        return by_stage

    @property
    def targets(self) -> list[tuple[Any, ...]]:
        """The targets of each micro-batch. An entry is an empty tuple if there is no target."""
        if not self.has_target:
            return [()] * self.chunks
        return [values[-1:] for values in self.by_stage[max(self.by_stage)]]


def append_target(
    inputs_by_stage: dict[int, list[tuple[Any, ...]]], last_stage: int, targets: list[Any]
) -> None:
    """Append the target of each micro-batch to the inputs of the last stage."""
    inputs = inputs_by_stage.get(last_stage, [()] * len(targets))
    inputs_by_stage[last_stage] = [
        (*values, target) for values, target in zip(inputs, targets, strict=True)
    ]


def _weight_loss(loss: Tensor, share: float | Tensor) -> Tensor:
    """Multiply a loss by its share. A loss with share 0 counts as 0, even if it is NaN."""
    if isinstance(share, float):
        return loss * share if share else torch.zeros_like(loss)
    return (loss * share).masked_fill(share == 0, 0)


# ---- the inputs as payloads of cells -------------------------------------------------------------


def collect_tensors_by_cell(inputs_by_stage: InputsByStage) -> dict[Cell, Sequence[Tensor]]:
    """Return the caller's tensors that enter each cell."""
    return {
        (stage, microbatch): flatten_values(values)[0]
        for stage, batches in inputs_by_stage.items()
        for microbatch, values in enumerate(batches)
    }


_get_data: Callable[[Tensor], Tensor] = attrgetter("data")


def build_input_payloads(inputs_by_stage: InputsByStage) -> dict[Cell, Payload]:
    """Return the payloads that carry the caller's tensors into the cells.

    A tensor is marked as shared if it requires a gradient or enters several cells. Layers must not
    change such a tensor in place.
    """
    flattened = {
        (stage, microbatch): flatten_values(values)
        for stage, batches in inputs_by_stage.items()
        for microbatch, values in enumerate(batches)
    }
    ids = [id(tensor) for tensors, _ in flattened.values() for tensor in tensors]
    repeated_ids = set()
    if len(set(ids)) < len(ids):
        repeated_ids = {key for key, count in Counter(ids).items() if count > 1}
    # `.data` shares the memory but has a version counter of its own, which starts at 0. So
    # `propagate_version_bumps` can tell afterwards whether a layer worked in place.
    payloads: dict[Cell, Payload] = {}
    for cell, (tensors, layout) in flattened.items():
        needs_grad = tuple(map(is_in_graph, tensors))
        payload = Payload(tuple(map(_get_data, tensors)), layout, needs_grad)
        payloads[cell] = payload
        if repeated_ids or any(needs_grad):
            payload.shared = frozenset(
                index
                for index, tensor in enumerate(tensors)
                if needs_grad[index] or id(tensor) in repeated_ids
            )
    return payloads


def propagate_version_bumps(
    caller_tensors: Iterable[Tensor], payload_tensors: Iterable[Tensor | None]
) -> None:
    """Increment the version of each caller tensor whose payload tensor a layer changed in place.

    Without this the caller's autograd would use a saved input that no longer has its old values.
    """
    for caller_tensor, payload_tensor in zip(caller_tensors, payload_tensors, strict=True):
        if (
            payload_tensor is not None
            and not payload_tensor.is_inference()
            and payload_tensor._version
        ):
            torch.autograd.graph.increment_version(caller_tensor)

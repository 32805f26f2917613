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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from penstock.microbatch import MicrobatchRows, gather
from penstock.schedules.ir import StageGraph
from penstock.stage.loss import LossReduction, TargetCounter, extract_model_loss
from penstock.torch_compat import pytree

# For each stage, the input values of each micro-batch.
InputsByStage = Mapping[int, list[tuple[Any, ...]]]
# The devices of the stages whose inputs this process supplies, by stage.
InputDevices = Mapping[int, torch.device]


@dataclass(frozen=True)
class Batch:
    """The arguments of one call of a pipe."""

    inputs: tuple[Any, ...]
    keyword_inputs: Mapping[str, Any] = field(default_factory=dict)
    target: tuple[Any, ...] = ()  # one value, or none
    uses_model_loss: bool = False  # a step without loss_fn: the model computes the loss itself


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
    # inputs with "label" in their names, if it is not known how the model's own loss counts them
    label_inputs: Sequence[tuple[Any, ...]] = ()
    # the tensors before the split, if all inputs are tensors that are split by their rows
    unsplit_tensors: tuple[Tensor, ...] = ()

    def refine_reduction(self, reduction: LossReduction) -> LossReduction:
        """Return the reduction, with the target counter of the model's own loss if it has one."""
        if self.target_count is None or reduction.is_sum:
            return reduction
        return replace(reduction, target_counter=self.target_count)

    def merge_outputs(self, outputs: Sequence[Any]) -> Any:
        """Combine the outputs of the micro-batches into the output of the batch.

        If the output contains the model's own loss, that is averaged; all else is concatenated.
        """
        losses = [extract_model_loss(output) for output in outputs]
        if not self.loss_shares or not all(isinstance(x, Tensor) and not x.dim() for x in losses):
            return gather(outputs, self.rows)
        weighted_losses = [
            _weight_loss(*pair) for pair in zip(losses, self.loss_shares, strict=True)
        ]
        total = torch.stack(weighted_losses).sum().to(losses[0].dtype)
        leaves = pytree.tree_leaves(outputs[0])
        loss_index = next(index for index, leaf in enumerate(leaves) if leaf is losses[0])
        return total if outputs[0] is losses[0] else gather(outputs, self.rows, {loss_index: total})

    def split_alike(self, unsplit_tensors: Sequence[Tensor]) -> InputsByStage:
        """Split other tensors in place of `unsplit_tensors`, in the same way."""
        columns = [torch.split(whole, list(self.rows.counts)) for whole in unsplit_tensors]
        pieces, input_count = (
            list(zip(*columns, strict=True)),
            len(unsplit_tensors) - self.has_target,
        )
        by_stage = {0: [piece[:input_count] for piece in pieces]}
        if self.has_target:
            append_target(by_stage, max(self.by_stage), [piece[-1] for piece in pieces])
        return by_stage

    @property
    def targets(self) -> list[tuple[Any, ...]]:
        """The targets of each micro-batch, or the inputs that may be targets of the model's loss.

        An entry is an empty tuple if there is no target.
        """
        if not self.has_target:
            return list(self.label_inputs) or [()] * self.chunks
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
    return loss * share if isinstance(share, float) else (loss * share).masked_fill(share == 0, 0)

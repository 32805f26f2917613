"""Split the batch of a call into micro-batches and assign its tensors to stages.

    model         positional inputs         keyword inputs                    target
    Sequential    the first stage           every stage with a layer that     the last stage
                                            takes an input of that name
    traced        every stage whose part    every stage whose part of the     the last stage
                  of the forward uses it    forward uses it

Each tensor goes straight to the device of the stage that uses it, not from stage to stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.microbatch import (
    MicrobatchRows,
    check_inputs,
    gather,
    have_equal_rows,
    move_to_device,
    scatter,
)
from penstock.model.partition import Partition, SequentialLayout
from penstock.model.sequential_stage import SideInputs, check_side_inputs
from penstock.model.traced.traced_partition import TracedMicrobatch, TracedPartition
from penstock.runtime.request import Request
from penstock.schedules.ir import StageGraph
from penstock.stage.loss import LossReduction, TargetCounter, extract_model_loss
from penstock.stage.payload import Payload, flatten_values
from penstock.torch_compat import pytree

# For each stage, the input values of each micro-batch.
InputsByStage = Mapping[int, list[tuple[Any, ...]]]
Cell = tuple[int, int]  # stage, micro-batch
# Returns the device of a stage, or None if this process does not supply the stage's inputs.
DeviceOfStage = Callable[[int], torch.device | None]


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
            _append_target(by_stage, max(self.by_stage), [piece[-1] for piece in pieces])
        return by_stage

    @property
    def targets(self) -> list[tuple[Any, ...]]:
        """The targets of each micro-batch, or the inputs that may be targets of the model's loss.

        An entry is an empty tuple if there is no target.
        """
        if not self.has_target:
            return list(self.label_inputs) or [()] * self.chunks
        return [values[-1:] for values in self.by_stage[max(self.by_stage)]]


def build_stage_inputs(
    partition: Partition, request: Request, device_of_stage: DeviceOfStage
) -> StageInputs:
    """Split the batch of a request into micro-batches and assign its tensors to stages."""
    check_inputs(request.inputs, request.keyword_inputs.values(), device_of_stage(0))
    if isinstance(partition.layout, TracedPartition):
        return _build_traced_inputs(partition, partition.layout, request, device_of_stage)
    return _build_sequential_inputs(partition, partition.layout, request, device_of_stage)


def _build_sequential_inputs(
    partition: Partition,
    sequential: SequentialLayout,
    request: Request,
    device_of_stage: DeviceOfStage,
) -> StageInputs:
    inputs, keyword_inputs, target = request.inputs, request.keyword_inputs, request.target
    if not keyword_inputs and not target:
        pieces, rows = scatter(inputs, request.chunks)
        by_stage = {0: pieces} if device_of_stage(0) else {}
        return StageInputs(
            by_stage,
            rows,
            len(pieces),
            partition.graph,
            unsplit_tensors=_row_aligned_tensors(inputs),
        )
    consumers = _find_consumers(partition, sequential, keyword_inputs)
    last_stage = len(partition.stages) - 1
    # All values are split by one call of `scatter`, which checks that their rows agree. A keyword
    # input that stages on several devices take is moved once to each device, before the split.
    values, names = list(inputs), [f"input {index}" for index in range(len(inputs))]
    value_indices: dict[tuple[str, torch.device | None], int] = {}
    for name, stages in consumers.items():
        for device in dict.fromkeys(map(device_of_stage, stages)):
            value_indices[name, device] = len(values)
            values.append(move_to_device(keyword_inputs[name], device))
            names.append(name)
    for value in target:
        values.append(move_to_device(value, device_of_stage(last_stage)))
        names.append("target")
    pieces, rows = scatter(tuple(values), request.chunks, names)
    by_stage = {0: [piece[: len(inputs)] for piece in pieces]}
    for stage in sorted({stage for stages in consumers.values() for stage in stages}):
        stage_indices = {
            name: value_indices[name, device_of_stage(stage)]
            for name in consumers
            if stage in consumers[name]
        }
        positional_inputs = by_stage.get(stage, [()] * len(pieces))
        by_stage[stage] = [
            (*values, SideInputs({name: piece[index] for name, index in stage_indices.items()}))
            for values, piece in zip(positional_inputs, pieces, strict=True)
        ]
    if target:
        _append_target(by_stage, last_stage, [piece[-1] for piece in pieces])
    local_inputs = {
        stage: microbatches
        for stage, microbatches in by_stage.items()
        if device_of_stage(stage) is not None
    }
    unsplit_tensors = _row_aligned_tensors(tuple(values)) if not keyword_inputs else ()
    return StageInputs(
        local_inputs,
        rows,
        len(pieces),
        partition.graph,
        bool(target) and last_stage in local_inputs,
        unsplit_tensors=unsplit_tensors,
    )


def _append_target(
    inputs_by_stage: dict[int, list[tuple[Any, ...]]], last_stage: int, targets: list[Any]
) -> None:
    """Append the target of each micro-batch to the inputs of the last stage."""
    inputs = inputs_by_stage.get(last_stage, [()] * len(targets))
    inputs_by_stage[last_stage] = [
        (*values, target) for values, target in zip(inputs, targets, strict=True)
    ]


def _row_aligned_tensors(values: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return values if have_equal_rows(values) else ()


def _find_consumers(
    partition: Partition, sequential: SequentialLayout, keyword_inputs: Mapping[str, Any]
) -> dict[str, list[int]]:
    """Return the stages that take each keyword input."""
    side_names, stages = sequential.side_names, partition.stages
    layers = [name for stage in stages for name in stage.names]
    check_side_inputs(keyword_inputs, layers, [names for stage in side_names for names in stage])
    return {
        name: [
            index for index, stage in enumerate(side_names) if any(name in names for names in stage)
        ]
        for name in keyword_inputs
    }


def _build_traced_inputs(
    partition: Partition,
    traced: TracedPartition,
    request: Request,
    device_of_stage: DeviceOfStage,
) -> StageInputs:
    """Split a batch for a traced model: trace each micro-batch and assign its inputs to stages."""
    inputs, keyword_inputs = (
        request.inputs,
        {**traced.get_default_inputs(request.keyword_inputs), **request.keyword_inputs},
    )
    last_stage = len(partition.stages) - 1
    target = tuple(move_to_device(value, device_of_stage(last_stage)) for value in request.target)
    names = [*(f"input {index}" for index in range(len(inputs))), *keyword_inputs, "target"]
    pieces, rows = scatter((*inputs, *keyword_inputs.values(), *target), request.chunks, names)
    settings, keywords_start = traced.read_settings(), len(inputs)
    keywords_end = keywords_start + len(keyword_inputs)
    plans = [
        traced.trace_microbatch(
            piece[:keywords_start],
            dict(zip(keyword_inputs, piece[keywords_start:keywords_end], strict=True)),
            settings,
        )
        for piece in pieces
    ]
    # Micro-batches of one batch may take different paths through the forward. The program is the
    # same for all of them, so an edge that one micro-batch needs is an edge for all.
    edges = sorted({edge for plan in plans for edge in plan.edges})
    graph = StageGraph.chain(len(partition.stages), edges)
    destinations = {
        stage: tuple(dst for src, dst in graph.edges if src == stage)
        for stage in range(last_stage + 1)
    }
    forward_requests = [plan.make_forward_request(settings, destinations) for plan in plans]
    by_stage: dict[int, list[tuple[Any, ...]]] = {}
    for stage in range(last_stage + 1):
        device = device_of_stage(stage)
        if device is not None:
            partition.stages[stage].may_draw_random |= any(plan.uses_rng(stage) for plan in plans)
            partition.stages[stage].may_mutate_inputs |= any(
                plan.mutates_inputs(stage) for plan in plans
            )
            by_stage[stage] = [
                (
                    forward_request,
                    *(move_to_device(tensor, device) for tensor in plan.select_inputs(stage)),
                )
                for forward_request, plan in zip(forward_requests, plans, strict=True)
            ]
    targets, target_counter = [piece[-1] for piece in pieces] if target else [], None
    # Without a target, the model may compute the loss itself, from labels among its inputs.
    model_targets = None if target else _find_model_targets(plans)
    loss_shares = (
        _compute_loss_shares(rows, model_targets, device_of_stage(last_stage))
        if not request.uses_model_loss
        else ()
    )
    if model_targets is not None and request.uses_model_loss:
        targets, target_counter = (
            [move_to_device(labels, device_of_stage(last_stage)) for labels in model_targets[0]],
            model_targets[1],
        )
    if targets and last_stage in by_stage:
        _append_target(by_stage, last_stage, targets)
    label_inputs = (
        [()]
        if model_targets or target
        else [
            tuple(value for name, value in zip(names, piece, strict=False) if "label" in name)
            for piece in pieces
        ]
    )
    has_target, digest = (
        bool(targets) and last_stage in by_stage,
        " ".join(plan.fingerprint for plan in plans),
    )
    return StageInputs(
        by_stage,
        rows,
        len(pieces),
        graph,
        has_target,
        digest,
        target_counter,
        loss_shares,
        label_inputs,
    )


def _compute_loss_shares(
    rows: MicrobatchRows,
    model_targets: tuple[list[Tensor], TargetCounter] | None,
    device: torch.device | None,
) -> Sequence[float | Tensor]:
    """Return the weight of each micro-batch in the model's own loss: by counted targets or rows."""
    if model_targets is None:
        return rows.fractions()
    counts = torch.stack([model_targets[1](target) for target in model_targets[0]])
    return list((counts / counts.sum()).to(device).unbind())


def _weight_loss(loss: Tensor, share: float | Tensor) -> Tensor:
    """Multiply a loss by its share. A loss with share 0 counts as 0, even if it is NaN."""
    return loss * share if isinstance(share, float) else (loss * share).masked_fill(share == 0, 0)


def _find_model_targets(
    microbatch_plans: Sequence[TracedMicrobatch],
) -> tuple[list[Tensor], TargetCounter] | None:
    """Return the targets of the model's own loss and their counter.

    Return None unless every micro-batch has such targets and counts them in the same way.
    """
    pairs = [pair for plan in microbatch_plans if (pair := plan.compute_loss_targets()) is not None]
    if (
        len(pairs) < len(microbatch_plans)
        or len({counter.ignore_index for _, counter in pairs}) > 1
    ):
        return None
    return [target for target, _ in pairs], pairs[0][1]


# ---- the inputs as payloads of cells -------------------------------------------------------------


def collect_tensors_by_cell(inputs_by_stage: InputsByStage) -> dict[Cell, list[Tensor]]:
    """Return the caller's tensors that enter each cell."""
    return {
        (stage, microbatch): flatten_values(values)[0]
        for stage, batches in inputs_by_stage.items()
        for microbatch, values in enumerate(batches)
    }


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
    use_counts = Counter(id(tensor) for tensors, _ in flattened.values() for tensor in tensors)
    # `.data` shares the memory but has a version counter of its own, which starts at 0. So
    # `propagate_version_bumps` can tell afterwards whether a layer worked in place.
    return {
        cell: Payload(
            tuple(tensor.data for tensor in tensors),
            layout,
            tuple(tensor.requires_grad for tensor in tensors),
            frozenset(
                index
                for index, tensor in enumerate(tensors)
                if tensor.requires_grad or use_counts[id(tensor)] > 1
            ),
        )
        for cell, (tensors, layout) in flattened.items()
    }


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

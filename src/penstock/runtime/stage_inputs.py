"""What comes from outside: the micro-batches of a call, for each stage that takes some of it.

Of a Sequential, the batch goes to the first stage, the target to the last, a side input to every
stage whose layers name it. Of a whole forward, each stage gets the inputs that its part takes.
All is moved there at once, not from stage to stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from penstock.schedules.ir import StageGraph
from penstock.stage.loss import LossReduction, TargetCounter, extract_model_loss
from penstock.torch_compat import pytree

InputsByStage = Mapping[int, list[tuple[Any, ...]]]  # by stage, the values of each micro-batch
DeviceOfStage = Callable[[int], torch.device | None]  # a stage's device; None: it is not fed here


@dataclass(frozen=True)
class Batch:
    """What a call was given."""

    inputs: tuple[Any, ...]
    keyword_inputs: Mapping[str, Any] = field(default_factory=dict)
    target: tuple[Any, ...] = ()  # of one, or of none
    uses_model_loss: bool = False  # the loss is the model's own


@dataclass(frozen=True)
class StageInputs:
    """What each stage is given from outside, and the rows that it was cut by."""

    by_stage: InputsByStage
    rows: MicrobatchRows
    chunks: int
    graph: StageGraph  # who feeds whom in this call
    has_target: bool = False  # is the last value of the last stage's
    assignment_digest: str = (
        ""  # how: the same on every rank that divides the forward in the same way
    )
    target_count: TargetCounter | None = (
        None  # what counts of targets that the model's own loss has
    )
    loss_shares: Sequence[
        float | Tensor
    ] = ()  # of the micro-batches in that loss, outside of a step
    label_inputs: Sequence[tuple[Any, ...]] = ()  # that it may count, and it is not known how
    unsplit_tensors: tuple[
        Tensor, ...
    ] = ()  # what was cut, if it was these alone, and all by their rows

    def refine_reduction(self, reduction: LossReduction) -> LossReduction:
        """How losses make one, if the model's own says what counts in it."""
        if self.target_count is None or reduction.is_sum:
            return reduction
        return replace(reduction, target_counter=self.target_count)

    def merge_outputs(self, outputs: Sequence[Any]) -> Any:
        """One output of those of the micro-batches; a loss of the model's own is one number."""
        losses = [extract_model_loss(output) for output in outputs]
        if not self.loss_shares or not all(isinstance(x, Tensor) and not x.dim() for x in losses):
            return gather(outputs, self.rows)
        parts = [_weight_loss(*pair) for pair in zip(losses, self.loss_shares, strict=True)]
        total = torch.stack(parts).sum().to(losses[0].dtype)
        leaves = pytree.tree_leaves(outputs[0])
        at = next(number for number, leaf in enumerate(leaves) if leaf is losses[0])
        return total if outputs[0] is losses[0] else gather(outputs, self.rows, {at: total})

    def split_alike(self, unsplit_tensors: Sequence[Tensor]) -> InputsByStage:
        """What would be given if these had been cut."""
        columns = [torch.split(whole, list(self.rows.counts)) for whole in unsplit_tensors]
        pieces, inputs = list(zip(*columns, strict=True)), len(unsplit_tensors) - self.has_target
        given = {0: [piece[:inputs] for piece in pieces]}
        if self.has_target:
            _append_target(given, max(self.by_stage), [piece[-1] for piece in pieces])
        return given

    @property
    def targets(self) -> list[tuple[Any, ...]]:
        """Those of the micro-batches; empty, if there is none."""
        if not self.has_target:
            return list(self.label_inputs) or [()] * self.chunks
        return [values[-1:] for values in self.by_stage[max(self.by_stage)]]


def build_stage_inputs(
    partition: Partition, chunks: int, batch: Batch, device_of_stage: DeviceOfStage
) -> StageInputs:
    """Cut a batch, and deal it out to the stages."""
    check_inputs(batch.inputs, batch.keyword_inputs.values(), device_of_stage(0))
    if isinstance(partition.how, TracedPartition):
        return _build_traced_inputs(partition, partition.how, chunks, batch, device_of_stage)
    return _build_sequential_inputs(partition, partition.how, chunks, batch, device_of_stage)


def _build_sequential_inputs(
    partition: Partition,
    sequential: SequentialLayout,
    chunks: int,
    batch: Batch,
    device_of_stage: DeviceOfStage,
) -> StageInputs:
    inputs, side, target = batch.inputs, batch.keyword_inputs, batch.target
    if not side and not target:
        pieces, rows = scatter(inputs, chunks)
        given = {0: pieces} if device_of_stage(0) else {}
        return StageInputs(
            given, rows, len(pieces), partition.graph, unsplit_tensors=_row_aligned_tensors(inputs)
        )
    takers = _find_consumers(partition, sequential, side)
    last = len(partition.stages) - 1
    values, names = list(inputs), [f"input {at}" for at in range(len(inputs))]
    homes: dict[tuple[str, torch.device | None], int] = {}
    for name, stages in takers.items():
        for device in dict.fromkeys(map(device_of_stage, stages)):
            homes[name, device] = len(values)
            values.append(move_to_device(side[name], device))
            names.append(name)
    for value in target:
        values.append(move_to_device(value, device_of_stage(last)))
        names.append("target")
    pieces, rows = scatter(tuple(values), chunks, names)
    given = {0: [piece[: len(inputs)] for piece in pieces]}
    for stage in sorted({stage for stages in takers.values() for stage in stages}):
        mine = {
            name: homes[name, device_of_stage(stage)] for name in takers if stage in takers[name]
        }
        before = given.get(stage, [()] * len(pieces))
        given[stage] = [
            (*values, SideInputs({name: piece[at] for name, at in mine.items()}))
            for values, piece in zip(before, pieces, strict=True)
        ]
    if target:
        _append_target(given, last, [piece[-1] for piece in pieces])
    fed = {stage: parts for stage, parts in given.items() if device_of_stage(stage) is not None}
    wholes = _row_aligned_tensors(tuple(values)) if not side else ()
    return StageInputs(
        fed,
        rows,
        len(pieces),
        partition.graph,
        bool(target) and last in fed,
        unsplit_tensors=wholes,
    )


def _append_target(
    inputs_by_stage: dict[int, list[tuple[Any, ...]]], last_stage: int, targets: list[Any]
) -> None:
    """To the last stage, after what it has."""
    before = inputs_by_stage.get(last_stage, [()] * len(targets))
    inputs_by_stage[last_stage] = [
        (*values, one) for values, one in zip(before, targets, strict=True)
    ]


def _row_aligned_tensors(values: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return values if have_equal_rows(values) else ()


def _find_consumers(
    partition: Partition, sequential: SequentialLayout, keyword_inputs: Mapping[str, Any]
) -> dict[str, list[int]]:
    """The stages that take each side input."""
    takes, stages = sequential.side_names, partition.stages
    layers = [name for stage in stages for name in stage.names]
    check_side_inputs(keyword_inputs, layers, [names for stage in takes for names in stage])
    return {
        name: [at for at, stage in enumerate(takes) if any(name in names for names in stage)]
        for name in keyword_inputs
    }


def _build_traced_inputs(
    partition: Partition,
    traced: TracedPartition,
    chunks: int,
    batch: Batch,
    device_of_stage: DeviceOfStage,
) -> StageInputs:
    """Each micro-batch is divided in its own way; who feeds whom in one of them, does in all."""
    inputs, side = (
        batch.inputs,
        {**traced.get_default_inputs(batch.keyword_inputs), **batch.keyword_inputs},
    )
    last = len(partition.stages) - 1
    target = tuple(move_to_device(value, device_of_stage(last)) for value in batch.target)
    names = [*(f"input {at}" for at in range(len(inputs))), *side, "target"]
    pieces, rows = scatter((*inputs, *side.values(), *target), chunks, names)
    state, split_at = traced.read_settings(), len(inputs)
    ends = split_at + len(side)
    dealt = [
        traced.trace_microbatch(
            piece[:split_at], dict(zip(side, piece[split_at:ends], strict=True)), state
        )
        for piece in pieces
    ]
    edges = sorted({edge for one in dealt for edge in one.edges})
    graph = StageGraph.chain(len(partition.stages), edges)
    sends = {s: tuple(d for a, d in graph.edges if a == s) for s in range(last + 1)}
    handed = [one.make_forward_request(state, sends) for one in dealt]
    given: dict[int, list[tuple[Any, ...]]] = {}
    for stage in range(last + 1):
        device = device_of_stage(stage)
        if device is not None:
            partition.stages[stage].may_draw_random |= any(one.uses_rng(stage) for one in dealt)
            partition.stages[stage].may_mutate_inputs |= any(
                one.mutates_inputs(stage) for one in dealt
            )
            given[stage] = [
                (told, *(move_to_device(tensor, device) for tensor in one.select_inputs(stage)))
                for told, one in zip(handed, dealt, strict=True)
            ]
    targets, counting = [piece[-1] for piece in pieces] if target else [], None
    own = None if target else _find_model_targets(dealt)
    shares = (
        _compute_loss_shares(rows, own, device_of_stage(last)) if not batch.uses_model_loss else ()
    )
    if own is not None and batch.uses_model_loss:
        targets, counting = [move_to_device(one, device_of_stage(last)) for one in own[0]], own[1]
    if targets and last in given:
        _append_target(given, last, targets)
    labels = (
        [()]
        if own or target
        else [
            tuple(v for name, v in zip(names, piece, strict=False) if "label" in name)
            for piece in pieces
        ]
    )
    has_target, ways = bool(targets) and last in given, " ".join(one.fingerprint for one in dealt)
    return StageInputs(given, rows, len(pieces), graph, has_target, ways, counting, shares, labels)


def _compute_loss_shares(
    rows: MicrobatchRows,
    model_targets: tuple[list[Tensor], TargetCounter] | None,
    device: torch.device | None,
) -> Sequence[float | Tensor]:
    """The micro-batches' parts in the model's own loss: by what counts, or by rows."""
    if model_targets is None:
        return rows.fractions()
    counts = torch.stack([model_targets[1](target) for target in model_targets[0]])
    return list((counts / counts.sum()).to(device).unbind())


def _weight_loss(loss: Tensor, share: float | Tensor) -> Tensor:
    """What counts for nothing may be no number."""
    return loss * share if isinstance(share, float) else (loss * share).masked_fill(share == 0, 0)


def _find_model_targets(
    microbatch_plans: Sequence[TracedMicrobatch],
) -> tuple[list[Tensor], TargetCounter] | None:
    """Those of the model's own loss, if every micro-batch has them, and counts them alike."""
    found = [pair for one in microbatch_plans if (pair := one.compute_loss_targets()) is not None]
    if (
        len(found) < len(microbatch_plans)
        or len({counting.ignore_index for _, counting in found}) > 1
    ):
        return None
    return [target for target, _ in found], found[0][1]

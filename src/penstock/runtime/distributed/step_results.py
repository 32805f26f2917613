"""The results of a step on all ranks and replicas: loss, gradient scale, metrics, timeline.

Only the rank with the last stage computes losses. Three steps make its results known:

1. `ReplicaLosses`        the last ranks of all replicas combine their losses (data parallelism)
2. `all_gather_results`   every rank of a pipeline gets the loss, the gradient scale and all timings
3. `DistributedLossAccumulator.finish_gradients`   every rank rescales its gradients, if necessary
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.microbatch import MicrobatchRows
from penstock.model.stage_inputs import StageInputs
from penstock.runtime.distributed.channels import CallCacheEntry, ProcessTransport
from penstock.runtime.distributed.control_channel import (
    ControlChannel,
    RankFacts,
    check_ranks_agree,
    hash_facts,
)
from penstock.runtime.execution import Execution, build_measured_timeline, compute_span_seconds
from penstock.runtime.loss_accumulator import (
    LossAccumulator,
    PreviousGradients,
    ReplicaShare,
    combine_metrics,
)
from penstock.schedules.ir import Program
from penstock.schedules.simulator import Span
from penstock.schedules.timeline import Timeline
from penstock.stage.payload import Payload
from penstock.stage.stage_runner import StageRunner
from penstock.torch_compat import pytree

_LOSS_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
# The first entries of the row that a rank sends: loss, index of its dtype in _LOSS_DTYPES, rescale
# factor, used_rng, has_outputs. The start and end of each action follow. nan: not known here.
_HEADER_LENGTH = 6


@dataclass(frozen=True)
class RankResult:
    """The results of one rank after it has run its lane."""

    loss: Tensor | None = None  # None on ranks without the last stage
    # The factor for this step's gradients, if their scale was not known before the end of the step.
    rescale_factor: Tensor | None = None
    used_rng: bool = False
    has_outputs: bool = False  # the last rank broadcasts outputs or metrics after this


@dataclass(frozen=True)
class GlobalResult:
    """The results of a step that all ranks of a pipeline know."""

    loss: float
    loss_dtype: torch.dtype
    rescale_factor: Tensor | None
    used_rng: bool
    has_outputs: bool
    timings: GatheredTimings
    averaged_replicas: int = 1  # how many replicas the pipe averages gradients over
    is_preempted: bool = False  # a rank has received SIGTERM, and the pipe saves on preemption

    @property
    def input_gradient_factor(self) -> Tensor | None:
        """The factor for gradients of inputs, which are not averaged over replicas.

        Gradients of a step are scaled so that their mean over replicas is right. An input belongs
        to one replica, so its gradient is divided by the number of replicas here.
        """
        if self.averaged_replicas == 1:
            return self.rescale_factor
        factor = torch.ones(()).double() if self.rescale_factor is None else self.rescale_factor
        return factor / self.averaged_replicas


@dataclass(frozen=True)
class GatheredTimings:
    """The start and end of every action on every rank, in seconds.

    Each rank counts from the moment when the ranks had agreed on the call. Clocks of different
    machines are not compared.
    """

    program: Program
    times: Sequence[Sequence[float]]  # by rank: start and end of each action, or nan

    @cached_property
    def timeline(self) -> Timeline:
        """The measured timeline of all ranks."""
        spans = []
        for rank, lane in enumerate(self.program.lanes):
            for index, action in enumerate(lane):
                start, end = self.times[rank][2 * index : 2 * index + 2]
                if not math.isnan(end):
                    spans.append(Span(rank, index, action, start, end))
        return build_measured_timeline(self.program, spans)


def all_gather_results(
    channel: ControlChannel,
    program: Program,
    execution: Execution,
    rank_result: RankResult,
    averaged_replicas: int = 1,
    is_preempted: bool = False,
) -> GlobalResult:
    """Send the results of this rank to all ranks of the pipeline, and return those of all.

    One all-gather of float64 numbers carries everything. On a GPU this waits for the end of the
    step, as it reads the loss and the timestamps.
    """
    longest = max(map(len, program.lanes))
    own_row = [math.nan] * (_HEADER_LENGTH + 2 * longest)
    if rank_result.loss is not None:
        own_row[0], own_row[1] = float(rank_result.loss), _LOSS_DTYPES.index(rank_result.loss.dtype)
    if rank_result.rescale_factor is not None:
        own_row[2] = float(rank_result.rescale_factor)
    own_row[3], own_row[4] = rank_result.used_rng, rank_result.has_outputs
    own_row[5] = is_preempted
    (worker,), (origin,) = execution.workers, execution.time_origins
    for bound_action, start, end in worker.timed_actions:
        offset = _HEADER_LENGTH + 2 * bound_action.lane_index
        own_row[offset], own_row[offset + 1] = compute_span_seconds(start, end, origin)
    numbers = torch.tensor(own_row, dtype=torch.float64)
    rows = [row.tolist() for row in channel.all_gather(numbers, "the end of the step")]
    last_row = rows[program.schedule.placement[-1]]
    return GlobalResult(
        last_row[0],
        _LOSS_DTYPES[int(last_row[1])] if not math.isnan(last_row[1]) else torch.float32,
        None if math.isnan(last_row[2]) else torch.tensor(last_row[2], dtype=torch.float64),
        any(row[3] for row in rows),
        bool(last_row[4]),
        GatheredTimings(program, [row[_HEADER_LENGTH:] for row in rows]),
        averaged_replicas,
        any(row[5] for row in rows),
    )


# -------------------------------------------------------------------------------------------------
# Losses over replicas
#
# The result of a step must equal that of the unsplit model on the batches of all replicas together.
# If the loss is a mean, a replica counts by one of these, as micro-batches do in one pipeline:
#
#     the number of its rows                    a plain mean
#     the number of targets that are not ignored   cross-entropy with ignore_index
#     the sum of the weights of loss_fn            loss_fn returns weights
#
# The ranks with the last stage exchange these numbers over the averaging channel: rows and target
# counts before the step, weights and losses after it.
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplicaLosses:
    """The losses of all replicas in one step. Only ranks with the last stage have this."""

    channel: ControlChannel
    row_counts: Sequence[float]  # by replica

    def combine_loss_and_metrics(
        self, accumulator: LossAccumulator, metrics: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss and the metrics of the batches of all replicas together.

        Metrics that are not scalar tensors stay those of this replica.
        """
        leaves, spec = pytree.tree_flatten(metrics)
        scalar_indices = [i for i, leaf in enumerate(leaves) if _is_scalar_tensor(leaf)]
        loss, weight = accumulator.compute_loss(), accumulator.total_weight
        aux_losses = accumulator.compute_aux_losses()
        kind = (
            "a sum" if accumulator.is_sum else "a mean by rows" if weight is None else "by weights"
        )
        facts = {
            "the loss": kind,
            "metrics": f"{', '.join(metrics)} ({len(scalar_indices)} numbers)",
        }
        # The hash of the facts travels with the numbers. Only if hashes differ do the replicas
        # exchange the facts themselves, which then raises an error with the differences.
        comparison = accumulator.comparison
        assert comparison is not None  # as in every step
        counted = comparison.measure_cross_entropies(self.row_counts[self.channel.rank])
        own_row = [
            *(hash_facts(facts), loss, sum(aux_losses) if aux_losses else 0.0, weight or 0.0),
            counted,
        ]
        rows = self.channel.all_gather(_to_float64(own_row), "its loss")
        if any(row[0] != rows[0][0] for row in rows):
            check_ranks_agree(self.channel, "the result of a step", facts)
        _, losses, aux_totals, weights, counts = torch.stack(rows).unbind(1)
        comparison.check_replicas(counts.tolist())
        shares = weights if weight is not None else torch.tensor(self.row_counts).double()
        if weight is not None:
            accumulator.set_global_weight(weights.sum())
        total = _combine_replicas(losses, shares, accumulator.is_sum)
        if aux_losses:  # a mean by rows, whatever the loss is
            total = total + _combine_replicas(
                aux_totals, torch.tensor(self.row_counts).double(), is_sum=False
            )
        if scalar_indices:
            own_metrics = _to_float64([leaves[index] for index in scalar_indices])
            columns = torch.stack(self.channel.all_gather(own_metrics, "its metrics")).unbind(1)
            for index, column in zip(scalar_indices, columns, strict=True):
                leaves[index] = _cast_like(
                    _combine_replicas(column, shares, accumulator.is_sum), leaves[index]
                )
        return _cast_like(total, loss), pytree.tree_unflatten(leaves, spec)


def exchange_replica_shares(
    channel: ControlChannel, facts: RankFacts, accumulator: LossAccumulator, rows: MicrobatchRows
) -> ReplicaLosses:
    """Set the share of this replica in the batch of all replicas, before a step."""
    check_ranks_agree(channel, "a step", facts)
    target_count = accumulator.target_count
    own_row = [sum(rows.counts) or 1, math.nan if target_count is None else target_count]
    row_counts, target_counts = torch.stack(
        channel.all_gather(_to_float64(own_row), "its rows")
    ).unbind(1)
    share = float(row_counts[channel.rank] / row_counts.sum())
    global_target_count = None if target_count is None else float(target_counts.sum())
    accumulator.set_replica_share(ReplicaShare(channel.size, share, global_target_count))
    return ReplicaLosses(channel, row_counts.tolist())


def _combine_replicas(values: Tensor, shares: Tensor, is_sum: bool) -> Tensor:
    """Return the sum of the values, or their mean weighted by shares."""
    if is_sum:
        return values.sum()
    # The mean loss of a replica with share 0 is nan: 0 * nan must count as 0.
    return (values * shares).masked_fill(shares == 0, 0).sum() / shares.sum()


def _is_scalar_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 0


def _to_float64(values: Sequence[Any]) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def _cast_like(value: Tensor, reference: Tensor) -> Tensor:
    return value.to(reference.device, reference.dtype)


# -------------------------------------------------------------------------------------------------
# The loss accumulator of a rank
#
# The rank with the last stage has a LossAccumulator. If loss_fn returns weights, their total is not
# known before the last forward, but backwards have begun by then. So the gradients of such a step
# have a provisional scale, apart from earlier `.grad`, until the rescale factor is known:
#
#     last rank     weights of loss_fn ─► gradients with provisional scale ─► total weight, factor
#     other ranks   `loss_is_weighted` arrives with the first gradients:      multiply by the
#                   set earlier `.grad` aside ──────────────────────────────► factor, add both
# -------------------------------------------------------------------------------------------------


class DistributedLossAccumulator:
    """The loss and the gradient scale of one step, on one rank.

    `accumulator` is None on a rank without the last stage. `replica_losses` is None unless the
    pipe averages over replicas.
    """

    metrics: dict[str, Any]  # after the step

    def __init__(
        self,
        accumulator: LossAccumulator | None,
        replica_losses: ReplicaLosses | None,
        transport: ProcessTransport,
        cache_entry: CallCacheEntry,
    ) -> None:
        self.accumulator, self._replica_losses = accumulator, replica_losses
        self._transport, self._cache_entry = transport, cache_entry
        self._previous_gradients: PreviousGradients | None = None
        self.metrics = {}

    def compute_output_gradients(self, microbatch: int, outputs: Payload) -> Payload:
        """Return the gradients with which the backward of a micro-batch begins.

        Whether they have a provisional scale is sent along with their headers.
        """
        assert self.accumulator is not None
        seeds = self.accumulator.compute_output_gradients(microbatch, outputs)
        self._transport.loss_is_weighted = self.accumulator.needs_rescale
        entry = self._cache_entry
        had_no_weight = entry.is_complete and not entry.loss_is_weighted
        if had_no_weight and self._transport.loss_is_weighted:
            raise RunError(
                "loss_fn returned a weight, but in the first step with such inputs it returned "
                "none. Return one always or never, or create the pipe with shapes='sent'."
            )
        return seeds

    @property
    def needs_rescale(self) -> bool:
        """Return whether this step's gradients have a provisional scale until the step ends."""
        if self.accumulator is not None:
            return self.accumulator.needs_rescale
        return self._previous_gradients is not None

    def before_backward(self, stage_runner: StageRunner, microbatch: int) -> None:
        """Set earlier gradients aside before the backward of a cell with a provisional scale."""
        if self.accumulator is not None:
            self.accumulator.before_backward(stage_runner, microbatch)
        elif self._transport.loss_is_weighted:
            self._previous_gradients = self._previous_gradients or PreviousGradients()
            self._previous_gradients.set_aside(stage_runner, microbatch)

    def build_rank_result(
        self, used_rng: bool, rows: MicrobatchRows, has_outputs: bool
    ) -> RankResult:
        """Return the results of this rank. This combines losses over replicas.

        `has_outputs` says that the caller asked for outputs on all ranks.
        """
        accumulator = self.accumulator
        if accumulator is None:
            return RankResult(used_rng=used_rng)
        loss, self.metrics = accumulator.compute_total_loss(), combine_metrics(accumulator, rows)
        if self._replica_losses is not None:
            loss, self.metrics = self._replica_losses.combine_loss_and_metrics(
                accumulator, self.metrics
            )
        return RankResult(
            loss, accumulator.rescale_factor, used_rng, has_outputs or bool(self.metrics)
        )

    def collect_outputs(self, inputs: StageInputs, loss: Tensor) -> Any:
        """Return the outputs of the step, or None if not requested or on another rank."""
        losses = [] if self.accumulator is None else self.accumulator.microbatch_losses
        outputs = [loss.extras.output[0] for loss in losses if loss.extras.output]
        return inputs.merge_step_outputs(outputs, loss) if outputs else None

    def finish_gradients(self, rescale_factor: Tensor | None) -> None:
        """Multiply the gradients of this step by the factor and add them to the earlier ones."""
        if self.accumulator is not None:
            self.accumulator.finish_gradients(self.accumulator.rescale_factor)
        elif self._previous_gradients is not None:
            self._previous_gradients.add_rescaled(
                torch.ones(()) if rescale_factor is None else rescale_factor
            )

    def restore_gradients(self) -> None:
        """Restore the gradients that were set aside, after the step has failed."""
        if self.accumulator is not None:
            self.accumulator.restore_gradients()
        elif self._previous_gradients is not None:
            self._previous_gradients.restore()

"""What comes of a step, told to every rank: its loss, its timeline, whether anybody drew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.microbatch import MicrobatchRows, gather
from penstock.runtime.distributed.channels import CallCacheEntry, ProcessTransport
from penstock.runtime.distributed.control_channel import (
    ControlChannel,
    RankFacts,
    check_ranks_agree,
    hash_facts,
)
from penstock.runtime.execution import Execution, build_measured_timeline, compute_span_seconds
from penstock.runtime.loss_accumulator import LossAccumulator, PreviousGradients, ReplicaShare
from penstock.runtime.train_step import combine_metrics
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
_HEADER_LENGTH = (
    5  # loss, its dtype, the factor of gradients, whether anybody drew, whether there is more
)


@dataclass(frozen=True)
class RankResult:
    """What a rank has to tell when its lane has ended."""

    loss: Tensor | None = None  # the last rank alone knows it
    rescale_factor: Tensor | None = (
        None  # of all gradients, if their unit was known only at the end
    )
    used_rng: bool = False
    has_outputs: bool = False  # values follow


@dataclass(frozen=True)
class GlobalResult:
    """What all ranks know after it."""

    loss: float
    loss_dtype: torch.dtype
    rescale_factor: Tensor | None
    used_rng: bool
    has_outputs: bool
    timings: GatheredTimings


@dataclass(frozen=True)
class GatheredTimings:
    """When every rank did what; each counted from the moment when the ranks had agreed."""

    program: Program
    times: Sequence[Sequence[float]]  # by rank: begin and end of each action; nan: none

    @cached_property
    def timeline(self) -> Timeline:
        """When everything ran."""
        spans = []
        for rank, lane in enumerate(self.program.lanes):
            for at, action in enumerate(lane):
                start, end = self.times[rank][2 * at : 2 * at + 2]
                if not math.isnan(end):
                    spans.append(Span(rank, at, action, start, end))
        return build_measured_timeline(self.program, spans)


def all_gather_results(
    channel: ControlChannel, program: Program, execution: Execution, rank_result: RankResult
) -> GlobalResult:
    """Tell all ranks. On a GPU this waits until the step has ended."""
    longest = max(map(len, program.lanes))
    mine = [math.nan] * (_HEADER_LENGTH + 2 * longest)
    if rank_result.loss is not None:
        mine[0], mine[1] = float(rank_result.loss), _LOSS_DTYPES.index(rank_result.loss.dtype)
    if rank_result.rescale_factor is not None:
        mine[2] = float(rank_result.rescale_factor)
    mine[3], mine[4] = rank_result.used_rng, rank_result.has_outputs
    (worker,), (origin,) = execution.workers, execution.time_origins
    for mark in worker.timed_actions:
        at = _HEADER_LENGTH + 2 * mark.bound_action.lane_index
        mine[at], mine[at + 1] = compute_span_seconds(mark, origin)
    numbers = torch.tensor(mine, dtype=torch.float64)
    rows = [row.tolist() for row in channel.all_gather(numbers, "the end of the step")]
    last = rows[program.schedule.placement[-1]]
    return GlobalResult(
        last[0],
        _LOSS_DTYPES[int(last[1])] if not math.isnan(last[1]) else torch.float32,
        None if math.isnan(last[2]) else torch.tensor(last[2], dtype=torch.float64),
        any(row[3] for row in rows),
        bool(last[4]),
        GatheredTimings(program, [row[_HEADER_LENGTH:] for row in rows]),
    )


# -------------------------------------------------------------------------------------------------
# Copies of a pipe that train together: each has a part of a batch, and all learn of the whole.
#
# The oracle is the unsplit model on the batches of all copies, put together. Where a loss is a mean,
# a copy counts for its rows, for its targets that are not ignored, or for the weights that the loss
# gives, as micro-batches do. The ranks with the last stage tell each other what these are.
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplicaLosses:
    """A step of all copies, on a rank with the last stage."""

    channel: ControlChannel
    row_counts: Sequence[float]  # of each copy

    def combine_loss_and_metrics(
        self, accumulator: LossAccumulator, metrics: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Those of the whole batch. Metrics that are no numbers are of this copy alone."""
        leaves, spec = pytree.tree_flatten(metrics)
        places = [at for at, leaf in enumerate(leaves) if _is_scalar_tensor(leaf)]
        loss, added, weight = (
            accumulator.compute_loss(),
            accumulator.compute_aux_losses(),
            accumulator.total_weight,
        )
        kind = (
            "a sum" if accumulator.is_sum else "a mean by rows" if weight is None else "by weights"
        )
        facts = {"the loss": kind, "metrics": f"{', '.join(metrics)} ({len(places)} numbers)"}
        own = [hash_facts(facts), loss, sum(added) if added else 0.0, weight or 0.0]
        told = self.channel.all_gather(_to_float64(own), "its loss")
        if any(row[0] != told[0][0] for row in told):
            check_ranks_agree(self.channel, "what comes of a step", facts)
        _, losses, extras, weights = torch.stack(told).unbind(1)
        shares = weights if weight is not None else torch.tensor(self.row_counts).double()
        if weight is not None:
            accumulator.set_global_weight(weights.sum())
        total = _combine_replicas(losses, shares, accumulator.is_sum)
        if added:
            total = total + _combine_replicas(
                extras, torch.tensor(self.row_counts).double(), is_sum=False
            )
        if places:
            mine = _to_float64([leaves[at] for at in places])
            found = torch.stack(self.channel.all_gather(mine, "its metrics")).unbind(1)
            for at, column in zip(places, found, strict=True):
                leaves[at] = _cast_like(
                    _combine_replicas(column, shares, accumulator.is_sum), leaves[at]
                )
        return _cast_like(total, loss), pytree.tree_unflatten(leaves, spec)


def exchange_replica_shares(
    channel: ControlChannel, facts: RankFacts, accumulator: LossAccumulator, rows: MicrobatchRows
) -> ReplicaLosses:
    """Before a step: what this copy counts for."""
    check_ranks_agree(channel, "a step", facts)
    counted = accumulator.target_count
    own = [sum(rows.counts) or 1, math.nan if counted is None else counted]
    of_rows, of_targets = torch.stack(channel.all_gather(_to_float64(own), "its rows")).unbind(1)
    share = float(of_rows[channel.rank] / of_rows.sum())
    known = None if counted is None else float(of_targets.sum())
    accumulator.set_replica_share(ReplicaShare(channel.size, share, known))
    return ReplicaLosses(channel, of_rows.tolist())


def _combine_replicas(values: Tensor, shares: Tensor, is_sum: bool) -> Tensor:
    """One number of those of the copies; what counts for nothing may be nan."""
    if is_sum:
        return values.sum()
    return (values * shares).masked_fill(shares == 0, 0).sum() / shares.sum()


def _is_scalar_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 0


def _to_float64(values: Sequence[Any]) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def _cast_like(value: Tensor, reference: Tensor) -> Tensor:
    return value.to(reference.device, reference.dtype)


# -------------------------------------------------------------------------------------------------
# What the losses of a step come to, on a rank that may not see them.
#
# The rank with the last stage keeps the ledger. If the loss returns weights, the step's gradients
# are of another unit until its end: the ranks before learn that with the first gradients they get.
# -------------------------------------------------------------------------------------------------


class DistributedLossAccumulator:
    """Of one step; `ledger` is None on a rank without the last stage.

    `together` tells what copies of the pipe come to, if there are any.
    """

    metrics: dict[str, Any]  # after the step

    def __init__(
        self,
        accumulator: LossAccumulator | None,
        replica_losses: ReplicaLosses | None,
        transport: ProcessTransport,
        cache_entry: CallCacheEntry,
    ) -> None:
        self.accumulator, self._replica_losses, self._transport, self._cache_entry = (
            accumulator,
            replica_losses,
            transport,
            cache_entry,
        )
        self._previous_gradients: PreviousGradients | None = None
        self.metrics = {}

    def compute_output_gradients(self, microbatch: int, outputs: Payload) -> Payload:
        """As the ledger does; whether its unit is its own goes with the gradients."""
        assert self.accumulator is not None
        seeds = self.accumulator.compute_output_gradients(microbatch, outputs)
        self._transport.loss_is_weighted = self.accumulator.needs_rescale
        if (
            self._cache_entry.is_complete
            and self._transport.loss_is_weighted
            and not self._cache_entry.loss_is_weighted
        ):
            raise RunError(
                "loss_fn gave a weight, and in the first step with such inputs it gave none: give "
                "one always or never, or make the pipe with shapes='sent'"
            )
        return seeds

    def before_backward(self, stage_runner: StageRunner, microbatch: int) -> None:
        """Before a cell's backward: set earlier gradients aside, if these are of another unit."""
        if self.accumulator is not None:
            self.accumulator.before_backward(stage_runner, microbatch)
        elif self._transport.loss_is_weighted:
            self._previous_gradients = self._previous_gradients or PreviousGradients()
            self._previous_gradients.set_aside(stage_runner, microbatch)

    def build_rank_result(
        self, used_rng: bool, rows: MicrobatchRows, has_outputs: bool
    ) -> RankResult:
        """What this rank has to tell; `more`: outputs follow, if there are any here."""
        ledger = self.accumulator
        if ledger is None:
            return RankResult(used_rng=used_rng)
        loss, self.metrics = ledger.compute_total_loss(), combine_metrics(ledger, rows)
        if self._replica_losses is not None:
            loss, self.metrics = self._replica_losses.combine_loss_and_metrics(ledger, self.metrics)
        return RankResult(loss, ledger.rescale_factor, used_rng, has_outputs or bool(self.metrics))

    def collect_outputs(self, rows: MicrobatchRows) -> Any:
        """Those that were asked for; None if they are not here."""
        scores = [] if self.accumulator is None else self.accumulator.microbatch_losses
        asked = [score.extras.output[0] for score in scores if score.extras.output]
        return gather(asked, rows) if asked else None

    def finish_gradients(self, rescale_factor: Tensor | None) -> None:
        """Add this step's gradients to the earlier ones, multiplied by what the last rank told."""
        if self.accumulator is not None:
            self.accumulator.finish_gradients()
        elif self._previous_gradients is not None:
            self._previous_gradients.add_rescaled(
                torch.ones(()) if rescale_factor is None else rescale_factor
            )

    def restore_gradients(self) -> None:
        """The step has failed: gradients are as they were before it."""
        if self.accumulator is not None:
            self.accumulator.restore_gradients()
        elif self._previous_gradients is not None:
            self._previous_gradients.restore()

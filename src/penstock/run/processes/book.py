"""What the losses of a step come to, on a rank that may not see them.

The rank with the last stage keeps the ledger. If the loss returns weights, the step's gradients
are of another unit until its end: the ranks before learn that with the first gradients they get.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.batch import MicrobatchRows, gather
from penstock.errors import RunError
from penstock.run.processes.copies import ReplicaLosses
from penstock.run.processes.results import RankResult
from penstock.run.processes.wire import CallCacheEntry, ProcessTransport
from penstock.run.training import combine_metrics
from penstock.run.weighing import LossAccumulator, PreviousGradients
from penstock.stage.parcel import Payload
from penstock.stage.tape import StageRunner


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

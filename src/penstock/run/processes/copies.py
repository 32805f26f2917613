"""Copies of a pipe that train together: each has a part of a batch, and all learn of the whole.

The oracle is the unsplit model on the batches of all copies, put together. Where a loss is a mean,
a copy counts for its rows, for its targets that are not ignored, or for the weights that the loss
gives, as micro-batches do. The ranks with the last stage tell each other what these are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.batch import MicrobatchRows
from penstock.run.processes.agreement import RankFacts, check_ranks_agree, hash_facts
from penstock.run.processes.peers import ControlChannel
from penstock.run.weighing import LossAccumulator, ReplicaShare


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

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

from penstock.batch import Rows
from penstock.run.processes.agreement import Facts, agree, numbered
from penstock.run.processes.peers import Peers
from penstock.run.weighing import Ledger, Part


@dataclass(frozen=True)
class Together:
    """A step of all copies, on a rank with the last stage."""

    line: Peers
    rows: Sequence[float]  # of each copy

    def loss_and_metrics(
        self, ledger: Ledger, metrics: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Those of the whole batch. Metrics that are no numbers are of this copy alone."""
        leaves, spec = pytree.tree_flatten(metrics)
        places = [at for at, leaf in enumerate(leaves) if _is_number(leaf)]
        loss, added, weight = ledger.loss(), ledger.added(), ledger.weight
        kind = "a sum" if ledger.sums else "a mean by rows" if weight is None else "by weights"
        facts = {"the loss": kind, "metrics": f"{', '.join(metrics)} ({len(places)} numbers)"}
        own = [numbered(facts), loss, sum(added) if added else 0.0, weight or 0.0]
        told = self.line.exchange(_numbers(own), "its loss")
        if any(row[0] != told[0][0] for row in told):
            agree(self.line, "what comes of a step", facts)
        _, losses, extras, weights = torch.stack(told).unbind(1)
        shares = weights if weight is not None else torch.tensor(self.rows).double()
        if weight is not None:
            ledger.give_all_weights(weights.sum())
        total = _combined(losses, shares, ledger.sums)
        if added:
            total = total + _combined(extras, torch.tensor(self.rows).double(), sums=False)
        if places:
            mine = _numbers([leaves[at] for at in places])
            found = torch.stack(self.line.exchange(mine, "its metrics")).unbind(1)
            for at, column in zip(places, found, strict=True):
                leaves[at] = _like(_combined(column, shares, ledger.sums), leaves[at])
        return _like(total, loss), pytree.tree_unflatten(leaves, spec)


def begin_together(line: Peers, facts: Facts, ledger: Ledger, rows: Rows) -> Together:
    """Before a step: what this copy counts for."""
    agree(line, "a step", facts)
    counted = ledger.counted
    own = [sum(rows.counts) or 1, math.nan if counted is None else counted]
    of_rows, of_targets = torch.stack(line.exchange(_numbers(own), "its rows")).unbind(1)
    share = float(of_rows[line.rank] / of_rows.sum())
    known = None if counted is None else float(of_targets.sum())
    ledger.take_part(Part(line.size, share, known))
    return Together(line, of_rows.tolist())


def _combined(numbers: Tensor, shares: Tensor, sums: bool) -> Tensor:
    """One number of those of the copies; what counts for nothing may be nan."""
    if sums:
        return numbers.sum()
    return (numbers * shares).masked_fill(shares == 0, 0).sum() / shares.sum()


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 0


def _numbers(values: Sequence[Any]) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def _like(number: Tensor, before: Tensor) -> Tensor:
    return number.to(before.device, before.dtype)

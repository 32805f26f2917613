"""The rows of the batch of a call: which are in which micro-batch, and which may be compared."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.microbatch import (
    find_related_rows,
    find_shared_ids,
    find_unlike_rows,
    list_tensors,
    take_rows,
)
from penstock.model.stage_inputs import StageInputs
from penstock.runtime.request import Request

Rows = tuple[int, int]  # the first row, and the one after the last


@dataclass(frozen=True)
class BatchRows:
    """The rows of the batch of a call.

    Attributes:
        request: The call.
        inputs: Its batch, split.
    """

    request: Request
    inputs: StageInputs

    def find_rows(self, microbatch: int) -> tuple[int, int]:
        """Return the first row of a micro-batch, and the one after its last."""
        counts = self.inputs.rows.counts
        start = sum(counts[:microbatch])
        return start, start + (counts[microbatch] if counts else 0)

    def get_counted_targets(self, *ranges: Rows) -> tuple[Any, ...] | None:
        """Return the labels that the model's own loss counts in some rows, if that is known."""
        if not self.request.is_step or self.request.target or not self.inputs.has_target:
            return None
        return (self.take_labels([target for (target,) in self.inputs.targets], ranges),)

    def take_counted_targets(self, *ranges: Rows) -> tuple[Any, ...]:
        """Return the targets of some rows, by which their loss may be weighted."""
        counted = self.get_counted_targets(*ranges)
        if counted is not None:
            return counted
        target: tuple[Any, ...] = take_rows(self.request.target, self.inputs.rows, *ranges)
        return target

    def take_labels(self, labels: Sequence[Tensor], ranges: Sequence[Rows]) -> Tensor:
        """Return some rows of the labels of the micro-batches. A row may have several labels.

        A range has rows of one micro-batch.
        """
        pieces = []
        for start, stop in ranges:
            ends = itertools.accumulate(self.inputs.rows.counts)
            microbatch = next(index for index, end in enumerate(ends) if start < end)
            begin, end = self.find_rows(microbatch)
            piece = labels[microbatch]
            if (start, stop) != (begin, end):
                times = len(piece) // (end - begin)
                piece = piece[(start - begin) * times : (stop - begin) * times]
            pieces.append(piece)
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def find_unlike_rows(self) -> tuple[int, int] | None:
        """Return the two rows of the batch of which a loss may count most differently, if any."""
        request = self.request
        batch = request.target, request.inputs, dict(request.keyword_inputs)
        return find_unlike_rows(batch, sum(self.inputs.rows.counts))

    def find_related_rows(self) -> list[tuple[int, int, int]]:
        """Return rows that the model may relate by a number that an input has for each row.

        The target is left out: each step compares a loss function with the whole batch if it has
        to.
        """
        inputs = self.request.inputs, dict(self.request.keyword_inputs)
        return find_related_rows(inputs, sum(self.inputs.rows.counts))

    def find_shared_ids(self) -> list[tuple[int, int, int]]:
        """Return rows of different micro-batches that have the same id, by number of its tensor."""
        return find_shared_ids(self.request.list_batch(), self.inputs.rows.counts)

    def has_row_ids(self, with_target: bool) -> bool:
        """Return whether an input, or the target, has one whole number for each row."""
        row_count = sum(self.inputs.rows.counts)
        request = self.request
        target = request.target if with_target else ()
        tensors = list_tensors((request.inputs, dict(request.keyword_inputs), target))
        return any(
            t.dim() and len(t) == t.numel() == row_count and not t.is_floating_point()
            for t in tensors
        )

    def have_different_inputs(self, ranges: Sequence[Rows]) -> bool:
        """Return whether not all parts have the same inputs. Mixed rows would not show then."""
        if len(ranges) < 2:
            return False
        inputs = self.request.inputs, dict(self.request.keyword_inputs)
        size = min(stop - start for start, stop in ranges)
        first_tensors, *others = (
            list_tensors(take_rows(inputs, self.inputs.rows, (start, start + size)))
            for start, _ in ranges
        )
        pairs = [pair for other in others for pair in zip(first_tensors, other, strict=True)]
        split = [(one, other) for one, other in pairs if one is not other]
        return not split or any(_are_different(one, other) for one, other in split)


def _are_different(first: Tensor, second: Tensor) -> bool:
    try:
        return not torch.equal(first, second)
    except (RuntimeError, NotImplementedError):  # of tensors without plain memory
        return True

"""What the losses of a step come to, on a rank that may not see them.

The rank with the last stage keeps the ledger. If the loss returns weights, the step's gradients
are of another unit until its end: the ranks before learn that with the first gradients they get.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.batch import Rows, gather
from penstock.errors import RunError
from penstock.run.processes.copies import Together
from penstock.run.processes.results import Ending
from penstock.run.processes.wire import Learned, Wire
from penstock.run.training import metrics_of
from penstock.run.weighing import Aside, Ledger
from penstock.stage.parcel import Parcel
from penstock.stage.tape import Tape


class Book:
    """Of one step; `ledger` is None on a rank without the last stage.

    `together` tells what copies of the pipe come to, if there are any.
    """

    metrics: dict[str, Any]  # after the step

    def __init__(
        self, ledger: Ledger | None, together: Together | None, wire: Wire, learned: Learned
    ) -> None:
        self.ledger, self._together, self._wire, self._learned = ledger, together, wire, learned
        self._aside: Aside | None = None
        self.metrics = {}

    def answer(self, microbatch: int, made: Parcel) -> Parcel:
        """As the ledger does; whether its unit is its own goes with the gradients."""
        assert self.ledger is not None
        seeds = self.ledger.answer(microbatch, made)
        self._wire.weighted = self.ledger.in_own_unit
        if self._learned.known and self._wire.weighted and not self._learned.weighted:
            raise RunError(
                "loss_fn gave a weight, and in the first step with such inputs it gave none: give "
                "one always or never, or make the pipe with shapes='sent'"
            )
        return seeds

    def prepare(self, tape: Tape, microbatch: int) -> None:
        """Before a cell's backward: set earlier gradients aside, if these are of another unit."""
        if self.ledger is not None:
            self.ledger.prepare(tape, microbatch)
        elif self._wire.weighted:
            self._aside = self._aside or Aside()
            self._aside.take(tape, microbatch)

    def ending(self, drew: bool, rows: Rows, more: bool) -> Ending:
        """What this rank has to tell; `more`: outputs follow, if there are any here."""
        ledger = self.ledger
        if ledger is None:
            return Ending(drew=drew)
        loss, self.metrics = ledger.total(), metrics_of(ledger, rows)
        if self._together is not None:
            loss, self.metrics = self._together.loss_and_metrics(ledger, self.metrics)
        return Ending(loss, ledger.factor, drew, more or bool(self.metrics))

    def outputs(self, rows: Rows) -> Any:
        """Those that were asked for; None if they are not here."""
        scores = [] if self.ledger is None else self.ledger.scores
        asked = [score.beside.output[0] for score in scores if score.beside.output]
        return gather(asked, rows) if asked else None

    def finish(self, factor: Tensor | None) -> None:
        """Add this step's gradients to the earlier ones, multiplied by what the last rank told."""
        if self.ledger is not None:
            self.ledger.finish()
        elif self._aside is not None:
            self._aside.give_back(torch.ones(()) if factor is None else factor)

    def give_up(self) -> None:
        """The step has failed: gradients are as they were before it."""
        if self.ledger is not None:
            self.ledger.give_up()
        elif self._aside is not None:
            self._aside.put_back()

"""Everything in the caller's thread, in the order of `play`: the reference, and for debuggers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from penstock.run.phase import Phase
from penstock.run.transport import Boxes, Transport
from penstock.run.worker import Worker
from penstock.stage.context import Context, no_autocast


class Inline:
    """The runtime of one call."""

    def __init__(self, boxes: Boxes) -> None:
        self._boxes = boxes

    def end(self, rank: int) -> Transport:
        """In one thread, a message waits in its box."""
        return self._boxes.end(rank)

    def carry_out(self, workers: Sequence[Worker], phase: Phase, context: Context) -> None:
        """Step by step, whichever rank's is next."""
        with in_this_thread(context):
            for rank, step in phase.order:
                with workers[rank].place.entered():
                    workers[rank].do(step)


@contextmanager
def in_this_thread(context: Context) -> Iterator[None]:
    """Within, the caller's thread computes as a worker's would."""
    before = torch._C._is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)
    try:
        with no_autocast(), torch.set_grad_enabled(context.grad):
            yield
    finally:
        torch.autograd.set_multithreading_enabled(before)

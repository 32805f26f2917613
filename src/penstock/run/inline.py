"""Everything in the caller's thread, in the order of `play`: the reference, and for debuggers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from penstock.run.phase import Phase
from penstock.run.transport import Boxes, Transport
from penstock.run.worker import Step, Worker
from penstock.stage.context import Context, no_autocast

Around = Callable[[int, Step], AbstractContextManager[object]]  # a step of a rank


def _nothing(rank: int, step: Step) -> AbstractContextManager[object]:
    return _AS_IT_IS


_AS_IT_IS = nullcontext()


class Inline:
    """The runtime of one call; `around` each of its steps something may be entered."""

    def __init__(self, boxes: Boxes, around: Around = _nothing) -> None:
        self._boxes, self._around = boxes, around

    def end(self, rank: int) -> Transport:
        """In one thread, a message waits in its box."""
        return self._boxes.end(rank)

    def carry_out(self, workers: Sequence[Worker], phase: Phase, context: Context) -> None:
        """Step by step, whichever rank's is next."""
        with in_this_thread(context):
            for rank, step in phase.order:
                with workers[rank].place.entered(), self._around(rank, step):
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

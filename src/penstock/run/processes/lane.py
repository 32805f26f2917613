"""One rank's lane, in the caller's thread: the runtime of a call among several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from penstock.ir import Compute, Recv
from penstock.run.inline import in_this_thread
from penstock.run.phase import Phase
from penstock.run.processes.wire import Learned, Wire
from penstock.run.transport import Transport
from penstock.run.worker import Step, Worker
from penstock.stage.context import Context

EARLIER = 2  # computations: with one, small messages are asked for too late


class OneRank:
    """Carries out the steps of this process's rank; `at` is told of each computation."""

    def __init__(self, wire: Wire, at: Callable[[object], None], learned: Learned) -> None:
        self._wire, self._at, self._learned = wire, at, learned

    def end(self, rank: int) -> Transport:
        """This process has one rank."""
        return self._wire

    def carry_out(self, workers: Sequence[Worker], phase: Phase, context: Context) -> None:
        """Until all that was sent has been taken."""
        (worker,) = workers
        steps = self._ordered(phase.lanes[worker.rank])
        # inference_mode(False) would switch autograd's threads on again
        mode = torch.inference_mode() if context.inference else nullcontext()
        with in_this_thread(context), mode, worker.place.entered():
            for step in steps:
                if isinstance(step.action, Compute):
                    self._at(step.action)
                worker.do(step)
            self._wire.flush()

    def _ordered(self, steps: Sequence[Step]) -> Sequence[Step]:
        """Receives early, if their sizes are known; found once for a signature."""
        learned = self._learned
        if not learned.known:
            return steps
        if learned.order is None or learned.order[0] is not steps:
            learned.order = steps, ahead(steps)
        return learned.order[1]


def ahead(steps: Sequence[Step]) -> list[Step]:
    """Each receive some computations earlier, so that the message arrives during those.

    A receive that is asked for early blocks nobody; so this program ends if the other does. It
    needs memory for as many more messages from each sender.
    """
    out: list[Step] = []
    least = 0  # receives keep their order
    for step in steps:
        if not isinstance(step.action, Recv):
            out.append(step)
            continue
        at = len(out)
        for _ in range(EARLIER):
            while at > least and not isinstance(out[at - 1].action, Compute):
                at -= 1
            at = max(at - 1, least)
        out.insert(at, step)
        least = at + 1
    return out

"""One rank's lane, in the caller's thread: the runtime of a call among several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from penstock.ir import Compute, Recv
from penstock.run.inline import use_worker_thread_settings
from penstock.run.phase import Phase
from penstock.run.processes.wire import CallCacheEntry, ProcessTransport
from penstock.run.transport import Transport
from penstock.run.worker import BoundAction, Worker
from penstock.stage.context import CallerContext

PREFETCH_DISTANCE = 2  # computations: with one, small messages are asked for too late


class RankExecutor:
    """Carries out the steps of this process's rank; `at` is told of each computation."""

    def __init__(
        self,
        transport: ProcessTransport,
        on_compute: Callable[[object], None],
        cache_entry: CallCacheEntry,
    ) -> None:
        self._transport, self._on_compute, self._cache_entry = transport, on_compute, cache_entry

    def endpoint(self, rank: int) -> Transport:
        """This process has one rank."""
        return self._transport

    def execute(self, workers: Sequence[Worker], phase: Phase, context: CallerContext) -> None:
        """Until all that was sent has been taken."""
        (worker,) = workers
        steps = self._order_actions(phase.lanes[worker.rank])
        # inference_mode(False) would switch autograd's threads on again
        mode = torch.inference_mode() if context.inference_mode else nullcontext()
        with use_worker_thread_settings(context), mode, worker.device.activate():
            for step in steps:
                if isinstance(step.action, Compute):
                    self._on_compute(step.action)
                worker.execute(step)
            self._transport.flush()

    def _order_actions(self, actions: Sequence[BoundAction]) -> Sequence[BoundAction]:
        """Receives early, if their sizes are known; found once for a signature."""
        learned = self._cache_entry
        if not learned.is_complete:
            return actions
        if learned.prefetch_order is None or learned.prefetch_order[0] is not actions:
            learned.prefetch_order = actions, prefetch_receives(actions)
        return learned.prefetch_order[1]


def prefetch_receives(actions: Sequence[BoundAction]) -> list[BoundAction]:
    """Each receive some computations earlier, so that the message arrives during those.

    A receive that is asked for early blocks nobody; so this program ends if the other does. It
    needs memory for as many more messages from each sender.
    """
    out: list[BoundAction] = []
    least = 0  # receives keep their order
    for step in actions:
        if not isinstance(step.action, Recv):
            out.append(step)
            continue
        at = len(out)
        for _ in range(PREFETCH_DISTANCE):
            while at > least and not isinstance(out[at - 1].action, Compute):
                at -= 1
            at = max(at - 1, least)
        out.insert(at, step)
        least = at + 1
    return out

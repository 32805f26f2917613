"""Everything in the caller's thread, in the order of `play`: the reference, and for debuggers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from penstock.runtime.program_cache import Phase
from penstock.runtime.transport import Transport, TransportFactory
from penstock.runtime.worker import BoundAction, Worker
from penstock.stage.caller_context import CallerContext, no_autocast

ActionContext = Callable[[int, BoundAction], AbstractContextManager[object]]  # a step of a rank


def _no_context(rank: int, bound_action: BoundAction) -> AbstractContextManager[object]:
    return _NULL_CONTEXT


_NULL_CONTEXT = nullcontext()


class InlineExecutor:
    """The runtime of one call; `around` each of its steps something may be entered."""

    def __init__(
        self, transports: TransportFactory, action_context: ActionContext = _no_context
    ) -> None:
        self._transports, self._action_context = transports, action_context

    def endpoint(self, rank: int) -> Transport:
        """In one thread, a message waits in its box."""
        return self._transports.endpoint(rank)

    def execute(self, workers: Sequence[Worker], phase: Phase, context: CallerContext) -> None:
        """Step by step, whichever rank's is next."""
        with use_worker_thread_settings(context):
            for rank, step in phase.execution_order:
                with workers[rank].device.activate(), self._action_context(rank, step):
                    workers[rank].execute(step)


@contextmanager
def use_worker_thread_settings(context: CallerContext) -> Iterator[None]:
    """Within, the caller's thread computes as a worker's would."""
    before = torch._C._is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)
    try:
        with no_autocast(), torch.set_grad_enabled(context.grad_enabled):
            yield
    finally:
        torch.autograd.set_multithreading_enabled(before)

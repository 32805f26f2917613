"""The `inline` runtime: all ranks run in the caller's thread, one action after another.

The actions come in the order in which `schedules.simulator.play` plays the program. It is the
reference that other runtimes are compared with, and the runtime to use with a debugger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from penstock.runtime.program_cache import Phase
from penstock.runtime.transport import Transport, TransportFactory
from penstock.runtime.worker import BoundAction, Worker
from penstock.stage.caller_context import CallerContext, no_autocast

# Returns a context to enter around one action of a rank.
ActionContext = Callable[[int, BoundAction], AbstractContextManager[object]]


def _no_context(rank: int, bound_action: BoundAction) -> AbstractContextManager[object]:
    return nullcontext()


class InlineExecutor:
    """The executor of one call in the caller's thread.

    `action_context` is entered around each action, for example to measure memory.
    """

    def __init__(
        self, transports: TransportFactory, action_context: ActionContext = _no_context
    ) -> None:
        self._transports, self._action_context = transports, action_context

    def endpoint(self, rank: int) -> Transport:
        """Return the transport of a rank."""
        return self._transports.endpoint(rank)

    def execute(self, workers: Sequence[Worker], phase: Phase, context: CallerContext) -> None:
        """Run the actions of all ranks in the execution order of the phase."""
        with context.use_thread_locals() if context.thread_locals else nullcontext():
            context.copy_variables().run(self._execute, workers, phase, context)

    def _execute(self, workers: Sequence[Worker], phase: Phase, context: CallerContext) -> None:
        # On the CPU there is nothing to activate, and a context per action costs time.
        needs_contexts = self._action_context is not _no_context or any(
            worker.device.needs_activation for worker in workers
        )
        for worker in workers:
            worker.shares_thread = len(workers) > 1
        with use_worker_thread_settings(context):
            for rank, bound_action in phase.execution_order:
                worker = workers[rank]
                if needs_contexts:
                    with worker.device.activate(), self._action_context(rank, bound_action):
                        worker.execute(bound_action)
                else:
                    worker.execute(bound_action)


@contextmanager
def use_worker_thread_settings(context: CallerContext) -> Iterator[None]:
    """Give the caller's thread the settings of a worker thread for the duration of the context.

    Backwards run in this thread, and autocast is off outside of the stages, which enter the
    caller's autocast themselves.
    """
    # With autograd's own threads on, the backward of a stage on a GPU would run in autograd's
    # thread for that GPU. It runs in this thread instead, as in a worker: see
    # `threads._worker_loop`.
    with (
        torch.autograd.set_multithreading_enabled(False),
        no_autocast(),
        torch.set_grad_enabled(context.grad_enabled),
    ):
        yield

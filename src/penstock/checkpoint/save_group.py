"""The processes that save or load together. They succeed or fail as one.

Each step of a save is a function that runs on some or all ranks. Its results, and any failure, are
gathered on every rank. If one rank fails, every rank raises the same `RemoteError`, so no rank is
left waiting and no rank commits a save that another could not finish.

    run_and_gather      every rank works and gets the results of all
    run_on_each_rank    every rank works and keeps its own result
    run_on_rank_zero    rank 0 works and every rank gets its result

The watchdog also makes all ranks fail together, but it stops the whole pipe. A background save runs
beside the steps of the pipe, and its failure must not stop them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import format_exception, format_exception_only
from typing import Any, Protocol, TypeVar, cast

from penstock.errors import RemoteError

T = TypeVar("T")


class ValueChannel(Protocol):
    """The part of `ControlChannel` that a save needs."""

    @property
    def rank(self) -> int:
        """The rank of this process in the channel."""

    def all_gather_value(self, value: Any, description: str) -> list[Any]:
        """Return the values of all ranks: tensors and plain values, in the order of the ranks."""


@dataclass(frozen=True)
class SaveGroup:
    """The processes that save together. All of them make the same calls in the same order.

    `channel` connects them. It is None for a process that saves alone, which does not need
    torch.distributed.
    """

    channel: ValueChannel | None = None

    @property
    def rank(self) -> int:
        """The rank of this process in the group. Rank 0 decides for all."""
        return 0 if self.channel is None else self.channel.rank

    def run_and_gather(self, description: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return the results of all ranks.

        The results are tensors and plain values. Raise `RemoteError` on every rank, with the same
        text, if the work of any rank fails.
        """
        # A single process raises its own exception, with its type and traceback.
        if self.channel is None:
            return [work()]
        # A failure must not leave this rank out of the gather: the others would wait for it.
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        problem = None if failure is None else _format_failure(failure)
        try:
            answers = self.channel.all_gather_value((result, problem), description)
        except RuntimeError:
            # The other ranks may learn of this rank's failure in another way and leave first. Then
            # the gather fails, and the rank's own failure is the one worth raising.
            if failure is None:
                raise
            raise failure from None
        problems = {rank: problem for rank, (_, problem) in enumerate(answers) if problem}
        if problems:
            first_rank, (_, frames) = next(iter(problems.items()))
            listed = "\n".join(f"  rank {rank}: {text}" for rank, (text, _) in problems.items())
            text = f"{description} failed, so no rank continues with it:\n{listed}"
            raise RemoteError(
                text, "raised", first_rank, description, traceback=frames
            ) from failure
        return [value for value, _ in answers]

    def run_on_each_rank(self, description: str, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return this rank's result. If one rank fails, all raise.

        The result is not sent to the other ranks, so it may be of any type.
        """
        results: list[T] = []
        self.run_and_gather(description, lambda: results.append(work()))
        return results[0]

    def run_on_rank_zero(self, description: str, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank. If it fails, all raise."""
        results = self.run_and_gather(description, lambda: work() if self.rank == 0 else None)
        return cast(T, results[0])

    @contextmanager
    def clean_up_on_failure(self, cleanup: Callable[[], None]) -> Iterator[None]:
        """Context manager: if the block raises, rank 0 removes the files that are half written."""
        try:
            yield
        except BaseException:
            if self.rank == 0:
                cleanup()
            raise


def _format_failure(failure: Exception) -> tuple[str, str]:
    """Return a failure as one short text and as a full traceback."""
    summary = "".join(format_exception_only(failure)).strip()
    return summary, "".join(format_exception(failure))
